"""Computes the standing of every budget from ledger entries, running attempts and their holds.

    charges, by account and day ─┐  one transaction, because entries between two reads would count twice or
    running attempts ────────────┤  not at all
    their posted entries ────────┘
            └─▶ look ─▶ standings ─┬─▶ `refuse`     submit: can the run start in this period?
                                   ├─▶ `BudgetsLeft.take` each tick: which waiting runs may start (`queue_snapshot.py`)
                                   ├─▶ `enter`      in the transaction of a placement: is enough left?
                                   └─▶ `budget_enforcer.py`: which runs stop, which thresholds are reached

`BudgetIndex` finds the budgets that count a run. `LedgerSums` caches posted usage by budget and day, and reads only new
ledger entries. `BudgetsLeft` counts down the remaining amounts within one tick.

A running attempt's cost is the price of its devices from the start of user code until its last report. After the
attempt ends, the ledger charges replace this estimate. The server chooses an attempt's tariff and account at placement.

The scheduler calls `look` before each decision. The budget enforcer calls `look` in each tick. Callers of `look`
provide the database transaction. Between two calls of `look`, `enter` adds new placements to the standings. Other
readers use the standings that `known` returns. All methods of `Spending` are thread-safe.

Several calls of `look` may run concurrently in separate database transactions. A `Spending` object numbers its events
(`moment`). Each call of `look` records the event number from before its transaction. If a newer call of `look` finishes
first, the older call returns the newer standings. A new placement also counts in each call of `look` that began before
the placement's commit.

Failure cases:

- The server has just started. Until the first call of `look`, the server starts no run that a budget could count.

- A call of `look` fails. The caller of `look` receives the error, while the standings stay unchanged.

- A budget changes during a call of `look`. The next call of `look` reads the changed budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import BudgetExhausted
from serverless_gpu.model.billing.budget import (
    FORECAST_DAYS,
    NOTHING,
    Budget,
    BudgetUse,
    BudgetWindow,
    Period,
    Spender,
    Standing,
    Subject,
    Weighed,
    first_hold,
    is_refused,
    judge,
    keys,
    left_text,
    may_start,
    no_room_text,
    part_until,
    refused_text,
    renewal_text,
    used,
    warning_text,
    window,
)
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.billing.pricing import Tariff, rate
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.lifecycle.attempt import MEANINGS
from serverless_gpu.model.scheduling.concurrency_limits import WaitingRun
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.metering import ClockPair, Lifetime
from serverless_gpu.server.records import budgets, charges, pools, runs
from serverless_gpu.server.records.budgets import StoredBudget
from serverless_gpu.server.records.charges import Account, UnpostedAttempt
from serverless_gpu.server.records.crews import CrewId, Gang
from serverless_gpu.server.records.duration_history import LearnedDurations
from serverless_gpu.server.records.pools import StoredPool
from serverless_gpu.server.records.runs import StoredRun

_KNOWN_MAX = 100_000
"""Number of cached accounts above which `LedgerSums` clears its account cache."""


class LookInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of `Spending.look` besides the database."""

    wall_ns: int  # Current wall time, nanoseconds since 1970.
    boot_ns: int  # Current boottime in nanoseconds.
    moment: int  # Value of `Spending.moment` before the transaction began.
    leases: Leases
    currency: str  # Currency of the budgets. Charges in another currency count as unpriced.


class OngoingAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt whose unposted usage counts towards budgets."""

    spender: Spender
    subject: Subject
    names: tuple[str, ...]  # Names of the budgets that count the attempt.
    name: str = ""  # Name of the run.


class _Known(msgspec.Struct):
    """A running attempt's constant properties."""

    subject: Subject
    names: tuple[str, ...]
    micros_per_hour: int | None
    grace_s: float
    name: str
    longest_s: float | None


