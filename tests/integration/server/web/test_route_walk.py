"""Every route of the pages: without a session, and with an object of another user."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2
import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.routing import PUBLIC, Route
from serverless_gpu.server.web import pages
from tests.support.server.served import Served
from tests.support.web.browser import make_user, sign_in_path
from tests.support.web.filled import Filling, filled

WAIT_S = 30
ROUTES = [route for routes in pages.ROUTES for route in routes.all if route.needs != PUBLIC]
OF_A_RUN = [route for route in ROUTES if "{run}" in route.path]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with runs of several people, which the walks do not change."""
    with filled(tmp_path_factory.mktemp("home"), Filling(runs=30, nodes=2)) as running:
        yield running


def path_of(route: Route, run: str = "01m8q1aaaaaaaaaaaaaaaaaaaa") -> str:
    """Return a path of a route, with a name for each part."""
    named = {"run": run, "fence": "1", "rank": "0", "stream": "stdout"}
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: named.get(found[1], "x"), route.full_path)


def test_without_a_session_no_route_shows_or_changes_anything(server: Served) -> None:
    with httpx2.Client(base_url=server.url, timeout=WAIT_S, headers={"Origin": server.url}) as client:
        for route in ROUTES:
            answer = client.request(route.method, path_of(route), data={} if route.method == "POST" else None)
            if route.method == "GET":
                assert answer.status_code == 303, route.full_path
                assert answer.headers["location"].startswith("/ui/sign-in"), route.full_path
            else:
                assert answer.status_code == 401, route.full_path


def test_a_run_of_another_user_does_not_exist_on_any_route(server: Served) -> None:
    database = Database(f"sqlite:///{server.home / 'server' / 'server.db'}", clock=SystemClock())
    query = sa.select(tables.runs.c.id).where(tables.runs.c.owner == "ada").limit(1)
    run = str(database.read(lambda connection: connection.scalar(query)))
    database.close()
    with httpx2.Client(base_url=server.url, timeout=WAIT_S, headers={"Origin": server.url}) as client:
        client.get(sign_in_path(server, make_user(server, "stan")))
        found = re.search(r'name="csrf" value="(\w+)"', client.get("/ui/").text)
        assert found is not None
        assert len(OF_A_RUN) > 10
        for route in OF_A_RUN:
            form = {"csrf": found[1]} if route.method == "POST" else None
            answer = client.request(route.method, path_of(route, run), data=form)
            # A form that lacks a field, or a query that lacks a text, is refused before the run is looked up.
            assert answer.status_code in (404, 400), (route.method, route.full_path, answer.status_code)
            assert "ada" not in answer.text, route.full_path
