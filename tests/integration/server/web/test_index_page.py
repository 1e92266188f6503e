"""The page of package indexes sets and deletes them, for administrators only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.wire.indexes import IndexList
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user
from tests.support.web.clients import post, signed_in


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "home") as server:
        yield server


def test_an_administrator_sets_and_deletes_an_index(running: Served) -> None:
    with signed_in(running) as client:
        form = {"name": "own", "url": "https://packages.example/simple/", "file_hosts": "files.example"}
        assert post(client, "/ui/indexes", **form).status_code == 303
        (made,) = running.connection().ask("GET", "/indexes", answer=IndexList).indexes
        assert (made.name, made.file_hosts) == ("own", ("files.example",))
        assert "packages.example" in client.get("/ui/indexes").text
        assert post(client, "/ui/indexes/own/delete").status_code == 303
        assert running.connection().ask("GET", "/indexes", answer=IndexList).indexes == ()


def test_a_member_sets_no_index_and_sees_no_requests(running: Served) -> None:
    with signed_in(running, make_user(running, "mina")) as client:
        page = client.get("/ui/indexes")
        assert "Last requests" not in page.text
        assert 'action="/ui/indexes"' not in page.text
        form = {"name": "own", "url": "https://packages.example/simple/"}
        assert post(client, "/ui/indexes", **form).status_code in (403, 404)
