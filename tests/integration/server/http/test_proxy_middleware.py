"""The door: past a declared proxy nobody comes in, what it says is believed of it alone, and at the end nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_log import ACCESS
from serverless_gpu.server.http.access_log import AccessLogMiddleware
from serverless_gpu.server.http.proxy_middleware import ProxyMiddleware
from serverless_gpu.wire.base import Problem
from tests.support.server.measures import value

pytestmark = pytest.mark.any_database

Headers = Mapping[str, str] | Sequence[tuple[str, str]]
PROXIES = ("192.0.2.1", "198.51.100.0/24")


async def tell_client(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with who asks, as the application sees it."""
    await PlainTextResponse(f"{scope['client'][0]} {scope['scheme']}")(scope, receive, send)


def ask(
    door: ProxyMiddleware | AccessLogMiddleware, peer: str, headers: Headers = (), path: str = "/api/v1/runs"
) -> httpx2.Response:
    """Return the answer to a request from an address."""

    async def asking() -> httpx2.Response:
        transport: Any = httpx2.ASGITransport(door, client=(peer, 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gpu.internal") as client:
            return await client.get(path, headers=dict(headers) if isinstance(headers, Mapping) else list(headers))

    return asyncio.run(asking())


@pytest.mark.parametrize("peer", ["192.0.2.1", "198.51.100.77", "::ffff:192.0.2.1"])
def test_the_proxy_says_who_asks(peer: str) -> None:
    door = ProxyMiddleware(tell_client, hub=Hub(), proxies=PROXIES)
    headers = {"X-Forwarded-For": "203.0.113.5", "X-Forwarded-Proto": "https"}
    assert ask(door, peer, headers).text == "203.0.113.5 https"


def test_this_machine_is_answered_and_not_believed() -> None:
    door = ProxyMiddleware(tell_client, hub=Hub(), proxies=PROXIES)
    assert ask(door, "127.0.0.1", {"X-Forwarded-For": "203.0.113.5"}).text == "127.0.0.1 http"


@pytest.mark.parametrize("peer", ["203.0.113.5", "192.0.2.2", "2001:db8::1", "unknown"])
def test_whoever_comes_past_the_proxy_is_refused_whatever_he_says(peer: str) -> None:
    door = ProxyMiddleware(tell_client, hub=Hub(), proxies=PROXIES)
    answer = ask(door, peer, {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"})
    assert answer.status_code == 403
    assert "through its proxy" in msgspec.json.decode(answer.content, type=Problem).message


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (["http"], "reached the proxy without TLS"),
        (["HTTP"], "reached the proxy without TLS"),
        (["http, http"], "reached the proxy without TLS"),
        (["https, http"], "reached the proxy without TLS"),
        (["https", "http"], "reached the proxy without TLS"),
        ([""], "reached the proxy without TLS"),
        ([], "does not report that its client used TLS"),
    ],
)
def test_a_proxy_that_was_reached_without_tls_is_told(said: list[str], problem: str) -> None:
    for peer in ("192.0.2.1", "127.0.0.1"):
        door = ProxyMiddleware(tell_client, hub=Hub(), proxies=(*PROXIES, "127.0.0.1"))
        headers = [("X-Forwarded-For", "203.0.113.5"), *(("X-Forwarded-Proto", value) for value in said)]
        answer = ask(door, peer, headers)
        assert answer.status_code == 403
        assert problem in msgspec.json.decode(answer.content, type=Problem).message


def test_beside_a_proxy_of_this_machine_its_own_requests_are_answered() -> None:
    door = ProxyMiddleware(tell_client, hub=Hub(), proxies=("127.0.0.1",))
    assert ask(door, "127.0.0.1").text == "127.0.0.1 http"
    headers = {"X-Forwarded-For": "203.0.113.5", "X-Forwarded-Proto": "HTTPS"}
    assert ask(door, "127.0.0.1", headers).text.startswith("203.0.113.5")


def test_without_a_declared_proxy_nobody_is_believed() -> None:
    door = ProxyMiddleware(tell_client, hub=Hub())
    assert ask(door, "192.0.2.1", {"X-Forwarded-For": "203.0.113.5"}).text == "192.0.2.1 http"


def test_a_server_that_stops_says_so_and_when_to_come_again() -> None:
    hub = Hub()
    door = ProxyMiddleware(tell_client, hub=hub)
    hub.close()
    answer = ask(door, "127.0.0.1")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert msgspec.json.decode(answer.content, type=Problem).code == "server_unavailable"
    for path in ("/api/v1/health", "/api/v1/version"):
        assert ask(door, "127.0.0.1", path=path).status_code == 200


def test_requests_that_go_on_are_counted_also_when_they_fail() -> None:
    seen: list[int] = []

    async def failing(_scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(door.busy)
        raise ValueError

    door = ProxyMiddleware(failing, hub=Hub())
    with pytest.raises(ValueError):
        ask(door, "127.0.0.1")
    assert (seen, door.busy) == ([1], 0)


@pytest.mark.parametrize("peer", ["127.0.0.1", "203.0.113.5"])
def test_what_the_door_refuses_is_counted_and_logged_and_has_an_identifier_too(
    services: Services, caplog: pytest.LogCaptureFixture, peer: str
) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    door = ProxyMiddleware(tell_client, hub=services.hub, proxies=PROXIES)
    door.close()
    answer = ask(
        AccessLogMiddleware(door, measures=services.measures, clock=services.clock),
        peer,
        {"X-Forwarded-For": "192.0.2.77"},
    )
    assert answer.status_code == (503 if peer == "127.0.0.1" else 403)
    status = f"{answer.status_code // 100}xx"
    assert value(services.measures, "sgpu_request_seconds_count", method="GET", route="other", status=status) == 1
    (line,) = (record.__dict__["sgpu"] for record in caplog.records if record.name == ACCESS)
    assert (line["request_id"], line["peer"]) == (answer.headers["SGPU-Request"], peer)


def test_the_line_of_a_request_names_who_asked_and_not_the_proxy(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    door = ProxyMiddleware(tell_client, hub=services.hub, proxies=PROXIES)
    ask(
        AccessLogMiddleware(door, measures=services.measures, clock=services.clock),
        "192.0.2.1",
        {"X-Forwarded-For": "203.0.113.5", "X-Forwarded-Proto": "https"},
    )
    (line,) = (record.__dict__["sgpu"] for record in caplog.records if record.name == ACCESS)
    assert line["peer"] == "203.0.113.5"
