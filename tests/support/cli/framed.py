"""Frames of a monitor: a node with eight GPUs, two runs, one GPU of somebody else, one in quarantine, one free."""

from __future__ import annotations

import msgspec

from serverless_gpu.cli.top_table import Around, DeviceOwner
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.telemetry import GpuSample, HostSample, RankSample, Sample
from serverless_gpu.node.monitor.messages import NodeFrame, WatchedAttempt

S = 1_000_000_000
NOW_NS = 1_800_000_000 * S
GB = 10**9
GIB = 2**30
FIRST, SECOND = "01kaqw3e5r7t9y2u4i6o8p0a1s", "01kaqw3e5r7t9y2u4i6o8p0zzz"


def gpu(busy: float, memory_gib: int, *, throttle: int = 0, ecc: int = 0, celsius: float = 64) -> GpuSample:
    return GpuSample(
        busy_percent=busy,
        memory_bytes=memory_gib * GIB,
        memory_total_bytes=80 * GIB,
        power_watts=busy * 6 + 50,
        power_limit_watts=700,
        temperature_celsius=celsius,
        sm_megahertz=1980,
        throttle=throttle,
        ecc_errors=ecc,
    )


def frame(*, at_ns: int = NOW_NS) -> NodeFrame:
    devices = tuple(
        Device(uuid=f"GPU-{place}", index=place, type="H100", memory_bytes=80 * GIB, kind=DeviceKind.GPU)
        for place in range(8)
    )
    gpus = (
        gpu(87, 61),
        gpu(99, 61, throttle=0x4),
        gpu(100, 79, throttle=0x20, celsius=88),
        gpu(3, 61, throttle=0x1),
        gpu(0, 0),
        gpu(0, 0),
        gpu(12, 40, ecc=2),
        GpuSample(),
    )
    seconds = (at_ns - NOW_NS) // S
    host = HostSample(37, 61 * GB, 251 * GB, 88 * GB, 500 * GB, GB + 12_000_000 * seconds, GB + 3_000_000 * seconds)
    ranks = (*(RankSample(rank, 101 + rank, 3_100_000_000, 61 * GIB) for rank in range(4)), RankSample(0, 50, GB))
    first = WatchedAttempt(
        run_id=FIRST,
        fence=2,
        name="train",
        state=State.RUNNING,
        devices=tuple(f"GPU-{place}" for place in range(4)),
        pids={rank: 100 + rank for rank in range(4)},
        began_ns=NOW_NS - 723 * S,
        tracked="http://127.0.0.1:5000/#/experiments/1/runs/abcdef",
    )
    second = WatchedAttempt(
        run_id=SECOND,
        fence=1,
        name="evil\x1b[31m\nname",
        state=State.STARTING,
        devices=("GPU-6",),
        pids={0: 5},
        began_ns=0,
    )
    return NodeFrame(devices=devices, sample=Sample(at_ns, host, gpus, ranks), attempts=(first, second))


def around() -> Around:
    bob = DeviceOwner(run_id="01zz", name="", rank=None, user="bob")
    return Around(
        node="node-7", user="ada", holders={"GPU-5": bob}, quarantined={"GPU-7": "memory of no process: 3.0 GB"}
    )


def slots(count: int, lent: int) -> NodeFrame:
    """Return a frame of a machine without GPUs, of which a run has so many slots."""
    devices = tuple(
        Device(uuid=f"cpu-{place}", index=place, type="CPU", memory_bytes=0, kind=DeviceKind.CPU)
        for place in range(count)
    )
    run = msgspec.structs.replace(
        frame().attempts[0],
        devices=tuple(f"cpu-{p}" for p in range(lent)),
        pids={rank: 9 + rank for rank in range(lent)},
    )
    gpus = tuple(GpuSample(busy_percent=99.0 if place < lent else None) for place in range(count))
    ranks = tuple(RankSample(rank, 99, GB) for rank in range(lent))
    return NodeFrame(devices=devices, sample=Sample(NOW_NS, HostSample(), gpus, ranks), attempts=(run,) if lent else ())