class Spending:
    """Holds the standing of every budget in memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._moment = 1
        self._changed = 1  # Event number of the last budget change.
        self._book_of = 0  # Event number of the last read of all budgets.
        self._looked = 0  # Event number of the newest finished `look`.
        self._index = BudgetIndex(())
        self._ledger = LedgerSums()
        self._known: dict[Gang, _Known] = {}
        self._lives: dict[Gang, Lifetime] = {}
        self._going: dict[Gang, OngoingAttempt] = {}
        # Event number at the end of the placement transaction; None before its end.
        self._entered: dict[Gang, int | None] = {}
        self._standings: dict[str, Standing] = {}
        self._closed: frozenset[tuple[str, int]] = frozenset()
        self._as_of_ns = 0
        self._learned = LearnedDurations()

    def moment(self) -> int:
        """Return the number of the last budget event, for `LookInputs.moment`."""
        with self._lock:
            return self._moment

    def change(self) -> None:
        """Mark the cached budgets as outdated, so that the next `look` reads all budgets again."""
        with self._lock:
            self._changed = self._next()

    def look(self, connection: sa.Connection, as_of: LookInputs, *, at_all: bool = False) -> dict[str, Standing]:
        """Read the database, and return the standing of each budget by name.

        The transaction must read from one snapshot of the database. With `at_all`, `look` reads the running attempts
        even if no budget exists.
        """
        with self._lock:
            first_day = first_day_of(as_of.wall_ns)
            if self._book_of < self._changed or first_day != self._ledger.first_day:
                self._index = BudgetIndex(budgets.every(connection), pools.every(connection))
                self._ledger = LedgerSums(first_day, self._index, as_of.currency)
                self._known = {}
                self._book_of = as_of.moment
            elif as_of.moment < self._looked:
                return dict(self._standings)
            self._as_of_ns = as_of.wall_ns
            if not self._index.budgets and not at_all:
                self._standings = {}
                return {}
            self._closed = budgets.closed(connection)
            there = charges.unposted(connection)
            cuts = {self._window(one, as_of.wall_ns).start_ns for one in self._index.budgets.values()}
            self._ledger.read(connection, there, as_of.wall_ns, {at_ns for at_ns in cuts if at_ns % DAY_NS})
            self._get_to_know(connection, there, as_of.wall_ns)
            freed = as_of.leases.freed()
            self._lives = {gang: self._lives.get(gang) or Lifetime() for gang in there}
            going = {gang: self._going_on(one, as_of, freed) for gang, one in there.items()}
            self._entered = {gang: at for gang, at in self._entered.items() if at is None or at > as_of.moment}
            for gang in self._entered.keys() - going.keys():
                one = self._going[gang]
                going[gang] = msgspec.structs.replace(one, names=self._index.names(one.subject))
            self._going = going
            self._looked = self._next()
            return dict(self._judge())

    def standings(self) -> dict[str, Standing]:
        """Return the standings of the last `look`, including later placements."""
        with self._lock:
            return dict(self._standings)

    def known(self) -> dict[str, Standing] | None:
        """Return the standings, or None if no `look` has finished since the start or the last budget change."""
        with self._lock:
            return None if self._book_of < self._changed else dict(self._standings)

    def going_on(self) -> list[OngoingAttempt]:
        """Return the running attempts of the last `look`, and later placements that a budget counts."""
        with self._lock:
            return list(self._going.values())

    def by_day(self, name: str) -> dict[int, int]:
        """Return a budget's daily usage in its period and the last week, in the limit's unit."""
        with self._lock:
            if name not in self._index.budgets:
                return {}  # An operator has deleted the budget since the last `look`.
            found = {day: self._index.budgets[name].counts(use) for day, use in self._ledger.days(name).items()}
            for gang, one in self._going.items():
                if name not in one.names:
                    continue
                for line, use in self._ledger.posted_of(gang):
                    found[line.day] = found.get(line.day, 0) - self._index.budgets[name].counts(use)
                for day, amount in _days_of(self._index.budgets[name], one.spender, self._ledger.first_day).items():
                    found[day] = found.get(day, 0) + amount
            return found

    # --- admission --------------------------------------------------------------------------------------------------

    def refuse(self, subject: Subject, hold: BudgetUse, *, currency: str) -> None:
        """Refuse a run that budgets do not allow to start in this period."""
        with self._lock:
            for name in self._index.names(subject):
                standing = self._standings.get(name)
                if standing is not None and is_refused(standing, hold):
                    raise BudgetExhausted(
                        refused_text(name, standing, currency, is_open=is_open_to(standing.budget, subject)),
                        hint=f"{renewal_text(standing)}; an operator can raise the budget: sgpu budget set {name}",
                    )

    def left(self, subject: Subject, *, currency: str, sees_all: bool = False) -> tuple[str, ...]:
        """Return the remaining amounts of the budgets that would count a run, as text."""
        with self._lock:
            there = [(name, self._standings.get(name)) for name in sorted(self._index.names(subject))]
            return tuple(
                left_text(name, standing, currency, is_open=sees_all or is_open_to(standing.budget, subject))
                for name, standing in there
                if standing is not None
            )

    def warning(self, subject: Subject, *, currency: str) -> str:
        """Return a warning if a budget of the run is nearly used up, or ""."""
        with self._lock:
            for name in self._index.names(subject):
                standing = self._standings.get(name)
                if standing is not None and standing.reached:
                    return warning_text(name, standing, currency, is_open=is_open_to(standing.budget, subject))
        return ""

    def rooms(self, holds: Callable[[WaitingRun], BudgetUse]) -> BudgetsLeft | None:
        """Return the remaining amounts of all budgets for one scheduler tick, or None without budgets."""
        with self._lock:
            if not self._standings:
                return None
            return BudgetsLeft(self._index, dict(self._standings), holds)

    def longest_s(self, connection: sa.Connection, owner: str, name: str, now_ns: int) -> float | None:
        """Return the longest device time in seconds among the owner's recent runs with this name, or None."""
        with self._lock:
            return self._learned.longest_s(connection, owner, name, now_ns)

    def enter(
        self, connection: sa.Connection, run: StoredRun, account: Account, tariff: Tariff, *, gpus: int, now_ns: int
    ) -> str:
        """Add an attempt to its budgets before its placement, or return the reason for a refusal.

        Repeated calls for the same attempt count once. The caller must call `entered` after the end of the transaction.
        """
        gang = (run.id, run.fence + 1)
        with self._lock:
            names = self._index.names(account.subject)
            if not names or gang in self._going:
                return ""
            micros_per_hour = rate_of(tariff, account.gpu_type, gpus, run.spec)
            longest_s = self._learned.longest_s(connection, run.owner, run.name, now_ns)
            hold = first_hold(run.spec.grace_s, gpus=gpus, micros_per_hour=micros_per_hour, longest_s=longest_s)
            for name in names:
                if not may_start(self._standings[name], hold):
                    return no_room_text(name, self._standings[name])
            spender = Spender(
                run_id=run.id,
                fence=run.fence + 1,
                gpus=gpus,
                micros_per_hour=micros_per_hour,
                placed_ns=now_ns,
                started_ns=None,
                seen_ns=now_ns,
                grace_s=run.spec.grace_s,
                alone_s=0.0,
                longest_s=longest_s,
            )
            self._going[gang] = OngoingAttempt(spender=spender, subject=account.subject, names=names)
            self._entered[gang] = None
            for name in names:
                self._standings[name] = with_hold(self._standings[name], hold)
            return ""

    def entered(self) -> None:
        """Record the end of the transaction that placed the given attempts."""
        with self._lock:
            at = self._next()
            self._entered = {gang: at if was is None else was for gang, was in self._entered.items()}

    # --- internals ----------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._moment += 1
        return self._moment

    def _get_to_know(self, connection: sa.Connection, there: Mapping[Gang, UnpostedAttempt], now_ns: int) -> None:
        for gang in self._known.keys() - there.keys():
            del self._known[gang]
        new = [one.attempt for gang, one in there.items() if gang not in self._known]
        there_are = {run.id: run for run in runs.find_many(connection, sorted({one.run_id for one in new}))}
        for one in new:
            run = there_are.get(one.run_id)
            spec = None if run is None else run.spec
            if one.account_id is not None:
                subject, names, is_foreign = self._ledger.account(one.account_id)
            else:  # Attempts from older server versions have no account.
                subject = Subject(owner="") if run is None else subject_of_run(run)
                names, is_foreign = self._index.names(subject), False
            micros_per_hour = rate_of(one.tariff, one.gpu_type, one.world_size, spec)
            self._known[one.run_id, one.fence] = _Known(
                subject=subject,
                names=names,
                micros_per_hour=None if is_foreign else micros_per_hour,
                grace_s=0.0 if spec is None else spec.grace_s,
                name="" if run is None else run.name,
                longest_s=None
                if run is None or not names
                else self._learned.longest_s(connection, run.owner, run.name, now_ns),
            )

    def _going_on(self, unposted: UnpostedAttempt, as_of: LookInputs, freed: frozenset[CrewId]) -> OngoingAttempt:
        one = unposted.attempt
        is_free = all(crew.id in freed for crew in one.open_crews)
        known, life = self._known[one.run_id, one.fence], self._lives[one.run_id, one.fence]
        now = ClockPair(as_of.wall_ns, as_of.boot_ns)
        life.look(one, now, as_of.leases, is_stopping=unposted.is_stopping)
        is_billed = one.reason is None or MEANINGS[one.reason].is_billed
        spender = Spender(
            run_id=one.run_id,
            fence=one.fence,
            gpus=one.world_size,
            micros_per_hour=known.micros_per_hour,
            placed_ns=one.created_ns,
            started_ns=None if life.began_ns is None or not is_billed else now.wall(life.began_ns),
            seen_ns=as_of.wall_ns if life.seen_ns is None else now.wall(life.seen_ns),
            grace_s=known.grace_s,
            alone_s=max(crew.grace_s for crew in one.crews),
            stop_ns=None if life.stop_ns is None else now.wall(life.stop_ns),
            is_over=one.ended_ns is not None or is_free,
            longest_s=known.longest_s,
        )
        return OngoingAttempt(spender=spender, subject=known.subject, names=known.names, name=known.name)

    @staticmethod
    def _window(budget: Budget, at_ns: int) -> BudgetWindow:
        return window(budget.period, at_ns, budget.zone)

    def _judge(self) -> dict[str, Standing]:
        """Compute every budget's standing from posted usage and running attempts."""
        of: dict[str, list[Spender]] = {name: [] for name in self._index.budgets}
        posted = {name: NOTHING for name in self._index.budgets}
        for gang, one in self._going.items():
            for name in one.names:
                of[name].append(one.spender)
            own = self._ledger.posted_of(gang)
            for name in one.names if own else ():
                within = self._window(self._index.budgets[name], self._as_of_ns)
                for line, use in own:
                    if line.day in within.days:
                        posted[name] -= use - use_until(line, use, within.start_ns)
        weighed: dict[tuple[Period, str], dict[Gang, Weighed]] = {}
        self._standings = {}
        for name, budget in self._index.budgets.items():
            within = self._window(budget, self._as_of_ns)
            by_day = self._ledger.days(name)
            total = sum((by_day[day] for day in within.days if day in by_day), start=posted[name])
            total -= self._ledger.before(name, within.start_ns)
            same = weighed.setdefault((budget.period, budget.time_zone), {})
            standing = judge(budget, total, of[name], self._as_of_ns, same)
            is_closed = budget.hard and (name, within.start_ns) in self._closed
            self._standings[name] = msgspec.structs.replace(standing, is_closed=is_closed)
        return self._standings


