"""Enforces budgets every five seconds: stops runs over a hard limit and sends threshold notices.

    look (`spending.py`) ─▶ 80 %, 95 %, 100 %, closed ─▶ row, audit, notice (one transaction); event for its runs
                        └─▶ no amount left to hold ─▶ StopReason.BUDGET by the server, naming the budget ─▶ node
            ranks write a checkpoint ─▶ BUDGET_STOPPED

The database stores a stop request with the run. A run with a stop request therefore stops even if an operator raises,
deletes or resets the budget. The owner may submit a stopped run again. The server announces a threshold only once, even
after a crash, because the database stores announced thresholds. The enforcer closes a hard budget before it stops any
run. Until an operator reopens the budget, the server therefore starts no other run with the amounts released by stopped
runs.

Failure cases:

- If the server is killed between the check and the stop request, the enforcer checks again within five seconds of the
  restart. The holds of the runs cover the costs until the next check.

- If the database is unavailable, the enforcer stops no runs. During an outage of the database, runs end when their
  leases expire.

- If an operator raises a budget between the check and the stop request, the request's transaction reads the budget
  again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, StaleAttempt
from serverless_gpu.model.billing.budget import CLOSED, FULL, Standing, goes_on_text, stopped_text, warning_text
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import ACTIVE, StopReason
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.budgets.spending import OngoingAttempt, Spending, first_day_of, is_open_to
from serverless_gpu.server.core.hub import NOTICES, Hub, run_key
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import audit, budgets, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.budgets import NoticeKind

EVERY_S = 5.0
TOGETHER = 8
"""The maximum number of stop requests in one transaction, so that other writers do not wait long."""
TOLD_TOGETHER = 64
"""Maximum number of runs that receive a threshold event in one transaction."""
_log = logging.getLogger(__name__)
_KINDS = {FULL: (Action.BUDGET_REACHED, NoticeKind.REACHED), CLOSED: (Action.BUDGET_CLOSED, NoticeKind.CLOSED)}
_Due = tuple[OngoingAttempt, str, Standing]
_Mark = tuple[str, int, int]


class BudgetEnforcer:
    """Enforces the limits of budgets."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        measures: ServerMetrics,
        spending: Spending,
        announcer: Announcer,
        budget_admission: BudgetAdmission,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._measures = measures
        self._spending = spending
        self._announcer = announcer
        self._budget_admission = budget_admission

    def tick(self, now_ns: int) -> int | None:
        """Check all budgets, announce thresholds, stop runs, and return the time of the next tick."""
        now = self._budget_admission.as_of()
        since_ns = first_day_of(now.wall_ns) * DAY_NS

        def read(connection: sa.Connection) -> tuple[dict[str, Standing], set[_Mark]]:
            return self._spending.look(connection, now, at_all=True), budgets.said(connection, since_ns=since_ns)

        standings, said = self._database.read(read)
        going = self._spending.going_on()
        for name, standing in standings.items():
            marks = [mark for mark in standing.reached if (name, standing.window.start_ns, mark) not in said]
            if marks:
                self._say(name, standing, marks, going)
        self._stop(standings, going)
        self._measures.budgets.set(len(standings))
        self._measures.budgets_used_up.set(sum(each.is_used_up for each in standings.values()))
        return now_ns + round(EVERY_S * 1e9)

    # --- stop requests ------------------------------------------------------------------------------------------------

    def _stop(self, standings: Mapping[str, Standing], going: Sequence[OngoingAttempt]) -> None:
        due: dict[str, _Due] = {}
        by_run = {one.spender.run_id: one for one in going if not one.spender.is_over}
        for name, standing in sorted(standings.items()):
            for run_id in standing.stop:
                if run_id in by_run:
                    due.setdefault(run_id, (by_run[run_id], name, standing))
        waiting = list(due.values())
        for first in range(0, len(waiting), TOGETHER):
            self._ask_together(waiting[first : first + TOGETHER])

    def _ask_together(self, due: Sequence[_Due]) -> None:
        at_ns, currency = self._clock.wall_ns(), self._settings.currency
        asked = self._database.write(lambda connection: [_ask(connection, one, currency, at_ns) for one in due])
        for told in asked:
            if told is not None and told.changed:
                self._announcer.announce(told)
                self._measures.budget_stops.inc()
                _log.warning("requested that run %s stops because of its budget", told.before.id)

    # --- announcements ------------------------------------------------------------------------------------------------

    def _say(self, name: str, standing: Standing, marks: Sequence[int], going: Sequence[OngoingAttempt]) -> None:
        """Announce each new threshold, the lowest first. Runs receive an event only for the highest threshold."""
        at_ns, currency, start_ns = self._clock.wall_ns(), self._settings.currency, standing.window.start_ns

        def work(connection: sa.Connection) -> list[tuple[int, str]]:
            news: list[tuple[int, str]] = []
            for mark in marks:
                if not budgets.say(connection, name, start_ns=start_ns, percent=mark, at_ns=at_ns):
                    continue
                sentence = warning_text(name, standing, currency, is_open=True, mark=mark)
                document = _document(name, standing, mark, currency) | {"sentence": sentence}
                action, kind = _KINDS.get(mark, (Action.BUDGET_WARNING, NoticeKind.WARNING))
                audit.record(connection, who=audit.SERVER, action=action, subject=name, now_ns=at_ns, detail=document)
                budgets.add_notice(connection, kind, document, at_ns=at_ns)
                news.append((mark, sentence))
            return news

        news = self._database.write(work)
        if not news:
            return
        for mark, sentence in news:
            _log.warning("%s", sentence)
            self._measures.budget_warnings.labels("closed" if mark == CLOSED else str(mark)).inc()
        self._hub.touch(NOTICES)
        # For runs that stop because of the budget, the stop request already contains the reason.
        concerned = [one for one in going if name in one.names and not one.spender.is_over]
        concerned = [one for one in concerned if one.spender.run_id not in standing.stop and not one.spender.stop_ns]
        for first in range(0, len(concerned), TOLD_TOGETHER):
            self._tell(name, standing, news[-1][0], concerned[first : first + TOLD_TOGETHER])

    def _tell(self, name: str, standing: Standing, mark: int, concerned: Sequence[OngoingAttempt]) -> None:
        at_ns, currency = self._clock.wall_ns(), self._settings.currency

        def work(connection: sa.Connection) -> None:
            for one in concerned:
                is_open = is_open_to(standing.budget, one.subject)
                if mark == CLOSED:
                    said = goes_on_text(name, standing, currency, is_open=is_open)
                else:
                    said = warning_text(name, standing, currency, is_open=is_open, mark=mark)
                transitions.add_remark(connection, one.spender.run_id, one.spender.fence, said, at_ns=at_ns)

        self._database.write(work)
        for one in concerned:
            self._hub.touch(run_key(one.spender.run_id))


