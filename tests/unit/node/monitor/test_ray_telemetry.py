"""What Ray tells of a node, on its way from its file into samples, MLflow and `Run.metrics()`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from serverless_gpu.client.metrics import read_metrics
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.spec import RayCluster, RunSpec
from serverless_gpu.model.telemetry import (
    RAY_BYTES_MAX,
    SECOND_NS,
    HostSample,
    RaySample,
    Sample,
    decode,
    encode,
    merged,
    read_ray,
    series,
)
from serverless_gpu.model.tracking_rules import valid_key
from serverless_gpu.node.inside.raycluster.share import metrics_file
from serverless_gpu.node.monitor.messages import Observe, Ranks
from serverless_gpu.node.monitor.recorder import RayFile, Recorder
from serverless_gpu.node.monitor.sampler import NodeSample
from serverless_gpu.testing import FakeClock
from serverless_gpu.tracking.metric_points import MetricPoints, SampleCursor
from tests.support.node.sampled import ORIGIN_NS, gpu, header, sample

NOW_NS = 1000 * SECOND_NS


def document(at_ns: object = NOW_NS, **figures: object) -> bytes:
    return json.dumps({"at_ns": at_ns, "figures": figures}).encode()


# --- the file's text ---


def test_what_is_told_is_taken_and_what_nobody_knows_is_left_out() -> None:
    told = read_ray(document(cpus=4, memory_bytes=12.3456, something_newer=1.0), NOW_NS)
    assert told == RaySample(cpus=4.0, memory_bytes=12.35)


def test_what_was_told_too_long_ago_or_in_the_future_is_not_of_now() -> None:
    assert read_ray(document(cpus=4), NOW_NS + 29 * SECOND_NS) is not None
    assert read_ray(document(cpus=4), NOW_NS + 31 * SECOND_NS) is None
    assert read_ray(document(cpus=4), NOW_NS - 31 * SECOND_NS) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        document(cpus=4)[:-5],
        b"null",
        b"[1, 2]",
        b'{"at_ns": 1}',
        document("now", cpus=4),
        document(cpus="four"),
        document(cpus=[4]),
        b"\xff\xfe{}",
        document(cpus=4) + b" " * RAY_BYTES_MAX,
    ],
)
def test_a_file_that_is_none_of_ours_tells_nothing(data: bytes) -> None:
    assert read_ray(data, NOW_NS) is None


def test_a_figure_that_is_no_number_is_not_known() -> None:
    data = document(cpus=4, gpus=1).replace(b'"gpus": 1', b'"gpus": 1e400')
    told = read_ray(data, NOW_NS)
    assert told is None or told == RaySample(cpus=4.0)


# --- samples ---


def test_series_are_named_by_node_in_the_units_of_the_others() -> None:
    told = RaySample(cpus=4.0, tasks_running=0.0, object_store_bytes=3e6, memory_bytes=5e9, cpu_percent=12.5)
    assert series(header(node_rank=1), Sample(ORIGIN_NS, HostSample(), ray=told)) == {
        "ray/node_1/cpus": 4.0,
        "ray/node_1/tasks_running": 0.0,
        "ray/node_1/object_store_usage_megabytes": 3.0,
        "ray/node_1/memory_usage_megabytes": 5000.0,
        "ray/node_1/cpu_utilization_percentage": 12.5,
    }


def test_every_value_has_a_series_of_its_own() -> None:
    told = RaySample(*[float(index) for index, _ in enumerate(RaySample.__struct_fields__)])
    names = list(series(header(), Sample(ORIGIN_NS, HostSample(), ray=told)))
    assert len(names) == len(RaySample.__struct_fields__)
    assert names == [valid_key(name) for name in names], "MLflow takes them"


def test_several_samples_become_one_with_what_was_told_last_and_peaks() -> None:
    first = replace(sample(1), ray=RaySample(tasks_running=9.0, object_store_bytes=7.0, cpu_percent=10.0))
    second = replace(sample(2), ray=RaySample(tasks_running=3.0, object_store_bytes=5.0, cpu_percent=30.0))
    assert merged([first, second, sample(3)]).ray == RaySample(
        tasks_running=3.0, object_store_bytes=7.0, cpu_percent=20.0
    )
    assert merged([sample(1), sample(2)]).ray is None


def test_files_of_samples_written_before_there_was_ray_are_read_as_ever() -> None:
    old = encode(header()) + b"[1800000001000000000,[10.0],[],[]]\n"
    assert decode(old)[0] == [header(), Sample(1_800_000_001 * SECOND_NS, HostSample(10.0))]
    told = replace(sample(1, gpu()), ray=RaySample(cpus=4.0))
    assert decode(encode(told))[0] == [told]


def test_mlflow_gets_what_ray_told_as_points(tmp_path: Path) -> None:
    rows = [replace(sample(at), ray=RaySample(tasks_running=float(at))) for at in range(1, 4)]
    (tmp_path / "0.telemetry").write_bytes(b"".join([encode(header()), *map(encode, rows)]))
    points = MetricPoints(tmp_path / "0.telemetry", 1, SampleCursor()).next(ended=True)
    told = [(point.key, point.value, point.step) for point in points if point.key.startswith("ray/")]
    assert told == [("ray/node_0/tasks_running", 1.0, 1), ("ray/node_0/tasks_running", 3.0, 3)]


# --- the file ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = Path(metrics_file(str(tmp_path), 0))
    path.parent.mkdir()
    return path


def test_the_latest_file_counts_and_one_that_is_gone_does_not(tmp_path: Path, path: Path) -> None:
    file = RayFile(tmp_path, 0)
    assert file.latest(NOW_NS) is None
    for cpus in (4.0, 5.0):
        path.with_suffix(".new").write_bytes(document(cpus=cpus))
        path.with_suffix(".new").replace(path)
        assert file.latest(NOW_NS) == file.latest(NOW_NS) == RaySample(cpus=cpus)
    assert file.latest(NOW_NS + 60 * SECOND_NS) is None
    path.unlink()
    assert file.latest(NOW_NS) is None


def test_whatever_lies_in_its_place_keeps_nobody_waiting(tmp_path: Path, path: Path) -> None:
    os.mkfifo(path)
    assert RayFile(tmp_path, 0).latest(NOW_NS) is None
    path.unlink()
    (tmp_path / "other").write_bytes(document(cpus=4))
    path.symlink_to(tmp_path / "other")
    assert RayFile(tmp_path, 0).latest(NOW_NS) is None
    path.unlink()
    path.mkdir()
    assert RayFile(tmp_path, 0).latest(NOW_NS) is None
    path.rmdir()
    with path.open("wb") as huge:
        huge.truncate(1 << 40)
    assert RayFile(tmp_path, 0).latest(NOW_NS) is None


# --- an attempt ---


def recorded(directory: Path, spec: RunSpec) -> dict[str, list[float]]:
    """Return the series of Ray's in what is recorded of an attempt: one look."""
    (directory / "logs").mkdir(exist_ok=True)
    observe = Observe(
        run_id="run-a",
        fence=1,
        directory=str(directory),
        spec=spec,
        world_size=1,
        node_rank=2,
        python="python3",
        environ={},
        called_ns=1,
    )

    class Peer:
        def send(self, message: object, *, passing: bool = False) -> None:
            pass

    recorder = Recorder(observe, ORIGIN_NS, FakeClock(boottime_ns=NOW_NS))
    recorder.join(Peer())  # type: ignore[arg-type]  # a recorder only sends to it
    device = Device(index=0, uuid="CPU-0", type="CPU", kind=DeviceKind.CPU, memory_bytes=0)
    recorder.receive(Ranks(devices=(device,), pids={0: 1}))
    recorder.record(NodeSample(at_ns=ORIGIN_NS, devices=(device,), host=HostSample(), gpus={}, ranks={}))
    metrics = read_metrics([(directory / "logs" / "2.telemetry").read_bytes()])
    return {name: one.values for name, one in metrics.items() if name.startswith("ray/")}


def test_samples_of_a_ray_run_have_what_its_cluster_told(tmp_path: Path) -> None:
    path = Path(metrics_file(str(tmp_path), 2))
    path.parent.mkdir()
    path.write_bytes(document(gpus_used=1, tasks_running=3))
    assert recorded(tmp_path, RunSpec(ray=RayCluster())) == {
        "ray/node_2/gpus_used": [1.0],
        "ray/node_2/tasks_running": [3.0],
    }


def test_a_run_without_ray_has_no_such_series_whatever_lies_there(tmp_path: Path) -> None:
    path = Path(metrics_file(str(tmp_path), 2))
    path.parent.mkdir()
    path.write_bytes(document(gpus_used=1))
    assert recorded(tmp_path, RunSpec()) == {}
