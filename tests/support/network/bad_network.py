"""A bad network between a client or a node and a server: a TCP proxy in this process, with a seed.

    with BadNetwork("127.0.0.1", 7878, delay_s=5.0, loss=0.5, seed=7) as network:
        …                                   whoever uses network.url is 5 s away, and half of its connections break

    connection ─▶ refused by the dice? ─ reset, at once or in the middle of what is sent
               ─▶ each piece: delay_s later, at most rate_bytes_s, in order, in both directions
               ─▶ half_open(): silence; nothing is closed, nothing arrives any more

Made by two threads of this process: nothing of the system is changed, and no right is needed. What a piece of TCP
loses, TCP sends again: that is a delay. So loss is what TCP cannot mend, connections that break.

Failure cases: the server behind is away (the connection is closed, as its own would be); a reader that does not read
(at most a megabyte waits for each direction, then its sender waits).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

_PIECE_BYTES = 64 << 10
_WAITING_PIECES = 16
_LINGER_NOT = struct.pack("ii", 1, 0)
_STARTED_S = 10.0
_PIECES_OF_A_DRAW = 4


class BadNetwork:
    """A proxy in front of a server.

    Args:
        host: of the server.
        port: of the server.
        delay_s: how much later each piece arrives, in either direction; half of it and as much again by chance.
        loss: the chance that a connection is reset within its next four pieces, again and again; 0.0 to 1.0.
        rate_bytes_s: how much passes each connection in each direction in a second; 0 for as much as can.
        seed: of chance.

    Attributes:
        connections: how many there were.
        resets: how many of them were reset.
        url: under which the server is reached through it.
    """

    def __init__(
        self, host: str, port: int, *, delay_s: float = 0.0, loss: float = 0.0, rate_bytes_s: int = 0, seed: int = 0
    ) -> None:
        self.delay_s, self.loss, self.rate_bytes_s = delay_s, loss, rate_bytes_s
        self.connections = self.resets = 0
        self.url = ""
        self._behind = (host, port)
        self._seed = seed
        self._lag = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bad network", daemon=True)
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> BadNetwork:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_STARTED_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STARTED_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STARTED_S)
        self._loop.close()

    def half_open(self) -> None:
        """Let nothing through any more, and close nothing: what a cable that was pulled looks like."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Let everything through again, also what has waited."""
        self._loop.call_soon_threadsafe(self._open.set)

    # --- in the loop's thread ------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        fate = _Fate(random.Random(f"{self._seed} {self.connections}"), self.loss)
        try:
            await self._carry(reader, writer, fate)
        except (OSError, _Broken) as error:
            if isinstance(error, _Broken):
                self.resets += 1
                _reset(writer)
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: _Fate) -> None:
        await self._open.wait()
        fate.pass_one()
        behind, to_behind = await asyncio.open_connection(*self._behind)
        try:
            await _both(self._pass_on(reader, to_behind, fate), self._pass_on(behind, writer, fate))
        finally:
            to_behind.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: _Fate) -> None:
        """Carry one direction: read at once, hand over when it is time."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING_PIECES)

        async def hand_over() -> None:
            while True:
                at_s, data = await waiting.get()
                await asyncio.sleep(max(0.0, at_s - self._loop.time()))
                await self._open.wait()
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                fate.pass_one()
                writer.write(data)
                await writer.drain()
                if self.rate_bytes_s:
                    await asyncio.sleep(len(data) / self.rate_bytes_s)

        async def take() -> None:
            data = b"-"
            while data:
                data = await reader.read(_PIECE_BYTES)
                delay_s = self.delay_s * self._lag.uniform(0.5, 1.5)
                await waiting.put((self._loop.time() + delay_s, data))

        await _both(take(), hand_over())


class _Broken(Exception):
    """The connection is to be reset."""


class _Fate:
    """When a connection breaks: at once, or later, so that half of a request is lost, or an answer is not heard."""

    def __init__(self, chance: random.Random, loss: float) -> None:
        self._chance, self._loss = chance, loss
        self._draw()

    def pass_one(self) -> None:
        """Let a piece pass, or raise `_Broken`."""
        if self._passed == self._breaks:
            raise _Broken
        self._passed += 1
        if self._passed == _PIECES_OF_A_DRAW:
            self._draw()

    def _draw(self) -> None:
        self._passed = 0
        self._breaks = self._chance.randrange(_PIECES_OF_A_DRAW) if self._chance.random() < self._loss else None


async def _both(*works: Coroutine[Any, Any, None]) -> None:
    """Do both until both are done; one that fails ends the other, and is what failed."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the connection end with a reset, not in order."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()
