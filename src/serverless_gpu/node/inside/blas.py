"""Thread counts of the OpenBLAS copies that numpy and scipy bring along.

They read their variables when they are loaded; from then on only their own calls change the count.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

_NAMES = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")

setters: list[Callable[[int], object]] = []


def find() -> None:
    """Fill `setters` with those of the copies already mapped into this process; done once, in the zygote."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(None, 5)[5].strip() for line in file if "openblas" in line}
    except OSError:
        return
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            setters.extend(getattr(library, name) for name in _NAMES if hasattr(library, name))
