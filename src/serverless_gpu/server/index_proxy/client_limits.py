"""Limits how many requests each client of the index proxy makes, and how many run at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator

from serverless_gpu.ambient import Clock
from serverless_gpu.node.base.token_bucket import TokenBucket

PER_S, BURST = 100, 1_000
"""Requests of one client per second, and at once after a pause."""
CONCURRENT_MAX = 64
CLIENT_CONCURRENT_MAX = 32
CLIENTS_MAX = 4_096
WAIT_S = 20.0
"""Maximum seconds that a request waits for other requests of its client. pip and uv wait 15 and 30 s."""


class LimitReached(Exception):
    """A request over a limit.

    Attributes:
        status: 429 for too many requests, 503 for a busy proxy.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Client:
    def __init__(self, now_ns: int) -> None:
        self.bucket = TokenBucket(per_s=PER_S, burst=BURST, resume=PER_S // 10, now_ns=now_ns)
        self.slots = asyncio.Semaphore(CLIENT_CONCURRENT_MAX)
        self.busy = 0


class ClientLimits:
    """Limits of all clients. Use within one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)

    @contextlib.asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Hold one of a client's concurrent requests. Raises LimitReached."""
        client = self._client(name)
        if not client.bucket.take(1, self._clock.boottime_ns()):
            raise LimitReached(429, f"{name} makes more than {PER_S} requests per second")
        client.busy += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(WAIT_S):
                        await stack.enter_async_context(client.slots)
                        await stack.enter_async_context(self._slots)
                except TimeoutError:
                    raise LimitReached(503, "the index proxy is busy with other requests") from None
                yield
        finally:
            client.busy -= 1

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self._clock.boottime_ns())
            if len(self._clients) > CLIENTS_MAX:
                # Forget the longest silent client, which has no request.
                idle = next((each for each, state in self._clients.items() if not state.busy and each != name), "")
                self._clients.pop(idle, None)
        self._clients.move_to_end(name)
        return client
