"""Connections that mean no good, in one event loop of a process of its own: one line of JSON in, one out.

idle        say nothing                                   oversized   headers over the bound, refused at once
dribbling   a byte of a header every second               crowding    100 headers and one more, refused with words
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from urllib.parse import urlsplit

import msgspec

EVERY_S = 1.0
_LARGE = b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Large: " + b"x" * (256 << 10) + b"\r\n\r\n"
_MANY = b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-One: 1\r\n" * 101 + b"\r\n"


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are, and for how long.

    Attributes:
        connections: idle and dribbling ones, half of each, at the same time.
        refused: oversized and crowding requests, one after another.
    """

    url: str
    connections: int
    refused: int
    seconds: float


class Slowed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of them.

    Attributes:
        closed: slow connections that the server ended.
        most: how many there were at once.
        answers: to requests that had to be refused, by status; 0 where the connection was closed instead.
    """

    closed: int
    most: int
    answers: dict[str, int]


async def play(asked: Slow) -> Slowed:
    """Be slow, and oversized."""
    parts = urlsplit(asked.url)
    address, until = (str(parts.hostname), parts.port or 80), asyncio.get_running_loop().time() + asked.seconds
    open_now, most, closed = 0, 0, 0
    answers: Counter[str] = Counter()

    async def slow(number: int) -> None:
        nonlocal open_now, most, closed
        reader, writer = await asyncio.open_connection(*address)
        open_now += 1
        most = max(most, open_now)
        try:
            if number % 2:
                writer.write(b"GET /api/v1/health HTTP/1.1\r\nX-Slow: ")
            while asyncio.get_running_loop().time() < until:
                if number % 2:
                    writer.write(b"x")
                try:
                    async with asyncio.timeout(EVERY_S):
                        if not await reader.read(1):
                            closed += 1
                            return
                except TimeoutError:
                    continue
        except ConnectionError:
            closed += 1
        finally:
            open_now -= 1
            writer.close()

    async def refused() -> None:
        for number in range(asked.refused):
            answers[await _status(*address, _LARGE if number % 2 else _MANY)] += 1

    await asyncio.gather(refused(), *(slow(number) for number in range(asked.connections)))
    return Slowed(closed=closed, most=most, answers=dict(answers))


async def _status(host: str, port: int, sent: bytes) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        await writer.drain()
        return (await reader.readline()).decode("ascii", "replace").split(" ")[1]
    except (ConnectionError, IndexError):
        return "0"
    finally:
        writer.close()


def main() -> None:
    """Do it, and say what became of it."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Slow)
    print(msgspec.json.encode(asyncio.run(play(asked))).decode(), flush=True)


if __name__ == "__main__":
    main()
