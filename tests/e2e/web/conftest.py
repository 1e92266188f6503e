"""A browser for all tests of the pages, and a server with much to show that no test changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.server.served import Served
from tests.support.web.browser import browser, make_user
from tests.support.web.filled import Filling, filled


@pytest.fixture(scope="package")  # While it runs, no other test of the process can start an event loop.
def chromium() -> Iterator[Browser]:
    """Yield the browser."""
    with browser() as running:
        yield running


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with 300 runs of seven people on twelve nodes."""
    with filled(tmp_path_factory.mktemp("home"), Filling(runs=300, nodes=12)) as running:
        yield running


@pytest.fixture(scope="session")
def tokens(crowd: Served) -> dict[str, str]:
    """Return the tokens of readers with less rights than the administrator."""
    return {
        "operator": make_user(crowd, "olga", role="operator"),
        "member": make_user(crowd, "mina", role="member", team="vision"),
        "viewer": make_user(crowd, "vera", role="viewer", team="vision"),
        "stranger": make_user(crowd, "stan", role="member"),
    }
