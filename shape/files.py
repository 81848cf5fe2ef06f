"""Files that are there completely or not at all, also after a crash of the machine or on a full disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shape.errors import DiskSpaceError, is_full_disk


@contextmanager
def written_whole(path: Path, writer: str = "") -> Iterator[Path]:
    """Gives a name beside `path` to write to, which becomes `path` once it is written; otherwise nothing is left.

    Args:
        writer: tells apart processes that write the same file at the same time.

    Raises:
        DiskSpaceError: the disk, a quota or the largest size of a file is exhausted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_full_disk(error):
            raise DiskSpaceError(
                f"there is no space left to write {path}; free some, and give the same command again: what was "
                "finished is kept"
            ) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
