"""Posts budget notices to the operator's webhook, one notice at a time.

    a threshold of a budget, an alarm ─▶ `notices` (written with the event) ─▶ POST, JSON ─▶ 2xx: sent
                                                                                 └─ else: retried later

    {"kind": "budget.warning", "at": "2026-11-22T17:40:00Z", "budget": "llm", "percent": 80, "used": …, "limit": …,
     "unit": "micros", "currency": "USD", "sentence": "budget 'llm' is at 80 %: …"}

The webhook may receive a notice twice, with the same `id`. If the operator configures no webhook, the server stores
notices for `sgpu budget list` only. A refused notice does not delay other notices, because the webhook loop retries
each notice independently.

Failure cases:

- The webhook does not answer, or answers with a status other than 2xx. The webhook loop doubles its retry delay from
  five seconds to at most one hour. The webhook loop stops retrying a notice after ten tries or one day. The database
  stores the number of tries but not the retry delays.

- The webhook sends an endless response body. The webhook loop reads only the status line and headers.

- The webhook answers with a redirect. Notices go only to the configured address, because the HTTP client does not
  follow redirects.

- The webhook path may be a secret. Log messages therefore contain only the webhook's host name.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import httpx2

from serverless_gpu.ambient import Clock, format_utc
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records import budgets
from serverless_gpu.server.records.budgets import Notice
from serverless_gpu.version import __version__

TIMEOUT_S = 5.0
TRIES_MAX = 10
OLD_S = 86_400.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 3_600.0
IDLE_S = 30.0
LOOKED_AT = 100
"""Maximum number of notices that one tick reads, fewest tries first."""
_log = logging.getLogger(__name__)


class NoticeWebhook:
    """Posts budget notices to the configured webhook."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions, measures: ServerMetrics) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._measures = measures
        self._not_before_ns: dict[int, int] = {}

    def tick(self, now_ns: int) -> int | None:
        """Post one due notice, and return the next tick's due time."""
        waiting = self._database.read(lambda connection: budgets.open_notices(connection, limit=LOOKED_AT))
        pauses = {one.seq: self._not_before_ns.get(one.seq, 0) for one in waiting}
        self._not_before_ns = pauses
        one = next((one for one in waiting if pauses[one.seq] <= now_ns), None)
        if one is None:
            return min(pauses.values(), default=now_ns + round(IDLE_S * 1e9))
        at_ns = self._clock.wall_ns()
        is_old = one.tries >= TRIES_MAX or at_ns - one.at_ns > OLD_S * 1e9
        if not self._settings.webhook or is_old:
            if is_old:
                _log.error("the server stopped retrying notice %d (%s) after %d tries", one.seq, one.kind, one.tries)
            self._done(one, at_ns)
            return now_ns
        problem = _post(self._settings.webhook, one)
        self._measures.notices.labels("failed" if problem else "sent").inc()
        if not problem:
            self._done(one, at_ns)
            return now_ns
        host = urlsplit(self._settings.webhook).hostname
        _log.warning("the webhook at %s did not accept notice %d: %s", host, one.seq, problem)
        self._database.write(lambda connection: budgets.mark_tried(connection, one.seq))
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**one.tries)
        pauses[one.seq] = self._clock.boottime_ns() + round(pause_s * 1e9)
        return now_ns

    def _done(self, one: Notice, at_ns: int) -> None:
        self._database.write(lambda connection: budgets.mark_sent(connection, one.seq, at_ns=at_ns))


def _post(url: str, one: Notice) -> str:
    """Post a notice to the webhook, and return an error description, or "" on success."""
    body = {"id": one.seq, "kind": one.kind, "at": format_utc(one.at_ns), **one.document}
    headers = {"User-Agent": f"serverless-gpu/{__version__}"}
    try:
        # The server opens a new connection for each notice, because notices are rare. The client ignores the
        # environment's proxy settings, because a proxy could read the notices.
        with (
            httpx2.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            return "" if answer.is_success else f"status {answer.status_code}"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return type(error).__name__
