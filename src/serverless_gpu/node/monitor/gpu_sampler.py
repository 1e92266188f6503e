"""Samples devices: GPUs through NVML, fakes through a file or ranks, CPU slots through ranks.

    sample() ── asks ──▶ thread: NVML, some ms for each GPU ──▶ the latest reading
        └────── waits 50 ms for it at most, and takes the one before where it is not ready ◀──┘

Failure cases, none an exception: a wedged driver blocks NVML (after 5 s the reading expires, samples have no GPUs and
`problem` says why, until the one thread comes back); a figure the card or driver does not have (None, asked again every
time); a GPU that fell off the bus (an empty sample, and `problem` names it); another error of the binding (an empty
reading, and `problem` says how). PCIe throughput is measured for 20 ms by the call that asks for it, so for two GPUs at
a time, in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.json_codec import from_builtins, from_json
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, RankSample
from serverless_gpu.node.devices.inventory import FAKE_STATE_FILE
from serverless_gpu.node.devices.nvml import NvmlBroken, initialised_nvml, nvml_errors, sees_all_pids

_WAIT_S = 0.05
_STALE_NS = 5 * SECOND_NS
_PCIE_AT_ONCE = 2
_FAKE_STATE_BYTES_MAX = 1 << 20
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024

# NVML's own numbers, of nvml.h.
TEMPERATURE_GPU = 0
CLOCK_SM, CLOCK_MEMORY = 1, 2
PCIE_TRANSMIT, PCIE_RECEIVE = 0, 1
UNCORRECTED, SINCE_DRIVER_LOADED = 1, 0
NVLINK_TRANSMIT, NVLINK_RECEIVE = 138, 139  # fields: KiB over all links


class GpuReading(NamedTuple):
    """GPUs at one moment, by uuid, and memory by process; None where that is hidden."""

    gpus: dict[str, GpuSample]
    memory_by_pid: dict[int, int] | None
    problem: str = ""


class NvmlSampler:
    """Samples NVIDIA GPUs, in a thread of its own; waits at most `wait_s` for a fresh reading.

    `pids_visible` says that NVML's pids are those of this process's namespace; None finds out.
    """

    def __init__(
        self,
        *,
        nvml: Any = None,
        clock: Clock | None = None,
        wait_s: float = _WAIT_S,
        pids_visible: bool | None = None,
    ) -> None:
        self._reader = _NvmlReader(nvml, sees_all_pids() if pids_visible is None else pids_visible)
        self._clock = clock or SystemClock()
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self._asked: tuple[str, ...] | None = None
        self._asked_ns = 0
        self._latest: GpuReading | None = None
        self._readings = 0
        self._thread: threading.Thread | None = None

    def sample(self, uuids: Sequence[str]) -> GpuReading:
        """Return the latest reading of these GPUs: one entry per uuid asked, never an exception, never long."""
        now_ns = self._clock.boottime_ns()
        with self._condition:
            before = self._readings
            if self._asked is None:
                self._asked, self._asked_ns = tuple(uuids), now_ns
                self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="sgpu-nvml-samples", daemon=True)
                self._thread.start()
            self._condition.wait_for(lambda: self._readings > before, self._wait_s)
            latest = self._latest
            silent_ns = now_ns - self._asked_ns if self._waits() else 0
        if silent_ns >= _STALE_NS:
            return _empty(uuids, "NVML does not answer")
        if latest is None:
            return _empty(uuids, "")
        gpus = {uuid: latest.gpus.get(uuid, GpuSample()) for uuid in uuids}
        return GpuReading(gpus, latest.memory_by_pid, latest.problem)

    def _waits(self) -> bool:
        """Return whether a question has no answer yet; asked by name, since the other thread answers meanwhile."""
        return self._asked is not None

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._asked is not None)
                asked = self._asked or ()
            try:
                reading = self._reader.read(asked, self._clock.boottime_ns)
            except Exception as error:  # noqa: BLE001 - whatever a binding raises, the next reading may be fine
                reading = _empty(asked, f"NVML cannot be asked: {error!r}")
            with self._condition:
                self._latest, self._readings = reading, self._readings + 1
                self._asked = None
                self._condition.notify_all()


class _NvmlReader:
    """Asks NVML; used by one thread."""

    def __init__(self, given: Any, pids_visible: bool) -> None:
        self._given = given
        self._pids_visible = pids_visible
        self._nvml: Any = None
        self._links: dict[tuple[str, int], tuple[int, int]] = {}  # (uuid, field) -> when, KiB
        self._pcie: dict[str, tuple[float | None, float | None]] = {}
        self._turn = 0

    def read(self, uuids: Sequence[str], now_ns: Callable[[], int]) -> GpuReading:
        try:
            self._nvml = self._nvml or initialised_nvml(self._given)
        except NvmlBroken as broken:
            return _empty(uuids, str(broken))
        if self._nvml is None:
            return _empty(uuids, "there is no NVIDIA driver to ask")
        gpus: dict[str, GpuSample] = {}
        memory: dict[int, int] = {}
        problem = ""
        for uuid in uuids:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml_errors(self._nvml) as error:
                gpus[uuid], problem = GpuSample(), f"{uuid} cannot be asked: {error}"
                continue
            gpus[uuid] = self._gpu(uuid, handle, now_ns)
            for process in self._ask("DeviceGetComputeRunningProcesses", handle) or ():
                memory[process.pid] = memory.get(process.pid, 0) + (process.usedGpuMemory or 0)
        self._measure_pcie(uuids)
        return GpuReading(gpus, memory if self._pids_visible else None, problem)

    def _gpu(self, uuid: str, handle: object, now_ns: Callable[[], int]) -> GpuSample:
        busy = self._ask("DeviceGetUtilizationRates", handle)
        memory = self._ask("DeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        power = self._ask("DeviceGetPowerUsage", handle)
        limit = self._ask("DeviceGetEnforcedPowerLimit", handle)
        receive, transmit = self._pcie.get(uuid, (None, None))
        return GpuSample(
            busy_percent=None if busy is None else float(busy.gpu),
            memory_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=None if power is None else round(power / 1000, 1),
            power_limit_watts=None if limit is None else round(limit / 1000, 1),
            temperature_celsius=self._ask("DeviceGetTemperature", handle, TEMPERATURE_GPU),
            sm_megahertz=self._ask("DeviceGetClockInfo", handle, CLOCK_SM),
            memory_megahertz=self._ask("DeviceGetClockInfo", handle, CLOCK_MEMORY),
            pcie_receive_bytes_s=receive,
            pcie_transmit_bytes_s=transmit,
            nvlink_receive_bytes_s=self._link_rate(uuid, handle, NVLINK_RECEIVE, now_ns()),
            nvlink_transmit_bytes_s=self._link_rate(uuid, handle, NVLINK_TRANSMIT, now_ns()),
            throttle=self._ask("DeviceGetCurrentClocksThrottleReasons", handle),
            ecc_errors=self._ask("DeviceGetTotalEccErrors", handle, UNCORRECTED, SINCE_DRIVER_LOADED),
        )

    def _link_rate(self, uuid: str, handle: object, field: int, at_ns: int) -> float | None:
        """Return bytes a second since the reading before; the card counts KiB."""
        values = self._ask("DeviceGetFieldValues", handle, [(field, _ALL_LINKS)])
        if values is None or values[0].nvmlReturn != 0:
            return None
        kib = int(values[0].value.ullVal)
        before = self._links.get((uuid, field))
        self._links[uuid, field] = (at_ns, kib)
        if before is None or at_ns <= before[0] or kib < before[1]:
            return None
        return round((kib - before[1]) * _KIB / (at_ns - before[0]) * 1e9)

    def _measure_pcie(self, uuids: Sequence[str]) -> None:
        for offset in range(min(_PCIE_AT_ONCE, len(uuids))):
            uuid = uuids[(self._turn + offset) % len(uuids)]
            handle = self._ask("DeviceGetHandleByUUID", uuid)
            rates = [self._ask("DeviceGetPcieThroughput", handle, way) for way in (PCIE_RECEIVE, PCIE_TRANSMIT)]
            receive, transmit = (None if rate is None else float(rate * _KIB) for rate in rates)
            self._pcie[uuid] = (receive, transmit)
        self._turn += _PCIE_AT_ONCE

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return what NVML answers, None where it has no answer, or where it was asked about nothing."""
        if arguments[0] is None:
            return None
        try:
            return getattr(self._nvml, f"nvml{function}")(*arguments)
        except AttributeError:  # a binding that does not know the function yet, or any more
            return None
        except nvml_errors(self._nvml):
            return None


class FakeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A fake's part of the state file; the fake's rank supplies the rest."""

    memory_used_bytes: int | None = None  # as the gate sees it
    problem: str = ""  # why it cannot be asked, or ""
    sampled: dict[str, int | float | None] = {}  # figures by the names of `GpuSample`


def fake_state(home: Path) -> dict[str, FakeGpu]:
    """Return the state file of fakes, by uuid; nothing where it is missing or unreadable."""
    try:
        with (home / FAKE_STATE_FILE).open("rb") as file:
            return from_json(file.read(_FAKE_STATE_BYTES_MAX), dict[str, FakeGpu])
    except (OSError, msgspec.MsgspecError):
        return {}


def from_rank(device: Device, rank: RankSample | None, share: int, state: Mapping[str, FakeGpu]) -> GpuSample:
    """Return the sample of a fake or a CPU slot from its rank, if any, which has `share` devices."""
    busy = 0.0 if rank is None else rank.cpu_percent
    memory = 0 if rank is None else rank.memory_bytes
    derived = GpuSample(
        busy_percent=None if busy is None else min(100.0, round(busy / share, 1)),
        memory_bytes=None if memory is None else memory // share,
    )
    if device.kind is DeviceKind.CPU:
        return derived
    fake = state.get(device.uuid, FakeGpu())
    if fake.problem:
        return GpuSample()
    figures = {
        **msgspec.structs.asdict(derived),
        "memory_bytes": fake.memory_used_bytes or derived.memory_bytes,
        "memory_total_bytes": device.memory_bytes or None,
        **fake.sampled,
    }
    try:
        return from_builtins([figures[name] for name in GpuSample.__struct_fields__], GpuSample)
    except msgspec.ValidationError:  # half a byte of memory, for example
        return derived


def _empty(uuids: Sequence[str], problem: str) -> GpuReading:
    return GpuReading({uuid: GpuSample() for uuid in uuids}, None, problem)
