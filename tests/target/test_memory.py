"""Weights in large pages: the same numbers, and pages of 2 MB where the system has them."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from shape.target.memory import in_large_pages

SIZE, COLLAPSE = 32 << 20, 25  # bytes; what madvise calls MADV_COLLAPSE


@pytest.mark.parametrize("count", [0, 1, 1000, 5_000_000])
def test_numbers_stay_what_they_are(count):
    given = torch.arange(count, dtype=torch.float32)
    found = in_large_pages(given)
    assert found is given and torch.equal(found, torch.arange(count, dtype=torch.float32))


def fresh(size: int) -> mmap.mmap:
    """Memory that nothing has used before, in pages of 4 KB."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(made, dtype=torch.uint8).fill_(1)
    return made


def large_pages() -> int:
    """Bytes of this process in large pages."""
    (size,) = re.findall(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 1024 * int(size)


@pytest.mark.skipif(sys.platform != "linux", reason="for Linux alone")
def test_pages_are_large_where_the_system_has_them():
    try:
        fresh(SIZE).madvise(COLLAPSE)
    except OSError:
        pytest.skip("this system has no large pages to give: Linux before 6.1, or no room")
    weight = torch.frombuffer(fresh(SIZE), dtype=torch.uint8)
    before = large_pages()
    in_large_pages(weight)
    assert large_pages() - before >= weight.nbytes // 2
