"""An open page follows the server, says when it does not, and goes on by itself after a restart."""

from __future__ import annotations

import contextlib
from pathlib import Path

from playwright.sync_api import Browser, expect

from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.support.server.served import served
from tests.support.web.browser import reader


def test_an_open_page_goes_on_by_itself_after_a_restart_of_the_server(chromium: Browser, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with served(tmp_path / "home", port=None) as server:
            page = stack.enter_context(reader(chromium, server))
            page.goto("/ui/pools")
            page.wait_for_selector("#connection.live")
            server.connection().ask("PUT", "/pools/one", PoolRequest(), answer=PoolView)
            expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
        page.wait_for_selector("#connection.stale")
        assert "not live since" in page.locator("#connection").inner_text()
        with served(tmp_path / "home", port=None) as again:
            assert again.url == server.url
            again.connection().ask("PUT", "/pools/two", PoolRequest(), answer=PoolView)
            page.wait_for_selector("#connection.live")
            expect(page.get_by_role("link", name="two", exact=True)).to_be_visible()
