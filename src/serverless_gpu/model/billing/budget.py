"""Budgets: limits on money or GPU time of a user, team or pool in a period, with forecasts and alarms.

    charges of the period ────┐
    use of running attempts ──┼─▶ standing: used, held, limit ─┬─▶ 80 %, 95 %: the server warns once for each
    held by each run ─────────┘                                ├─▶ used up: no new run starts; soft: runs finish
                                                               └─▶ closed (hard): the server stops runs without a hold

A run holds (reserves) the cost of its next minute, or of a longer grace period. The server stops a run when the budget
no longer covers the run's hold. The stopped run can then write its checkpoint within the limit. While the server and
the node communicate, device usage never exceeds a hard limit. Without communication, each run can exceed the limit by
the cost of `partition_grace`.

If earlier runs have the same name, a run holds at most the remaining part of the longest earlier duration. A run that
takes longer than all earlier runs holds the full amount again. If the budget cannot cover the full amount, the server
stops the run. The stopped run may exceed the limit by the cost of one minute.

    used                       held
    ├──────────────────────────┼───────────────────────────────┤
    user code begins           last report         now         now + ahead; after a stop request, stop + grace + 15 s

A hold ends with the budget period, because the next period pays for later usage.

The server grants holds to runs in the order of their placement. The server first stops the most recently placed runs.
Other runs continue while the remaining budget covers their holds. No other run can use the money that a run with a stop
request holds.

Budgets, alarms and fair share use the teams that a run has at submission:

    team="search"             search
    no team, member of some   all of them in budgets; the first by name in fair share, which needs exactly one
    no team, member of none   no team; in fair share, the owner alone

A member therefore cannot avoid a team's budget and fair share by omitting the team.

    forecast    use so far  +  average use per day, over the last seven days and today  ×  days left in the period
    alarm       a run        its use per hour  >  3 × the median of at least 5 earlier runs with its name
                a team       its use in the last hour  >  3 × the median of its own hours with any use, over 4 weeks,
                             of at least 24 hours

Alarms compare with a median, because one expensive night would raise an average.

Failure cases: A silent node may still use devices. The budget therefore also holds the possible device usage of a
silent node's runs until now, up to `partition_grace`. The server counts the real usage when the node reports again.
Device time without a price costs nothing. A money budget shows the unpriced time but does not stop unpriced runs. A
budget with an unknown time zone uses UTC. Messages omit amounts for readers who may not see amounts.
"""

from __future__ import annotations

import datetime
import statistics
import zoneinfo
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Literal, get_args

import msgspec

from serverless_gpu import units
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS, bounds_ns, format_day, local_day

AHEAD_S = 60.0
"""Minimum number of seconds whose cost a run reserves in advance. A longer grace period replaces the minimum."""
STOPPING_S = 15.0
"""Seconds of cost that a run reserves beyond its grace period, for the next budget check and the stop request."""
LOOK_S = 5.0
"""Seconds between budget checks. The server may notice a used-up budget `LOOK_S` seconds late."""
LONGER = 1.25
"""Factor of the longest earlier duration above which a run reserves the full hold."""
WARN_AT = (80, 95)
"""Percentages of a limit at which the server sends a warning, once per period."""
FULL = 100
CLOSED = 101
"""Warning threshold of a hard budget that stopped runs to stay within its limit. Other thresholds are percentages."""
ScopeKind = Literal["everything", "user", "team", "pool", "policy", "tag"]
SCOPES: tuple[ScopeKind, ...] = get_args(ScopeKind)


