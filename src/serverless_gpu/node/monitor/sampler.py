"""Samples the node once a second in a thread, so that a hanging driver blocks only this thread.

    main thread ──ask(wanted)──▶ SamplerThread ──▶ NodeSample, and the main thread is woken ──take()──▶ main thread

    HostSampler ─────┐
    RankSampler ─────┼─▶ MachineSampler.sample(wanted) ─▶ NodeSample ─▶ a part for each attempt, a frame for `sgpu top`
    NvmlSampler ─────┤      └─ waits at most 50 ms for its thread's reading, else uses the previous reading
    fake_gpus.json ──┘

The sampler takes one sample for all attempts. Only one request is active at a time. The sampler drops further requests
until the active request ends. Each sample reads the PCIe throughput of only two GPUs in rotation, because each GPU
takes 20 ms.

Sampling failures raise no exceptions:

A metric that cannot be read is None. `NodeSample.problems` contains the reason, so that the receiver reports the
problem once.

The sampler omits a failed sample and logs a repeated failure once.

If a hanging driver blocks NVML, the latest GPU reading expires after 5 s. After the expiry, samples contain no GPUs
until the NVML thread returns. Listing GPUs for `sgpu top` waits for the driver.

If a GPU has failed, its sample is empty and `problems` names the GPU.

The sampler ignores a process that ends during the sample. If the parent has reaped the ended process, the parent's CPU
time includes the ended process.

The sampler counts shared memory once in each process, like `ps`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.json_codec import from_builtins, from_json
from serverless_gpu.model.hardware import Device, DeviceKind, GpuType
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, HostSample, RankSample
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.inventory import FAKE_STATE_FILE, FAKE_VARIABLE, Provider, providers
from serverless_gpu.node.devices.nvml import NvmlBroken, initialised_nvml, nvml_errors, sees_all_pids

_DISK_EVERY_NS = 10 * SECOND_NS
_LIST_EVERY_NS = 30 * SECOND_NS
_NETWORKS = Path("/sys/class/net")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WAIT_S = 0.05
_STALE_NS = 5 * SECOND_NS
_PCIE_AT_ONCE = 2
_FAKE_STATE_BYTES_MAX = 1 << 20
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024

# Constants from the NVML header file nvml.h.
TEMPERATURE_GPU = 0
CLOCK_SM, CLOCK_MEMORY = 1, 2
PCIE_TRANSMIT, PCIE_RECEIVE = 0, 1
UNCORRECTED, SINCE_DRIVER_LOADED = 1, 0
NVLINK_TRANSMIT, NVLINK_RECEIVE = 138, 139  # NVML fields for NVLink traffic in KiB, summed over all links.

RankKey = tuple[str, int]
"""Key of a rank: attempt key and global rank."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and ranks to include in a sample."""

    devices: tuple[Device, ...] = ()  # Devices of all attempts, without duplicates.
    ranks: Mapping[str, Mapping[int, int]] = {}  # Pids by global rank for each attempt key.
    used_by: Mapping[str, tuple[str, int]] = {}  # Attempt key and global rank by device uuid.
    # Fake devices that `sgpu top` declares instead of the node's devices; None while `sgpu top` does not run.
    fakes: str | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at one time: devices by uuid, ranks by attempt."""

    at_ns: int  # Nanoseconds since 1970.
    devices: tuple[Device, ...]
    host: HostSample
    gpus: Mapping[str, GpuSample]
    ranks: Mapping[str, tuple[RankSample, ...]]
    # Messages about missing sample values. The receiver reports each problem message once.
    problems: tuple[str, ...] = ()


class NodeReader(Protocol):
    """Interface of a node sampler."""

    def sample(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        """Return a sample of the node's current state."""
        ...


