"""Huge pages for what a zygote has loaded: a fork copies one entry where it would copy 512.

Copying page tables dominates a fork of a process with torch in it, and each call has three such forks. A process that
writes to a huge page gets its own copy of 4 KiB of it, as without. Where the kernel cannot do it (before Linux 6.1, no
memory in one piece, transparent huge pages forbidden) nothing changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_SIZE = 2 << 20
_MADV_COLLAPSE = 25


def ranges(maps: str = "/proc/self/maps") -> list[int]:
    """Return the addresses of the writable anonymous memory that could be one huge page each."""
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as file:
            return [address for line in file for address in _within(line)]
    except OSError:
        return []


def collapse(address: int) -> bool:
    """Put one range into a huge page; return whether the kernel did."""
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _MADV_COLLAPSE) == 0)


def _within(line: str) -> Iterator[int]:
    place, mode, _offset, _device, _inode, *name = line.split(None, 5)
    if mode != "rw-p" or (name and name[0].strip() != "[heap]"):
        return
    start, end = (int(number, 16) for number in place.split("-"))
    yield from range(-(-start // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE)
