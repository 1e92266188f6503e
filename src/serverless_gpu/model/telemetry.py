"""Telemetry samples of a node: measured values, sampling intervals, series names and sums.

Sample ─┬─▶ logs/<node rank>.telemetry   one JSON line each, the buffer of all uploads
        ├─▶ DeviceTotals (a running sum) ─▶ DeviceUse of the receipt
        └─▶ series()   ─▶ system/node_<i>/…, ray/node_<i>/… of MLflow, Run.metrics(), Run.plot()

<attempt>/ray/<node rank>.metrics.json ─▶ read_ray() ─▶ RaySample ─▶ a Sample's `ray`
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.receipt import DeviceUse

RAY_BYTES_MAX = 1 << 16
"""Size in bytes above which the reader ignores a metrics file."""

_FRESH_NS = 30 * 1_000_000_000  # Maximum age of a valid metrics file: three intervals of the monitor.


class RaySample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State of Ray on one node at one moment. None stands for an unknown value.

    A node's sample counts the tasks that run on the node. Waiting and ended tasks count on the node of the task's
    owner. Only the head node's sample contains placement groups, waiting actors and ended actors.
    """

    cpus: float | None = None  # CPUs that Ray can assign.
    cpus_used: float | None = None  # CPUs assigned to tasks, actors and placement groups.
    gpus: float | None = None  # GPUs that Ray can assign.
    gpus_used: float | None = None  # GPUs assigned to tasks, actors and placement groups.
    object_store_bytes: float | None = None  # Used bytes of the object store.
    object_store_free_bytes: float | None = None  # Free bytes of the object store.
    objects: float | None = None
    spilled_bytes: float | None = None  # Bytes of objects that Ray moved to the disk because the object store was full.
    tasks_pending: float | None = None  # Tasks that wait for arguments, for resources or in the queue.
    tasks_running: float | None = None  # Running tasks.
    tasks_finished: float | None = None  # Tasks that have ended since the cluster began.
    tasks_failed: float | None = None  # Tasks that have failed since the cluster began.
    tasks_infeasible: float | None = None  # Tasks that wait forever, because no node has the requested resources.
    actors: float | None = None  # Running actors.
    actors_pending: float | None = None  # Actors that Ray has not created yet.
    actors_restarting: float | None = None  # Actors that Ray is currently restarting.
    actors_dead: float | None = None  # Actors that have ended.
    placement_groups: float | None = None  # All existing placement groups.
    placement_groups_pending: float | None = None  # Placement groups that wait for resources.
    workers: float | None = None
    workers_out_of_memory: float | None = None  # Workers that Ray ended because the node ran out of memory.
    cpu_percent: float | None = None  # CPU usage of the node, as reported by Ray.
    memory_bytes: float | None = None  # Used memory of the node, as reported by Ray.
    memory_total_bytes: float | None = None  # Total memory of the node, as reported by Ray.


_MEGABYTES = {
    "object_store_bytes": "object_store_usage_megabytes",
    "object_store_free_bytes": "object_store_available_megabytes",
    "spilled_bytes": "object_store_spilled_megabytes",
    "memory_bytes": "memory_usage_megabytes",
    "memory_total_bytes": "memory_total_megabytes",
}
_OTHERS = {"cpu_percent": "cpu_utilization_percentage"}


def ray_series(node_rank: int, sample: RaySample) -> dict[str, float]:
    """Return a sample's known values by their series names in MLflow."""
    values: dict[str, float] = {}
    for field, name, per in _named(node_rank):
        value = getattr(sample, field)
        if value is not None:
            values[name] = value / per
    return values


def read_ray(data: bytes, now_ns: int) -> RaySample | None:
    """Return the Ray sample in a node's metrics file, or None for an outdated or invalid file."""
    if len(data) > RAY_BYTES_MAX:
        return None
    try:
        file = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if abs(now_ns - file.at_ns) > _FRESH_NS:
        return None
    known = {name: file.figures[name] for name in RaySample.__struct_fields__ if name in file.figures}
    return RaySample(**{name: round(value, 2) for name, value in known.items() if math.isfinite(value)})


class _File(msgspec.Struct, frozen=True):
    at_ns: int
    figures: Mapping[str, float]


_decoder = msgspec.json.Decoder(_File)


@functools.lru_cache(maxsize=256)
def _named(node_rank: int) -> tuple[tuple[str, str, float], ...]:
    """Return the field, name and divisor of each MLflow series of a node."""
    prefix = f"ray/node_{node_rank}/"
    return tuple(
        (field, prefix + (_MEGABYTES.get(field) or _OTHERS.get(field) or field), 1e6 if field in _MEGABYTES else 1.0)
        for field in RaySample.__struct_fields__
    )


class GpuSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Telemetry of one device at one moment. None stands for an unknown value."""

    # Percentage of the last second in which a GPU kernel ran, or, for a CPU slot, the rank's share of a core.
    busy_percent: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_megahertz: float | None = None
    memory_megahertz: float | None = None
    pcie_receive_bytes_s: float | None = None
    pcie_transmit_bytes_s: float | None = None
    nvlink_receive_bytes_s: float | None = None
    nvlink_transmit_bytes_s: float | None = None
    throttle: int | None = None  # NVML bits that contain the reasons for reduced clocks.
    ecc_errors: int | None = None  # Number of uncorrected memory errors since the driver started.


class HostSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Telemetry of the machine at one moment, with the home's disk and all non-loopback interfaces.

    Network counters start when the machine boots. In a telemetry file, network counters start at the file's first
    sample.
    """

    cpu_percent: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_bytes: int | None = None
    disk_total_bytes: int | None = None
    network_receive_bytes: int | None = None
    network_transmit_bytes: int | None = None


class RankSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Telemetry of a rank and its child processes, where a `cpu_percent` of 100 is one core."""

    rank: int
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Telemetry of a node at one moment.

    The order of `gpus` follows the header's devices. `at_ns` is in nanoseconds since 1970. `ray` is the last state of
    the run's Ray cluster, at most 30 s old, or None without Ray.
    """

    at_ns: int
    host: HostSample
    gpus: tuple[GpuSample, ...] = ()
    ranks: tuple[RankSample, ...] = ()
    ray: RaySample | None = None


class Sampled(msgspec.Struct, frozen=True):
    """Identity of a device in a telemetry file."""

    uuid: str
    type: str
    kind: DeviceKind


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a telemetry file, repeated once the node knows the attempt's devices."""

    run_id: str
    fence: int
    node: str
    node_rank: int
    origin_ns: int  # Time of the user's call in nanoseconds since 1970, from which MLflow steps count seconds.
    devices: tuple[Sampled, ...] = ()


# --- sampling intervals -------------------------------------------------------------------------------------------

SECOND_NS = 1_000_000_000
_ROWS_PER_INTERVAL = 3600
_DOUBLINGS_MAX = 8


