"""Writes the server log `server.log` as JSON lines without secrets.

    {"ts":"2026-11-22T10:04:11.052Z","level":"WARNING","logger":"scheduler","msg":"…","run":"01k…","attempt":2}

    bound(request_id="…", method="GET")              context of a request, in its task and every thread it starts
      └─ note(route="/runs/{run}", principal="ada")  fields that become known later
           └─ _log.warning("…") ─▶ queue of 10,000 records ─▶ a thread ─▶ redacted ─▶ file, 16 MiB,
                                                                                     and three rotated files

A log line contains only the fields of `FIELDS`. Request bodies, tokens and callers' variables therefore cannot enter
the server log by mistake. The log formatter removes tokens, passwords in addresses, and configured secrets from
messages and tracebacks. Threads that anyio starts inherit their caller's logging context. Each server loop adds its
name to its log lines.

The event loop never waits for the disk, because a separate writer thread writes the log file.

Failure cases:

* The disk does not respond. Log records wait in a bounded queue until the disk responds. If the queue is full, the
  server drops log records. A later log line reports the number of dropped records. A stopping server waits at most
  `CLOSING_S` seconds for the queue.

* The disk is full. The server loses log lines but continues.

* A signal kills the server. The last log lines may be missing.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import logging.handlers
import os
import queue
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import msgspec

FIELDS = (
    "loop",  # Name of the loop that wrote the line.
    "run",
    "attempt",  # Number of the attempt (its fence).
    "node",
    "request_id",  # Request identifier from the SGPU-Request header.
    "principal",  # Owner of the request's token.
    "method",
    "route",  # Declared route such as "/runs/{run}", never the actual path.
    "status",
    "ms",  # Milliseconds until the first response byte.
    "total_ms",  # Milliseconds until the last response byte.
    "peer",  # Network address of the peer.
    "client",  # Client of the index proxy: a build, an attempt, a user or an address.
    "index",  # Package index of the index proxy.
    "project",  # Project of a package index.
    "file",  # File of a package index.
    "bytes",  # Bytes of the response body.
    "outcome",  # Result of a request of the index proxy.
    "more",  # Number of dropped log lines before this line.
)
VALUE_CHARACTERS_MAX = 200
_fields: ContextVar[dict[str, object] | None] = ContextVar("sgpu_log_fields", default=None)


BYTES_MAX = 16 << 20
KEPT = 3
LOGGERS = ("serverless_gpu", "uvicorn.error", "asyncio")
ACCESS = "serverless_gpu.server.http.access_log"
"""Logger of the access log."""
QUEUE_MAX = 10_000
CLOSING_S = 5.0
"""Maximum seconds that a stopping server waits for unwritten log lines."""
MESSAGE_CHARACTERS_MAX = 8_000
TRACEBACK_CHARACTERS_MAX = 32_000
SECRET_CHARACTERS_MIN = 6
"""Minimum length of a secret that the formatter removes. Shorter secrets could match ordinary words."""
_TOKEN = re.compile(r"\b(sgp[uanx]_)[A-Za-z0-9_\-]{8,}")
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer) +[A-Za-z0-9._~+/=-]{8,}")
_ROW = re.compile(r"Failing row contains \(.*")
"""PostgreSQL quotes the refused row, which may contain secrets, in its error message."""
_OURS = "serverless_gpu."


@contextlib.contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Add fields to all log lines within the `with` block."""
    token = _fields.set({**current(), **_checked(fields)})
    try:
        yield
    finally:
        _fields.reset(token)


def note(**fields: object) -> None:
    """Add fields to the innermost `bound` block. Outside of a `bound` block, do nothing."""
    held = _fields.get()
    if held is not None:
        held.update(_checked(fields))


def current() -> Mapping[str, object]:
    """Return the log fields of the current context."""
    return _fields.get() or {}


def _checked(fields: Mapping[str, object]) -> dict[str, object]:
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise ValueError(f"the server log does not define the field {sorted(unknown)[0]!r}")
    return {
        name: value if isinstance(value, int | float) else str(value)[:VALUE_CHARACTERS_MAX]
        for name, value in fields.items()
        if value not in (None, "")
    }


class RedactingFormatter(logging.Formatter):
    """Formats log records as JSON, and removes secrets from messages and tracebacks."""

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        self.converter = time.gmtime
        self._secrets = sorted((one for one in secrets if len(one) >= SECRET_CHARACTERS_MIN), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        logger = record.name.removeprefix(_OURS)
        line: dict[str, object] = {
            "ts": self.formatTime(record),
            "level": record.levelname,
            "logger": logger.rpartition(".")[2] if logger.startswith("server.") else logger,
            "msg": self._clean(record.getMessage(), MESSAGE_CHARACTERS_MAX),
        }
        for name, value in getattr(record, "sgpu", current()).items():
            line[name] = self._clean(value, VALUE_CHARACTERS_MAX) if isinstance(value, str) else value
        if record.exc_info:
            line["traceback"] = self._clean(self.formatException(record.exc_info), TRACEBACK_CHARACTERS_MAX)
        return msgspec.json.encode(line).decode()

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return a log record's time in UTC, with milliseconds."""
        text = super().formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return f"{text}.{int(record.msecs):03d}Z"

    def _clean(self, text: str, characters_max: int) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = _ROW.sub("Failing row contains …", _TOKEN.sub(r"\1…", text))
        text = _BEARER.sub(r"\1 …", _PASSWORD.sub(r"\1:…@", text))
        text = text.encode("utf-8", "replace").decode()  # UTF-8 cannot encode a lone surrogate.
        return text if len(text) <= characters_max else f"{text[:characters_max]}… ({len(text)} characters)"


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file with a separate writer thread, so that callers never wait for the disk."""

    def __init__(self, path: Path, secrets: Collection[str] = ()) -> None:
        super().__init__(path, maxBytes=BYTES_MAX, backupCount=KEPT, encoding="utf-8")
        self.setFormatter(RedactingFormatter(secrets))
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_MAX)
        self._left_out = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue a log record with its context, and return False if the queue is full."""
        record = copy.copy(record)  # Other log handlers share this record.
        try:
            # Format the message now, because its mutable arguments may change before the write.
            record.msg, record.args = record.getMessage(), None
        except (TypeError, ValueError):
            record.args = None  # If the arguments do not match the format, log the format alone.
        fields = dict(getattr(record, "sgpu", current()))
        record.sgpu = {**fields, "more": self._left_out} if self._left_out else fields
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._left_out += 1
            return False
        self._left_out = 0
        return True

    def flush(self) -> None:
        """Flush the log file. Outside of the writer thread, do nothing."""
        if self.stream and threading.current_thread() is self._thread:
            self.stream.flush()

    def close(self) -> None:
        """Write the queued log lines, and stop the writer thread. If the disk hangs, leave the file open."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident is None:  # Without a writer thread, the queue is empty.
            super().close()
            return
        deadline_s = time.monotonic() + CLOSING_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSING_S)
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if not self._thread.is_alive():
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failed write of a log line. The server continues."""

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            self.emit(record)
            if self._is_closed and self._queue.empty():
                break
        if self.stream:
            with contextlib.suppress(OSError):  # The last flush fails if the disk is full.
                self.stream.close()


def to_file(path: Path, secrets: Collection[str] = ()) -> logging.Handler:
    """Start logging to a private file, and return the log handler for `detach`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    handler = LogFile(path, secrets)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return handler


def detach(handler: logging.Handler) -> None:
    """Stop logging to the file."""
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(handler)
    handler.close()
