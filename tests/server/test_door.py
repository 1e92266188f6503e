"""The door: past a declared proxy nobody comes in, what it says is believed of it alone, and at the end nobody does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from serverless_gpu.server.door import Door
from serverless_gpu.server.hub import Hub
from serverless_gpu.wire.base import Problem

PROXIES = ("192.0.2.1", "198.51.100.0/24")


async def tell_client(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with who asks, as the application sees it."""
    await PlainTextResponse(f"{scope['client'][0]} {scope['scheme']}")(scope, receive, send)


def ask(door: Door, peer: str, headers: dict[str, str] | None = None, path: str = "/api/v1/runs") -> httpx2.Response:
    """Return the answer to a request from an address."""

    async def asking() -> httpx2.Response:
        transport: Any = httpx2.ASGITransport(door, client=(peer, 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gpu.internal") as client:
            return await client.get(path, headers=headers or {})

    return asyncio.run(asking())


@pytest.mark.parametrize("peer", ["192.0.2.1", "198.51.100.77", "::ffff:192.0.2.1"])
def test_the_proxy_says_who_asks(peer: str) -> None:
    door = Door(tell_client, hub=Hub(), proxies=PROXIES)
    headers = {"X-Forwarded-For": "203.0.113.5", "X-Forwarded-Proto": "https"}
    assert ask(door, peer, headers).text == "203.0.113.5 https"


def test_this_machine_is_answered_and_not_believed() -> None:
    door = Door(tell_client, hub=Hub(), proxies=PROXIES)
    assert ask(door, "127.0.0.1", {"X-Forwarded-For": "203.0.113.5"}).text == "127.0.0.1 http"


@pytest.mark.parametrize("peer", ["203.0.113.5", "192.0.2.2", "2001:db8::1", "unknown"])
def test_whoever_comes_past_the_proxy_is_refused_whatever_he_says(peer: str) -> None:
    door = Door(tell_client, hub=Hub(), proxies=PROXIES)
    answer = ask(door, peer, {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"})
    assert answer.status_code == 403
    assert "through its proxy" in msgspec.json.decode(answer.content, type=Problem).message


def test_a_proxy_that_was_reached_without_tls_is_told() -> None:
    door = Door(tell_client, hub=Hub(), proxies=PROXIES)
    answer = ask(door, "192.0.2.1", {"X-Forwarded-Proto": "http"})
    assert answer.status_code == 403
    assert "without TLS" in msgspec.json.decode(answer.content, type=Problem).message


def test_without_a_declared_proxy_nobody_is_believed() -> None:
    door = Door(tell_client, hub=Hub())
    assert ask(door, "192.0.2.1", {"X-Forwarded-For": "203.0.113.5"}).text == "192.0.2.1 http"


def test_a_server_that_stops_says_so_and_when_to_come_again() -> None:
    hub = Hub()
    door = Door(tell_client, hub=hub)
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

    door = Door(failing, hub=Hub())
    with pytest.raises(ValueError):
        ask(door, "127.0.0.1")
    assert (seen, door.busy) == ([1], 0)
