"""Samples as tests need them."""

from __future__ import annotations

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, Header, HostSample, RankSample, Sample, Sampled

GB = 10**9
ORIGIN_NS = 1_800_000_000 * SECOND_NS


def header(*, devices: int = 2, kind: DeviceKind = DeviceKind.GPU, node_rank: int = 0, fence: int = 1) -> Header:
    """Return the header of an attempt with so many devices."""
    return Header(
        run_id="01run",
        fence=fence,
        node="n",
        node_rank=node_rank,
        origin_ns=ORIGIN_NS,
        devices=tuple(Sampled(f"GPU-{index}", "H100", kind) for index in range(devices)),
    )


def gpu(busy: float | None = 50.0, *, memory: int | None = 10 * GB, watts: float | None = 300.0) -> GpuSample:
    """Return a sample of a card of 80 GB and 700 W."""
    return GpuSample(
        busy_percent=busy,
        memory_bytes=memory,
        memory_total_bytes=80 * GB,
        power_watts=watts,
        power_limit_watts=700.0,
        throttle=0,
    )


def sample(at_s: float, *gpus: GpuSample, received: int | None = None, ranks: tuple[RankSample, ...] = ()) -> Sample:
    """Return a sample so many seconds after the call."""
    host = HostSample(
        cpu_percent=10.0,
        memory_bytes=4 * GB,
        memory_total_bytes=16 * GB,
        disk_bytes=30 * GB,
        disk_total_bytes=100 * GB,
        network_receive_bytes=received,
        network_transmit_bytes=received,
    )
    return Sample(ORIGIN_NS + round(at_s * 1e9), host, gpus, ranks)