class BudgetIndex:
    """Finds the budgets that count a run."""

    def __init__(self, there: Iterable[StoredBudget], pools_there: Iterable[StoredPool] = ()) -> None:
        self.budgets = {one.name: one.budget for one in there}
        self._index: dict[tuple[str, str], list[str]] = {}
        for name, budget in self.budgets.items():
            self._index.setdefault((budget.scope.kind, budget.scope.name), []).append(name)
        self._reserved = {pool.name for pool in pools_there if pool.kind == pools.RESERVED}

    def names(self, subject: Subject) -> tuple[str, ...]:
        """Return the names of the budgets that count a run, in order."""
        return self._sorted({name for key in keys(subject) for name in self._index.get(key, ())}, subject)

    def names_of_waiting(self, subject: Subject) -> tuple[str, ...]:
        """Return the names of the budgets of every pool that a waiting run may use."""
        found = set(self.names(subject))
        if not subject.pool:
            for (kind, pool), names in self._index.items():
                if kind == "pool" and pool not in self._reserved:
                    found.update(names)
        return self._sorted(found, subject)

    def _sorted(self, names: set[str], subject: Subject) -> tuple[str, ...]:
        counted = (name for name in names if not subject.is_cpu or self.budgets[name].limit_gpu_ms is None)
        return tuple(sorted(counted))


