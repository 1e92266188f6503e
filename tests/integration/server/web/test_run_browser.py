"""Runs in a real browser: from a filter to a run, cancelled with a confirmation, and several at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.wire.runs import RunView, StopRequest
from tests.support.server.runs_api import submit
from tests.support.server.served import Served, served
from tests.support.web.browser import browser, reader


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server for the tests of this file, which each submit runs of their own."""
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Yield a browser."""
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser, server: Served) -> Iterator[Page]:
    """Yield a page of the administrator."""
    with reader(chromium, server) as one:
        yield one


def state(server: Served, run: RunView) -> State:
    found: RunView = server.connection().ask("GET", f"/runs/{run.id}", answer=RunView)
    return found.state


def test_a_run_is_found_by_a_filter_opened_and_cancelled(server: Served, page: Page) -> None:
    submit(server.connection(), name="other")
    run = submit(server.connection(), name="wanted")
    page.goto("/ui/runs")
    page.keyboard.press("/")
    page.keyboard.type("wanted")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/runs?*q=wanted*")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="wanted").click()
    page.wait_for_url(f"**/ui/runs/{run.id}")
    expect(page.locator("#connection")).to_have_class("connection live")
    page.locator("#run-actions").get_by_role("button", name="Cancel").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text(run.id)
    expect(question).to_contain_text("1 × CPU")
    question.get_by_role("button", name="Keep").click()
    expect(question).to_have_count(0)
    assert state(server, run) is State.QUEUED
    page.locator("#run-actions").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("#run-head .state")).to_contain_text("cancelled")
    expect(page.locator("#run-actions").get_by_role("button", name="Cancel")).to_have_count(0)
    assert state(server, run) is State.CANCELLED
    page.go_back()
    page.go_back()
    assert "q=wanted" in page.url
    expect(page.get_by_label("Name, id or message")).to_have_value("wanted")


def test_rows_and_the_header_follow_a_run_and_keep_what_is_selected(server: Served, page: Page) -> None:
    runs = [submit(server.connection(), name=f"live-{n}") for n in range(3)]
    page.goto("/ui/runs?q=live-")
    expect(page.locator("#connection")).to_have_class("connection live")
    page.get_by_label("Select live-0").check()
    page.get_by_label("Select live-2").check()
    server.connection().ask("POST", f"/runs/{runs[1].id}/stop", StopRequest(), answer=RunView)
    expect(page.locator(f"#run-{runs[1].id} .state")).to_contain_text("cancelled")
    expect(page.get_by_label("Select live-0")).to_be_checked()
    page.get_by_label("Select live-1").check()
    expect(page.locator("#selected")).to_contain_text("3 selected, 2")
    page.get_by_role("button", name="Cancel selected").click()
    expect(page.get_by_role("dialog")).to_contain_text("2 runs with 2 GPUs: live-2, live-0")
    page.get_by_role("dialog").get_by_role("button", name="Cancel selected").click()
    page.wait_for_url("**/ui/stopped-runs?*")
    expect(page.locator("tbody tr")).to_have_count(3)
    assert [state(server, run) for run in runs] == [State.CANCELLED] * 3


def test_compare_opens_from_the_list_and_shows_differences_first(server: Served, page: Page) -> None:
    for retries in (0, 5):
        submit(server.connection(), name="compared", retries=retries)
    page.goto("/ui/runs?name=compared")
    expect(page.get_by_role("button", name="Compare selected")).to_be_disabled()
    for box in page.get_by_label("Select compared").all():
        box.check()
    page.get_by_role("button", name="Compare selected").click()
    page.wait_for_url("**/ui/compare?*")
    expect(page.locator("tr.differs", has_text="retries").locator("td")).to_have_text(["5", "0"])


@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_of_runs_is_wider_than_the_window(server: Served, chromium: Browser, width: int) -> None:
    run = submit(server.connection(), name="w" * 200, tags={"long" * 30: "tag" * 40})
    other = submit(server.connection(), name="y" * 200)
    paths = ("/ui/runs?cols=tags,owner", *(f"/ui/runs/{run.id}{tab}" for tab in ("", "/files", "/receipt", "/spec")))
    with reader(chromium, server, width=width) as page:
        for path in (*paths, f"/ui/runs/{run.id}/environment", f"/ui/compare?runs={run.id},{other.id}", "/ui/compare"):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
