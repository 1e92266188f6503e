"""Detects unusual spending of runs and teams once a minute.

    run      its usage per hour  >  3 × the median of the owner's last 50 runs of that name          once
    team     its usage in the last hour  >  3 × the median of its own hours in four weeks            once a day

Spend alarms compare money if a price applies, and device time otherwise. The spend alarm loop writes each alarm to the
log, the audit trail and the notices. A run's alarm also becomes a run event. The server records each sent alarm as a
`budget_warnings` row with 0 per cent.

The spend alarm loop reads each team's hourly usage from the ledger and caches the usage in memory. A ledger entry
counts evenly over its period. The ledger contains a running attempt's usage only up to the previous day. The spend
alarm loop therefore adds today's usage of running attempts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from serverless_gpu import units
from serverless_gpu.ambient import Clock
from serverless_gpu.model.billing import budget
from serverless_gpu.model.billing.budget import (
    HOURS,
    HOURS_MIN,
    NOTHING,
    RUNS_MAX,
    RUNS_MIN,
    Alarm,
    BudgetUse,
    BudgetWindow,
    used,
)
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS
from serverless_gpu.model.hardware import time_unit
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.budgets.spending import OngoingAttempt, Spending, rate_of
from serverless_gpu.server.core.hub import NOTICES, Hub, run_key
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import audit, budgets, charges, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.budgets import NoticeKind
from serverless_gpu.server.records.duration_history import latest_of_name

EVERY_S = 60.0
AT_ONCE = 100
"""Maximum number of attempts that one tick compares."""
PAGE = 5_000
"""Maximum number of ledger entries in one page."""
MONEY, TIME = "micros", "gpu_ms"
_log = logging.getLogger(__name__)
_Hours = dict[int, tuple[int, int]]
"""Money and device-milliseconds by hour, counted in hours since 1970."""


class SpendAlarms:
    """Detects runs and teams that spend more than usual."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        measures: ServerMetrics,
        spending: Spending,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._measures = measures
        self._spending = spending
        self._seq = 0
        self._teams: dict[str, _Hours] = {}
        self._seen: set[tuple[str, int]] = set()

    def tick(self, now_ns: int) -> int:
        """Announce unusual spending of running attempts, and return the next tick's due time."""
        going = self._spending.going_on()
        there = [one for one in going if not one.spender.is_over and one.spender.started_ns is not None]
        self._database.read(self._read)
        self._look_at_runs(there)
        self._look_at_teams(there)
        return now_ns + round(EVERY_S * 1e9)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _look_at_runs(self, going: Sequence[OngoingAttempt]) -> None:
        """Compare each new attempt with earlier attempts once, because its hourly cost is constant."""
        gangs = {(one.spender.run_id, one.spender.fence) for one in going}
        self._seen &= gangs
        new = [one for one in going if one.name and (one.spender.run_id, one.spender.fence) not in self._seen]
        for one in new[:AT_ONCE]:
            spender = one.spender
            self._seen.add((spender.run_id, spender.fence))
            earlier, specs = self._database.read(functools.partial(_earlier, one=one))
            if spender.micros_per_hour is not None:
                unit, rate = MONEY, spender.micros_per_hour
                prices = [
                    rate_of(each.tariff, each.gpu_type, each.world_size, specs.get(each.run_id)) for each in earlier
                ]
                past = [price for price in prices if price is not None]
            else:
                unit, rate = TIME, spender.gpus * units.MS_PER_HOUR
                past = [each.world_size * units.MS_PER_HOUR for each in earlier]
            found = budget.unusual(rate, past, least=RUNS_MIN)
            if found is not None:
                usual = f"the usual value is the median of {found.count} earlier runs named {one.name!r}"
                sentence = f"run {spender.run_id} uses {self._words(found, unit)} per hour; {usual}"
                whose = {"owner": one.subject.owner, "team": one.subject.team}
                self._say(f"run {spender.run_id}", 0, sentence, found, whose, one)

    # --- teams --------------------------------------------------------------------------------------------------------

    def _read(self, connection: sa.Connection) -> None:
        """Add new ledger entries to the teams' hourly usage, at most 20 pages per call."""
        oldest = self._clock.wall_ns() // HOUR_NS - HOURS
        for _ in range(20):
            page = charges.after(connection, self._seq, limit=PAGE)
            if not page:
                break
            self._seq = page[-1].seq
            known = charges.find_accounts(connection, {one.account_id for one in page})
            for one in page:
                teams, line = known[one.account_id].subject.teams, one.entry.line
                if not teams or line.end_ns // HOUR_NS < oldest:
                    continue
                money = budget.spread(line.micros or 0, line.start_ns, line.end_ns)
                time = budget.spread(line.billed_ms, line.start_ns, line.end_ns)
                for hours in (self._teams.setdefault(team, {}) for team in teams):
                    for hour in time:
                        before = hours.get(hour, (0, 0))
                        hours[hour] = (before[0] + money[hour], before[1] + time[hour])
        for team in list(self._teams):
            self._teams[team] = {hour: amount for hour, amount in self._teams[team].items() if hour >= oldest}

    def _look_at_teams(self, going: Iterable[OngoingAttempt]) -> None:
        now_ns = self._clock.wall_ns()
        # The ledger already contains yesterday's usage of running attempts.
        last = BudgetWindow(start_ns=max(now_ns - HOUR_NS, now_ns // DAY_NS * DAY_NS), end_ns=now_ns)
        uses: dict[str, BudgetUse] = {}
        for one in going:
            for team in one.subject.teams:
                uses[team] = uses.get(team, NOTHING) + used(one.spender, last)
        this = now_ns // HOUR_NS
        for team, use in uses.items():
            hours = self._teams.get(team, {})
            ahead, before = hours.get(this, (0, 0)), hours.get(this - 1, (0, 0))
            part_ns = HOUR_NS - now_ns % HOUR_NS  # Part of the previous clock hour within the last 60 minutes.
            which = 0 if use.micros else 1
            rate = (use.micros if which == 0 else use.gpu_ms) + ahead[which] + before[which] * part_ns // HOUR_NS
            past = [amounts[which] for hour, amounts in hours.items() if hour < this - 1]
            found = budget.unusual(rate, past, least=HOURS_MIN)
            if found is not None:
                usual = f"the usual value is the median of the team's {found.count} hours in four weeks"
                sentence = f"team {team} used {self._words(found, (MONEY, TIME)[which])} in the last hour; {usual}"
                self._say(f"team {team}", now_ns // DAY_NS * DAY_NS, sentence, found, {"team": team}, None)

    # --- announcements ------------------------------------------------------------------------------------------------

    def _say(
        self,
        subject: str,
        start_ns: int,
        sentence: str,
        found: Alarm,
        whose: Mapping[str, str],
        run: OngoingAttempt | None,
    ) -> None:
        at_ns = self._clock.wall_ns()
        # A line break distinguishes an alarm key from a budget name. Deleting a budget's warnings therefore never
        # deletes an alarm.
        key = f"alarm\n{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
        document = {"subject": subject, "sentence": sentence, "rate": found.rate, "usual": found.usual, **whose}

        def work(connection: sa.Connection) -> bool:
            if not budgets.say(connection, key, start_ns=start_ns, percent=0, at_ns=at_ns):
                return False
            audit.record(
                connection,
                who=audit.SERVER,
                action=Action.SPEND_ALARM,
                subject=subject.partition(" ")[2],
                now_ns=at_ns,
                detail=document,
            )
            budgets.add_notice(connection, NoticeKind.ALARM, document, at_ns=at_ns)
            if run is not None:
                transitions.add_remark(connection, run.spender.run_id, run.spender.fence, sentence, at_ns=at_ns)
            return True

        if self._database.write(work):
            _log.warning("%s", sentence)
            self._measures.alarms.inc()
            self._hub.touch(NOTICES)
            if run is not None:
                self._hub.touch(run_key(run.spender.run_id))

    def _words(self, found: Alarm, unit: str) -> str:
        currency = self._settings.currency

        def amount(value: int) -> str:
            return (
                units.format_micros(value, currency) if unit == MONEY else units.format_gpu_ms(value, unit=time_unit())
            )

        return f"{amount(found.rate)} (usual: {amount(found.usual)})"


def _earlier(connection: sa.Connection, one: OngoingAttempt) -> tuple[list[StoredAttempt], dict[str, RunSpec]]:
    """Return the latest attempts of the owner's runs with the same name, and the specs of these runs."""
    found = latest_of_name(connection, one.subject.owner, one.name, limit=RUNS_MAX)
    there = runs.find_many(connection, [each.run_id for each in found])
    return found, {run.id: run.spec for run in there}
