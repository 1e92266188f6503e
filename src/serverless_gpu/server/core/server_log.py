"""The server's own log: `server.log`, one JSON object a line, bounded, with times in UTC, and without secrets.

    {"ts":"2026-11-22T10:04:11.052Z","level":"WARNING","logger":"scheduler","msg":"…","run":"01k…","attempt":2}

    bound(request_id="…", method="GET")              context of a request, in its task and every thread it starts
      └─ note(route="/runs/{run}", principal="ada")  what is found out later
           └─ _log.warning("…") ─▶ queue of 10,000 records ─▶ a thread ─▶ redacted ─▶ file, 16 MiB,
                                                                                     and the three before it

Only the fields of `FIELDS` can be there, so a line cannot hold a request's contents, a token or a caller's variable by
mistake. A message is one of ours; a traceback has lines of source and what an exception says. What looks like a token
of ours, a password in an address, or a secret that the server was started with is taken out of both. Threads that anyio
starts have the context of their caller; loops bind their own.

One thread writes the file, and callers take no lock that it holds: neither the event loop nor the end of the process
waits for the disk.

What can go wrong: the disk stands still (records wait in the queue; beyond it they are counted and left out, which a
later line says; the end waits `CLOSING_S` for them); it is full (lines are lost, the server goes on); the process is
killed (the last moments may be missing).
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
    "loop",  # whose tick it is
    "run",
    "attempt",  # number of the attempt: its fence
    "node",
    "request_id",  # also in the answer's header SGPU-Request
    "principal",  # whose token it is
    "method",
    "route",  # as declared, "/runs/{run}": never the path
    "status",
    "ms",  # until the answer began
    "total_ms",  # until it ended
    "peer",  # address it came from
    "more",  # lines like this one that were left out before it
)
VALUE_CHARACTERS_MAX = 200
_fields: ContextVar[dict[str, object] | None] = ContextVar("sgpu_log_fields", default=None)


BYTES_MAX = 16 << 20
KEPT = 3
LOGGERS = ("serverless_gpu", "uvicorn.error", "asyncio")
ACCESS = "serverless_gpu.server.http.access_log"
"""The logger of lines about requests."""
QUEUE_MAX = 10_000
CLOSING_S = 5.0
"""How long the end waits for what was not written yet."""
MESSAGE_CHARACTERS_MAX = 8_000
TRACEBACK_CHARACTERS_MAX = 32_000
SECRET_CHARACTERS_MIN = 6
"""A shorter secret is not looked for: it would be found in every other word."""
_TOKEN = re.compile(r"\b(sgp[ua]_)[A-Za-z0-9_\-]{8,}")
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer) +[A-Za-z0-9._~+/=-]{8,}")
_ROW = re.compile(r"Failing row contains \(.*")
"""PostgreSQL shows the row that it refused, whatever is in it."""
_OURS = "serverless_gpu."


@contextlib.contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Have lines say this, too, until the block ends."""
    token = _fields.set({**current(), **_checked(fields)})
    try:
        yield
    finally:
        _fields.reset(token)


def note(**fields: object) -> None:
    """Add to the innermost `bound`, for everybody in it; nothing happens outside of one."""
    held = _fields.get()
    if held is not None:
        held.update(_checked(fields))


def current() -> Mapping[str, object]:
    """Return what lines say now."""
    return _fields.get() or {}


def _checked(fields: Mapping[str, object]) -> dict[str, object]:
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise ValueError(f"lines of the log have no field {sorted(unknown)[0]!r}")
    return {
        name: value if isinstance(value, int | float) else str(value)[:VALUE_CHARACTERS_MAX]
        for name, value in fields.items()
        if value not in (None, "")
    }


class RedactingFormatter(logging.Formatter):
    """A line of the log as JSON, with secrets taken out; of a traceback, too."""

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        self.converter = time.gmtime
        self._secrets = sorted((one for one in secrets if len(one) >= SECRET_CHARACTERS_MIN), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
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
        """Return the time of a record, UTC with milliseconds."""
        text = super().formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return f"{text}.{int(record.msecs):03d}Z"

    def _clean(self, text: str, characters_max: int) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = _ROW.sub("Failing row contains …", _TOKEN.sub(r"\1…", text))
        text = _BEARER.sub(r"\1 …", _PASSWORD.sub(r"\1:…@", text))
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no bytes
        return text if len(text) <= characters_max else f"{text[:characters_max]}… ({len(text)} characters)"


class LogFile(logging.handlers.RotatingFileHandler):
    """The file, written by a thread of its own, so that no caller waits for the disk."""

    def __init__(self, path: Path, secrets: Collection[str] = ()) -> None:
        super().__init__(path, maxBytes=BYTES_MAX, backupCount=KEPT, encoding="utf-8")
        self.setFormatter(RedactingFormatter(secrets))
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_MAX)
        self._left_out = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Put a record where the thread finds it, with what it is about; return whether there was room."""
        record = copy.copy(record)  # other handlers have theirs
        try:
            record.msg, record.args = record.getMessage(), None  # the thread would see what its values have become
        except (TypeError, ValueError):
            record.args = None  # they do not fit: the line says what it can
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
        """Write what the file has in memory; only the thread does, others would wait for it."""
        if self.stream and threading.current_thread() is self._thread:
            self.stream.flush()

    def close(self) -> None:
        """Write what waits, and end; a disk that stands still keeps the file, and not the process."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident is None:  # it could not be started, and nothing waits
            super().close()
            return
        deadline_s = time.monotonic() + CLOSING_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSING_S)
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if not self._thread.is_alive():
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose a line that cannot be written: there is nowhere to say so, and the server goes on."""

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            self.emit(record)
            if self._is_closed and self._queue.empty():
                break
        if self.stream:
            self.stream.close()


def to_file(path: Path, secrets: Collection[str] = ()) -> logging.Handler:
    """Send what the server logs to a file that only its user can read; returns the handler, for `detach`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    handler = LogFile(path, secrets)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return handler


def detach(handler: logging.Handler) -> None:
    """Log to the file no more."""
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(handler)
    handler.close()
