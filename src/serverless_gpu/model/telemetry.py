"""What is sampled of a node: values, how often, under which names, and what they add up to.

Sample ─┬─▶ logs/<node rank>.telemetry   one JSON line each, the buffer of everything that is sent anywhere
        ├─▶ Use (a running sum)          ─▶ DeviceUse of the receipt
        └─▶ series()                     ─▶ system/node_<i>/… of MLflow, Run.metrics(), Run.plot()
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.hardware import DeviceKind


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One device at one moment; None is "not known", which is not 0.

    Attributes:
        busy_percent: share of the last second in which a kernel ran; of a CPU slot, its rank's share of a core.
        memory_bytes: used.
        memory_total_bytes: there.
        power_watts: drawn now.
        power_limit_watts: allowed.
        temperature_celsius: of the chip.
        sm_megahertz: clock of the multiprocessors.
        memory_megahertz: clock of the memory.
        pcie_receive_bytes_s: over PCIe.
        pcie_transmit_bytes_s: over PCIe.
        nvlink_receive_bytes_s: over all links.
        nvlink_transmit_bytes_s: over all links.
        throttle: NVML's bits for why the clocks are lower than asked for.
        ecc_errors: uncorrected, since the driver was loaded.
    """

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
    throttle: int | None = None
    ecc_errors: int | None = None


class HostSample(msgspec.Struct, frozen=True, array_like=True):
    """The machine at one moment; disk is that of the home, network all but loopback, counted since the first sample."""

    cpu_percent: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_bytes: int | None = None
    disk_total_bytes: int | None = None
    network_receive_bytes: int | None = None
    network_transmit_bytes: int | None = None


class RankSample(msgspec.Struct, frozen=True, array_like=True):
    """One rank with its children at one moment; `cpu_percent` 100 is one core."""

    rank: int
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A node at one moment: `gpus` in the order of the header's devices, `at_ns` nanoseconds since 1970."""

    at_ns: int
    host: HostSample
    gpus: tuple[GpuSample, ...] = ()
    ranks: tuple[RankSample, ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """A device of which samples speak."""

    uuid: str
    type: str
    kind: DeviceKind


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file of samples, and again where an attempt's devices become known.

    Attributes:
        origin_ns: of the call, nanoseconds since 1970; steps count seconds from here.
    """

    run_id: str
    fence: int
    node: str
    node_rank: int
    origin_ns: int
    devices: tuple[Sampled, ...] = ()