class SamplerThread:
    """The sampling thread.

    The thread calls `machine` and `wake` itself, so that a slow start does not block the event loop.
    """

    def __init__(self, machine: Callable[[], NodeReader], clock: Clock, wake: Callable[[], None]) -> None:
        self._make = machine
        self._clock = clock
        self._wake = wake
        self._asked: queue.SimpleQueue[SampleRequest] = queue.SimpleQueue()
        self._samples: queue.SimpleQueue[NodeSample | None] = queue.SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None

    def ask(self, wanted: SampleRequest) -> bool:
        """Request a sample. Return False while the previous request is active."""
        if self._busy:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)
            self._thread.start()
        self._busy = True
        self._asked.put(wanted)
        return True

    def take(self) -> NodeSample | None:
        """Return the requested sample once, or None if the request is active or has failed."""
        try:
            sample = self._samples.get_nowait()
        except queue.Empty:
            return None
        self._busy = False
        return sample

    def _serve(self) -> None:
        machine: NodeReader | None = None
        logged = ""
        while True:
            wanted = self._asked.get()
            sample = None
            try:
                machine = machine or self._make()
                sample = machine.sample(wanted, self._clock.wall_ns())
                logged = ""
            except Exception as error:  # noqa: BLE001 - only this thread takes the next sample, which may succeed
                if repr(error) != logged:
                    logged = repr(error)
                    traceback.print_exc()
            self._samples.put(sample)
            self._wake()


class WakeupEvent:
    """Wakes an event loop from other threads."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # Descriptor that is readable while the event is set.

    def set(self) -> None:
        """Wake the event loop."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Reset the event, so that the event loop can wait again."""
        os.eventfd_read(self.fd)


