"""Posts notices in a loop, one at a time, to the webhook that the operator configured.

    a threshold of a budget, an alarm ─▶ `notices` (written with the event) ─▶ POST, JSON ─▶ 2xx: sent
                                                                                 └─ else: retried later

    {"kind": "budget.warning", "at": "2026-11-22T17:40:00Z", "budget": "llm", "percent": 80, "used": …, "limit": …,
     "unit": "micros", "currency": "USD", "sentence": "budget 'llm' is at 80 %: …"}

A notice may arrive twice, with the same `id`. Without a webhook address, the server only stores notices for `sgpu
budget list`. The loop retries each notice independently, so a refused notice does not delay other notices.

Failure cases:

- No answer, or a status other than 2xx: The loop retries after 5, 10, 20 … s, and at most an hour. After ten tries or a
  day, the loop stops retrying the notice. The database stores the number of tries, but not the pauses between tries.

- An endless response body: The loop does not read the body, and the request times out after 5 s.

- A redirect: The loop does not follow redirects, so notices go only to the configured address.

- Log messages contain the webhook address without its path, because the path may be a secret.
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
"""Maximum number of notices in one read, sorted by the number of tries, lowest first."""
_log = logging.getLogger(__name__)


class NoticeWebhook:
    """Posts notices to the configured webhook."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions, measures: ServerMetrics) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._measures = measures
        self._not_before_ns: dict[int, int] = {}

    def tick(self, now_ns: int) -> int | None:
        """Post one due notice, and return the time of the next tick."""
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
                _log.error("gave up notice %d (%s) after %d tries", one.seq, one.kind, one.tries)
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
    """Post a notice, and return a description of the problem, or ""."""
    body = {"id": one.seq, "kind": one.kind, "at": format_utc(one.at_ns), **one.document}
    headers = {"User-Agent": f"serverless-gpu/{__version__}"}
    try:
        # Each notice uses a new client, because one notice a day needs no open connection. The client ignores the proxy
        # settings of the environment, because a proxy could read notices.
        with (
            httpx2.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            return "" if answer.is_success else f"status {answer.status_code}"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return type(error).__name__
