"""Counts and logs each request of the index proxy, and keeps the last requests for `sgpu index log`."""

from __future__ import annotations

import logging
import threading
from collections import deque

from serverless_gpu.ambient import Clock
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.server_metrics import OTHER, ServerMetrics
from serverless_gpu.server.http.access_log import LineBudget
from serverless_gpu.wire.indexes import IndexLogEntry

KEPT_MAX = 1_000
OK, REFUSED = "ok", "refused"
_log = logging.getLogger(__name__)


class IndexRequestLog:
    """The last requests of the index proxy. Thread-safe."""

    def __init__(self, *, clock: Clock, measures: ServerMetrics) -> None:
        self._measures = measures
        self._lock = threading.Lock()
        self._kept: deque[IndexLogEntry] = deque(maxlen=KEPT_MAX)
        self._refused = LineBudget(clock)

    def add(self, entry: IndexLogEntry, *, request_id: str, peer: str) -> None:
        """Count and log one request. Requests without a client use a budget of log lines."""
        index = entry.index or OTHER
        self._measures.index_requests.labels(index, entry.outcome).inc()
        self._measures.index_bytes.labels(index).inc(entry.bytes)
        more: int | None = 0
        if not entry.client:
            more = self._refused.spend()
            if more is None:
                return
        with self._lock:
            self._kept.append(entry)
        kind, _, name = entry.client.partition(":")
        run, _, attempt = name.partition(":") if kind == "attempt" else ("", "", "")
        with server_log.bound(
            request_id=request_id,
            method=entry.method,
            client=entry.client,
            run=run,
            attempt=int(attempt) if attempt.isdigit() else None,
            node=name.partition(":")[0] if kind == "build" else "",
            index=entry.index,
            project=entry.project,
            file=entry.file,
            status=entry.status,
            bytes=entry.bytes,
            ms=entry.ms,
            outcome=entry.outcome,
            peer=peer,
            more=more or None,
        ):
            _log.log(logging.INFO if entry.status < 500 else logging.WARNING, "%s", entry.detail or entry.outcome)

    def last(self, limit: int) -> tuple[IndexLogEntry, ...]:
        """Return the last requests, oldest first."""
        with self._lock:
            return tuple(self._kept)[-limit:]
