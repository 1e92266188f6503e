"""Probes the GPUs.

A separate process (`main`) queries NVML, because a hung driver blocks the querying process forever.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.doctor.facts import GpuFacts, GpuHealth, UnknownFact
from serverless_gpu.doctor.probes.bounded_calls import look
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.hardware import GpuType
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.devices.inventory import NvmlProvider
from serverless_gpu.node.devices.kernel_log import KERNEL, KernelLog
from serverless_gpu.node.devices.locks import MACHINE_DIRECTORIES, DeviceLocks, LockHolder
from serverless_gpu.node.devices.nvml import Nvml
from serverless_gpu.node.processes.spawn import clean_process
from serverless_gpu.node.supervisor.gpu_faults import suspects

_PCI = Path("/sys/bus/pci/devices")


def look_at_gpus(environ: Mapping[str, str], limit_s: float) -> GpuFacts | UnknownFact:
    """Return the NVIDIA GPUs that NVML and the kernel report, and the runs that hold GPUs.

    `limit_s` is the time limit for the NVML queries in seconds.
    """
    home = ""
    with contextlib.suppress(StorageError):
        home = str(find_home(environ).root)
    ended = look(
        lambda fd, log: clean_process(__name__, (fd, home), fds=(fd,), log=log, environ=environ),
        limit_s,
    )
    try:
        facts = from_json(ended.answer, GpuFacts)
    except msgspec.MsgspecError:
        return UnknownFact(f"NVML said nothing: {ended.why}. {ended.written.strip()[-300:]}")
    directory = next((path for path in MACHINE_DIRECTORIES if path.is_dir()), None)
    if directory is not None:
        facts = msgspec.structs.replace(facts, held=_held(directory))
        with contextlib.suppress(StorageError):
            notes = DeviceLocks(directory).quarantined()
            quarantined = {uuid: (note.reason, str(directory / f"{uuid}.quarantine")) for uuid, note in notes.items()}
            facts = msgspec.structs.replace(facts, quarantined=quarantined)
        with contextlib.suppress(StorageError):
            suspected = suspects(directory, [device.uuid for device in facts.devices], SystemClock().wall_ns())
            facts = msgspec.structs.replace(facts, suspects=tuple(suspected))
    log = KernelLog(KERNEL, SystemClock())
    log.close()
    device_files = 0
    with contextlib.suppress(OSError):
        for path in Path("/dev").glob("nvidia[0-9]*"):
            device_files += stat.S_ISCHR(path.stat().st_mode)
    return msgspec.structs.replace(facts, on_bus=_on_bus(), device_files=device_files, kernel_log=log.problem)


def _held(directory: Path) -> dict[str, str]:
    """Return the run that holds each locked device.

    The function briefly acquires each device lock. A run that fails to acquire a device lock tries again.
    """
    held: dict[str, str] = {}
    for path in sorted(directory.glob("*.lock")):
        note = held_note(path)
        if note is not None:
            held[path.stem] = ""
            with contextlib.suppress(msgspec.MsgspecError):
                held[path.stem] = from_json(note, LockHolder).run_id
    return held


def _on_bus() -> int:
    """Return the number of NVIDIA display controllers on the PCI bus, with or without a driver."""
    count = 0
    with contextlib.suppress(OSError):
        for device in _PCI.iterdir():
            with contextlib.suppress(OSError):
                vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
                count += vendor == "0x10de" and kind.startswith("0x03")
    return count


T = TypeVar("T")


def main(fd: int, home: str) -> NoReturn:
    """Write NVML's answers to a file descriptor and exit.

    `look_at_gpus` starts a process that runs this function. If `home` is not empty, the function reads the user-defined
    GPU types from that home directory.
    """
    os.write(fd, msgspec.json.encode(ask_nvml(home)))
    os._exit(0)


def ask_nvml(home: str) -> GpuFacts:
    """Query NVML and return the answers as facts."""
    try:
        import pynvml
    except ImportError as error:
        return GpuFacts(binding_problem=f"nvidia-ml-py is not installed: {error}")
    own: tuple[GpuType, ...] = ()
    if home:
        with contextlib.suppress(ServerlessGpuError):
            own = read_configuration(Home(Path(home))).types
    provider = NvmlProvider(nvml=cast(Nvml, pynvml), own=own)
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
    )  # NVML returns four row remapping counts: corrected, uncorrected, pending and failed.
    return GpuHealth(
        capability=None if capability is None else (capability[0], capability[1]),
        uncorrected_errors=_asked(pynvml, lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
    )


def _asked(pynvml: Any, ask: Callable[[], Any], *, fails: bool = False) -> Any:
    """Return NVML's answer, or None after an error.

    If `fails` is set, return True for an error and None for an answer.
    """
    try:
        answer = ask()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return True if fails else None
    return None if fails else answer
