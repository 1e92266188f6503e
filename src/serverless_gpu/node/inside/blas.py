"""Sets the thread counts of the OpenBLAS copies that numpy and scipy bundle.

OpenBLAS reads its environment variables when Python loads the library. After the import, only OpenBLAS's functions can
change the thread count. OpenBLAS's functions also start all threads of the library. Each started thread spins for about
30 ms. In ranks that share two cores, the spinning threads were the largest cost of a short call. Until the threads
start, an exported variable of OpenBLAS holds the thread count. `set_threads` sets the exported variable. `set_threads`
calls OpenBLAS's function only if the variable has no effect.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import NamedTuple

_AFFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("scipy_openblas_", ""), ("openblas_", ""))
_COUNT = "blas_cpu_number"
# `get_parallel` returns 1 for builds with OpenBLAS's own threads. OpenMP builds have a second thread count.
_THREADS_OF_ITS_OWN = 1


class Library(NamedTuple):
    """A loaded OpenBLAS copy: its functions, and its exported thread count if a rank may set the variable."""

    read: Callable[[], int]
    change: Callable[[int], object]
    variable: ctypes.c_int | None


libraries: list[Library] = []


def find() -> None:
    """Fill `libraries` with the OpenBLAS copies in this process. The zygote calls `find` once."""
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
    """Make each OpenBLAS copy use `count` threads in later parallel operations."""
    for library in libraries:
        before = library.read()
        if library.variable is not None and count < before:
            library.variable.value = count
        if library.read() != count:
            library.change(count)


def _library(loaded: ctypes.CDLL, prefix: str, suffix: str) -> Library:
    parallel = getattr(loaded, f"{prefix}get_parallel{suffix}", None)
    variable = None
    with contextlib.suppress(ValueError):  # Some OpenBLAS builds do not export the variable.
        if parallel is not None and parallel() == _THREADS_OF_ITS_OWN:
            variable = ctypes.c_int.in_dll(loaded, _COUNT)
    read, change = (getattr(loaded, f"{prefix}{name}{suffix}") for name in ("get_num_threads", "set_num_threads"))
    return Library(read, change, variable)
