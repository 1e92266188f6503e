"""Nothing passes the gate but what the list says: all routes, all methods, WebSockets, mounts, on loopback too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anyio import to_thread
from starlette.routing import Route as PlainRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import NotAuthenticated, ServerProblem
from serverless_gpu.server import composition as application_module
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.http import auth_middleware
from serverless_gpu.server.http.auth_middleware import PUBLIC_ROUTES, AuthMiddleware
from serverless_gpu.server.http.routing import ANY_CALLER, ATTEMPT, PUBLIC, Call, Incoming, Need, Route, Routes, writing
from serverless_gpu.wire.access import TeamRequest, TeamView
from serverless_gpu.wire.agents import ReportAnswer
from serverless_gpu.wire.base import API
from tests.support.server.made import made_services

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "PROPFIND")
RUN = "01kaz5w8d3e4f5g6h7j8k9m0n1"
PEOPLE = {
    "good": Caller(name="ada", role="member"),
    "low": Caller(name="vic", role="viewer"),
    "attempt": Caller(kind="attempt", attempt=(RUN, 2, 0)),
}


class NoDatabase:
    """A database that nobody may ask: the gate comes first."""

    def read(self, work: Callable[[Any], Any]) -> Any:
        raise AssertionError("the database was asked before the gate was passed")

    write = read


def authenticate(token: str) -> Caller:
    try:
        return PEOPLE[token]
    except KeyError:
        raise NotAuthenticated from None


def reach(who: Caller, need: Need) -> str:
    return "all" if who.role == "member" else "none"


extra = Routes("extra")


@extra.post("/things", needs=writing("things"), limit=100)
def make_thing(call: Call, body: TeamRequest) -> TeamView:
    return TeamView(name=body.name, members=(call.who.name, call.reach))


@extra.put("/things/{key:path}", needs=writing("things", attempts=True), limit=10)
async def put_thing(call: Call, key: str, body: Incoming) -> None:
    async for _ in body:
        pass


@extra.post("/attempts/{run}/{fence}/other", needs=ATTEMPT)
def report(call: Call, run: str, fence: int, body: TeamRequest) -> ReportAnswer:
    return ReportAnswer()


@extra.get("/me", needs=ANY_CALLER)
def me(call: Call) -> TeamView:
    return TeamView(name=call.who.name, members=())


@extra.get("/broken", needs=ANY_CALLER)
def broken(call: Call) -> TeamView:
    raise KeyError("sgpu_secret")


def everything() -> list[Route]:
    return [*application_module.api_routes(), *extra.all]


def closed(routes: list[Route], *, ask: Callable[[str], Caller] = authenticate) -> AuthMiddleware:
    services = made_services(NoDatabase(), Path("/nonexistent"), clock=SystemClock())
    routes = [route.bound(services.by_type) for route in routes]
    inner = application_module.application(routes)
    return AuthMiddleware(
        inner,
        clock=services.clock,
        measures=services.measures,
        routes=routes,
        hosts=auth_middleware.LOOPBACK,
        authenticate=ask,
        reach=reach,
    )


def test_tokens_that_are_looked_at_leave_threads_for_those_who_were_let_in() -> None:
    looking, answered = threading.Semaphore(0), threading.Event()

    def slowly(token: str) -> Caller:
        looking.release()
        assert answered.wait(60)
        return authenticate(token)

    async def crowd() -> None:
        closed_gate = closed(everything(), ask=slowly)
        transport = httpx2.ASGITransport(app=closed_gate)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as somebody:
            asked = [asyncio.ensure_future(somebody.get(f"{API}/me", headers=bearer("bad"))) for _ in range(60)]
            for _ in range(auth_middleware.AUTHENTICATING_MAX):
                await to_thread.run_sync(looking.acquire)
            assert not looking.acquire(blocking=False)
            answered.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {401}

    asyncio.run(crowd())


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(closed(everything()), base_url="http://127.0.0.1:7878", raise_server_exceptions=False) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def filled(path: str) -> str:
    return API + path.replace("{run}", RUN).replace("{fence}", "2").replace("{key:path}", "a/b")


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "Basic Z29vZDpnb29k"}, bearer("")])
def test_without_a_valid_token_every_route_and_method_is_401_but_those_of_the_list(
    client: TestClient, headers: dict[str, str]
) -> None:
    paths = {filled(route.path) for route in everything()} | {"/", "/docs", "/openapi.json", f"{API}/nothing"}
    for path in paths:
        for method in METHODS:
            status = client.request(method, path, headers=headers).status_code
            admitted = 200 if method == "GET" else 415  # Without the body that the route needs.
            assert status == (admitted if (method, path) in PUBLIC_ROUTES else 401), (method, path)


def test_a_token_of_a_low_role_gets_403_where_the_role_has_no_reach(client: TestClient) -> None:
    for route in everything():
        if route.needs in (PUBLIC, ANY_CALLER):
            continue
        status = client.request(route.method, filled(route.path), headers=bearer("low")).status_code
        assert status == 403, route


def test_there_are_no_mounts_no_websockets_and_no_route_that_was_not_declared(client: TestClient) -> None:
    routes = everything()
    served = application_module.application(routes).routes
    assert all(isinstance(route, PlainRoute) for route in served)
    declared = {(route.method, API + route.path) for route in routes}
    assert {(m, route.path) for route in served for m in route.methods} == declared  # type: ignore[attr-defined] # plain routes, as said above
    for headers in ({}, bearer("good")):
        for path in {filled(route.path) for route in routes}:
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path, headers=headers):
                pass


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "127.0.0.2", "", "0.0.0.0:7878"]
)
def test_a_request_under_another_name_is_refused_whatever_token_it_has(client: TestClient, host: str) -> None:
    for path in (f"{API}/health", f"{API}/me"):
        answer = client.get(path, headers={"Host": host, **bearer("good")})
        assert answer.status_code == 403
        assert answer.json()["code"] == "not_allowed"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:7878", "LOCALHOST", "[::1]:7878"])
def test_loopback_names_are_answered_with_any_port(client: TestClient, host: str) -> None:
    assert client.get(f"{API}/me", headers={"Host": host, **bearer("good")}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost:7878.evil"])
def test_a_page_of_another_site_is_refused(client: TestClient, origin: str) -> None:
    answer = client.get(f"{API}/me", headers={"Origin": origin, **bearer("good")})
    assert answer.status_code == 403


def test_who_has_a_token_learns_what_is_there_and_which_method(client: TestClient) -> None:
    assert client.get(f"{API}/nothing", headers=bearer("good")).status_code == 404
    answer = client.delete(f"{API}/things", headers=bearer("good"))
    assert (answer.status_code, answer.json()["hint"]) == (405, "possible: POST")
    assert answer.headers["allow"] == "POST"


def test_the_token_of_an_attempt_is_good_for_that_attempt_only(client: TestClient) -> None:
    def post(run: str, fence: str, token: str = "attempt") -> int:
        path = f"{API}/attempts/{run}/{fence}/other"
        return client.post(path, headers=bearer(token), json={"name": "x"}).status_code

    assert post(RUN, "2") == 200
    assert post(RUN, "1") == post(RUN, "22") == post(RUN + "x", "2") == post(RUN, "2", "good") == 403
    assert client.get(f"{API}/me", headers=bearer("attempt")).status_code == 403
    upload = client.put(
        f"{API}/things/x", headers={**bearer("attempt"), "Content-Type": "application/octet-stream"}, content=b"1"
    )
    assert upload.status_code == 204


def test_a_body_is_of_the_declared_type_and_size_and_read_by_nobody_before_that(client: TestClient) -> None:
    def post(content: bytes | Iterator[bytes], kind: str = "application/json", **headers: str) -> tuple[int, str]:
        answer = client.post(
            f"{API}/things", headers={**bearer("good"), "Content-Type": kind, **headers}, content=content
        )
        return answer.status_code, answer.json().get("code", "")

    assert post(b'{"name":"x"}') == (200, "")
    assert post(b'{"name":"x"}', "application/json; charset=utf-8") == (200, "")
    assert post(b'{"name":"x"}', "text/plain")[0] == 415
    assert post(b"name=x", "application/x-www-form-urlencoded")[0] == 415
    assert post(b'{"name":"x"}', **{"Content-Encoding": "gzip"})[0] == 415
    assert post(b'{"name":"x","sudo":1}') == (400, "invalid_value")
    assert post(b'{"name":1}') == (400, "invalid_value")
    assert post(b"\xff") == (400, "invalid_value")
    assert post(b'{"name":"' + b"x" * 200 + b'"}') == (413, "too_large")
    assert post(iter([b'{"name":"', b"x" * 200, b'"}'])) == (413, "too_large")
    assert client.request("GET", f"{API}/me", headers=bearer("good"), content=b"x").status_code == 413


def test_a_streamed_body_over_its_limit_ends_in_the_middle(client: TestClient) -> None:
    headers = {**bearer("good"), "Content-Type": "application/octet-stream"}
    answer = client.put(f"{API}/things/a/b", headers=headers, content=iter([b"12345"] * 3))
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_headers_and_paths_have_bounds(client: TestClient) -> None:
    many = {f"X-{number}": "1" for number in range(120)}
    assert client.get(f"{API}/me", headers={**bearer("good"), **many}).status_code == 413
    assert client.get(f"{API}/me", headers={**bearer("good"), "X": "1" * 40_000}).status_code == 413
    assert client.get(f"{API}/me?x={'1' * 5_000}", headers=bearer("good")).status_code == 413
    assert client.get(f"{API}/me", headers=bearer("x" * 5_000)).status_code == 401


def test_a_bug_in_a_route_says_nothing_to_the_outside(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.get(f"{API}/broken", headers=bearer("good"))
    assert answer.status_code == 500
    assert "sgpu_secret" not in answer.text
    assert "KeyError" in caplog.text


def test_a_route_that_is_reached_without_the_gate_serves_nothing() -> None:
    inner = application_module.application(everything())
    with TestClient(inner, raise_server_exceptions=False) as client:
        assert client.get(f"{API}/me").status_code == 500
        assert client.get(f"{API}/health").status_code == 500


def test_a_public_route_that_is_not_in_the_list_keeps_the_server_from_starting() -> None:
    more = Routes("more")

    @more.get("/open", needs=PUBLIC)
    def wide_open(call: Call) -> TeamView:
        raise AssertionError

    with pytest.raises(ServerProblem, match="open"):
        closed([*everything(), *more.all])
    with pytest.raises(ServerProblem, match="version"):
        closed(extra.all)
