"""A browser for tests of the web pages: Debian's Chromium, driven by Playwright.

    with browser() as chromium, reader(chromium, server) as page: …     a page of the administrator
    with reader(chromium, server, token=token_of(server, "ada")) as page: …

A page fails its test if its script raises, or if the Content-Security-Policy blocks something.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from serverless_gpu.wire.access import PrincipalRequest, SignInLink, TeamList, TeamRequest, TeamView, TokenMade
from tests.support.server.served import Served

WAIT_MS = 30_000


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser without a window; skip where Chromium is not installed."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield running
        finally:
            running.close()


@contextlib.contextmanager
def reader(
    chromium: Browser,
    server: Served,
    *,
    token: str | None = None,
    width: int = 1280,
    height: int = 800,
    scheme: Literal["light", "dark"] = "light",
    **options: Any,
) -> Iterator[Page]:
    """Open the home page of somebody who is signed in.

    Args:
        chromium: the browser.
        server: that serves the pages.
        token: of the reader, the administrator's unless another is given; "" for somebody who is not signed in.
        width: of the window, in pixels.
        height: likewise.
        scheme: of the colours.
        options: of Playwright's browser context.
    """
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, base_url=server.url, **options
    )
    problems: list[str] = []
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))

    def console(message: Any) -> None:
        if "Content Security Policy" in message.text:
            problems.append(message.text)

    page.on("console", console)
    try:
        page.goto("/ui/" if token == "" else sign_in_path(server, token))
        yield page
    finally:
        context.close()
    assert problems == []


def sign_in_path(server: Served, token: str | None = None) -> str:
    """Return a link that signs the owner of a token in."""
    made: SignInLink = server.connection(token).ask("POST", "/sign-in-links", answer=SignInLink)
    return made.path


def make_user(server: Served, name: str, *, role: str = "member", team: str = "") -> str:
    """Create a user, and return the user's token."""
    root = server.connection()
    if team:
        there: TeamList = root.ask("GET", "/teams", answer=TeamList)
        if team not in {one.name for one in there.teams}:
            root.ask("POST", "/teams", TeamRequest(name=team), answer=TeamView)
    request = PrincipalRequest(name=name, kind="user", role=role, teams=(team,) if team else ())  # type: ignore[arg-type]  # text
    made: TokenMade = root.ask("POST", "/users", request, answer=TokenMade)
    return made.secret
