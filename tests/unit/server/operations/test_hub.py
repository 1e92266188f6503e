"""Whoever waits for a key is woken by a touch, from any thread, and never by luck alone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serverless_gpu.server.core import hub as hub_module
from serverless_gpu.server.core.hub import Hub


def test_a_touch_between_reading_and_waiting_is_not_missed() -> None:
    async def story() -> None:
        hub = Hub()
        seen = hub.version("run:a")
        hub.touch("run:a")
        assert await hub.changed("run:a", seen, 60) != seen

    asyncio.run(story())


def test_a_touch_from_another_thread_wakes_who_waits() -> None:
    async def story() -> None:
        hub = Hub()
        waiting = asyncio.create_task(hub.changed("run:a", hub.version("run:a"), 60))
        other = asyncio.create_task(hub.changed("run:b", hub.version("run:b"), 60))
        await asyncio.sleep(0)
        thread = threading.Thread(target=hub.touch, args=("run:a",))
        thread.start()
        assert await waiting == hub.version("run:a") > 0
        assert not other.done()
        thread.join()
        hub.close()
        assert await other == 0

    asyncio.run(story())


def test_nothing_changed_is_said_after_the_timeout_and_nobody_is_left_waiting() -> None:
    async def story() -> None:
        hub = Hub()
        hub.touch("run:a")
        seen = hub.version("run:a")
        assert await hub.changed("run:a", seen, 0.01) == seen
        assert not hub._waiting

    asyncio.run(story())


def test_a_closed_hub_keeps_nobody() -> None:
    async def story() -> None:
        hub = Hub()
        hub.close()
        assert hub.closed
        assert await hub.changed("run:a", 0, 60) == 0

    asyncio.run(story())


def test_a_forgotten_key_ends_a_wait_and_is_not_mistaken_for_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEYS_MAX", 2)

    async def story() -> None:
        hub = Hub()
        hub.touch("run:a")
        seen = hub.version("run:a")
        hub.touch("run:a")
        for key in ("run:b", "run:c", "run:d"):
            hub.touch(key)
        assert await hub.changed("run:a", seen, 60) != seen

    asyncio.run(story())


def test_listeners_hear_every_touch_of_their_key() -> None:
    hub, heard = Hub(), []
    hub.listen(hub_module.SCHEDULER, lambda: heard.append(1))
    hub.touch(hub_module.SCHEDULER)
    hub.touch("run:a")
    hub.touch(hub_module.SCHEDULER)
    assert len(heard) == 2
