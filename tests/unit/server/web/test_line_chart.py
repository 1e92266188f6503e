"""Line charts as SVG: axes, gaps, bands, escaped texts."""

from __future__ import annotations

import datetime
import zoneinfo
from xml.etree import ElementTree

from serverless_gpu.server.web.line_chart import PlotLine, line_chart, line_class, measure, sentence

START_MS = 1_800_000_000_000  # 2027-01-15 08:00:00 UTC
UTC = datetime.UTC


def drawn(
    *lines: PlotLine,
    times: int = 4,
    unit: str = "percent",
    zone: datetime.tzinfo = UTC,
    limit: float | None = None,
) -> ElementTree.Element:
    times_ms = [START_MS + n * 60_000 for n in range(times)]
    return ElementTree.fromstring(line_chart(times_ms, lines, unit=unit, zone=zone, limit=limit))


def texts(svg: ElementTree.Element) -> list[str]:
    return [str(element.text) for element in svg.iter("text")]


def paths(svg: ElementTree.Element, kind: str) -> list[str]:
    return [path.get("d", "") for path in svg.iter("path") if kind in path.get("class", "").split()]


def test_a_gap_interrupts_the_line_and_its_band() -> None:
    line = PlotLine(label="a", mean=(1.0, 2.0, None, 4.0), minimum=(0.0, 1.0, None, 3.0), maximum=(2.0, 3.0, None, 5.0))
    svg = drawn(line)
    assert len(paths(svg, "line")) == len(paths(svg, "band")) == 2
    assert not paths(drawn(PlotLine(label="a", mean=(1.0, 1.0, 1.0, 1.0))), "band")


def test_the_value_axis_ends_at_the_capacity_or_above_the_highest_value() -> None:
    low = PlotLine(label="a", mean=(1.0, 2.0, 3.0, 4.0))
    assert "100 %" in texts(drawn(low, limit=100.0))
    assert "80.0 GB" in texts(drawn(PlotLine(label="m", mean=(1e9,) * 4), unit="bytes", limit=80e9))
    over = PlotLine(label="a", mean=(1.0, 2.0, 3.0, 140.0))
    assert "150 %" in texts(drawn(over, limit=100.0))
    assert texts(drawn(times=0))


def test_the_time_axis_is_in_the_zone_of_the_reader() -> None:
    line = PlotLine(label="a", mean=(1.0,) * 4)
    assert "08:02:00" in texts(drawn(line))
    assert "13:32:00" in texts(drawn(line, zone=zoneinfo.ZoneInfo("Asia/Kolkata")))


def test_lines_beyond_the_colours_have_other_dashes() -> None:
    assert len({line_class(number) for number in range(24)}) == 24


def test_values_have_units_and_a_sentence_names_the_extremes() -> None:
    assert [measure(71.4, "percent"), measure(2.5, "watts"), measure(None, "bytes"), measure(1.5e9, "bytes")] == [
        "71 %",
        "2.5 W",
        "–",
        "1.5 GB",
    ]
    said = sentence([PlotLine(label="GPU 0", mean=(1.0, 3.0)), PlotLine(label="GPU 1", mean=(None, 8.0))], "celsius")
    assert all(part in said for part in ("GPU 0 to GPU 1", "1 °C", "8 °C", "5.5 °C"))
    assert sentence([PlotLine(label="a", mean=(None,))], "watts")


def test_hostile_units_and_labels_stay_text() -> None:
    svg = str(line_chart([START_MS], [PlotLine(label="<b>", mean=(1.0,))], unit="<script>", zone=UTC))
    assert "<script>" not in svg
