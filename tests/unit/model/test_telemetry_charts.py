"""Telemetry becomes charts: lines by device and rank, with a bound on their number."""

from __future__ import annotations

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.telemetry import Line, RankSample
from serverless_gpu.model.telemetry_charts import LINES_MAX, Chart, TelemetryCharts
from tests.support.node.sampled import GB, gpu, header, sample


def charts_of(*lines: Line) -> dict[str, Chart]:
    charts = TelemetryCharts(1_000)
    for line in lines:
        charts.add(line)
    return {chart.kind.name: chart for chart in charts.charts()[1]}


def test_devices_and_ranks_have_lines_and_capacities() -> None:
    found = charts_of(
        header(),
        sample(1, gpu(10.0), gpu(20.0, watts=None), ranks=(RankSample(3, 50.0, 5 * GB),)),
        sample(2, gpu(30.0), gpu(40.0), ranks=(RankSample(3, 60.0, 6 * GB, 2 * GB),)),
    )
    use = found["gpu-use"]
    assert [(line.label, line.band.mean) for line in use.lines] == [("GPU 0", (10.0, 30.0)), ("GPU 1", (20.0, 40.0))]
    assert (use.limit, found["gpu-memory"].limit, found["gpu-power"].limit) == (100.0, 80 * GB, 700.0)
    assert found["gpu-power"].lines[1].band.mean == (None, 300.0)
    assert [line.label for line in found["rank-cpu"].lines] == ["rank 3"]
    assert found["rank-gpu-memory"].lines[0].band.mean == (None, 2 * GB)
    assert "gpu-temperature" not in found  # No sample has a temperature.
    assert found["node-memory"].limit == 16 * GB


def test_cpu_slots_have_no_gpu_charts() -> None:
    found = charts_of(header(kind=DeviceKind.CPU), sample(1, gpu(), gpu(), ranks=(RankSample(0, 50.0, 5),)))
    assert set(found) == {"rank-cpu", "rank-memory", "node-cpu", "node-memory"}


def test_samples_before_a_header_do_not_count_and_devices_can_appear_later() -> None:
    charts = TelemetryCharts(1_000)
    for line in (sample(1, gpu()), header(devices=0), sample(2), header(devices=1), sample(3, gpu(7.0))):
        charts.add(line)
    assert charts.samples == 2
    found = {chart.kind.name: chart for chart in charts.charts()[1]}
    assert found["gpu-use"].lines[0].band.mean == (None, 7.0)


def test_a_chart_has_a_bounded_number_of_lines_and_counts_the_others() -> None:
    ranks = tuple(RankSample(rank, 1.0, 1) for rank in range(LINES_MAX + 5))
    chart = charts_of(header(devices=0), sample(1, ranks=ranks))["rank-cpu"]
    assert (len(chart.lines), chart.omitted) == (LINES_MAX, 5)
