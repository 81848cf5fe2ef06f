"""Helpers for files and their sizes."""

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from shape import files
from shape.errors import ConfigError
from shape.files import human_bytes, human_time, sole_writer, write_whole, written_together


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (999_499_999, "999 MB"),
        (999_999_999, "1 GB"),
        (1.5e9, "1.5 GB"),
        (2.34e12, "2.34 TB"),
        (999.7e12, "1,000 TB"),
        (1.5e15, "1,500 TB"),
        (1.2345e18, "1,234,500 TB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(size, shown):
    assert human_bytes(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.04 s"), (99.4, "99 s"), (99.6, "1.7 min"), (5900, "98 min"), (6000, "1.7 h"), (4e5, "111 h")],
)
def test_times_are_shown_to_people(seconds, shown):
    assert human_time(seconds) == shown


def test_where_files_cannot_be_locked_work_goes_on(tmp_path, monkeypatch):
    """As on NFS without its lock service."""

    fcntl = pytest.importorskip("fcntl")

    def fails(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    with files.locked(tmp_path / ".lock"), sole_writer(tmp_path / ".lock", "it"):
        pass


def test_one_process_writes_at_a_time(tmp_path):
    lock = tmp_path / "a folder that is not there yet" / ".lock"
    with sole_writer(lock, "a training into o"):
        second = sole_writer(lock, "a training into o")
        with pytest.raises(ConfigError, match="another process does a training into o already; wait for its end"):
            second.__enter__()
    with sole_writer(lock, "a training into o"):
        assert lock.exists()
    assert not lock.exists()


def writes(folder: Path) -> None:
    """A file and an export, as they are written everywhere here."""
    write_whole(folder / "a file", "–")
    assert (folder / "a file").read_bytes() == "–".encode()
    with written_together(folder / "an export") as place:
        (place / "config.json").write_text("{}")
    assert [path.name for path in (folder / "an export").iterdir()] == ["config.json"]


def test_files_are_written_by_the_rules_of_windows(tmp_path, monkeypatch):
    """Folders cannot be opened there, and what is synced must be open for writing."""
    fcntl, opens, syncs = pytest.importorskip("fcntl"), os.open, os.fsync
    synced: list[int] = []

    def no_folder(path, flags, *rest, **options):
        if os.path.isdir(path) and sys._getframe(1).f_globals["__name__"] != "shutil":  # which is another on Windows
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, flags, *rest, **options)

    def no_reader(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        synced.append(descriptor)
        syncs(descriptor)

    monkeypatch.setattr(files, "_ON_WINDOWS", True)
    monkeypatch.setattr(os, "open", no_folder)
    monkeypatch.setattr(os, "fsync", no_reader)
    writes(tmp_path)
    assert len(synced) == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF])
def test_mounts_that_sync_no_folders_are_written_to(number, tmp_path, monkeypatch):
    syncs = os.fsync

    def no_folder(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        syncs(descriptor)

    monkeypatch.setattr(os, "fsync", no_folder)
    writes(tmp_path)


def test_a_folder_that_fails_to_sync_is_an_error(tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_whole(tmp_path / "a file", "")