class Period(StrEnum):
    """Length of a budget period, in the budget's time zone."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Principal, pool, policy or tag whose device usage a budget counts."""

    kind: ScopeKind
    # Name of the user, service, team, pool or policy. The name of a tag scope is `key=value`, or `key` for any value.
    name: str = ""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget with a limit of either money or GPU time."""

    scope: Scope
    period: Period  # Budget period: each day, week or month.
    limit_micros: int | None = None  # Limit in millionths of the currency unit. Unpriced time costs 0.
    limit_gpu_ms: int | None = None  # Limit in GPU-milliseconds, without the time of CPU slots.
    # At 100 %, the server stops the runs of a hard budget. For a soft budget, the server only refuses new runs.
    hard: bool = False
    # Time zone of the budget periods, such as "Europe/Berlin". An empty name selects the team's time zone, or UTC.
    time_zone: str = ""

    @property
    def zone(self) -> datetime.tzinfo:
        """Return the time zone of the budget periods, or UTC if the machine does not know the zone."""
        try:
            return datetime.UTC if self.time_zone in ("", "UTC") else zoneinfo.ZoneInfo(self.time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, OSError):
            return datetime.UTC

    @property
    def limit(self) -> int:
        """Return the budget's limit in micros or GPU-milliseconds."""
        return self.limit_micros if self.limit_micros is not None else self.limit_gpu_ms or 0

    def counts(self, use: BudgetUse) -> int:
        """Return the amount of a device usage in the unit of the budget's limit."""
        return use.micros if self.limit_micros is not None else use.gpu_ms


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Run attributes that determine the budgets for the run's device usage."""

    owner: str
    team: str = ""
    pool: str = ""
    policy: str = ""
    tags: dict[str, str] = {}
    is_cpu: bool = False  # True for runs on CPU slots. Only money budgets count the time of CPU slots.
    # Teams of the run's owner. A run without a team counts in the budgets of all teams of its owner.
    member_of: tuple[str, ...] = ()

    @property
    def teams(self) -> tuple[str, ...]:
        """Return the teams whose budgets include the run."""
        return teams_charged(self.team, self.member_of)


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """Device usage that counts toward budgets. Budgets exclude attempts that fail because of the platform."""

    micros: int = 0  # Cost in millionths of the currency unit.
    gpu_ms: int = 0  # Total GPU-milliseconds, with or without a price.
    unpriced_ms: int = 0  # GPU-milliseconds of devices without a price.

    def __add__(self, other: BudgetUse) -> BudgetUse:
        """Return the sum of two device usages."""
        return BudgetUse(
            micros=self.micros + other.micros,
            gpu_ms=self.gpu_ms + other.gpu_ms,
            unpriced_ms=self.unpriced_ms + other.unpriced_ms,
        )

    def __sub__(self, other: BudgetUse) -> BudgetUse:
        """Return the difference of two device usages."""
        return BudgetUse(
            micros=self.micros - other.micros,
            gpu_ms=self.gpu_ms - other.gpu_ms,
            unpriced_ms=self.unpriced_ms - other.unpriced_ms,
        )


NOTHING = BudgetUse()


