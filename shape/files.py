"""Files are written completely or not at all, also in a crash or on a full disk, and are read or refused."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from textwrap import shorten
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from filelock import FileLock, Timeout

from shape.errors import ConfigError, DiskSpaceError, ShapeError, is_full_disk

T = TypeVar("T")
_ON_WINDOWS = os.name == "nt"
_SECONDS_TO_APPEAR = 60.0  # of what another process has written, on a network file system


def cache_folder() -> Path:
    """For what can be made again: the folder that SHAPE_CACHE names, or ~/.cache/shape-decoding."""
    return Path(os.environ.get("SHAPE_CACHE") or Path.home() / ".cache" / "shape-decoding")


def prepare_file(path: str | Path) -> None:
    """Make the folder of a file before the work whose result it takes.

    Raises:
        OSError: with the name of what stands in the way.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Waits for a lock file and holds it, where files can be locked."""
    held = FileLock(lock)
    with suppress(OSError):  # what writes there says what is wrong with the folder
        held.acquire()
    try:
        yield
    finally:
        held.release()


@contextmanager
def sole_writer(lock: Path, work: str) -> Iterator[None]:
    """Holds a lock file, where files can be locked.

    Raises:
        ConfigError: another process does.
    """
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another process does {work} already; wait for its end, or give another output") from None
    except OSError:  # what writes there says what is wrong with the folder
        pass
    try:
        yield
    finally:
        if held.is_locked:
            with suppress(OSError):  # a system may not delete what is open
                lock.unlink()  # nobody waits for it
            held.release()


@contextmanager
def written_whole(path: Path, writer: str = "") -> Iterator[Path]:
    """A temporary name beside `path` to write to, renamed to `path` once it is written; after an error nothing is left.

    Args:
        writer: part of the temporary name, for processes that write the same file at the same time.

    Raises:
        DiskSpaceError: the disk, a quota or the largest size of a file is exhausted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        with _space_for(path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _space_for(path: Path) -> Iterator[None]:
    """Raises DiskSpaceError where what is written to `path` finds no space."""
    try:
        yield
    except BaseException as error:
        if is_full_disk(error):
            raise DiskSpaceError(
                f"there is no space left to write {path}; free some, and give the same command again: what was "
                "finished is kept"
            ) from error
        raise


def appears(there: Callable[[], bool], output: Path, error: type[ShapeError]) -> None:
    """Returns once `there()` is true: other processes have written, and what they wrote is on its way.

    Raises:
        `error`: it stays false.
    """
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while not there():
        if time.monotonic() > deadline:
            raise error(
                f"what other processes have written for {output} is not to be seen by this one; give an output on a "
                "file system that all of them share"
            )
        time.sleep(0.1)


@contextmanager
def written_together(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which move to `folder` once all are written, config.json last: a folder that has one
    has all that belongs to it. After an error nothing has changed.

    Raises:
        DiskSpaceError: as `written_whole` does.
    """
    temporary = folder / ".export.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with _space_for(folder):
            yield temporary
            files = sorted(
                (path for path in temporary.rglob("*") if path.is_file()), key=lambda path: path.name == "config.json"
            )
            for file in files:
                _sync(file)
            for file in files:
                place = folder / file.relative_to(temporary)
                place.parent.mkdir(exist_ok=True)
                os.replace(file, place)
            _sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write a file completely or not at all; what is no file, such as a terminal, as it is."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def reading(what: str, error: type[ShapeError], advice: str) -> Iterator[None]:
    """Turns any exception of reading a damaged file, or one of another kind, into a sentence.

    Raises:
        `error`: "`what` cannot be read; `advice`", with the reason; one that was raised inside stays as it is.
    """
    try:
        yield
    except Exception as reason:
        if isinstance(reason, error) or type(reason).__name__ == "OutOfMemoryError":  # torch's, which is slow to import
            raise
        said = shorten(str(reason), 200, placeholder=" …") or type(reason).__name__
        raise error(f"{what} cannot be read; {advice} ({said})") from reason


@overload
def typed(kind: type[T], value: Any) -> T: ...


@overload
def typed(kind: Any, value: Any) -> Any: ...


def typed(kind: Any, value: Any) -> Any:
    """A JSON value as a type of annotations: dataclasses of objects, tuples of lists, numbers as keys.

    Raises:
        TypeError: the value is of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        for each in inner:
            try:
                return typed(each, value)
            except TypeError:
                continue
    elif origin is Literal:
        if value in inner:
            return value
    elif origin in (list, tuple, Sequence):
        if isinstance(value, list | tuple):
            several = origin is not tuple or inner[-1] is ...
            kinds = [inner[0]] * len(value) if several else inner
            if len(kinds) == len(value):
                return (tuple if origin is tuple else list)(map(typed, kinds, value))
    elif origin in (dict, Mapping):
        if isinstance(value, dict):
            return {typed(inner[0], _key(inner[0], key)): typed(inner[1], each) for key, each in value.items()}
    elif is_dataclass(kind):
        if isinstance(value, dict):
            hints = get_type_hints(kind)
            if unknown := value.keys() - hints.keys():
                raise TypeError(f"it has no field {min(unknown)}")
            return kind(**{name: typed(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    elif isinstance(value, NoneType if kind is None else kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', kind)}")


def human_bytes(size: float) -> str:
    """For people: 3 digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # or else it would be shown with an exponent
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB" if size >= 999.5 else f"{size:.3g} TB"


def human_time(seconds: float) -> str:
    """For people: 2 digits and a unit."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.2g} {unit}"
    hours = seconds / 3600
    return f"{hours:.2g} h" if hours < 99.5 else f"{hours:,.0f} h"


def _key(kind: Any, key: str) -> Any:
    """JSON's keys are strings."""
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise TypeError(f"{key[:40]!r} is no int") from None


def _sync(path: Path) -> None:
    folder = path.is_dir()
    if folder and _ON_WINDOWS:  # which opens none
        return
    descriptor = os.open(path, os.O_RDWR if _ON_WINDOWS else os.O_RDONLY)  # Windows syncs what may be written
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.EBADF):  # of mounts that sync no folders
            raise
    finally:
        os.close(descriptor)
