"""Helpers for files and their sizes."""

import pytest

from shape.errors import ConfigError
from shape.files import human_bytes, sole_writer


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


def test_one_process_writes_at_a_time(tmp_path):
    lock = tmp_path / "a folder that is not there yet" / ".lock"
    with sole_writer(lock, "a training into o"):
        second = sole_writer(lock, "a training into o")
        with pytest.raises(ConfigError, match="another process does a training into o already; wait for its end"):
            second.__enter__()
    with sole_writer(lock, "a training into o"):
        assert lock.exists()
    assert not lock.exists()
