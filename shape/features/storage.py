"""Where a feature store is: a folder of this machine, or any address that fsspec has a file system for."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from os.path import expanduser
from pathlib import Path
from threading import Lock, get_ident
from typing import Generic, TypeVar

from fsspec.core import url_to_fs

from shape.errors import ConfigError, FeatureStoreError, is_full_disk
from shape.files import written_whole

_PARALLEL = 4  # files fetched ahead at a time
_ABANDONED = 3600  # seconds after which a half-fetched file is a killed process's

T = TypeVar("T")


class Storage:
    """Named files under one address: `features/mine`, `s3://bucket/features`, `gs://...`, `memory://...`.

    Attributes:
        folder: the folder of this machine that it is; None for any other address.

    Raises:
        ConfigError: no file system is known or installed for the address, or it cannot be reached.
    """

    def __init__(self, address: "str | Path | Storage") -> None:
        self.address = expanduser(str(address))
        self.folder = None if "://" in self.address else Path(self.address)
        try:
            self._files, self._root = url_to_fs(self.address)
            self._files.exists(self._root)
        except Exception as error:  # every file system has errors of its own
            raise ConfigError(
                f"{self.address} cannot be reached ({' '.join(str(error).split())}); check the address, what it needs "
                "to be installed, and the credentials"
            ) from error

    def __str__(self) -> str:
        return self.address

    def exists(self, name: str) -> bool:
        return self._files.exists(self._path(name))

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""
        self._files.invalidate_cache()
        try:
            listed = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rsplit("/", 1)[-1]: each["size"] for each in listed if each["type"] == "file"}

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._files.cat_file(self._path(name))

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Bytes [start, end) of files, all at the same time where the file system can. Raises FileNotFoundError."""
        if not parts:
            return []
        names, starts, ends = zip(*parts, strict=True)
        return self._files.cat_ranges([self._path(name) for name in names], list(starts), list(ends), on_error="raise")

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there completely or not at all."""
        self._files.makedirs(self._root, exist_ok=True)
        with self._files.transaction, self._files.open(self._path(name), "wb") as file:
            file.write(content)

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file to this machine. Raises FileNotFoundError."""
        self._files.get_file(self._path(name), str(to))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class LocalCopies(Generic[T]):
    """Copies of remote files in a folder of this machine, at most so many bytes of them, least recently used first out.

    Processes may share the folder: a file appears in it as a whole, and one that another process has dropped is fetched
    anew. fsspec's own caches (`filecache::`, `simplecache::`) do neither: they grow without limit, and another process
    sees half-fetched files.

    Args:
        folder: of the copies, and of nothing else: what it holds is deleted to make room.
        room: bytes that they may take together, beside those on their way; a single one may exceed it.
        read: makes of a copy what is asked for; called once for each copy.
    """

    def __init__(self, storage: Storage, folder: Path, room: int, read: Callable[[Path], T]) -> None:
        self.storage, self.folder, self.room, self.read = storage, folder, room, read
        self._process = -1
        self._ensure_threads()

    def _ensure_threads(self) -> None:
        """Threads do not survive the fork of a data worker, which therefore starts its own."""
        if self._process != os.getpid():
            if self._process >= 0:  # nor do connections
                self.storage = Storage(self.storage.address)
            self._process = os.getpid()
            self._threads = ThreadPoolExecutor(_PARALLEL)
            self._making_room = Lock()
            self._fetching: dict[str, Future[None]] = {}
            self._read: dict[str, T] = {}

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to fetch files that will be asked for."""
        self._ensure_threads()
        for name in names:
            under_way = name in self._fetching and not self._fetching[name].done()
            if not under_way and not (self.folder / name).exists():
                self._fetching[name] = self._threads.submit(self._fetch, name)

    def __getitem__(self, name: str) -> T:
        """What `read` made of a file, waiting for it if need be."""
        self._ensure_threads()
        copy = self.folder / name
        if (fetching := self._fetching.pop(name, None)) is not None:
            fetching.result()
        while True:
            try:
                os.utime(copy)  # so that it counts as used
                found = self._read.get(name)  # a thread may drop it at any time
                if found is None:
                    found = self._read[name] = self.read(copy)
                return found
            except FileNotFoundError:
                self._read.pop(name, None)
                self._fetch(name)

    def _fetch(self, name: str) -> None:
        writer = f".{os.getpid()}.{get_ident()}"
        with ExitStack() as until_there, written_whole(self.folder / name, writer) as temporary:
            try:
                self.storage.fetch(name, temporary)
            except Exception as error:  # every file system has errors of its own
                if is_full_disk(error):
                    raise
                raise FeatureStoreError(
                    f"{name} cannot be fetched from {self.storage} ({' '.join(str(error).split())}); once it can, give "
                    "the same command again, with --ckpt_path last where training had begun"
                ) from error
            until_there.enter_context(self._making_room)
            self._make_room(temporary.stat().st_size)

    def _make_room(self, size: int) -> None:
        copies = []
        for path in self.folder.iterdir():
            try:
                found = path.stat()
            except FileNotFoundError:  # dropped by another process
                continue
            if not path.name.startswith("."):
                copies.append((found.st_mtime_ns, found.st_size, path))
            elif time.time() - found.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        taken = size + sum(each for _, each, _ in copies)
        for _, each, path in sorted(copies):
            if taken <= self.room:
                break
            self._read.pop(path.name, None)  # which would keep its bytes on the disk
            with suppress(PermissionError):  # of Windows, for a file that is still mapped
                path.unlink(missing_ok=True)
                taken -= each