def _ask(connection: sa.Connection, due: _Due, currency: str, at_ns: int) -> TransitionResult | None:
    one, name, standing = due
    there = budgets.find_in_force(connection, name)
    run = runs.find(connection, one.spender.run_id)
    if there is None or there.budget != standing.budget:
        return None  # The next tick checks the changed budget.
    if run is None or run.fence != one.spender.fence or run.state not in ACTIVE:
        return None
    because = stopped_text(name, standing, currency, is_open=is_open_to(standing.budget, one.subject))
    try:
        return transitions.ask_to_stop(
            connection, run.id, who=audit.SERVER, why=StopReason.BUDGET, at_ns=at_ns, because=because
        )
    except (AlreadyFinished, StaleAttempt):
        return None


def _document(name: str, standing: Standing, mark: int, currency: str) -> dict[str, object]:
    """Return the notice of a threshold for the webhook and the audit. The notice contains no secrets."""
    budget = standing.budget
    return {
        "budget": name,
        "scope": f"{budget.scope.kind} {budget.scope.name}".strip(),
        "period": budget.period.value,
        "percent": int(standing.percent) if mark == CLOSED else mark,
        "used": budget.counts(standing.used),
        "held": budget.counts(standing.held),
        "limit": budget.limit,
        "unit": "micros" if budget.limit_micros is not None else "gpu_ms",
        "currency": currency,
        "hard": budget.hard,
        "start_ns": standing.window.start_ns,
        "end_ns": standing.window.end_ns,
    }
