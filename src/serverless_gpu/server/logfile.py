"""The server's own log: `server.log`, bounded, with times in UTC, and without secrets.

Nothing of a request is logged but its method, its route and what went wrong. The filter here is the net below that: it
takes out what looks like a token of ours, wherever it came from.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import time
from pathlib import Path

BYTES_MAX = 16 << 20
KEPT = 3
LOGGERS = ("serverless_gpu", "uvicorn.error")
_TOKEN = re.compile(r"\b(sgp[ua]_)[A-Za-z0-9_\-]{8,}")


class Redacted(logging.Formatter):
    """A line of the log, with tokens taken out; of a traceback, too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return _TOKEN.sub(r"\1…", super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time of a record, UTC with milliseconds."""
        text = super().formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return f"{text}.{int(record.msecs):03d}Z"


def to_file(path: Path) -> logging.Handler:
    """Send what the server logs to a file that only its user can read; returns the handler, for `detach`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=BYTES_MAX, backupCount=KEPT, encoding="utf-8")
    formatter = Redacted("%(asctime)s %(levelname)s %(name)s %(message)s")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
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
