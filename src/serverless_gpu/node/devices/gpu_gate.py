"""The GPU gate: verifies that a device is free before a run and clean after the run.

`judge` and `foreign` evaluate the usage of a device. `verify` reads the usage of devices repeatedly. Callers of this
module lend and quarantine devices.

Each verdict contains its evidence. If processes are visible, the gate checks a device's processes and memory. If
processes are hidden, the gate checks only memory and notes this limitation in the evidence. A device in an unknown
state never passes the gate. On a workstation, display servers and browsers draw on the GPU and hold little memory.
Display processes neither block a run nor fail the check after a run. The gate does not count the memory of display
processes. The gate also ignores processes that were running before the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.devices.inventory import Provider
from serverless_gpu.node.devices.nvml import IDLE_MEMORY_BYTES, MIB, GpuProcess, Usage, unknown_usage

BASELINE_TOLERANCE_BYTES = 64 * MIB
"""Tolerance in bytes between two memory readings of an idle GPU. The driver's own memory varies by a few MiB, while a
CUDA context uses more than 100 MiB.
"""

DISPLAY_MEMORY_BYTES_MAX = 1024 * MIB
"""Maximum GPU memory in bytes of a display process. A leftover renderer holds more memory."""

_PROCESSES_NAMED = 3


class Verdict(Struct, frozen=True):
    """Decision about lending a device again, with the evidence for the decision."""

    ok: bool
    evidence: str


class GatePolicy(Struct, frozen=True):
    """Pauses in seconds between two checks of a device.

    The first pauses are short, because the driver usually frees memory milliseconds after a process has ended. All
    pauses together take 15 s.
    """

    pauses_s: tuple[float, ...] = (0.05, 0.2, 0.75, 4.0, 10.0)

    def __post_init__(self) -> None:
        if min(self.pauses_s, default=0) < 0:
            raise InvalidValue(f"A gate needs pauses of 0 s or more, not {self}.")


def verify(
    provider: Provider,
    uuids: Sequence[str],
    before: Mapping[str, Usage],
    policy: GatePolicy,
    sleep: Callable[[float], None],
) -> dict[str, Verdict]:
    """Return a verdict for every device. After each pause, recheck the devices that are not clean.

    If `before` lacks a device, the earlier usage of the device is unknown.
    """
    verdicts: dict[str, Verdict] = {}
    waiting = tuple(uuids)
    for pause_s in (None, *policy.pauses_s):
        if pause_s is not None:
            sleep(pause_s)
        usage = provider.usage(waiting)
        for uuid in waiting:
            after = usage.get(uuid, unknown_usage("the driver returned no usage for this device"))
            verdicts[uuid] = judge(before.get(uuid), after, kind=provider.kind)
        waiting = tuple(uuid for uuid in waiting if not verdicts[uuid].ok)
        if not waiting:
            break
    return verdicts


def judge(before: Usage | None, after: Usage, *, kind: DeviceKind) -> Verdict:
    """Decide whether a device is as clean as before an attempt.

    `before` is the device usage before the attempt, or None if unknown. If `before` is None, memory must be at the idle
    level. CPU slots always pass. Fake devices follow the rules of GPUs.
    """
    if kind is DeviceKind.CPU:
        return Verdict(True, "CPU slot: nothing to verify")
    if after.problem:
        return Verdict(False, after.problem)
    known = {(process.pid, process.name) for process in before.processes} if before else set()
    # Processes that were running before the attempt are not leftovers of the attempt.
    stayed = tuple(process for process in after.processes if (process.pid, process.name) in known)
    left = [process for process in after.processes if not _is_display(process) and process not in stayed]
    if left:
        return Verdict(False, _holders(left, "still holds"))
    if after.memory_used_bytes is None:
        return Verdict(False, "could not read the GPU memory in use")
    ok = _memory_is_back(before, after, stayed)
    return Verdict(ok, _evidence(before, after, stayed, ok=ok))


def foreign(usage: Usage) -> str | None:
    """Return a description of the processes that use a device, or None if the device is free.

    The function treats a device with unknown usage as in use.
    """
    if usage.problem:
        return usage.problem
    computing = [process for process in usage.processes if not _is_display(process)]
    if computing:
        return _holders(computing, "holds")
    if usage.memory_used_bytes is None:
        return "could not read the GPU memory in use"
    if usage.memory_used_bytes - _held(filter(_is_display, usage.processes)) > IDLE_MEMORY_BYTES:
        return f"{_amount(usage.memory_used_bytes)} used by processes that are not visible here (memory only)"
    return None


def _memory_is_back(before: Usage | None, after: Usage, stayed: Sequence[GpuProcess]) -> bool:
    ours = (after.memory_used_bytes or 0) - _held(p for p in after.processes if _is_display(p) or p in stayed)
    if before is None or before.memory_used_bytes is None:
        return ours <= IDLE_MEMORY_BYTES
    # The gate subtracts only the memory of processes that still run, because ended processes must have freed their
    # memory.
    still = {process.pid for process in stayed}
    others = _held(p for p in before.processes if _is_display(p) or p.pid in still)
    return ours <= before.memory_used_bytes - others + BASELINE_TOLERANCE_BYTES


def _evidence(before: Usage | None, after: Usage, stayed: Sequence[GpuProcess], *, ok: bool) -> str:
    if before is None or before.memory_used_bytes is None:
        baseline = f"baseline unknown, idle is at most {_amount(IDLE_MEMORY_BYTES)}"
    else:
        baseline = f"baseline {_amount(before.memory_used_bytes)}"
    memory = f"{_amount(after.memory_used_bytes)} used ({baseline})"
    if not after.pids_visible:
        return f"memory only: {memory}, processes are not visible here"
    others = [process for process in after.processes if process in stayed or _is_display(process)]
    who = f"no process except {_listed([_name(process) for process in others])}" if others else "no process"
    return f"{who}, {memory}" if ok else f"{who}, but {memory}"


def _is_display(process: GpuProcess) -> bool:
    return process.graphics and (process.memory_bytes or 0) <= DISPLAY_MEMORY_BYTES_MAX


def _held(processes: Iterable[GpuProcess]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


def _holders(processes: Sequence[GpuProcess], verb: str) -> str:
    return _listed([f"{_name(process)} {verb} {_amount(process.memory_bytes)}" for process in processes])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _PROCESSES_NAMED
    return ", ".join(texts[:_PROCESSES_NAMED]) + (f", and {more} more" if more > 0 else "")


def _name(process: GpuProcess) -> str:
    return f"pid {process.pid} ({process.name})" if process.name else f"pid {process.pid}"


def _amount(count: int | None) -> str:
    """Return a number of bytes as GPU tools print it: whole MiB, or GiB with one decimal from 1 GiB."""
    if count is None:
        return "an unknown amount"
    return f"{count / (1024 * MIB):.1f} GiB" if count >= 1024 * MIB else f"{count / MIB:.0f} MiB"
