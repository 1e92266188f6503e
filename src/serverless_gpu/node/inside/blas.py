"""Thread counts of the OpenBLAS copies that numpy and scipy bring along.

They read their variables when they are loaded; from then on only their own calls change the count. That call starts
all threads of the library at once, and each spins for some 30 ms waiting for work: in ranks that share two cores this
was the largest single cost of a short call. So the threads are ended again, as the library itself does before each
fork, and it starts them when a function needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import NamedTuple

_AFFIXES = (("scipy_openblas", "64_"), ("openblas", "64_"), ("scipy_openblas", ""), ("openblas", ""))
_END_THREADS = "blas_thread_shutdown_"


class Library(NamedTuple):
    """One loaded copy of OpenBLAS: its own calls."""

    read_count: Callable[[], int]
    set_count: Callable[[int], object]
    end_threads: Callable[[], object] | None


libraries: list[Library] = []


def find() -> None:
    """Fill `libraries` with the copies already mapped into this process; done once, in the zygote."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(None, 5)[5].strip() for line in file if "openblas" in line}
    except OSError:
        return
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            loaded = ctypes.CDLL(path)
            end_threads = getattr(loaded, _END_THREADS, None)
            libraries.extend(
                Library(getattr(loaded, read), getattr(loaded, change), end_threads)
                for read, change in ((f"{a}_get_num_threads{z}", f"{a}_set_num_threads{z}") for a, z in _AFFIXES)
                if hasattr(loaded, read) and hasattr(loaded, change)
            )


def set_threads(count: int) -> None:
    """Have each copy use so many threads from its next parallel operation on, and have none until then."""
    for library in libraries:
        if library.read_count() != count:
            library.set_count(count)
            if library.end_threads is not None:
                library.end_threads()
