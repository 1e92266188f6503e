"""Run directories with samples in them, as the monitor writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Failure, Reason, State
from serverless_gpu.model.telemetry import GpuSample, Header, HostSample, RankSample, Sample, Sampled, encode
from serverless_gpu.node.base.protocol import Stopped

S = 1_000_000_000
ORIGIN_NS = 1_800_000_000 * S


def telemetry(
    count: int,
    *,
    fence: int = 1,
    node_rank: int = 0,
    gpus: int = 1,
    kind: DeviceKind = DeviceKind.GPU,
    start_s: float = 0,
) -> bytes:
    """Return a file of so many samples, one a second: device k is busy for 10 k + 5 percent."""
    uuids = [f"{kind.value}-{node_rank}-{place}" for place in range(gpus)]
    devices = tuple(Sampled(uuid=uuid, type="CPU" if kind is DeviceKind.CPU else "H100", kind=kind) for uuid in uuids)
    header = Header(
        run_id="r", fence=fence, node=f"node-{node_rank}", node_rank=node_rank, origin_ns=ORIGIN_NS, devices=devices
    )
    lines = [encode(header)]
    for place in range(count):
        at_ns = ORIGIN_NS + int((start_s + place) * S)
        now = tuple(
            GpuSample((10.0 * k + 5) % 100, 40_000_000_000 + k * 10**9, 80_000_000_000, 300.0, 700.0)
            for k in range(gpus)
        )
        ranks = tuple(RankSample(rank, 97.0, 1_500_000_000) for rank in range(gpus))
        lines.append(encode(Sample(at_ns, HostSample(12.0, 5, 10), now, ranks)))
    return b"".join(lines)


def attempt(
    run: Path, fence: int, files: list[bytes], *, began_s: float = 0, failed_s: float | None = None, asked: str = ""
) -> Path:
    """Make the directory of an attempt: it began, was asked to stop or failed, and has these files of samples."""
    directory = run / str(fence)
    (directory / "logs").mkdir(parents=True)
    for node, data in enumerate(files):
        (directory / "logs" / f"{node}.telemetry").write_bytes(data)
    boot_ns = 5_000 * S
    fact = Fact(
        attempt=f"r:{fence}",
        seq=1,
        kind=FactKind.EXEC,
        boot_id="b",
        boottime_ns=boot_ns,
        wall_ns=ORIGIN_NS + int(began_s * S),
        gpus=(),
        cpus=0,
        memory_bytes=0,
    )
    (directory / "facts.jsonl").write_bytes(msgspec.json.encode(fact) + b"\n")
    stopped = Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=())
    if failed_s is not None:
        at_ns = boot_ns + int((failed_s - began_s) * S)
        cause = Failure(rank=1, reason=Reason.RANK_RAISED, at_ns=at_ns, detail="ValueError")
        stopped = Stopped(state=State.FAILED, reason=Reason.RANK_RAISED, cause=cause, consequences=())
    if asked:
        (directory / "stop_reason").write_text(asked, encoding="ascii")
        stopped = Stopped(state=State.CANCELLED, reason=Reason.CANCELLED, cause=None, consequences=())
    (directory / "stopped.json").write_bytes(msgspec.json.encode(stopped))
    return directory