class Spender(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that uses devices or may still use them."""

    run_id: str
    fence: int
    gpus: int  # Number of devices.
    micros_per_hour: int | None  # Cost per hour of the attempt's devices, cores and memory. None without a price.
    placed_ns: int  # Time at which the scheduler allocated the attempt's devices, in nanoseconds since 1970.
    started_ns: int | None  # Time at which user code began, or None before user code begins.
    seen_ns: int  # Time of the attempt's last report, or the time at which the attempt ended.
    grace_s: float  # Grace period of the ranks after a stop request.
    alone_s: float  # Longest time that the attempt continues without an answer from the server.
    stop_ns: int | None = None  # Time at which the server requested a stop of the attempt, or None without a request.
    is_over: bool = False  # True if the attempt has ended and reserves no budget.
    # Longest device time of earlier runs with the same name, or None when unknown.
    longest_s: float | None = None


class BudgetWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Budget period of one day, week or month, in nanoseconds since 1970 and without `end_ns` itself."""

    start_ns: int
    end_ns: int

    @property
    def days(self) -> range:
        """Return the day numbers (UTC days since 1970-01-01) that overlap the window."""
        return range(self.start_ns // DAY_NS, -(-self.end_ns // DAY_NS))


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A budget's usage in one period, and the runs that the server must stop."""

    budget: Budget
    window: BudgetWindow
    used: BudgetUse  # Device usage up to each attempt's last report.
    held: BudgetUse  # Device usage reserved for running attempts within the period, usually one minute ahead.
    # Device usage reserved for running attempts, also beyond the end of the period. The server compares the reserved
    # usage with the limit of the next period.
    ahead: BudgetUse = NOTHING
    stop: tuple[str, ...] = ()  # Runs that the server must stop because a hard budget cannot cover their holds.
    # True after the budget has stopped a run in the period or is used up. Stopped runs release their holds. The server
    # admits no new run for the released amount, because the budget would stop the new run too. New runs start when the
    # limit changes or the period ends.
    is_closed: bool = False

    @property
    def left(self) -> int:
        """Return the limit minus usage and holds, which may be negative."""
        return self.budget.limit - self.budget.counts(self.used) - self.budget.counts(self.held)

    @property
    def is_spent(self) -> bool:
        """Return True if the device usage has reached the budget's limit."""
        return self.budget.counts(self.used) >= self.budget.limit

    @property
    def is_used_up(self) -> bool:
        """Return True if the budget admits no new run, even if running attempts release their holds."""
        return self.is_closed or self.is_spent

    @property
    def percent(self) -> float:
        """Return the used percentage of the budget's limit."""
        return 100.0 * self.budget.counts(self.used) / self.budget.limit if self.budget.limit else 100.0

    @property
    def reached(self) -> tuple[int, ...]:
        """Return the reached warning thresholds, from `WARN_AT`, `FULL` and `CLOSED`.

        For a hard budget, holds count toward the thresholds. Without the holds, a budget for only a few minutes of its
        runs would close without a warning.
        """
        used, limit = self.budget.counts(self.used), self.budget.limit
        taken = used + (self.budget.counts(self.held) if self.budget.hard else 0)
        marks = tuple(mark for mark in WARN_AT if taken * FULL >= limit * mark)
        if self.is_spent:
            marks += (FULL,)
        return (*marks, CLOSED) if self.budget.hard and (self.is_closed or self.stop) else marks


def window(period: Period, at_ns: int, zone: datetime.tzinfo = datetime.UTC) -> BudgetWindow:
    """Return the day, week or month that contains a timestamp."""
    start_ns, end_ns = bounds_ns(period.value, at_ns, zone)
    return BudgetWindow(start_ns=start_ns, end_ns=end_ns)


def keys(subject: Subject) -> list[tuple[ScopeKind, str]]:
    """Return the scopes of a run as (kind, name). A run counts toward each budget with one of the scopes."""
    found: list[tuple[ScopeKind, str]] = [("everything", ""), ("user", subject.owner)]
    found += [("team", team) for team in subject.teams]
    named: tuple[tuple[ScopeKind, str], ...] = (
        ("pool", subject.pool),
        ("policy", subject.policy),
    )
    found += [(kind, name) for kind, name in named if name]
    for key, value in subject.tags.items():
        if "=" in key:
            # Skip tag keys with "=", because a budget for the tag key "a" could otherwise match the tag "a=b=c". A tag
            # key with "=" must not move a run into or out of a budget.
            continue
        found += [("tag", key), ("tag", f"{key}={value}")]
    return found


def teams_charged(team: str, member_of: Sequence[str]) -> tuple[str, ...]:
    """Return the teams whose budgets include a run, sorted by name."""
    return (team,) if team else tuple(sorted(set(member_of) - {""}))


def share_team(team: str, member_of: Sequence[str]) -> str:
    """Return the team whose fair share a run uses, or "" without a team.

    Choosing the first team by name gives no member an advantage, because a member may choose any team. `share_team`
    takes the same arguments as `teams_charged`.
    """
    return next(iter(teams_charged(team, member_of)), "")


# --- device usage and holds of one attempt ----------------------------------------------------------------------------


def ahead_ns(grace_s: float) -> int:
    """Return an attempt's hold in nanoseconds, which covers its stop time and at least a minute."""
    return round(max(AHEAD_S, grace_s + STOPPING_S) * 1e9)


def costs(ns: int, *, gpus: int, micros_per_hour: int | None) -> BudgetUse:
    """Return the device usage for a duration on a number of devices.

    `micros_per_hour` is the price of all devices together, or None without a price.
    """
    ms = ns // 1_000_000
    gpu_ms = units.gpu_milliseconds(gpus, ms)
    if micros_per_hour is None:
        return BudgetUse(gpu_ms=gpu_ms, unpriced_ms=gpu_ms)
    return BudgetUse(micros=units.micros_for(ms, micros_per_hour), gpu_ms=gpu_ms)


def used(one: Spender, within: BudgetWindow) -> BudgetUse:
    """Return an attempt's device usage in a period, up to the attempt's last report."""
    if one.started_ns is None:
        return NOTHING
    ns = min(one.seen_ns, within.end_ns) - max(one.started_ns, within.start_ns)
    return costs(max(0, ns), gpus=one.gpus, micros_per_hour=one.micros_per_hour)


def _learned_ns(grace_s: float, longest_s: float | None) -> int | None:
    """Return the expected device time of an attempt in nanoseconds, or None when unknown.

    A run with a long grace period reserves the full grace period. A run therefore exceeds its expected usage by at most
    75 seconds.
    """
    if longest_s is None or grace_s > AHEAD_S:
        return None
    return round((LONGER * longest_s + LOOK_S) * 1e9)


def held(one: Spender, now_ns: int, within: BudgetWindow | None = None) -> BudgetUse:
    """Return the reserved usage of an attempt after the attempt's last report.

    If `within` is a budget period, the hold covers only that period.
    """
    if one.is_over:
        return NOTHING
    ahead = ahead_ns(one.grace_s)
    until_ns = now_ns + ahead
    learned = _learned_ns(one.grace_s, one.longest_s)
    ends_ns = None if learned is None else (now_ns if one.started_ns is None else one.started_ns) + learned
    if ends_ns is not None and now_ns < ends_ns:
        until_ns = min(until_ns, ends_ns)
    if one.stop_ns is not None:
        until_ns = max(now_ns, one.stop_ns + round((one.grace_s + STOPPING_S) * 1e9))
    from_ns = now_ns
    if one.started_ns is not None:
        # The node ends the attempt after `partition_grace` without contact, even if the server cannot reach the node.
        until_ns = min(until_ns, one.seen_ns + round(one.alone_s * 1e9) + ahead)
        from_ns = one.seen_ns
    if within is not None:
        from_ns, until_ns = max(from_ns, within.start_ns), min(until_ns, within.end_ns)
    return costs(max(0, until_ns - from_ns), gpus=one.gpus, micros_per_hour=one.micros_per_hour)


def first_hold(grace_s: float, *, gpus: int, micros_per_hour: int | None, longest_s: float | None = None) -> BudgetUse:
    """Return the reserved usage that a budget must cover before a run can start.

    `micros_per_hour` is the price of all devices together, or None without a price.
    """
    learned = _learned_ns(grace_s, longest_s)
    ns = ahead_ns(grace_s) if learned is None else min(ahead_ns(grace_s), learned)
    return costs(ns, gpus=gpus, micros_per_hour=micros_per_hour)


# --- decisions --------------------------------------------------------------------------------------------------------


_Gang = tuple[str, int]
"""Identifies an attempt: run ID and attempt number."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """Device usage and holds of an attempt in one period. `ahead` is the hold without a period limit."""

    spender: Spender
    used: BudgetUse
    held: BudgetUse
    ahead: BudgetUse


def weigh(one: Spender, within: BudgetWindow, now_ns: int) -> Weighed:
    """Return the device usage and the holds of an attempt in a period."""
    ahead = held(one, now_ns)
    is_whole = within.start_ns <= one.seen_ns and now_ns + ahead_ns(one.grace_s) <= within.end_ns
    return Weighed(
        spender=one, used=used(one, within), held=ahead if is_whole else held(one, now_ns, within), ahead=ahead
    )


def judge(
    budget: Budget,
    posted: BudgetUse,
    going_on: Sequence[Spender],
    now_ns: int,
    known: dict[_Gang, Weighed] | None = None,
) -> Standing:
    """Return a budget's usage in a period, and the runs that the server must stop.

    `posted` is the usage in the ledger, without the attempts in `going_on`. `known` caches the weighed attempts for
    further budgets with the same period.
    """
    within = window(budget.period, now_ns, budget.zone)
    known = {} if known is None else known
    weighed: list[Weighed] = []
    for one in going_on:
        gang = (one.run_id, one.fence)
        if gang not in known:
            known[gang] = weigh(one, within, now_ns)
        weighed.append(known[gang])
    spent = _sum(posted, (each.used for each in weighed))
    together = _sum(NOTHING, (each.held for each in weighed))
    left = budget.limit - budget.counts(spent)
    stop: list[str] = []
    if budget.hard and left < budget.counts(together):
        # Sort attempts with a stop request first, because attempts with a stop request keep their hold. Sort all other
        # attempts by placement time.
        for each in sorted(
            weighed, key=lambda one: (one.spender.stop_ns is None, one.spender.placed_ns, one.spender.run_id)
        ):
            hold = budget.counts(each.held)
            left -= hold
            if left < 0 and hold and each.spender.stop_ns is None:
                stop.append(each.spender.run_id)
    return Standing(
        budget=budget,
        window=within,
        used=spent,
        held=together,
        ahead=_sum(NOTHING, (each.ahead for each in weighed)),
        stop=tuple(stop),
    )


def _sum(first: BudgetUse, others: Iterable[BudgetUse]) -> BudgetUse:
    micros, gpu_ms, unpriced_ms = first.micros, first.gpu_ms, first.unpriced_ms
    for one in others:
        micros += one.micros
        gpu_ms += one.gpu_ms
        unpriced_ms += one.unpriced_ms
    return BudgetUse(micros=micros, gpu_ms=gpu_ms, unpriced_ms=unpriced_ms)


def may_start(standing: Standing, hold: BudgetUse) -> bool:
    """Return True if one budget admits a run.

    `standing` includes the holds of runs that start in the same scheduler tick.
    """
    if standing.is_used_up:
        return False
    wants = standing.budget.counts(hold)
    if not standing.budget.hard:
        return standing.left > 0 or not wants
    # The next period must also cover the runs that continue into that period.
    return wants <= min(standing.left, standing.budget.limit - standing.budget.counts(standing.ahead))


def is_refused(standing: Standing, hold: BudgetUse) -> bool:
    """Return True if a budget cannot admit a run in a period, even after other runs release their holds."""
    if standing.is_used_up:
        return True
    return standing.budget.hard and standing.budget.counts(standing.used + hold) > standing.budget.limit


def part_until(amount: int, gpu_ms: int, gpus: int, start_ns: int, end_ns: int, until_ns: int) -> int:
    """Return the part of a charge for usage before a given time within the charge's UTC day.

    A budget period in another time zone begins within a UTC day. The parts before and after `until_ns` add up to the
    whole amount. `amount` and `gpu_ms` may be negative. Device usage is at the end of a charge's time range, because
    the node first prepares the environment and starts the ranks.
    """
    took_ns = abs(gpu_ms) // gpus * 1_000_000 if gpus > 0 else 0
    from_ns = max(start_ns, end_ns - took_ns) if took_ns else start_ns
    if until_ns >= end_ns:
        return amount
    if until_ns <= from_ns:
        return 0
    sign = -1 if amount < 0 else 1
    return sign * (abs(amount) * (until_ns - from_ns) // (end_ns - from_ns))


# --- messages ---------------------------------------------------------------------------------------------------------


PERIOD_WORDS = {Period.DAY: "today", Period.WEEK: "this week", Period.MONTH: "this month"}


def amount_text(budget: Budget, amount: int, currency: str) -> str:
    """Return an amount in a budget's unit as text, such as ``81.20 USD`` or ``12.3 GPU-hours``."""
    if budget.limit_micros is not None:
        return units.format_micros(amount, currency)
    return units.format_gpu_ms(amount)


def used_text(standing: Standing, currency: str) -> str:
    """Return the used amount, the limit and the period, such as ``81.20 of 100.00 USD this month``."""
    budget = standing.budget
    limit = amount_text(budget, budget.limit, currency)
    amount = amount_text(budget, budget.counts(standing.used), currency)
    unit = f" {limit.rpartition(' ')[2]}"
    return f"{amount.removesuffix(unit)} of {limit} {PERIOD_WORDS[budget.period]}"


def left_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the budget's name, the remaining amount, the limit and the period as text."""
    budget, when = standing.budget, PERIOD_WORDS[standing.budget.period]
    if not is_open:
        return f"{name}: {'used up' if standing.is_used_up else 'not used up'} {when}"
    limit = amount_text(budget, budget.limit, currency)
    there = amount_text(budget, max(0, standing.left), currency).removesuffix(f" {limit.rpartition(' ')[2]}")
    return f"{name}: {there} of {limit} left {when}"


def refused_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the reason why a budget refuses a run until the period ends, as text."""
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    if standing.is_closed:
        return (
            f"budget {name!r} has stopped runs {when}: the remaining amount does not cover another minute of "
            f"its runs{amounts}"
        )
    return f"the remaining amount of budget {name!r} {when} does not cover the first minute of the run{amounts}"


def stopped_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the reason why the server stops a run for its budget, as text."""
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return f"the remaining amount of budget {name!r} {when} does not cover the run's next minute{amounts}"


def warning_text(name: str, standing: Standing, currency: str, *, is_open: bool, mark: int = 0) -> str:
    """Return the warning about a budget's usage and its consequences for runs.

    `mark` selects a reached warning threshold. The default 0 selects the highest reached threshold.
    """
    mark = mark or max(standing.reached, default=0)
    is_hard, when, amounts = standing.budget.hard, _when(standing), _amounts(standing, currency, is_open=is_open)
    if mark == CLOSED:
        count = len(standing.stop)
        stops = f"{count} {'run is' if count == 1 else 'runs are'} stopped" if count else "the budget has stopped runs"
        then = (
            "the server stops the latest runs first, keeps the runs that the remaining amount covers, and "
            "starts no new run"
        )
        return (
            f"budget {name!r} is closed {when}: the remaining amount does not cover all its runs{amounts}; "
            f"{stops}; {then}"
        )
    if mark == FULL:
        then = "the server stops its runs, with their grace period for a checkpoint" if is_hard else "no new run starts"
        return f"{_is_used_up(name, standing, currency, is_open=is_open)}; {then}"
    then = (
        "at 100 % the server stops its runs, with their grace period for a checkpoint"
        if is_hard
        else "at 100 % no new run starts"
    )
    if standing.percent >= mark:
        return f"budget {name!r} is at {int(standing.percent)} % {when}{amounts}; {then}"
    return f"{mark} % of budget {name!r} is used or held by running attempts {when}{amounts}; {then}"


def goes_on_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the message for a run that continues after the budget has stopped other runs."""
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return (
        f"budget {name!r} no longer covers all its runs {when}{amounts}, but this run "
        "continues while the remaining amount covers the run"
    )


def no_room_text(name: str, standing: Standing) -> str:
    """Return the reason why a run waits for a budget, without amounts that change all the time."""
    when = _when(standing)
    if standing.is_spent:
        return f"budget {name!r} is used up {when}; {renewal_text(standing)}"
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when} and is closed; {renewal_text(standing)}"
    return (
        f"budget {name!r} does not yet cover the first minute of this run {when}, because of its usage or the "
        f"holds of running attempts; {renewal_text(standing)}"
    )


def _is_used_up(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    said = f": {used_text(standing, currency)}" if is_open else f" {_when(standing)}"
    return f"budget {name!r} is used up{said}"


def _when(standing: Standing) -> str:
    return PERIOD_WORDS[standing.budget.period]


def _amounts(standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the used amount in parentheses, or "" for readers without the right to see amounts."""
    return f" ({used_text(standing, currency).removesuffix(_when(standing))}used)" if is_open else ""


def renewal_text(standing: Standing) -> str:
    """Return a clause that names the start of the next budget period."""
    return f"the next period begins on {next_day_text(standing)}"


def next_day_text(standing: Standing) -> str:
    """Return the first day of the next budget period with its time zone, such as ``2026-12-01 (UTC)``."""
    budget = standing.budget
    return f"{format_day(local_day(standing.window.end_ns, budget.zone))} ({budget.time_zone or 'UTC'})"


FORECAST_DAYS = 7
"""Number of days before today that a forecast includes."""
FACTOR = 3
"""Ratio of the current spending rate to the usual rate that raises an alarm."""
RUNS_MIN = 5
RUNS_MAX = 50
"""Minimum and maximum number of earlier runs for the median rate of a run name."""
HOURS_MIN = 24
HOURS = 28 * 24
"""Minimum number of hours in a team's median rate, and the maximum age of an hour in that median."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A budget's expected usage at the end of a period."""

    amount: int  # Expected usage at the end of the budget period, in the unit of the limit.
    per_day: int  # Usage per day that the forecast assumes.
    # Time at which usage reaches the limit, in nanoseconds since 1970, or None if later than the period.
    reached_ns: int | None
    basis: str  # Formula of the forecast as text.


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Alarm about a spending rate far above the usual rate."""

    rate: int  # Current usage per hour.
    usual: int  # Median usage per hour.
    count: int  # Number of earlier runs or hours in the median.


def forecast(standing: Standing, by_day: Mapping[int, int], now_ns: int) -> Forecast:
    """Return the expected usage of a budget at the end of its period."""
    budget, within = standing.budget, standing.window
    today = now_ns // DAY_NS
    there = [day for day, amount in by_day.items() if today - FORECAST_DAYS <= day <= today and amount]
    first = min(there, default=today)
    looked_ns = max(1, now_ns - first * DAY_NS)
    amount = sum(by_day[day] for day in there)
    spent = budget.counts(standing.used)
    left_ns = max(0, within.end_ns - now_ns)
    at_end = spent + amount * left_ns // looked_ns
    reached_ns = None
    if spent >= budget.limit:
        reached_ns = now_ns
    elif amount and at_end >= budget.limit:
        reached_ns = now_ns + (budget.limit - spent) * looked_ns // amount
    days = today - first
    basis = "used so far + use per day since " + (f"{days} days ago" if days else "midnight") + " × days left"
    return Forecast(amount=at_end, per_day=amount * DAY_NS // looked_ns, reached_ns=reached_ns, basis=basis)


def unusual(rate: int, earlier: Sequence[int], *, least: int) -> Alarm | None:
    """Return an alarm if a spending rate is far above the median of earlier rates, else None."""
    past = [one for one in earlier if one > 0]
    if len(past) < max(1, least):
        return None
    usual = statistics.median_low(past)
    return Alarm(rate=rate, usual=usual, count=len(past)) if rate > FACTOR * usual else None


def spread(amount: int, start_ns: int, end_ns: int) -> dict[int, int]:
    """Divide an amount evenly over the hours of a time range of at most a day."""
    first, last = start_ns // HOUR_NS, max(start_ns, end_ns - 1) // HOUR_NS
    length = max(1, end_ns - start_ns)
    found: dict[int, int] = {}
    given = 0
    for hour in range(first, last + 1):
        until = length if hour == last else (hour + 1) * HOUR_NS - start_ns
        upto = amount * until // length
        found[hour], given = upto - given, upto
    return found
