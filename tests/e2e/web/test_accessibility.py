"""Every page has no serious finding of axe-core, fits small windows, and works from the keyboard."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from serverless_gpu.server.web.navigation import ENTRIES
from tests.support.server.served import Served
from tests.support.web.browser import reader

PATHS = tuple(entry.path for entry in ENTRIES)


def serious(page: Page) -> list[tuple[str, str]]:
    found: dict[str, Any] = Axe().run(page).response
    return [
        (problem["id"], problem["nodes"][0]["html"][:200])
        for problem in found["violations"]
        if problem["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_no_page_has_a_serious_finding(chromium: Browser, crowd: Served, scheme: Literal["light", "dark"]) -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    with reader(chromium, crowd, scheme=scheme) as page:
        for path in PATHS:
            page.goto(f"/ui{path}")
            found[path] = serious(page)
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_the_sign_in_page_has_no_serious_finding(chromium: Browser, crowd: Served) -> None:
    with reader(chromium, crowd, token="") as page:
        assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_no_page_of_a_run_has_a_serious_finding(
    chromium: Browser, crowd: Served, scheme: Literal["light", "dark"]
) -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    with reader(chromium, crowd, scheme=scheme) as page:
        runs = []
        for state in ("FAILED", "RUNNING", "QUEUED"):
            page.goto(f"/ui/runs?state={state}&limit=1")
            runs += page.eval_on_selector_all("input[name=runs]", "boxes => boxes.map(box => box.value)")
        paths = [f"/runs/{run}" for run in runs]
        paths += [f"{paths[0]}/{tab}" for tab in ("files", "environment", "receipt", "spec")]
        for path in (*paths, f"/compare?runs={','.join(runs)}", "/compare", f"/stopped-runs?runs={runs[0]}"):
            page.goto(f"/ui{path}")
            found[path] = serious(page)
    assert len(runs) == 3
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize("width", [400, pytest.param(2560, marks=pytest.mark.long)])
def test_no_page_is_wider_than_its_window(chromium: Browser, crowd: Served, width: int) -> None:
    wide: list[str] = []
    with reader(chromium, crowd, width=width) as page:
        for path in PATHS:
            page.goto(f"/ui{path}")
            if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                wide.append(path)
    assert wide == []


def test_the_keyboard_opens_pages_and_rows(chromium: Browser, crowd: Served) -> None:
    with reader(chromium, crowd) as page:
        page.wait_for_selector("#connection.live")
        page.keyboard.press("g")
        page.keyboard.press("r")
        page.wait_for_url("**/ui/runs")
        page.wait_for_selector("#connection.live")
        page.keyboard.press("j")
        page.keyboard.press("j")
        name = page.locator("tr a:focus").inner_text()
        page.keyboard.press("Enter")
        page.wait_for_url("**/ui/runs/*")
        assert name in page.locator("h1").inner_text()
        page.keyboard.press("?")
        assert page.locator("dialog").is_visible()
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
