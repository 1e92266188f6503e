"""The file of samples: written ever more rarely, read on from an offset, whatever happens to its writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from serverless_gpu.client.metrics import read_metrics
from serverless_gpu.model.telemetry import Header, Sample, decode, encode
from serverless_gpu.node.monitor import telemetry_file
from serverless_gpu.node.monitor.telemetry_file import TelemetryFile
from serverless_gpu.tracking.metric_points import SampleReader
from tests.support.node.sampled import ORIGIN_NS, gpu, header, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.telemetry"


def lines(path: Path) -> list[Header | Sample]:
    return decode(path.read_bytes())[0]


# --- writing ---


def test_the_header_comes_first_and_again_where_devices_become_known(path: Path) -> None:
    recording = TelemetryFile(path, header(devices=0))
    assert recording.append(sample(1))
    recording.describe(header(devices=1))
    recording.describe(header(devices=1))
    assert recording.append(sample(2, gpu()))
    assert recording.append(sample(3, gpu()))
    assert lines(path) == [header(devices=0), sample(1), header(devices=1), sample(2, gpu()), sample(3, gpu())]
    assert path.stat().st_mode & 0o777 == 0o600


def test_later_rows_stand_for_several_samples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_file, "interval_ns", lambda rows: 10**9 if rows < 2 else 4 * 10**9)
    recording = TelemetryFile(path, header(devices=1))
    written = [recording.append(sample(at, gpu(float(at)))) for at in range(1, 12)]
    assert [at for at, row in enumerate(written, start=1) if row] == [1, 2, 6, 10]
    assert recording.flush()  # the end: what was taken since
    assert not recording.flush()
    rows = [line for line in lines(path) if isinstance(line, Sample)]
    assert [row.gpus[0].busy_percent for row in rows] == [1.0, 2.0, 4.5, 8.5, 11.0]
    assert recording.uses["GPU-0"].samples == 11  # the account has every sample


def test_a_sampler_whose_seconds_are_not_exact_writes_every_one(path: Path) -> None:
    recording = TelemetryFile(path, header())
    assert all(recording.append(sample(at)) for at in (1.0, 1.99, 2.97, 4.1, 5.0))


def test_a_clock_that_was_set_back_does_not_stop_the_rows(path: Path) -> None:
    recording = TelemetryFile(path, header())
    assert recording.append(sample(7200))
    assert recording.append(sample(1))
    assert recording.append(sample(2))


def test_network_counts_from_the_first_sample_also_of_a_writer_that_goes_on(path: Path) -> None:
    first = TelemetryFile(path, header())
    first.append(sample(1, received=5000))
    first.append(sample(2, received=5400))
    second = TelemetryFile(path, header())
    second.append(sample(3, received=9000))
    second.append(sample(4, received=9100))
    counted = [line.host.network_receive_bytes for line in lines(path) if isinstance(line, Sample)]
    assert counted == [0, 400, 400, 500]


def test_a_writer_that_was_killed_is_taken_over_from(path: Path) -> None:
    first = TelemetryFile(path, header(devices=1))
    for at in range(3):
        first.append(sample(at, gpu()))
    with path.open("ab") as file:
        file.write(encode(sample(3, gpu()))[:50])
    second = TelemetryFile(path, header(devices=1))
    assert second.rows == 3
    assert second.uses == first.uses
    assert second.append(sample(4, gpu()))
    assert lines(path) == [header(devices=1), *(sample(at, gpu()) for at in (0, 1, 2, 4))]


def test_F44_a_full_disk_loses_rows_counts_them_and_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = TelemetryFile(path, header(devices=1))
    recording.append(sample(1, gpu()))
    real = os.write
    room = 30

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, room = real(fd, data[:room]), 0
        return written

    monkeypatch.setattr(os, "write", write)
    assert not recording.append(sample(2, gpu()))  # half a line
    assert not recording.append(sample(3, gpu()))  # nothing
    monkeypatch.undo()
    assert recording.append(sample(4, gpu()))
    assert recording.lost == 2
    assert lines(path) == [header(devices=1), sample(1, gpu()), sample(4, gpu())]
    assert recording.uses["GPU-0"].samples == 4


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    recording = TelemetryFile(tmp_path / "gone" / "0.telemetry", header())
    assert not recording.append(sample(1))
    assert recording.lost == 1


# --- reading on ---


def written(path: Path, count: int) -> TelemetryFile:
    recording = TelemetryFile(path, header(devices=1))
    for at in range(count):
        assert recording.append(sample(at, gpu()))
    return recording


def test_reading_goes_on_where_it_stopped(path: Path) -> None:
    recording = written(path, 2)
    samples = SampleReader(path)
    assert [read.at_ns - ORIGIN_NS for _, read in samples.read()] == [0, 10**9]
    assert samples.read() == []
    recording.append(sample(5, gpu()))
    assert samples.read() == [(header(devices=1), sample(5, gpu()))]
    assert samples.backlog == 0


def test_another_reader_goes_on_from_the_offset_with_the_header_that_holds_there(path: Path) -> None:
    recording = written(path, 3)
    recording.describe(header(devices=2))
    recording.append(sample(3, gpu(), gpu()))
    first = SampleReader(path)
    first.read()
    recording.append(sample(4, gpu(), gpu()))
    assert SampleReader(path, first.offset).read() == [(header(devices=2), sample(4, gpu(), gpu()))]


def test_small_reads_get_everything_once(path: Path) -> None:
    written(path, 20)
    samples, read = SampleReader(path), []
    while batch := samples.read(700):
        read += batch
    assert [line.at_ns - ORIGIN_NS for _, line in read] == [at * 10**9 for at in range(20)]


def test_a_line_longer_than_a_read_is_left_out(path: Path) -> None:
    head = encode(header(devices=1))
    path.write_bytes(head + encode(sample(1, *[gpu()] * 100)) + encode(sample(2, gpu())))
    samples, read = SampleReader(path, 0), []
    for _ in range(50):
        read += samples.read(500)
    assert read == [(header(devices=1), sample(2, gpu()))]
    assert samples.backlog == 0


def test_half_a_line_is_read_when_it_is_whole(path: Path) -> None:
    line = encode(sample(1, gpu()))
    path.write_bytes(encode(header()) + line[:30])
    samples = SampleReader(path)
    assert samples.read() == []
    with path.open("ab") as file:
        file.write(line[30:])
    assert samples.read() == [(header(), sample(1, gpu()))]


def test_no_file_is_nothing_to_read(path: Path) -> None:
    samples = SampleReader(path, 500)
    assert (samples.read(), samples.backlog) == ([], 0)


# --- what a person reads ---


def test_metrics_of_a_run_are_those_of_all_its_nodes_and_attempts(tmp_path: Path) -> None:
    for fence in (2, 1):
        for node in (0, 1):
            recording = TelemetryFile(tmp_path / f"{fence}-{node}", header(devices=1, node_rank=node, fence=fence))
            for at in range(2):
                recording.append(sample(fence * 100 + at, gpu(float(fence * 10 + node))))
    metrics = read_metrics((tmp_path / name).read_bytes() for name in ("2-0", "2-1", "1-0", "1-1"))
    busy = metrics["system/node_1/gpu_0_utilization_percentage"]
    assert busy.values == [11.0, 11.0, 21.0, 21.0]
    assert busy.times == [ORIGIN_NS / 1e9 + at for at in (100, 101, 200, 201)]
    assert list(metrics) == sorted(metrics)
    assert read_metrics([]) == {}
    assert read_metrics([b"", b"torn"]) == {}