def interval_ns(rows: int) -> int:
    """Return the sampling interval after the given number of rows, which is 1 s in the first hour.

    The interval doubles every 3600 rows, up to 256 s. A run of ten days produces fewer than 29,000 rows.
    """
    return SECOND_NS << min(rows // _ROWS_PER_INTERVAL, _DOUBLINGS_MAX)


def merged(samples: Sequence[Sample]) -> Sample:
    """Return one sample that combines several samples.

    The function combines rates by mean, memory by maximum, and counters by last value. After a change of devices or
    ranks, the function uses only samples with the last set of devices and ranks.
    """
    last = samples[-1]
    if len(samples) == 1:
        return last
    alike = [sample for sample in samples if len(sample.gpus) == len(last.gpus)]
    gpus = tuple(_merged(gpu, [sample.gpus[index] for sample in alike]) for index, gpu in enumerate(last.gpus))
    by_rank = {rank.rank: [r for sample in samples for r in sample.ranks if r.rank == rank.rank] for rank in last.ranks}
    ranks = tuple(_merged(rank, by_rank[rank.rank]) for rank in last.ranks)
    told = [sample.ray for sample in samples if sample.ray is not None]
    ray = _merged(told[-1], told) if told else None
    return Sample(last.at_ns, _merged(last.host, [sample.host for sample in samples]), gpus, ranks, ray)


_MEANS = frozenset(
    {
        "busy_percent",
        "cpu_percent",
        "power_watts",
        "temperature_celsius",
        "sm_megahertz",
        "memory_megahertz",
        "pcie_receive_bytes_s",
        "pcie_transmit_bytes_s",
        "nvlink_receive_bytes_s",
        "nvlink_transmit_bytes_s",
    }
)
_PEAKS = frozenset({"memory_bytes", "gpu_memory_bytes", "object_store_bytes"})

T = TypeVar("T", GpuSample, HostSample, RankSample, RaySample)


def _merged(last: T, samples: Sequence[T]) -> T:
    changed: dict[str, object] = {}
    for name in last.__struct_fields__:
        known = [value for value in (getattr(sample, name) for sample in samples) if value is not None]
        if not known:
            continue
        if name in _MEANS:
            changed[name] = round(sum(known) / len(known), 1)
        elif name in _PEAKS:
            changed[name] = max(known)
        elif name == "throttle":
            changed[name] = functools.reduce(operator.or_, known)
        else:
            changed[name] = known[-1]
    return msgspec.structs.replace(last, **changed)


# --- lines --------------------------------------------------------------------------------------------------------

Line = Header | Sample

_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(Header)
_sample_decoder = msgspec.json.Decoder(Sample)


def encode(line: Line) -> bytes:
    """Return one line of a telemetry file: a JSON object for a header, an array for a sample."""
    return _encoder.encode(line) + b"\n"


def decode(data: bytes) -> tuple[list[Line], int]:
    """Return the valid lines of a telemetry file, decoded, and the number of consumed bytes.

    A killed writer leaves an incomplete line. The next writer terminates the incomplete line, which is then invalid.
    """
    end = data.rfind(b"\n") + 1
    lines: list[Line] = []
    for text in data[:end].splitlines():
        try:  # `contextlib.suppress` would double the time of this loop.
            lines.append((_header_decoder if text.startswith(b"{") else _sample_decoder).decode(text))
        except msgspec.MsgspecError:
            continue
    return lines, end


# --- names --------------------------------------------------------------------------------------------------------


def step(header: Header, sample: Sample) -> int:
    """Return the whole seconds from the user's call to a sample, at least 0."""
    return max(0, (sample.at_ns - header.origin_ns) // SECOND_NS)


def series(header: Header, sample: Sample) -> dict[str, float]:
    """Return a sample's known values by their series names in MLflow.

    Names and units follow MLflow's own system metrics, where a megabyte is 1,000,000 bytes. Series without an MLflow
    counterpart follow the same naming pattern. Series names contain the run's device and rank numbers. CPU slots have
    no GPU series, because the series of their ranks contain the same values.
    """
    prefix = f"system/node_{header.node_rank}/"
    named = zip(_names(prefix, _HOST_SERIES), _host_values(sample.host), strict=True)
    values = {name: float(value) for name, value in named if value is not None}
    for index, (device, gpu) in enumerate(zip(header.devices, sample.gpus, strict=False)):
        if device.kind is not DeviceKind.CPU:
            named = zip(_names(f"{prefix}gpu_{index}_", _GPU_SERIES), _gpu_values(gpu), strict=True)
            values.update((name, float(value)) for name, value in named if value is not None)
    for rank in sample.ranks:
        measured = (rank.cpu_percent, _megabytes(rank.memory_bytes), _megabytes(rank.gpu_memory_bytes))
        named = zip(_names(f"{prefix}rank_{rank.rank}_", _RANK_SERIES), measured, strict=True)
        values.update((name, float(value)) for name, value in named if value is not None)
    if sample.ray is not None:
        values.update(ray_series(header.node_rank, sample.ray))
    return values


_HOST_SERIES = (
    "cpu_utilization_percentage",
    "system_memory_usage_megabytes",
    "system_memory_usage_percentage",
    "disk_usage_megabytes",
    "disk_usage_percentage",
    "disk_available_megabytes",
    "network_receive_megabytes",
    "network_transmit_megabytes",
)
_GPU_SERIES = (
    "utilization_percentage",
    "memory_usage_megabytes",
    "memory_usage_percentage",
    "power_usage_watts",
    "power_usage_percentage",
    "temperature_celsius",
    "sm_clock_megahertz",
    "memory_clock_megahertz",
    "pcie_receive_megabytes_per_second",
    "pcie_transmit_megabytes_per_second",
    "nvlink_receive_megabytes_per_second",
    "nvlink_transmit_megabytes_per_second",
    "throttle_reasons",
    "ecc_errors",
)
_RANK_SERIES = ("cpu_utilization_percentage", "memory_usage_megabytes", "gpu_memory_usage_megabytes")


@functools.lru_cache(maxsize=4096)
def _names(prefix: str, series: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for name in series)


def _host_values(host: HostSample) -> tuple[float | None, ...]:
    free = None if host.disk_bytes is None or host.disk_total_bytes is None else host.disk_total_bytes - host.disk_bytes
    return (
        host.cpu_percent,
        _megabytes(host.memory_bytes),
        _share(host.memory_bytes, host.memory_total_bytes),
        _megabytes(host.disk_bytes),
        _share(host.disk_bytes, host.disk_total_bytes),
        _megabytes(free),
        _megabytes(host.network_receive_bytes),
        _megabytes(host.network_transmit_bytes),
    )


def _gpu_values(gpu: GpuSample) -> tuple[float | None, ...]:
    return (
        gpu.busy_percent,
        _megabytes(gpu.memory_bytes),
        _share(gpu.memory_bytes, gpu.memory_total_bytes),
        gpu.power_watts,
        _share(gpu.power_watts, gpu.power_limit_watts),
        gpu.temperature_celsius,
        gpu.sm_megahertz,
        gpu.memory_megahertz,
        _megabytes(gpu.pcie_receive_bytes_s),
        _megabytes(gpu.pcie_transmit_bytes_s),
        _megabytes(gpu.nvlink_receive_bytes_s),
        _megabytes(gpu.nvlink_transmit_bytes_s),
        gpu.throttle,
        gpu.ecc_errors,
    )


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole * 100, 2)


# --- sums ---------------------------------------------------------------------------------------------------------

THROTTLED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""NVML bits for throttling by heat or power: software power cap, hardware and thermal slowdown, power brake.

The mask excludes idle clocks, operator-set clocks and synchronised GPU groups.
"""

_THROTTLE_WORDS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

BUSY_PERCENT = 5.0
"""Minimum busy share of a working device, which desktops and monitoring tools do not reach."""

_GAP_NS_MAX = 600 * SECOND_NS


class DeviceTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Running sum of one device's telemetry samples. `result()` returns the device's `DeviceUse`.

    Each sample covers the time since the preceding sample, up to ten minutes. The first telemetry sample of a device
    covers one second.
    """

    uuid: str
    samples: int = 0
    at_ns: int = 0
    watts: float | None = None
    busy_percent_ns: float = 0.0
    busy_known_ns: int = 0
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    throttled_ns: int | None = None

    def plus(self, at_ns: int, gpu: GpuSample) -> DeviceTotals:
        """Return the running sum with one more sample."""
        gap_ns = min(max(0, at_ns - self.at_ns), _GAP_NS_MAX) if self.samples else 0
        stands_ns = gap_ns or SECOND_NS
        throttled_ns = stands_ns if (gpu.throttle or 0) & THROTTLED else 0
        peaks = [peak for peak in (self.peak_memory_bytes, gpu.memory_bytes) if peak is not None]
        energy_joules = self.energy_joules
        if gpu.power_watts is not None:
            mean_watts = gpu.power_watts if self.watts is None else (gpu.power_watts + self.watts) / 2
            energy_joules = (energy_joules or 0.0) + mean_watts * gap_ns / 1e9
        return msgspec.structs.replace(
            self,
            samples=self.samples + 1,
            at_ns=at_ns,
            watts=gpu.power_watts,
            busy_percent_ns=self.busy_percent_ns + (gpu.busy_percent or 0.0) * stands_ns,
            busy_known_ns=self.busy_known_ns + (0 if gpu.busy_percent is None else stands_ns),
            peak_memory_bytes=max(peaks, default=None),
            energy_joules=energy_joules,
            throttled_ns=self.throttled_ns if gpu.throttle is None else (self.throttled_ns or 0) + throttled_ns,
        )

    def result(self) -> DeviceUse:
        """Return the `DeviceUse` of the samples so far."""
        return DeviceUse(
            uuid=self.uuid,
            samples=self.samples,
            busy_percent=round(self.busy_percent_ns / self.busy_known_ns, 1) if self.busy_known_ns else None,
            peak_memory_bytes=self.peak_memory_bytes,
            energy_joules=None if self.energy_joules is None else round(self.energy_joules, 1),
            throttled_s=None if self.throttled_ns is None else round(self.throttled_ns / 1e9, 1),
        )


def add(uses: Mapping[str, DeviceTotals], header: Header, sample: Sample) -> dict[str, DeviceTotals]:
    """Add a sample to the running sums of an attempt's devices, and return the new sums by uuid."""
    summed = dict(uses)
    for device, gpu in zip(header.devices, sample.gpus, strict=False):
        summed[device.uuid] = summed.get(device.uuid, DeviceTotals(uuid=device.uuid)).plus(sample.at_ns, gpu)
    return summed


def works(sample: Sample) -> bool:
    """Return True if a device is busy, or if its busy share is unknown."""
    return not sample.gpus or any(gpu.busy_percent is None or gpu.busy_percent >= BUSY_PERCENT for gpu in sample.gpus)


def throttle_words(bits: int | None) -> tuple[str, ...]:
    """Return the reasons for a device's reduced clocks from the NVML bits, ignoring idle clocks."""
    return tuple(word for bit, word in _THROTTLE_WORDS.items() if (bits or 0) & bit)
