"""Thread counts of the OpenBLAS copies that numpy and scipy bring along.

They read their variables when they are loaded; later only their own calls change the count. Such a call also starts all
threads of the library, and each spins for some 30 ms: in ranks that share two cores this was the largest cost of a
short call. Before the threads run, the count is one exported variable, which is set here; where that has no effect the
call is made.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import NamedTuple

_AFFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("scipy_openblas_", ""), ("openblas_", ""))
_COUNT = "blas_cpu_number"
_THREADS_OF_ITS_OWN = 1  # `get_parallel`; OpenMP's have another count beside this one


class Library(NamedTuple):
    """One loaded copy of OpenBLAS: its own calls, and its count where a rank may set that."""

    read: Callable[[], int]
    change: Callable[[int], object]
    variable: ctypes.c_int | None


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
            for prefix, suffix in _AFFIXES:
                if all(hasattr(loaded, f"{prefix}{name}{suffix}") for name in ("get_num_threads", "set_num_threads")):
                    libraries.append(_library(loaded, prefix, suffix))


def set_threads(count: int) -> None:
    """Have each copy use so many threads from its next parallel operation on."""
    for library in libraries:
        before = library.read()
        if library.variable is not None and count < before:
            library.variable.value = count
        if library.read() != count:
            library.change(count)


def _library(loaded: ctypes.CDLL, prefix: str, suffix: str) -> Library:
    parallel = getattr(loaded, f"{prefix}get_parallel{suffix}", None)
    variable = None
    with contextlib.suppress(ValueError):  # a build that does not export it
        if parallel is not None and parallel() == _THREADS_OF_ITS_OWN:
            variable = ctypes.c_int.in_dll(loaded, _COUNT)
    read, change = (getattr(loaded, f"{prefix}{name}{suffix}") for name in ("get_num_threads", "set_num_threads"))
    return Library(read, change, variable)