class BudgetsLeft:
    """Subtracts the holds of waiting runs from budgets in queue order (`concurrency_limits.BudgetRooms`)."""

    def __init__(
        self,
        index: BudgetIndex,
        standings: dict[str, Standing],
        holds: Callable[[WaitingRun], BudgetUse],
    ) -> None:
        self._index, self._standings, self._hold = index, standings, holds

    def take(self, candidate: WaitingRun) -> str:
        """Subtract a run's first hold from its budgets, or return the reason why a budget is too small."""
        names = self._index.names_of_waiting(candidate.subject)
        if not names:
            return ""
        hold = self._hold(candidate)
        for name in names:
            if not may_start(self._standings[name], hold):
                return no_room_text(name, self._standings[name])
        self._count(names, hold)
        return ""

    def keep(self, candidate: WaitingRun) -> None:
        """Subtract a run's hold from its budgets, even if a budget is too small."""
        self._count(self._index.names_of_waiting(candidate.subject), self._hold(candidate))

    def _count(self, names: Iterable[str], hold: BudgetUse) -> None:
        for name in names:
            self._standings[name] = with_hold(self._standings[name], hold)


class LedgerSums:
    """Sums posted usage by budget and day. Each `read` continues after the last known ledger entry."""

    def __init__(self, first_day: int = -1, index: BudgetIndex | None = None, currency: str = "") -> None:
        self.first_day = first_day
        self._index, self._currency = index or BudgetIndex(()), currency
        self._seq = 0
        self._days: dict[str, dict[int, BudgetUse]] = {name: {} for name in self._index.budgets}
        self._accounts: dict[int, tuple[Subject, tuple[str, ...], bool]] = {}
        self._posted: dict[Gang, list[tuple[LedgerLine, BudgetUse]]] = {}
        self._cuts: dict[int, _Cut] = {}

    def days(self, name: str) -> Mapping[int, BudgetUse]:
        """Return the posted usage of a budget by day."""
        return self._days[name]

    def posted_of(self, gang: Gang) -> Sequence[tuple[LedgerLine, BudgetUse]]:
        """Return a running attempt's ledger lines with their posted usage."""
        return self._posted.get(gang, ())

    def before(self, name: str, at_ns: int) -> BudgetUse:
        """Return a budget's posted usage between the start of a UTC day and a time on that day."""
        cut = self._cuts.get(at_ns)
        return NOTHING if cut is None else cut.uses.get(name, NOTHING)

    def account(self, number: int) -> tuple[Subject, tuple[str, ...], bool]:
        """Return an account's subject, the names of its budgets, and its foreign currency flag."""
        return self._accounts.get(number, (Subject(owner=""), (), False))

    def read(
        self,
        connection: sa.Connection,
        there: Mapping[Gang, UnpostedAttempt],
        wall_ns: int,
        cuts: AbstractSet[int] = frozenset(),
    ) -> None:
        """Read new ledger entries, and all ledger entries of running attempts.

        The transaction must read from one snapshot of the database. `cuts` contains the start times of budget periods
        that begin during a UTC day.
        """
        if not self._index.budgets:  # Without budgets, the standings need only the accounts of running attempts.
            going = {one.attempt.account_id for one in there.values() if one.attempt.account_id is not None}
            self._get_to_know(connection, going)
            return
        newest = charges.newest_seq(connection)
        assert newest >= self._seq, "an older ledger snapshot would make `LedgerSums` count entries twice"
        sums = []
        if newest > self._seq:
            sums = charges.sums(connection, from_day=self.first_day, after_seq=self._seq)
        wanted = {one.account_id for one in sums}
        wanted |= {one.attempt.account_id for one in there.values() if one.attempt.account_id is not None}
        self._get_to_know(connection, wanted)
        # The server posts an attempt's usage after the end of each day and after the attempt's end.
        today_ns = wall_ns // DAY_NS * DAY_NS
        may = {gang for gang, one in there.items() if one.attempt.created_ns < today_ns or one.attempt.uncharged}
        if newest > self._seq or may != self._posted.keys():
            self._posted = {
                gang: [
                    (one.entry.line, self._use_of_line(one.account_id, one.entry.line))
                    for one in own
                    if one.entry.line.day >= self.first_day
                ]
                for gang, own in charges.of_attempts(connection, may).items()
            }
        for one in sums:
            use = self._use(one.account_id, one.micros, one.billed_ms, one.unpriced_ms)
            for name in self._accounts[one.account_id][1]:
                self._days[name][one.day] = self._days[name].get(one.day, NOTHING) + use
        self._seq = newest
        self._cuts = {at_ns: self._cuts.get(at_ns) or _Cut() for at_ns in cuts}
        for at_ns, cut in self._cuts.items():
            self._read_cut(connection, at_ns, cut, newest)

    def _read_cut(self, connection: sa.Connection, at_ns: int, cut: _Cut, newest: int) -> None:
        """Add new ledger entries between the start of a UTC day and a time on that day."""
        if cut.seq == newest:
            return
        whole, crossing = charges.before(connection, at_ns, after_seq=cut.seq)
        self._get_to_know(connection, {one.account_id for one in whole} | {number for number, _ in crossing})
        for one in whole:
            cut.add(
                self._accounts[one.account_id][1], self._use(one.account_id, one.micros, one.billed_ms, one.unpriced_ms)
            )
        for number, line in crossing:
            cut.add(self._accounts[number][1], use_until(line, self._use_of_line(number, line), at_ns))
        cut.seq = newest

    def _get_to_know(self, connection: sa.Connection, wanted: AbstractSet[int]) -> None:
        if len(self._accounts) > _KNOWN_MAX:
            self._accounts = {}
        for number, account in charges.find_accounts(connection, wanted - self._accounts.keys()).items():
            is_foreign = account.currency != self._currency
            self._accounts[number] = (account.subject, self._index.names(account.subject), is_foreign)

    def _use_of_line(self, account_id: int, line: LedgerLine) -> BudgetUse:
        unpriced_ms = line.billed_ms if line.micros is None else 0
        return self._use(account_id, line.micros or 0, line.billed_ms, unpriced_ms)

    def _use(self, account_id: int, micros: int, billed_ms: int, unpriced_ms: int) -> BudgetUse:
        if self._accounts[account_id][2]:
            return BudgetUse(gpu_ms=billed_ms, unpriced_ms=billed_ms)
        return BudgetUse(micros=micros, gpu_ms=billed_ms, unpriced_ms=unpriced_ms)


