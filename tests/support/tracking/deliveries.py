"""Attempts to deliver: a directory with samples, and a delivery in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.spec import Resources, RunSpec, Tracking
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, Header, HostSample, Sample, Sampled, encode
from serverless_gpu.testing.mlflow import FakeMlflow
from serverless_gpu.tracking.base import Tracker, TrackerRun
from serverless_gpu.tracking.delivery import DeliveryJob, MlflowDelivery
from serverless_gpu.tracking.metric_points import telemetry_path
from serverless_gpu.tracking.mlflow import MlflowTracker

RUN_ID = "01kzzzzzzzzzzzzzzzzzzzzzzz"
CALLED_NS = 1_800_000_000 * SECOND_NS
BUSY = "system/node_0/gpu_0_utilization_percentage"
CPU = "system/node_0/cpu_utilization_percentage"


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.runs: list[TrackerRun] = []
        self.problems: list[tuple[str, bool]] = []
        self.sentences: list[tuple[str, bool]] = []

    def tracked(self, tracked: TrackerRun) -> None:
        self.runs.append(tracked)

    def untracked(self, sentence: str, *, final: bool) -> None:
        self.problems.append((sentence, final))

    def said(self, sentence: str, *, note: bool) -> None:
        self.sentences.append((sentence, note))


def tracking(**changes: object) -> Tracking:
    return Tracking(**{"experiment": "/Users/ada/digits", "run_name": f"jobTaskRun-{RUN_ID}", **changes})  # type: ignore[arg-type]  # whatever a test says


def job(tracker: Tracking | None = None, *, fence: int = 1, node_rank: int = 0, num_nodes: int = 1) -> DeliveryJob:
    spec = RunSpec(
        name="train", resources=Resources(gpus=1), tags={"team": "search"}, tracker=tracker or tracking(uri="http://x")
    )
    return DeliveryJob(
        run_id=RUN_ID,
        fence=fence,
        node_rank=node_rank,
        num_nodes=num_nodes,
        spec=spec,
        environment="live",
        called_ns=CALLED_NS,
    )


def attempt(tmp_path: Path, fence: int = 1) -> Path:
    directory = tmp_path / str(fence)
    for name in ("logs", "failures", "results"):
        (directory / name).mkdir(parents=True)
    (directory / "spec.json").write_text('{"run_id": "01"}')
    (directory / "environment.json").write_text('{"python": "3.11"}')
    (directory / "_air.py").write_text("print('again')\n")
    return directory


def header(node_rank: int = 0, fence: int = 1) -> Header:
    device = Sampled(uuid="GPU-1", type="H100", kind=DeviceKind.FAKE)
    return Header(run_id=RUN_ID, fence=fence, node="n", node_rank=node_rank, origin_ns=CALLED_NS, devices=(device,))


def sample(second: float, busy: float = 50.0) -> Sample:
    gpu = GpuSample(busy_percent=busy, memory_bytes=1_000_000_000, memory_total_bytes=80_000_000_000)
    return Sample(CALLED_NS + round(second * SECOND_NS), HostSample(cpu_percent=second), (gpu,))


def record(directory: Path, seconds: range, *, node_rank: int = 0, first: bool = True) -> None:
    """Append samples, one for each second, as the monitor does."""
    with telemetry_path(directory, node_rank).open("ab") as file:
        if first:
            file.write(encode(header(node_rank)))
        for second in seconds:
            file.write(encode(sample(second)))


@contextmanager
def delivering(
    directory: Path,
    tracker: Tracker | FakeMlflow,
    what: DeliveryJob | None = None,
    *,
    clock: Clock | None = None,
) -> Iterator[tuple[MlflowDelivery, Heard]]:
    """Have an attempt delivered; the thread has ended afterwards."""
    heard = Heard()
    if isinstance(tracker, FakeMlflow):
        tracker = MlflowTracker(tracker.uri, {})
    delivery = MlflowDelivery(directory, what or job(), tracker, heard, clock=clock or SystemClock())
    thread = threading.Thread(target=delivery.run, daemon=True)
    thread.start()
    try:
        yield delivery, heard
    finally:
        delivery.stop()
        thread.join(30)
    assert not thread.is_alive()


def until(delivery: MlflowDelivery, holds: Callable[[], object], what: str) -> None:
    """Wait for something without waiting for the delivery's own pauses."""
    waited = threading.Event()
    for _ in range(3000):
        if holds():
            return
        delivery.wake()
        waited.wait(0.01)
    raise AssertionError(f"{what} did not happen; over={delivery.over!r}")


def delivered(delivery: MlflowDelivery) -> None:
    """Wait until nothing is left to do."""
    until(delivery, lambda: delivery.over, "its delivery")
