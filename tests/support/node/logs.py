"""Helpers of the tests of logs that other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.model.redaction import Redactor
from serverless_gpu.node.output.logs import RankLog
from serverless_gpu.testing import FakeClock


class Rank:
    """A log whose write ends a test holds, as a rank would, and whoever watches it."""

    def __init__(self, directory: Path, redactor: Redactor | None = None) -> None:
        self.directory = directory
        self.watching = True
        self.heard: list[tuple[int, str, str]] = []
        self.missed: list[tuple[str, int, bool]] = []
        self.clock = FakeClock()
        self.log = RankLog(3, directory, self, self.clock, redactor)
        self.closed = False

    def output(self, rank: int, stream: str, text: str, *, size: int, lost: bool) -> None:
        self.heard.append((rank, stream, text))

    def skipped(self, rank: int, stream: str, size: int, *, lost: bool) -> None:
        self.heard.append((rank, stream, "<missing>"))
        self.missed.append((stream, size, lost))

    def write(self, data: bytes, stream: int = 0) -> None:
        os.write(self.log.write_ends()[stream], data)

    def drain(self) -> list[bool]:
        return [drain() for _, drain in self.log.readers()]

    def flood(self, data: bytes, stream: int = 0) -> None:
        """Write more than a pipe holds, read as it goes."""
        for start in range(0, len(data), 1 << 15):
            self.write(data[start : start + (1 << 15)], stream)
            self.drain()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.log.close()

    def stored(self, stream: str = "stdout") -> bytes:
        path = self.directory / f"3.{stream}"
        return path.read_bytes() if path.exists() else b""

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for _, name, text in self.heard if name == stream)
