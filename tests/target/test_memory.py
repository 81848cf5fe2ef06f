"""Weights in large pages: the same numbers, and pages of 2 MB where the system has them."""

import mmap
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from shape.target.memory import in_large_pages


@pytest.mark.parametrize("count", [0, 1, 1000, 5_000_000])
def test_numbers_stay_what_they_are(count):
    given = torch.arange(count, dtype=torch.float32)
    found = in_large_pages(given)
    assert found is given and torch.equal(found, torch.arange(count, dtype=torch.float32))


def large_pages() -> int:
    """Bytes of this process in large pages."""
    (size,) = re.findall(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 1024 * int(size)


def test_pages_are_large_on_linux():
    known = re.match(r"(\d+)\.(\d+)", platform.release())
    if sys.platform != "linux" or known is None or tuple(map(int, known.groups())) < (6, 1):
        pytest.skip("Linux moves memory to large pages from 6.1 on")
    fresh = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # which nothing has used before
    weight = torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    before = large_pages()
    in_large_pages(weight)
    assert large_pages() - before >= weight.nbytes // 2
