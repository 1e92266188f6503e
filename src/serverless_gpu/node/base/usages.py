"""Usage of a GPU: values that cross between processes."""

from __future__ import annotations

from msgspec import Struct

MIB = 1024 * 1024

IDLE_MEMORY_BYTES = 256 * MIB
"""Memory an idle GPU may show. NVML's version 2 figure leaves out the driver's own reserve (0.9 GB on an
A100), so an idle card of any size shows some MiB (8 MB on that A100). This leaves room for resident services, and stays
below the bare CUDA context of a data-centre card."""


class GpuProcess(Struct, frozen=True):
    """A process that has a GPU open; `graphics` means it only draws (a display server, a browser)."""

    pid: int
    memory_bytes: int | None
    name: str = ""
    graphics: bool = False


class Usage(Struct, frozen=True):
    """Usage of one device; `problem` says why it is unknown, and then nothing else counts."""

    processes: tuple[GpuProcess, ...]
    memory_used_bytes: int | None
    pids_visible: bool
    problem: str = ""
    silent: bool = False  # the driver does not answer


class Unavailable(Struct, frozen=True):
    """A device that exists and cannot be lent."""

    name: str
    reason: str


class VisibleGpu(Struct, frozen=True):
    """A GPU that NVML can see."""

    place: tuple[int, int, int]  # PCI domain, bus, device
    uuid: str
    product: str
    memory_bytes: int


def unknown_usage(problem: str, *, silent: bool = False) -> Usage:
    """Return the usage of a device that could not be asked; `silent` if the driver does not answer."""
    return Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem=problem, silent=silent)
