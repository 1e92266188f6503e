"""The page of a run's output, in a browser: live, hostile, interrupted, searched, and without scripts."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from serverless_gpu.server.http import routing
from serverless_gpu.server.runs import run_stream
from serverless_gpu.wire.access import SessionList
from tests.support.server.served import Served, served
from tests.support.web.browser import browser, make_user, reader
from tests.support.web.hostile_output import HOSTILE_OUTPUT
from tests.support.web.output import OutputRun

ROW_PX = 18


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def run(server: Served) -> Iterator[OutputRun]:
    with OutputRun(server, ranks=2) as running:
        yield running


@pytest.fixture(scope="module")
def page(chromium: Browser, server: Served) -> Iterator[Page]:
    with reader(chromium, server) as opened:
        yield opened


def open_log(page: Page, run: OutputRun, query: str = "") -> None:
    page.goto(f"{run.path}/logs{query}")
    expect(page.locator("#log-view")).to_be_visible()


def open_live(page: Page, run: OutputRun, query: str = "") -> None:
    open_log(page, run, query)
    expect(page.locator("#log-connection")).to_have_text("live")


def rows(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        "() => [...document.querySelectorAll('.log-row:not([hidden]) .log-text')].map(row => row.textContent)"
    )
    return found


def row(page: Page, text: str | re.Pattern[str]) -> Locator:
    return page.locator(".log-row:not([hidden])", has=page.get_by_text(text, exact=True))


def count(page: Page) -> int:
    height: float = page.evaluate("() => document.getElementById('log-spacer').getBoundingClientRect().height")
    return round(height / ROW_PX)


def test_output_appears_with_its_colours_as_it_is_written(page: Page, run: OutputRun) -> None:
    run.write(b"before\n")
    open_live(page, run)
    assert rows(page) == ["before"]
    run.write(b"\x1b[1;31mfail\x1b[0m done\n")
    expect(row(page, "fail done")).to_be_visible()
    assert page.locator(".log-row .bold.fg1").inner_text() == "fail"
    run.write(b"problem\n", rank=1, stream="stderr")
    expect(row(page, "problem").locator(".log-from")).to_have_text("1 err")
    run.write("10 %\r50 %\rgrö".encode()[:-1])
    expect(row(page, "gr")).to_be_visible()
    run.write("ö".encode()[1:] + b"sse\r\n")
    expect(row(page, "grösse")).to_be_visible()
    run.end()
    expect(page.locator("#log-connection")).to_have_text("complete")
    expect(page.locator("#run-head .state")).to_contain_text("succeeded")


def test_ranks_and_streams_are_selected(page: Page, run: OutputRun) -> None:
    run.write(b"zero\n")
    run.write(b"one\n", rank=1)
    run.write(b"one bad\n", rank=1, stream="stderr")
    open_live(page, run)
    expect(row(page, "zero")).to_be_visible()
    page.locator("select[name=rank]").select_option("1")
    expect(page).to_have_url(re.compile(r"rank=1&stream=&"))
    expect(row(page, "one bad")).to_be_visible()
    assert rows(page) == ["one", "one bad"]
    page.locator("select[name=stream]").select_option("stdout")
    expect(page).to_have_url(re.compile(r"rank=1&stream=stdout"))
    expect(page.locator("#log-connection")).to_have_text("live")
    run.write(b"not shown\n", rank=1, stream="stderr")
    run.write(b"two\n", rank=1)
    expect(row(page, "two")).to_be_visible()
    assert rows(page) == ["one", "two"]
    page.keyboard.press("[")
    expect(row(page, "zero")).to_be_visible()


def test_reading_pauses_the_log_and_counts_new_lines(page: Page, run: OutputRun) -> None:
    run.write(b"".join(b"line %d\n" % n for n in range(1_000)))
    open_live(page, run)
    expect(row(page, "line 999")).to_be_visible()
    page.locator("#log-scroll").hover()
    page.mouse.wheel(0, -4_000)
    expect(page.locator("#log-follow")).to_have_text("Follow")
    top = rows(page)
    run.write(b"more\n" * 12)
    expect(page.locator("#log-follow")).to_have_text("12 new lines ↓")
    assert rows(page) == top
    page.keyboard.press("f")
    expect(page.locator("#log-follow")).to_have_text("Following")
    expect(row(page, "more").last).to_be_visible()


def test_hostile_output_is_inert_text(page: Page, run: OutputRun) -> None:
    requests: list[str] = []
    open_live(page, run)
    run.write(b"harmless\n" * len(HOSTILE_OUTPUT))
    expect(row(page, "harmless").first).to_be_visible()
    elements = page.evaluate("() => document.querySelectorAll('*').length")
    page.on("request", lambda request: requests.append(request.url))
    run.write(b"".join(data + b"\x1b\\\x1b[0m\n" for data, _ in HOSTILE_OUTPUT))
    run.write(b"end of the hostile output\n")
    expect(row(page, "end of the hostile output")).to_be_visible()
    page.keyboard.press("f")
    shown: list[str] = []
    for at in range(0, len(HOSTILE_OUTPUT), 10):
        page.evaluate(f"() => document.getElementById('log-scroll').scrollTop = {(len(HOSTILE_OUTPUT) + at) * ROW_PX}")
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shown += rows(page)
    for data, text in HOSTILE_OUTPUT:
        assert text in shown, (data, text)
    assert page.evaluate("() => document.querySelectorAll('#log-rows *:not(div):not(span)').length") == 0
    assert page.evaluate("() => window.hacked") is None
    assert abs(page.evaluate("() => document.querySelectorAll('*').length") - elements) < 200  # Rows and colours.
    assert [url for url in requests if run.path not in url] == []
    heights: list[float] = page.evaluate(
        "() => [...document.querySelectorAll('.log-row:not([hidden])')].map(row => row.getBoundingClientRect().height)"
    )
    assert set(heights) == {float(ROW_PX)}


def test_the_list_is_bounded_and_older_output_loads(page: Page, run: OutputRun) -> None:
    open_live(page, run)
    for start in range(0, 60_000, 20_000):
        run.write(b"".join(b"%d\n" % n for n in range(start, start + 20_000)))
    expect(row(page, "59999")).to_be_visible()
    assert count(page) == 50_000
    assert page.locator(".log-row").count() < 150
    page.evaluate("() => document.getElementById('log-scroll').scrollTop = 0")
    expect(row(page, "10000")).to_be_visible()
    run.write(b"while reading\n" * 7)
    expect(page.locator("#log-follow")).to_have_text("7 new lines ↓")
    assert count(page) == 50_000  # A full list keeps its place, and takes no new lines.
    page.locator("#log-older").click()
    expect(row(page, "9999")).to_be_visible()
    page.locator("#log-follow").click()
    expect(row(page, "while reading").last).to_be_visible()
    assert count(page) < 50_000


def test_the_next_attempt_continues_the_page_and_earlier_ones_remain(page: Page, server: Served) -> None:
    with OutputRun(server, retries=1) as run:
        run.write(b"first try\n")
        open_live(page, run)
        run.fail_and_retry()
        run.write(b"second try\n")
        expect(row(page, "second try")).to_be_visible()
        assert rows(page) == ["first try", "— attempt 2 —", "second try"]
        page.goto(f"{run.path}/logs")
        expect(row(page, "second try")).to_be_visible()
        assert rows(page) == ["second try"]
        page.locator("select[name=fence]").select_option("1")
        expect(page.locator("#log-connection")).to_have_text("complete")
        assert rows(page) == ["first try"]


@pytest.mark.long
def test_a_long_line_is_cut_and_a_click_shows_its_link(page: Page, run: OutputRun) -> None:
    run.write(b"first\n")
    offset = run.write(b"x" * 10_000 + b"\n")
    open_live(page, run)
    expect(page.locator(".log-cut").nth(1)).to_have_text("… 5904 more characters")
    page.locator(".log-row").nth(1).locator(".log-text").click(position={"x": 5, "y": 5})
    link = page.locator("#log-detail a")
    assert link.get_attribute("href") == f"{run.path}/logs?fence=1&rank=0&stream=stdout&at={offset}"


@pytest.mark.long
def test_too_fast_output_is_a_gap_that_loads(page: Page, run: OutputRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stream, "SHOWN_BURST_BYTES", 20_000)
    open_live(page, run)
    run.write(b"".join(b"fast %d ".ljust(99, b"x") % n + b"\n" for n in range(40_000)))
    gap = page.locator(".log-row.gap")
    expect(row(page, re.compile("fast 39999 "))).to_be_visible()
    expect(gap).to_have_count(1)
    before = count(page)
    page.locator("#log-scroll").hover()
    page.mouse.wheel(0, -500)
    expect(page.locator("#log-follow")).to_have_text("Follow")
    gap.click()
    expect(gap).to_have_count(0)  # The rest of the gap follows after the loaded lines, out of sight.
    assert count(page) > before + 2_000


def test_a_restart_of_the_server_loses_and_repeats_nothing(chromium: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as first:
        run, port = OutputRun(first), first.outside_port
        with reader(chromium, first) as page:
            run.write("one\nhalf \u00e9".encode()[:-1])
            open_live(page, run)
            first.stop()
            first.wait_stopped()
            expect(page.locator("#log-connection")).to_contain_text("not live since")
            with served(tmp_path, port=port):
                run.write("\u00e9 line\ntwo\n".encode()[1:])
                expect(row(page, "two")).to_be_visible()
                assert rows(page) == ["one", "half é line", "two"]
                expect(page.locator("#log-connection")).to_have_text("live")


def test_a_hidden_page_has_no_stream_and_continues_later(page: Page, run: OutputRun) -> None:
    open_live(page, run)
    hide = "is => { Object.defineProperty(document, 'hidden', {value: is, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    expect(page.locator("#log-connection")).to_have_text("paused while hidden")
    run.write(b"meanwhile\n")
    page.evaluate(hide, False)
    expect(page.locator("#log-connection")).to_have_text("live")
    run.write(b"later\n")
    expect(row(page, "later")).to_be_visible()
    assert rows(page) == ["meanwhile", "later"]


def test_a_style_continues_over_pieces_and_lines(page: Page, run: OutputRun) -> None:
    open_live(page, run)
    found: list[Any] = page.evaluate(
        """async () => {
          const address = document.querySelector("script[type=module]").src.replace("log.js", "ansi.js");
          const {Terminal, newLine, className} = await import(address);
          const terminal = new Terminal(), found = [];
          const blue = "\\x1b[38;2;0;0;255my\\x1b[39;1;7mz";
          for (const pieces of [["\\x1b[3", "1mred"], ["still"], ["\\x1b[38;5;196", ";4mx\\x1b[0m"], [blue]]) {
            const line = newLine(null, 0);
            for (const piece of pieces) terminal.write(line, piece);
            terminal.endLine();
            found.push([line.text, (line.runs ?? []).filter((_, at) => at % 2).map(className)]);
          }
          return found;
        }"""
    )
    assert found == [
        ["red", ["fg1"]],
        ["still", ["fg1"]],
        ["x", ["underline fg9"]],
        ["yz", ["fg12", "bold inverse"]],
    ]


def test_the_pages_of_a_run_have_no_serious_accessibility_problem(page: Page, run: OutputRun) -> None:
    run.write(b"\x1b[2;33mdim\x1b[0m\n" * 100)
    run.measure(60)
    for path in ("/logs?q=dim", "/metrics"):
        page.goto(f"{run.path}{path}")
        expect(page.locator(".log-row, .uplot").first).to_be_visible()
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_the_end_of_a_session_leads_to_the_sign_in_page(
    chromium: Browser, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CHECKED_S", 0.1)
    monkeypatch.setattr(run_stream, "IDLE_S", 0.1)
    token = make_user(server, "cleo")
    cleo = server.connection(token)
    with OutputRun(server, token=token) as run, reader(chromium, server, token=token) as page:
        open_live(page, run)
        for session in cleo.ask("GET", "/sessions", answer=SessionList).sessions:
            cleo.ask("DELETE", f"/sessions/{session.id}", answer=type(None))
        expect(page.locator("input[name=token]")).to_be_visible()
        assert "sign-in" in page.url


def test_a_search_finds_in_the_whole_log_and_opens_the_place(page: Page, run: OutputRun) -> None:
    lines = [b"needle <b>%d</b>" % n if n % 4_000 == 1 else b"line %d" % n for n in range(20_000)]
    run.write(b"\n".join(lines) + b"\n")
    open_live(page, run)
    page.keyboard.press("/")
    page.keyboard.type("needle")
    page.keyboard.press("Enter")
    matches = page.locator("#log-matches li")
    expect(matches).to_have_count(5)
    expect(matches.nth(1)).to_contain_text("line 4002")
    assert matches.nth(1).locator("mark").inner_text() == "needle"
    matches.nth(1).locator("a").click()
    expect(page.locator(".log-row.selected .log-text")).to_have_text("needle <b>4001</b>")
    page.locator("h1").click()
    page.keyboard.press("n")
    expect(page.locator(".log-row.selected .log-text")).to_have_text("needle <b>8001</b>")
    link = page.locator("#log-detail a").get_attribute("href")
    page.locator("#log-follow").click()
    expect(row(page, "line 19999")).to_be_visible()
    page.goto(str(link))
    expect(page.locator(".log-row.selected .log-text")).to_have_text("needle <b>8001</b>")
    page.locator("#log-newer").scroll_into_view_if_needed()
    page.locator("#log-newer").click()


def test_without_scripts_the_log_is_text_in_parts(chromium: Browser, server: Served, run: OutputRun) -> None:
    run.write(b"".join(b"line %d\n" % n for n in range(20_000)) + b"\x1b[31m<b>red</b>\x1b[0m\n")
    with reader(chromium, server, java_script_enabled=False) as page:
        page.goto(f"{run.path}/logs?q=line+19998")
        text = page.locator("pre.log").inner_text().rstrip("\n")
        assert text.endswith("line 19999\n<b>red</b>") and len(text) <= 65_536
        first = text.split("\n")[0]
        expect(page.locator("#log-matches mark")).to_have_text("line 19998")
        page.get_by_role("link", name="Older output").click()
        older = page.locator("pre.log").inner_text().rstrip("\n").split("\n")
        assert int(older[-1].split()[1]) + 1 == int(first.split()[1])
        page.get_by_role("link", name="Newer output").click()
        assert page.locator("pre.log").inner_text().startswith(first)


@pytest.mark.long
def test_an_empty_log_says_so_and_a_download_is_a_file(page: Page, run: OutputRun) -> None:
    open_live(page, run)
    expect(page.locator("#log-empty")).to_be_visible()
    run.write(b"data\n")
    expect(page.locator("#log-empty")).to_be_hidden()
    page.goto(f"{run.path}/logs")
    page.locator(".downloads summary").click()
    with page.expect_download() as started:
        page.locator(".downloads a").first.click()
    assert gzip.decompress(Path(started.value.path()).read_bytes()) == b"data\n"
    assert started.value.suggested_filename == f"{run.id}-1-0-stdout.log.gz"


PATHS = ("/logs", "/stream", "/logs/sizes", "/logs/part", "/logs/download", "/metrics", "/metrics/data")


def test_another_users_output_does_not_exist(chromium: Browser, server: Served, run: OutputRun) -> None:
    run.write(b"secret\n")
    with reader(chromium, server, token=make_user(server, "eve")) as page:
        for path in PATHS:
            answer = page.request.get(f"{run.path}{path}", headers={"HX-Request": "true"})
            assert answer.status == 404, path
            assert "secret" not in answer.text()
    with reader(chromium, server, token="") as page:
        for path in PATHS:
            assert page.request.get(f"{run.path}{path}", headers={"HX-Request": "true"}).status == 401, path


def test_raw_parts_are_never_documents(page: Page, run: OutputRun) -> None:
    run.write(b"<script>window.hacked = 1</script>")
    answer = page.request.get(f"{run.path}/logs/part")
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/octet-stream"