class MachineSampler:
    """Samples this machine from one thread. The sampler creates an NVML sampler if `nvml` is None."""

    def __init__(self, home: Path, *, nvml: NvmlSampler | None = None, clock: Clock | None = None) -> None:
        self._home = home
        self._host = HostSampler(home)
        self._processes = RankSampler()
        self._clock = clock or SystemClock()
        self._nvml = nvml or NvmlSampler(clock=self._clock)
        self._listed: tuple[str, int, tuple[Device, ...], str] | None = None
        self._sources: tuple[str, tuple[GpuType, ...], tuple[Provider, ...]] | None = None

    def sample(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        """Return a sample. A fake device without a rank is idle.

        `at_ns` is the sampling time in nanoseconds since 1970.
        """
        boottime_ns = self._clock.boottime_ns()
        own, problem = ((), "") if wanted.fakes is None else self._list(wanted.fakes, boottime_ns)
        devices = {device.uuid: device for device in (*own, *wanted.devices)}
        real = [uuid for uuid, device in devices.items() if device.kind is DeviceKind.GPU]
        roots = {pid: (key, rank) for key, pids in wanted.ranks.items() for rank, pid in pids.items()}
        usages = self._processes.sample(boottime_ns, roots)
        reading = self._nvml.sample(real) if real else GpuReading({}, None)
        on_gpus = {key for uuid, (key, _) in wanted.used_by.items() if uuid in real}
        ranks = {
            key: _ranks(key, pids, usages, reading if key in on_gpus else GpuReading({}, None))
            for key, pids in wanted.ranks.items()
        }
        return NodeSample(
            at_ns=at_ns,
            devices=tuple(devices.values()),
            host=self._host.sample(boottime_ns),
            gpus={**reading.gpus, **self._made_up(devices, wanted, ranks)},
            ranks=ranks,
            problems=tuple(text for text in (problem, reading.problem) if text),
        )

    def _list(self, fakes: str, now_ns: int) -> tuple[tuple[Device, ...], str]:
        """Return this node's devices, with the reason if the list is incomplete.

        On a node without GPUs, the devices are CPU slots.
        """
        if self._listed is None or self._listed[0] != fakes or now_ns - self._listed[1] >= _LIST_EVERY_NS:
            devices: tuple[Device, ...] = ()
            problem = ""
            try:
                own = read_configuration(Home(self._home)).types
                if self._sources is None or self._sources[:2] != (fakes, own):
                    self._sources = (fakes, own, providers(self._home, {FAKE_VARIABLE: fakes}, own))
                devices = next(filter(None, (source.devices() for source in self._sources[2])), ())
            except ServerlessGpuError as error:
                problem = str(error)
            self._listed = (fakes, now_ns, devices, problem)
        return self._listed[2:]

    def _made_up(
        self, devices: Mapping[str, Device], wanted: SampleRequest, ranks: Mapping[str, Sequence[RankSample]]
    ) -> dict[str, GpuSample]:
        """Return the samples of fake GPUs and CPU slots, computed from their ranks' usage."""
        made_up = {uuid: device for uuid, device in devices.items() if device.kind is not DeviceKind.GPU}
        fakes = any(device.kind is DeviceKind.FAKE for device in made_up.values())
        state: dict[str, FakeGpu] = fake_state(self._home) if fakes else {}
        by_key = {(key, rank.rank): rank for key, samples in ranks.items() for rank in samples}
        shares = Counter(wanted.used_by.values())
        gpus: dict[str, GpuSample] = {}
        for uuid, device in made_up.items():
            user = wanted.used_by.get(uuid)
            rank = None if user is None else by_key.get(user, RankSample(user[1]))
            gpus[uuid] = from_rank(device, rank, 1 if user is None else shares[user], state)
        return gpus


def _ranks(
    key: str, pids: Mapping[int, int], usages: Mapping[RankKey, RankUsage], reading: GpuReading
) -> tuple[RankSample, ...]:
    samples: list[RankSample] = []
    for rank in sorted(pids):
        usage = usages.get((key, rank))
        if usage is None:
            samples.append(RankSample(rank))
            continue
        used = reading.memory_by_pid
        memory = None if used is None else sum(used.get(pid, 0) for pid in usage.pids)
        samples.append(RankSample(rank, usage.cpu_percent, usage.memory_bytes, memory))
    return tuple(samples)


class HostSampler:
    """Samples CPU, memory, disk and network of the machine.

    The first sample has no CPU usage (None), because CPU usage requires two samples. The sampler queries the disk only
    every ten seconds. On a network file system, each disk query is a request to the file server.
    """

    def __init__(self, home: Path, networks: Path = _NETWORKS) -> None:
        self._home = home
        self._networks = networks
        self._cpu: tuple[float, float] | None = None  # Busy and total CPU time in seconds.
        self._disk: tuple[int | None, int | None] = (None, None)
        self._disk_ns: int | None = None

    def sample(self, at_ns: int) -> HostSample:
        """Return a sample of the machine. `at_ns` may come from any clock."""
        if self._disk_ns is None or not 0 <= at_ns - self._disk_ns < _DISK_EVERY_NS:
            self._disk, self._disk_ns = _disk(self._home), at_ns
        memory = psutil.virtual_memory()
        receive, transmit = self._network()
        return HostSample(
            cpu_percent=self._cpu_percent(),
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_bytes=self._disk[0],
            disk_total_bytes=self._disk[1],
            network_receive_bytes=receive,
            network_transmit_bytes=transmit,
        )

    def _cpu_percent(self) -> float | None:
        times = psutil.cpu_times()
        idle: float = times.idle + times.iowait
        # A virtual machine's guest time is already part of its host process's user time.
        total: float = sum(times) - times.guest - times.guest_nice
        before, self._cpu = self._cpu, (total - idle, total)
        if before is None or total <= before[1]:
            return None
        share = (total - idle - before[0]) / (total - before[1])
        return round(min(100.0, max(0.0, share * 100)), 1)

    def _network(self) -> tuple[int | None, int | None]:
        """Return the bytes received and sent on the counted network interfaces.

        Bridges, bonds and container interfaces forward the traffic of a network card. If the machine has network cards,
        the sampler therefore counts only network cards. In a container without network cards, the sampler counts all
        interfaces except loopback.
        """
        try:
            counters = psutil.net_io_counters(pernic=True)
        except OSError:
            return None, None
        names = [name for name in counters if name != "lo"]
        cards = [name for name in names if (self._networks / name / "device").exists()]
        counted = [counters[name] for name in cards or names]
        return sum(card.bytes_recv for card in counted), sum(card.bytes_sent for card in counted)


def _disk(path: Path) -> tuple[int | None, int | None]:
    with contextlib.suppress(OSError):
        disk = os.statvfs(path)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        return used, used + disk.f_bavail * disk.f_frsize  # The disk total excludes space that is reserved for root.
    return None, None


class RankUsage(NamedTuple):
    """Usage of one rank and its descendants.

    CPU usage is the average since the previous sample. The first sample has no CPU usage (None).
    """

    cpu_percent: float | None
    memory_bytes: int
    pids: tuple[int, ...]


class ProcessStat(NamedTuple):
    """Parent pid and resource usage of a process."""

    parent: int
    cpu_s: float
    memory_bytes: int


class RankSampler:
    """Samples CPU and memory of each rank's process and its descendants.

        /proc ─ every pid once ─▶ which rank's descendant? ─▶ for those of ranks, every second: stat

    The sampler assigns a process to a rank when the sampler first sees the process. Reading every process of a large
    machine every second would be too slow. A process whose parent has ended stays assigned to its rank.
    """

    def __init__(self) -> None:
        self._roots: dict[int, RankKey] = {}
        self._owners: dict[int, RankKey | None] = {}
        self._before: dict[RankKey, tuple[int, float]] = {}

    def sample(self, at_ns: int, roots: Mapping[int, RankKey]) -> dict[RankKey, RankUsage]:
        """Return the resource usage of each rank.

        `at_ns` is a monotonic time. `roots` maps the pids of rank processes to ranks.
        """
        if roots != self._roots:
            # Children of a new rank may be assigned to another rank, because the previous assignment lacked the new
            # rank.
            self._roots, self._owners = dict(roots), dict(roots)
        self._find_owners()
        sums: dict[RankKey, tuple[float, int, tuple[int, ...]]] = {key: (0.0, 0, ()) for key in roots.values()}
        for pid, owner in self._owners.items():
            stat = None if owner is None else read_stat(pid)
            if owner is not None and stat is not None:
                cpu_s, memory_bytes, pids = sums[owner]
                sums[owner] = (cpu_s + stat.cpu_s, memory_bytes + stat.memory_bytes, (*pids, pid))
        usages = {
            key: RankUsage(self._cpu_percent(key, at_ns, cpu_s), memory_bytes, pids)
            for key, (cpu_s, memory_bytes, pids) in sums.items()
            if pids
        }
        self._before = {key: (at_ns, sums[key][0]) for key in usages}
        return usages

    def _find_owners(self) -> None:
        if not self._roots:
            self._owners = {}
            return
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._owners = {pid: owner for pid, owner in self._owners.items() if pid in there}
        parents = {pid: stat.parent for pid in there - self._owners.keys() if (stat := read_stat(pid)) is not None}
        for pid in parents:
            self._owners[pid] = self._owner(pid, parents)

    def _owner(self, pid: int, parents: Mapping[int, int]) -> RankKey | None:
        for _ in range(len(parents) + 1):
            if pid in self._owners:
                return self._owners[pid]
            if pid not in parents:
                return None
            pid = parents[pid]
        return None

    def _cpu_percent(self, key: RankKey, at_ns: int, cpu_s: float) -> float | None:
        if key not in self._before:
            return None
        before_ns, before_s = self._before[key]
        if at_ns <= before_ns:
            return None
        return round(max(0.0, cpu_s - before_s) / (at_ns - before_ns) * 1e11, 1)


def read_stat(pid: int) -> ProcessStat | None:
    """Return a process's parent, CPU time and memory, or None if the process has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # A program name may contain spaces and parentheses.
        # The CPU time includes child processes that the process has reaped.
        ticks = sum(int(field) for field in fields[11:15])
        return ProcessStat(int(fields[1]), ticks * _TICK_S, int(fields[21]) * _PAGE_BYTES)
    return None


class GpuReading(NamedTuple):
    """GPU readings at one time by uuid, and GPU memory by process.

    The memory by process is None if NVML does not report it.
    """

    gpus: dict[str, GpuSample]
    memory_by_pid: dict[int, int] | None
    problem: str = ""


class NvmlSampler:
    """Samples NVIDIA GPUs in a thread. `sample` waits at most `wait_s` seconds for a new reading.

    `pids_visible` is True if NVML reports pids of this process's pid namespace. If `pids_visible` is None, the sampler
    detects the value.
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
        """Return the latest reading of these GPUs, with one entry per uuid. Failures raise no exceptions.

        The method waits at most `wait_s` seconds for a new reading.
        """
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
        """Return True while a request has no answer.

        The check is a method, because another thread changes the attribute.
        """
        return self._asked is not None

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._asked is not None)
                asked = self._asked or ()
            try:
                reading = self._reader.read(asked, self._clock.boottime_ns)
            except Exception as error:  # noqa: BLE001 - the next reading may succeed, whatever exception the binding raises
                reading = _empty(asked, f"the call to NVML failed: {error!r}")
            with self._condition:
                self._latest, self._readings = reading, self._readings + 1
                self._asked = None
                self._condition.notify_all()


