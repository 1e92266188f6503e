"""The page of package indexes sets and deletes them, for administrators only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serverless_gpu.wire.indexes import IndexList
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path

WAIT_S = 30


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "home") as server:
        yield server


@contextlib.contextmanager
def signed_in(server: Served, token: str | None = None) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=WAIT_S, headers={"Origin": server.url}) as client:
        client.get(sign_in_path(server, token))
        yield client


def csrf_of(client: httpx2.Client) -> str:
    found = re.search(r'name="csrf" value="(\w+)"', client.get("/ui/").text)
    assert found is not None
    return found[1]


def test_an_administrator_sets_and_deletes_an_index(running: Served) -> None:
    with signed_in(running) as client:
        csrf = csrf_of(client)
        form = {"csrf": csrf, "name": "own", "url": "https://packages.example/simple/", "file_hosts": "files.example"}
        assert client.post("/ui/indexes", data=form).status_code == 303
        (made,) = running.connection().ask("GET", "/indexes", answer=IndexList).indexes
        assert (made.name, made.file_hosts) == ("own", ("files.example",))
        assert "packages.example" in client.get("/ui/indexes").text
        assert client.post("/ui/indexes/own/delete", data={"csrf": csrf}).status_code == 303
        assert running.connection().ask("GET", "/indexes", answer=IndexList).indexes == ()


def test_a_member_sets_no_index_and_sees_no_requests(running: Served) -> None:
    with signed_in(running, make_user(running, "mina")) as client:
        page = client.get("/ui/indexes")
        assert "Last requests" not in page.text
        assert 'action="/ui/indexes"' not in page.text
        form = {"csrf": csrf_of(client), "name": "own", "url": "https://packages.example/simple/"}
        assert client.post("/ui/indexes", data=form).status_code in (403, 404)
