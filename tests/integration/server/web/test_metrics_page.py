"""The page of a run's telemetry, in a browser: charts that zoom, live values, and pictures without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from serverless_gpu.ambient import SystemClock
from tests.support.server.served import Served, served
from tests.support.web.browser import browser, reader
from tests.support.web.output import OutputRun, samples

LIVE_MS = 15_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def page(chromium: Browser, server: Served) -> Iterator[Page]:
    with reader(chromium, server) as opened:
        yield opened


@pytest.fixture
def run(server: Served) -> Iterator[OutputRun]:
    with OutputRun(server) as running:
        yield running


def ranges_asked(page: Page) -> list[str]:
    found: list[str] = []

    def asked(request: Any) -> None:
        if "/metrics/data" in request.url:
            found.append(request.url)

    page.on("request", asked)
    return found


def test_charts_zoom_into_values_that_the_server_downsamples_again(
    chromium: Browser, server: Served, run: OutputRun
) -> None:
    run.measure(1_200, gpus=9, gap=range(300, 400))
    with reader(chromium, server, height=2_400) as page:
        asked = ranges_asked(page)
        page.goto(f"{run.path}/metrics")
        expect(page.locator(".chart .uplot")).to_have_count(6)
        use = page.locator("[data-chart=gpu-use]")
        expect(use.locator("p")).to_have_text(re.compile(r"GPU 0 to GPU 8: .*maximum 99 %"))
        expect(use.locator(".legend li")).to_have_count(9)
        box = use.locator(".u-over").bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.5, middle)
        expect(page.locator("[data-chart=gpu-memory] .legend .value").first).to_contain_text("GB")  # One cursor.
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
        page.mouse.up()
        expect(page.locator("#metrics-state")).to_have_text(re.compile(r"^[12] s for each point"))
        zoomed = dict(re.findall(r"(from_ms|to_ms)=(\d+)", asked[-1]))
        assert int(zoomed["to_ms"]) - int(zoomed["from_ms"]) == pytest.approx(300_000, abs=15_000)
        page.locator("[data-zoom=reset]").click()
        expect(page.locator("#metrics-state")).to_have_text("")
        assert "from_ms" not in asked[-1]
        page.locator("[data-zoom=in]").click()
        expect(page.locator("[data-zoom=reset]")).to_be_enabled()


@pytest.mark.long
def test_a_table_has_at_most_fifty_rows(page: Page, run: OutputRun) -> None:
    run.measure(1_200)
    page.goto(f"{run.path}/metrics")
    tables = page.locator("[data-chart=node-cpu] details")
    tables.locator("summary").click()
    expect(tables.locator("tbody tr")).to_have_count(50)
    expect(tables.locator("tbody tr").first).to_contain_text("%")


@pytest.mark.long
def test_live_charts_append_points_every_five_seconds(page: Page, run: OutputRun) -> None:
    begin_ns = SystemClock().wall_ns() - 400 * 10**9
    data = samples(300, start_ns=begin_ns, gpus=1)
    whole = samples(400, start_ns=begin_ns, gpus=1)
    run.write(data[: data.rfind(b"\n") + 1], stream="telemetry")
    asked = ranges_asked(page)
    page.goto(f"{run.path}/metrics")
    expect(page.locator(".chart .uplot").first).to_be_visible()
    lines = whole.split(b"\n")
    run.write(b"\n".join(lines[301:]), stream="telemetry")
    with page.expect_response(lambda answer: "step_ms" in answer.url, timeout=LIVE_MS) as newest:
        pass
    found = newest.value.json()
    assert 100 <= len(found["times_ms"]) <= 102  # Only the newest points, with the same step.
    assert "from_ms" in asked[-1]
    run.end()
    with page.expect_response(lambda answer: answer.json()["complete"], timeout=LIVE_MS):
        pass


@pytest.mark.long
def test_the_first_samples_replace_the_empty_page(page: Page, run: OutputRun) -> None:
    page.goto(f"{run.path}/metrics")
    expect(page.locator(".empty")).to_be_visible()
    run.measure(3)
    expect(page.locator("[data-chart=gpu-use]")).to_be_visible(timeout=LIVE_MS)


def test_without_scripts_charts_are_pictures(chromium: Browser, server: Served, run: OutputRun) -> None:
    run.measure(600, gap=range(100, 200))
    with reader(chromium, server, java_script_enabled=False) as page:
        page.goto(f"{run.path}/metrics")
        picture = page.locator("[data-chart=gpu-use] svg.line-chart")
        expect(picture.locator("path.line")).to_have_count(4)  # Two devices, before and after the gap.
        page.locator("select[name=last_ms]").select_option("600000")
        page.locator("#metrics-form button").first.click()
        expect(page.locator("[data-chart=node-memory]")).to_be_visible()
        assert len(page.content()) < 150_000


def test_a_quick_run_says_why_it_has_no_charts(page: Page, run: OutputRun) -> None:
    run.end()
    page.goto(f"{run.path}/metrics")
    expect(page.locator(".empty code")).to_have_text(f"sgpu show {run.id}")
    expect(page.locator("#metrics")).to_have_count(0)