class _NvmlReader:
    """Reads NVML from one thread."""

    def __init__(self, given: Any, pids_visible: bool) -> None:
        self._given = given
        self._pids_visible = pids_visible
        self._nvml: Any = None
        self._links: dict[tuple[str, int], tuple[int, int]] = {}  # (uuid, field) → (time, KiB)
        self._pcie: dict[str, tuple[float | None, float | None]] = {}
        self._turn = 0

    def read(self, uuids: Sequence[str], now_ns: Callable[[], int]) -> GpuReading:
        try:
            self._nvml = self._nvml or initialised_nvml(self._given)
        except NvmlBroken as broken:
            return _empty(uuids, str(broken))
        if self._nvml is None:
            return _empty(uuids, "no NVIDIA driver is loaded on this machine")
        gpus: dict[str, GpuSample] = {}
        memory: dict[int, int] = {}
        problem = ""
        for uuid in uuids:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml_errors(self._nvml) as error:
                gpus[uuid], problem = GpuSample(), f"cannot query {uuid}: {error}"
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
        """Return the bytes per second since the previous reading. The GPU counts traffic in KiB."""
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
        """Return an NVML call's result, or None if the call fails or its first argument is None."""
        if arguments[0] is None:
            return None
        try:
            return getattr(self._nvml, f"nvml{function}")(*arguments)
        except AttributeError:  # The installed NVML binding lacks this function.
            return None
        except nvml_errors(self._nvml):
            return None


class FakeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A fake GPU's entry in the state file. The rank on the fake GPU determines the other metric values."""

    memory_used_bytes: int | None = None  # Memory usage in bytes, as the GPU gate reads it.
    problem: str = ""  # Reason for which the device does not answer, or "".
    sampled: dict[str, int | float | None] = {}  # Metric values by field name of `GpuSample`.


def fake_state(home: Path) -> dict[str, FakeGpu]:
    """Return the fake GPUs' state file entries by uuid; empty if the file is missing or unreadable."""
    try:
        with (home / FAKE_STATE_FILE).open("rb") as file:
            return from_json(file.read(_FAKE_STATE_BYTES_MAX), dict[str, FakeGpu])
    except (OSError, msgspec.MsgspecError):
        return {}


def from_rank(device: Device, rank: RankSample | None, share: int, state: Mapping[str, FakeGpu]) -> GpuSample:
    """Return the sample of a fake GPU or CPU slot, computed from its rank, which has `share` devices."""
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
    except msgspec.ValidationError:  # The state file contains an invalid value, for example half a byte of memory.
        return derived


def _empty(uuids: Sequence[str], problem: str) -> GpuReading:
    return GpuReading({uuid: GpuSample() for uuid in uuids}, None, problem)
