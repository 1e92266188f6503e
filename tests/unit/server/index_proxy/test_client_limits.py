"""Limits of the index proxy's clients."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from serverless_gpu.server.index_proxy import client_limits
from serverless_gpu.server.index_proxy.client_limits import ClientLimits, LimitReached
from serverless_gpu.testing import FakeClock


def test_a_client_makes_a_burst_of_requests_and_then_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "BURST", 20)
    clock = FakeClock()

    async def work() -> None:
        limits = ClientLimits(clock)

        async def admitted(name: str, count: int) -> int:
            done = 0
            with contextlib.suppress(LimitReached):
                for _ in range(count):
                    async with limits.slot(name):
                        done += 1
            return done

        assert await admitted("a", 30) == 20
        assert await admitted("a", 1) == 0
        assert await admitted("b", 1) == 1, "another client is not affected"
        clock.advance(1)
        assert await admitted("a", 1_000) == 20

    asyncio.run(work())


def test_a_busy_proxy_refuses_after_a_wait_and_frees_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "WAIT_S", 0.01)
    monkeypatch.setattr(client_limits, "CLIENT_CONCURRENT_MAX", 2)

    async def work() -> None:
        limits = ClientLimits(FakeClock())
        async with limits.slot("a"), limits.slot("a"):
            with pytest.raises(LimitReached) as refused:
                async with limits.slot("a"):
                    pass
            assert refused.value.status == 503
            async with limits.slot("b"):
                pass
        async with limits.slot("a"), limits.slot("a"):
            pass

    asyncio.run(work())


def test_silent_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "CLIENTS_MAX", 2)

    async def work() -> None:
        limits = ClientLimits(FakeClock())
        async with limits.slot("busy"):
            for number in range(10):
                async with limits.slot(f"{number}"):
                    pass
            assert set(limits._clients) == {"busy", "9"}

    asyncio.run(work())
