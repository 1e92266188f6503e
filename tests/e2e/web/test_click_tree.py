"""Every link that a reader can see opens a page of the server, for each role, with and without scripts."""

from __future__ import annotations

from collections import deque
from urllib.parse import urlsplit

import httpx2
import pytest
from playwright.sync_api import Browser, Page

from tests.support.server.served import Served
from tests.support.web.browser import reader, sign_in_path

PAGES_MAX = 150
LIKE_MAX = 3
"""Pages of one kind that a walk opens, such as the pages of runs."""


def kind(path: str) -> str:
    """Return what pages of one kind have in common: the first part, and the last one below an object."""
    parts = path.strip("/").split("/")
    return "/".join(part if at != 2 else "*" for at, part in enumerate(parts))


def walk(chromium: Browser, server: Served, token: str | None) -> dict[str, int]:
    """Open every page that links lead to; return the status of each."""
    statuses: dict[str, int] = {}
    with reader(chromium, server, token=token, java_script_enabled=False) as page:
        waiting, kinds = deque(["/ui/"]), dict[str, int]()
        while waiting and len(statuses) < PAGES_MAX:
            path = waiting.popleft()
            like = kind(urlsplit(path).path)
            if path in statuses or kinds.get(like, 0) >= LIKE_MAX:
                continue
            kinds[like] = kinds.get(like, 0) + 1
            with httpx2.Client(base_url=server.url, cookies=cookies(page)) as client:
                answer = client.get(path)
            statuses[path] = answer.status_code
            if "text/html" not in answer.headers.get("content-type", ""):
                continue
            page.goto(path)
            links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.getAttribute('href'))")
            assert all(link.startswith(("/ui", "#")) or urlsplit(link).scheme == "http" for link in links), links
            waiting.extend(link for link in links if link.startswith("/ui"))
    return statuses


def cookies(page: Page) -> dict[str, str]:
    return {one.get("name", ""): one.get("value", "") for one in page.context.cookies()}


@pytest.mark.parametrize("role", ["admin", pytest.param("member", marks=pytest.mark.long), "viewer"])
def test_every_link_opens_a_page(chromium: Browser, crowd: Served, tokens: dict[str, str], role: str) -> None:
    statuses = walk(chromium, crowd, None if role == "admin" else tokens[role])
    assert len(statuses) > 15
    assert {path: status for path, status in statuses.items() if status != 200} == {}


def test_a_viewer_has_no_form_that_changes_anything_of_others(
    chromium: Browser, crowd: Served, tokens: dict[str, str]
) -> None:
    allowed = {"/ui/sign-out", "/ui/people/sign-out"}
    with reader(chromium, crowd, token=tokens["viewer"]) as page:
        for path in (
            "/ui/",
            "/ui/runs",
            "/ui/queue",
            "/ui/nodes",
            "/ui/nodes/gpu-001",
            "/ui/pools",
            "/ui/pools/default",
        ):
            page.goto(path)
            actions = page.eval_on_selector_all(
                "form[method=post]", "forms => forms.map(form => form.getAttribute('action'))"
            )
            assert set(actions) <= allowed, path


def test_a_signed_in_reader_returns_to_the_wanted_page(chromium: Browser, crowd: Served) -> None:
    with reader(chromium, crowd, token="") as page:
        page.goto("/ui/nodes?state=SILENT")
        page.get_by_label("Token").fill(crowd.token)
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.wait_for_url("**/ui/nodes?state=SILENT")


def test_a_link_signs_in(crowd: Served, chromium: Browser) -> None:
    with reader(chromium, crowd, token="") as page:
        page.goto(sign_in_path(crowd))
        assert page.locator("h1").inner_text() == "Home"
