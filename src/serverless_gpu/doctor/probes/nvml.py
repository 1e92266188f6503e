"""What asks NVML on behalf of the doctor: runs in a clean process of its own, sends its facts and ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from serverless_gpu.doctor.facts import GpuFacts, GpuHealth
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.hardware import GpuType
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.inventory import NvmlProvider
from serverless_gpu.node.devices.nvml import Nvml

T = TypeVar("T")


def main(fd: int, home: str) -> NoReturn:
    """Send the facts on a descriptor and end.

    Args:
        fd: where to.
        home: the home directory, for the user's own GPU types; "" without one.
    """
    os.write(fd, msgspec.json.encode(ask(home)))
    os._exit(0)


def ask(home: str) -> GpuFacts:
    """Return what NVML says."""
    try:
        import pynvml
    except ImportError as error:
        return GpuFacts(binding_problem=f"nvidia-ml-py is not installed: {error}")
    provider = NvmlProvider(nvml=cast(Nvml, pynvml), own=_own_types(home))
    devices, unavailable = provider.devices(), provider.unavailable()
    facts = GpuFacts(
        devices=devices, unavailable=unavailable, usage=provider.usage([device.uuid for device in devices])
    )
    if not devices and not unavailable and _asked(pynvml, pynvml.nvmlInit, fails=True):
        return facts
    cuda = _asked(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return msgspec.structs.replace(
        facts,
        driver=str(_asked(pynvml, pynvml.nvmlSystemGetDriverVersion) or ""),
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        health={device.uuid: _health(pynvml, device.uuid) for device in devices},
    )


def _health(pynvml: Any, uuid: str) -> GpuHealth:
    handle = _asked(pynvml, lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return GpuHealth()
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    capability = _asked(pynvml, lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    remapped = _asked(
        pynvml, lambda: pynvml.nvmlDeviceGetRemappedRows(handle)
    )  # corrected, uncorrected, pending, failed
    return GpuHealth(
        capability=None if capability is None else (capability[0], capability[1]),
        uncorrected_errors=_asked(pynvml, lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
    )


def _asked(pynvml: Any, ask: Callable[[], Any], *, fails: bool = False) -> Any:
    """Return NVML's answer, None where it has none; with `fails`, whether asking failed."""
    try:
        answer = ask()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return True if fails else None
    return None if fails else answer


def _own_types(home: str) -> tuple[GpuType, ...]:
    try:
        return read_configuration(Home(Path(home))).types if home else ()
    except ServerlessGpuError:
        return ()