class _Cut:
    """Posted usage by budget, from the start of a UTC day up to a given time."""

    def __init__(self) -> None:
        self.seq = 0
        self.uses: dict[str, BudgetUse] = {}

    def add(self, names: Iterable[str], use: BudgetUse) -> None:
        """Add usage to the sums of budgets."""
        for name in names:
            self.uses[name] = self.uses.get(name, NOTHING) + use


def use_until(line: LedgerLine, use: BudgetUse, at_ns: int) -> BudgetUse:
    """Return the part of a ledger line's usage before a given time."""
    micros, gpu_ms, unpriced_ms = (
        part_until(amount, line.gpu_ms, line.gpus, line.start_ns, line.end_ns, at_ns)
        for amount in (use.micros, use.gpu_ms, use.unpriced_ms)
    )
    return BudgetUse(micros=micros, gpu_ms=gpu_ms, unpriced_ms=unpriced_ms)


def first_day_of(now_ns: int) -> int:
    """Return the first UTC day that budget periods or forecasts need, in days since 1970-01-01."""
    month = window(Period.MONTH, now_ns - DAY_NS)  # No time zone is a full day behind UTC.
    return min(month.days[0] - 1, now_ns // DAY_NS - FORECAST_DAYS)


def rate_of(tariff: Tariff, gpu_type: str, gpus: int, spec: RunSpec | None) -> int | None:
    """Return an attempt's hourly cost, or None if its devices have no price."""
    cpus = memory_bytes = 0
    if spec is not None:
        cpus, memory_bytes = spec.resources.cpus or 0, spec.resources.memory_bytes or 0
    return rate(tariff, gpu_type=gpu_type, gpus=gpus, cpus=cpus, memory_bytes=memory_bytes)


def is_open_to(budget: Budget, subject: Subject) -> bool:
    """Return True if the budget belongs to the run's owner or one of the run's teams."""
    teams = [("team", team) for team in subject.teams]
    return (budget.scope.kind, budget.scope.name) in (("user", subject.owner), *teams)


def subject_of(owner: str, spec: RunSpec, *, team: str, pool: str, member_of: tuple[str, ...]) -> Subject:
    """Return the properties of a run that determine which budgets count the run."""
    is_cpu = spec.resources.gpu_type == CPU
    return Subject(
        owner=owner,
        team=team,
        pool=pool,
        policy=spec.policy or "",
        tags=spec.tags,
        is_cpu=is_cpu,
        member_of=member_of,
    )


def subject_of_run(run: StoredRun) -> Subject:
    """Return the properties of a stored run that determine which budgets count the run."""
    return subject_of(run.owner, run.spec, team=run.team, pool=run.pool, member_of=run.member_of)


def with_hold(standing: Standing, hold: BudgetUse) -> Standing:
    """Return a budget standing with one additional hold."""
    return msgspec.structs.replace(standing, held=standing.held + hold, ahead=standing.ahead + hold)


def _days_of(budget: Budget, one: Spender, first_day: int) -> dict[int, int]:
    """Return a running attempt's usage by UTC day."""
    if one.started_ns is None:
        return {}
    days = range(max(first_day, one.started_ns // DAY_NS), one.seen_ns // DAY_NS + 1)
    return {
        day: budget.counts(used(one, BudgetWindow(start_ns=day * DAY_NS, end_ns=(day + 1) * DAY_NS))) for day in days
    }
