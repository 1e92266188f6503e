"""The process that asks a node's Ray for its metrics, and leaves the latest figures in a file.

    node task ── fork ──▶ monitor.run ── GET /metrics, every 10 s ──▶ Ray's agent of this node
                             └─▶ <attempt>/ray/<node rank>.metrics.json ──▶ the home's monitor: into the run's samples

It speaks HTTP/1.0 by itself: without proxies and redirections, for five seconds at most. It parses the text as it comes
and never keeps it (`figures.py`).

Failure cases: Ray is not up yet, or hangs, or is gone (tried again; the file grows old, which its reader sees by the
time in it); half a text, or one that does not end (not written); the disk is full (the file before stays). The process
ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import NoReturn

from .. import linux, protocol
from . import ray_installation
from .figures import RayFigures

EVERY_S = 10.0
"""Between two looks; Ray renews its metrics as often."""

_SOON_S = 2.0  # until Ray has said what it has, but not for longer than it may take to start
_SOON_LOOKS = 60
_LIMIT_S = 5.0
_HEAD_BYTES_MAX = 1 << 16
BODY_BYTES_MAX = 64 << 20
_LINE_BYTES_MAX = 1 << 16
_CHUNK_BYTES = 1 << 16
_WHOLE = "cpus"


def missing() -> str:
    """Return why this environment's Ray has no metrics, as a sentence; "" where it has."""
    absent = ray_installation.missing_parts()
    if not absent:
        return ""
    return f"Ray's own metrics are not recorded: {absent[0]} is missing (pip install 'ray[default]')"


def run(address: str, port: int, path: str, *, every_s: float = EVERY_S) -> NoReturn:
    """Poll `address`:`port` for ever, every `every_s`; the whole life of a forked process."""
    linux.set_name("sgpu-raymetrics")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    linux.leave_descriptors()
    looks, whole = 0, False
    while True:
        began = time.monotonic()
        figures = scrape(address, port)
        if figures:
            _write(path, figures)
        looks, whole = looks + 1, whole or _WHOLE in figures
        pause_s = every_s if whole or looks > _SOON_LOOKS else min(every_s, _SOON_S)
        time.sleep(max(0.0, began + pause_s - time.monotonic()))


def scrape(address: str, port: int, limit_s: float = _LIMIT_S) -> dict[str, float]:
    """Return the figures of a node's Ray; none where it does not answer whole within `limit_s`."""
    until = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as sock:
            sock.sendall(f"GET /metrics HTTP/1.0\r\nHost: {address}:{port}\r\n\r\n".encode())
            return _Answer(sock, until).figures()
    except (OSError, ValueError):
        return {}


class _Answer:
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def figures(self) -> dict[str, float]:
        """Return the figures in the answer; raises OSError (late) or ValueError (not Ray's, or not whole)."""
        buffer = self._head()
        figures = RayFigures()
        got, skipping = len(buffer), False
        while got <= BODY_BYTES_MAX:
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if not skipping and len(line) <= _LINE_BYTES_MAX:
                    figures.add(line)
                skipping = False
            if len(buffer) > _LINE_BYTES_MAX:
                buffer, skipping = b"", True
            chunk = self._receive()
            if not chunk:
                if buffer or skipping or (self._length is not None and got != self._length):
                    raise ValueError("it was cut off")
                return figures.result()
            got += len(chunk)
            buffer += chunk
        raise ValueError("it does not end")

    def _head(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = self._receive()
            if not chunk or len(data) > _HEAD_BYTES_MAX:
                raise ValueError("no head of an answer")
            data += chunk
        head, _, rest = data.partition(b"\r\n\r\n")
        status, *fields = head.split(b"\r\n")
        if not status.startswith(b"HTTP/1.") or status.split()[1:2] != [b"200"]:
            raise ValueError(f"answered {status[:64]!r}")
        self._length: int | None = None
        for field in fields:
            name, _, value = field.partition(b":")
            if name.strip().lower() == b"transfer-encoding":
                raise ValueError("answered in chunks, which HTTP/1.0 has not")
            if name.strip().lower() == b"content-length":
                self._length = int(value)
        return rest

    def _receive(self) -> bytes:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        self._sock.settimeout(left_s)
        return self._sock.recv(_CHUNK_BYTES)


def _write(path: str, figures: dict[str, float]) -> None:
    body = json.dumps({"at_ns": protocol.now_ns(), "figures": figures}).encode()
    new = f"{path}.new"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            whole = os.write(fd, body) == len(body)
        finally:
            os.close(fd)
        if whole:
            os.replace(new, path)
