"""Budgets: how much money or GPU time a user, team or pool may use in a period; forecasts and alarms.

    charges of the period ─┐
    what goes on now ──────┼─▶ standing: used, held, limit ─┬─▶ 80 %, 95 %: one warning each
    what each run holds ───┘                                ├─▶ used up: nothing new starts; soft: the others finish
                                                            └─▶ closed (hard): who cannot hold its share is stopped

A run holds what its next minute costs, or its grace when that is longer. What cannot be held any more is the sign to
stop, so that the checkpoint is written with money that is there. That bounds what is used beyond a hard limit: nothing
while server and node talk, and `partition_grace` of its devices for each run while they do not.

A run whose earlier runs are known holds no more than the longest of them would still use. When it takes longer, it
holds as any other; if there is no room for that, it is stopped, and may have used its minute beyond the limit.

    used                       held
    ├──────────────────────────┼───────────────────────────────┤
    user code begins           last sign of life    now        now + ahead; once it is asked, the stop + grace + 15 s

At the end of a period a run holds what is left of the period: what comes after it is paid by the next.

What holds was let in one after the other: those that were placed last are stopped first, and the others go on as long
as what is left holds for them. One that has been asked to stop keeps what it holds: no other run gets that.

Teams that a run counts for, in budgets, in alarms and in the fair share alike, as they are when it is submitted:

    team="search"             search
    no team, member of some   all of them in budgets; the first by name in the fair share, where one has to pay
    no team, member of none   no team; in the fair share, the owner alone

So no member escapes a team's budget and share by leaving the team out.

    forecast    used so far  +  what a day used on average, over the last seven and today  ×  days that are left
    alarm       a run        what it uses in an hour  >  3 × the median of earlier runs of its name, at least 5 of them
                a team       what it used in the last hour  >  3 × the median of its own hours, those in which it used
                             something, over 4 weeks; at least 24 of them

Alarms compare with a median: one night that went wrong does not make the next one usual.

Failure cases: a node that is silent may be using devices, so what it may use until now is held as well, up to its
`partition_grace`; what it used is counted once the node reports it. Time without a price is no money: a budget of money
says how much of it there was, and stops nothing that costs nothing. A time zone that the machine does not know any more
is UTC. Messages to readers who may not see the amounts leave them out.
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
"""How much of its time a run holds ahead, in seconds, where its grace is not longer."""
STOPPING_S = 15.0
"""What is held beyond a grace: the next look and the way to the node take that."""
LOOK_S = 5.0
"""How often the server looks at budgets: what a run may use before its end is noticed."""
LONGER = 1.25
"""How much longer than the longest of its earlier runs a run may take before it holds as any other."""
WARN_AT = (80, 95)
"""Per cent of a limit at which a warning goes out, once in a period."""
FULL = 100
CLOSED = 101
"""Mark of a hard budget that has stopped runs since it could not pay for their next minute; its per cent are others."""
ScopeKind = Literal["everything", "user", "team", "pool", "policy", "tag"]
SCOPES: tuple[ScopeKind, ...] = get_args(ScopeKind)


class Period(StrEnum):
    """The period of a limit."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The use that a budget counts."""

    kind: ScopeKind
    # Of the user, service, team, pool or policy; of a tag `key=value`, or `key` for each run that has it.
    name: str = ""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One budget; exactly one of the two limits is set."""

    scope: Scope
    period: Period  # in which
    limit_micros: int | None = None  # millionths of the currency unit; time without a price counts nothing there
    limit_gpu_ms: int | None = None  # GPU-milliseconds; those of CPU slots are none
    hard: bool = False  # whether runs are stopped at 100 %; else they finish, and nothing new starts
    time_zone: str = ""  # of its periods, as "Europe/Berlin"; "" for that of its team, or UTC

    @property
    def zone(self) -> datetime.tzinfo:
        """Return the time zone of its periods."""
        try:
            return datetime.UTC if self.time_zone in ("", "UTC") else zoneinfo.ZoneInfo(self.time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, OSError):
            return datetime.UTC

    @property
    def limit(self) -> int:
        """Return the limit that is set."""
        return self.limit_micros if self.limit_micros is not None else self.limit_gpu_ms or 0

    def counts(self, use: BudgetUse) -> int:
        """Return how much of its limit a use is."""
        return use.micros if self.limit_micros is not None else use.gpu_ms


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a run that decide which budgets it counts for."""

    owner: str
    team: str = ""
    pool: str = ""
    policy: str = ""
    tags: dict[str, str] = {}
    is_cpu: bool = False  # CPU slots: their time is no GPU-hours and counts for budgets of money alone
    member_of: tuple[str, ...] = ()  # teams of its owner; a run without a team counts for all of them

    @property
    def teams(self) -> tuple[str, ...]:
        """Return the teams whose budgets count it."""
        return teams_charged(self.team, self.member_of)


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use that counts: failures of the platform do not."""

    micros: int = 0  # millionths of the currency unit
    gpu_ms: int = 0  # GPU-milliseconds
    unpriced_ms: int = 0  # those among them that have no price

    def __add__(self, other: BudgetUse) -> BudgetUse:
        """Return both together."""
        return BudgetUse(
            micros=self.micros + other.micros,
            gpu_ms=self.gpu_ms + other.gpu_ms,
            unpriced_ms=self.unpriced_ms + other.unpriced_ms,
        )

    def __sub__(self, other: BudgetUse) -> BudgetUse:
        """Return this without the other."""
        return BudgetUse(
            micros=self.micros - other.micros,
            gpu_ms=self.gpu_ms - other.gpu_ms,
            unpriced_ms=self.unpriced_ms - other.unpriced_ms,
        )


NOTHING = BudgetUse()


class Spender(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that uses something, or may still."""

    run_id: str
    fence: int
    gpus: int  # devices that it has
    micros_per_hour: int | None  # of all it has together; None where it has no price
    placed_ns: int  # when it got them, nanoseconds since 1970, as all times here
    started_ns: int | None  # when user code began; None before
    seen_ns: int  # its last sign of life, or its end
    grace_s: float  # how long its ranks have once they are asked to stop
    alone_s: float  # the longest it goes on without an answer of the server
    stop_ns: int | None = None  # since when it is asked to stop; None while it is not
    is_over: bool = False  # whether it has ended, so that it holds nothing
    # The longest that earlier runs of its name had their devices; None where that is not known.
    longest_s: float | None = None


class BudgetWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One day, week or month: from `start_ns` until before `end_ns`, nanoseconds since 1970."""

    start_ns: int
    end_ns: int

    @property
    def days(self) -> range:
        """Return the days of UTC that it touches, since 1970-01-01; the first and the last may be whole or not."""
        return range(self.start_ns // DAY_NS, -(-self.end_ns // DAY_NS))


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a budget in a period, and its consequences."""

    budget: Budget
    window: BudgetWindow
    used: BudgetUse  # until the last signs of life
    held: BudgetUse  # for what goes on, until a minute from now, and not beyond the period
    ahead: BudgetUse = NOTHING  # the same without an end of the period: what the next one begins with
    stop: tuple[str, ...] = ()  # runs that can hold nothing any more, of a hard budget: they are to stop
    # Whether it has stopped a run in this period, or was used up. What those gave back admits no run, which would be
    # stopped in turn: nothing new starts until the limit is another one, or the period ends.
    is_closed: bool = False

    @property
    def left(self) -> int:
        """Return what of the limit is neither used nor held; negative when there is less than nothing."""
        return self.budget.limit - self.budget.counts(self.used) - self.budget.counts(self.held)

    @property
    def is_spent(self) -> bool:
        """Return whether all of the limit is used."""
        return self.budget.counts(self.used) >= self.budget.limit

    @property
    def is_used_up(self) -> bool:
        """Return whether nothing new starts, whatever is given back."""
        return self.is_closed or self.is_spent

    @property
    def percent(self) -> float:
        """Return how much of the limit is used, in per cent."""
        return 100.0 * self.budget.counts(self.used) / self.budget.limit if self.budget.limit else 100.0

    @property
    def reached(self) -> tuple[int, ...]:
        """Return the marks that are reached: of `WARN_AT`, `FULL`, `CLOSED`.

        What runs of a hard budget hold is not left for others, so it counts for a warning: otherwise a budget that is
        smaller than some minutes of its runs would close without one.
        """
        used, limit = self.budget.counts(self.used), self.budget.limit
        taken = used + (self.budget.counts(self.held) if self.budget.hard else 0)
        marks = tuple(mark for mark in WARN_AT if taken * FULL >= limit * mark)
        if self.is_spent:
            marks += (FULL,)
        return (*marks, CLOSED) if self.budget.hard and (self.is_closed or self.stop) else marks


def window(period: Period, at_ns: int, zone: datetime.tzinfo = datetime.UTC) -> BudgetWindow:
    """Return the day, week or month that a moment is in."""
    start_ns, end_ns = bounds_ns(period.value, at_ns, zone)
    return BudgetWindow(start_ns=start_ns, end_ns=end_ns)


def keys(subject: Subject) -> list[tuple[ScopeKind, str]]:
    """Return the scopes that a run is in, as kind and name: a budget of any of them counts it."""
    found: list[tuple[ScopeKind, str]] = [("everything", ""), ("user", subject.owner)]
    found += [("team", team) for team in subject.teams]
    named: tuple[tuple[ScopeKind, str], ...] = (
        ("pool", subject.pool),
        ("policy", subject.policy),
    )
    found += [(kind, name) for kind, name in named if name]
    for key, value in subject.tags.items():
        if "=" in key:
            continue  # "a=b=c" is the tag "a", and no run slips out of its budget, or into another, by a key like that
        found += [("tag", key), ("tag", f"{key}={value}")]
    return found


def teams_charged(team: str, member_of: Sequence[str]) -> tuple[str, ...]:
    """Return the teams whose budgets count a run, by name."""
    return (team,) if team else tuple(sorted(set(member_of) - {""}))


def share_team(team: str, member_of: Sequence[str]) -> str:
    """Return the team whose fair share a run uses, or ""; the arguments are those of `teams_charged`.

    A member may name any of the teams, so the first by name gives no member more than they can ask for.
    """
    return next(iter(teams_charged(team, member_of)), "")


# --- what one attempt uses, and holds ---------------------------------------------------------------------------------


def ahead_ns(grace_s: float) -> int:
    """Return how far ahead an attempt holds, nanoseconds: until it can have stopped, and a minute at least."""
    return round(max(AHEAD_S, grace_s + STOPPING_S) * 1e9)


def costs(ns: int, *, gpus: int, micros_per_hour: int | None) -> BudgetUse:
    """Return what some time of devices is.

    `micros_per_hour` is of all devices together; None without a price.
    """
    ms = ns // 1_000_000
    gpu_ms = units.gpu_milliseconds(gpus, ms)
    if micros_per_hour is None:
        return BudgetUse(gpu_ms=gpu_ms, unpriced_ms=gpu_ms)
    return BudgetUse(micros=units.micros_for(ms, micros_per_hour), gpu_ms=gpu_ms)


def used(one: Spender, within: BudgetWindow) -> BudgetUse:
    """Return what an attempt used of a period, until its last sign of life."""
    if one.started_ns is None:
        return NOTHING
    ns = min(one.seen_ns, within.end_ns) - max(one.started_ns, within.start_ns)
    return costs(max(0, ns), gpus=one.gpus, micros_per_hour=one.micros_per_hour)


def _learned_ns(grace_s: float, longest_s: float | None) -> int | None:
    """Return how long an attempt is expected to use devices, nanoseconds; None where it holds as if that were unknown.

    A long grace is held in full: what a run uses beyond what was learned stays within a minute and a quarter.
    """
    if longest_s is None or grace_s > AHEAD_S:
        return None
    return round((LONGER * longest_s + LOOK_S) * 1e9)


def held(one: Spender, now_ns: int, within: BudgetWindow | None = None) -> BudgetUse:
    """Return what an attempt holds, from its last sign of life on.

    `within` limits it to one period; None for all.
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
        # Beyond that its node has ended it, whether it is heard of or not.
        until_ns = min(until_ns, one.seen_ns + round(one.alone_s * 1e9) + ahead)
        from_ns = one.seen_ns
    if within is not None:
        from_ns, until_ns = max(from_ns, within.start_ns), min(until_ns, within.end_ns)
    return costs(max(0, until_ns - from_ns), gpus=one.gpus, micros_per_hour=one.micros_per_hour)


def first_hold(grace_s: float, *, gpus: int, micros_per_hour: int | None, longest_s: float | None = None) -> BudgetUse:
    """Return what a run has to be able to hold so that it may start.

    `micros_per_hour` is of all devices together; None without a price.
    """
    learned = _learned_ns(grace_s, longest_s)
    ns = ahead_ns(grace_s) if learned is None else min(ahead_ns(grace_s), learned)
    return costs(ns, gpus=gpus, micros_per_hour=micros_per_hour)


# --- what follows -----------------------------------------------------------------------------------------------------


_Gang = tuple[str, int]
"""A run and the number of the attempt."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at one moment, for one period: what it used of that, what it holds of it, and beyond its end."""

    spender: Spender
    used: BudgetUse
    held: BudgetUse
    ahead: BudgetUse


def weigh(one: Spender, within: BudgetWindow, now_ns: int) -> Weighed:
    """Return what an attempt used of a period, and what it holds."""
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
    """Return how a budget stands, and whom it stops.

    `posted` excludes the attempts in `going_on`. `known` caches what other budgets of this period weighed at this
    moment.
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
        # First what is on its way out, which cannot be taken back; then in the order in which they came.
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
    """Return whether a run may start, as far as one budget goes.

    `standing` includes what other runs that start now hold.
    """
    if standing.is_used_up:
        return False
    wants = standing.budget.counts(hold)
    if not standing.budget.hard:
        return standing.left > 0 or not wants
    # What goes on at the turn of a period has to fit into the next one, too.
    return wants <= min(standing.left, standing.budget.limit - standing.budget.counts(standing.ahead))


def is_refused(standing: Standing, hold: BudgetUse) -> bool:
    """Return whether a run cannot start in this period, whatever the others give back."""
    if standing.is_used_up:
        return True
    return standing.budget.hard and standing.budget.counts(standing.used + hold) > standing.budget.limit


def part_until(amount: int, gpu_ms: int, gpus: int, start_ns: int, end_ns: int, until_ns: int) -> int:
    """Return what of an amount of a charge, which is of one UTC day, lies before a moment in that day.

    A period of another zone begins within such a day. Both parts add up to the whole.
    `amount` and `gpu_ms` may have any sign. The time that counts comes last: environment and start precede it.
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
    """Return an amount of a budget for people: ``81.20 USD``, ``12.3 GPU-hours``."""
    if budget.limit_micros is not None:
        return units.format_micros(amount, currency)
    return units.format_gpu_ms(amount)


def used_text(standing: Standing, currency: str) -> str:
    """Return how much of a limit is used, and when that is: ``81.20 of 100.00 USD this month``."""
    budget = standing.budget
    limit = amount_text(budget, budget.limit, currency)
    amount = amount_text(budget, budget.counts(standing.used), currency)
    unit = f" {limit.rpartition(' ')[2]}"
    return f"{amount.removesuffix(unit)} of {limit} {PERIOD_WORDS[budget.period]}"


def left_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return what of a budget is neither used nor held: ``llm: 76.08 of 100.00 USD left this month``."""
    budget, when = standing.budget, PERIOD_WORDS[standing.budget.period]
    if not is_open:
        return f"{name}: {'used up' if standing.is_used_up else 'not used up'} {when}"
    limit = amount_text(budget, budget.limit, currency)
    there = amount_text(budget, max(0, standing.left), currency).removesuffix(f" {limit.rpartition(' ')[2]}")
    return f"{name}: {there} of {limit} left {when}"


def refused_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return why a run cannot start in this period."""
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when}: what is left did not pay for another minute of them{amounts}"
    return f"budget {name!r} has less left {when} than the run's first minute costs{amounts}"


def stopped_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return why a run is stopped."""
    if standing.is_spent:
        return _is_used_up(name, standing, currency, is_open=is_open)
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return f"what is left of budget {name!r} {when} does not pay for its next minute{amounts}"


def warning_text(name: str, standing: Standing, currency: str, *, is_open: bool, mark: int = 0) -> str:
    """Return how much of a budget is used, and what follows.

    `mark` picks one of the reached marks; 0 for the last.
    """
    mark = mark or max(standing.reached, default=0)
    is_hard, when, amounts = standing.budget.hard, _when(standing), _amounts(standing, currency, is_open=is_open)
    if mark == CLOSED:
        count = len(standing.stop)
        stops = f"{count} {'run is' if count == 1 else 'runs are'} stopped" if count else "it has stopped runs"
        then = "those that were placed last; the others go on while what is left pays for them, and nothing new starts"
        return f"budget {name!r} is closed {when}: what is left does not pay for all its runs{amounts}; {stops}, {then}"
    if mark == FULL:
        then = "its runs are stopped, with their grace for a checkpoint" if is_hard else "nothing new starts"
        return f"{_is_used_up(name, standing, currency, is_open=is_open)}; {then}"
    then = (
        "at 100 % its runs are stopped, with their grace for a checkpoint" if is_hard else "at 100 % nothing new starts"
    )
    if standing.percent >= mark:
        return f"budget {name!r} is at {int(standing.percent)} % {when}{amounts}; {then}"
    return f"{mark} % of budget {name!r} {when} is used, or held for runs that go on{amounts}; {then}"


def goes_on_text(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return the message to a run that goes on when a budget has stopped others."""
    when, amounts = _when(standing), _amounts(standing, currency, is_open=is_open)
    return (
        f"budget {name!r} does not pay for all its runs any more {when}{amounts}: those that were placed last are"
        " stopped; this one goes on while what is left pays for it"
    )


def no_room_text(name: str, standing: Standing) -> str:
    """Return why a run that a budget has no room for waits; the same for as long as it waits for the same."""
    when = _when(standing)
    if standing.is_spent:
        return f"budget {name!r} is used up {when}; {renewal_text(standing)}"
    if standing.is_closed:
        return f"budget {name!r} has stopped runs {when}, and is closed; {renewal_text(standing)}"
    return (
        f"budget {name!r} has no room for it: what is left {when} is less than its first minute,"
        f" or held for runs that go on; {renewal_text(standing)}"
    )


def _is_used_up(name: str, standing: Standing, currency: str, *, is_open: bool) -> str:
    said = f": {used_text(standing, currency)}" if is_open else f" {_when(standing)}"
    return f"budget {name!r} is used up{said}"


def _when(standing: Standing) -> str:
    return PERIOD_WORDS[standing.budget.period]


def _amounts(standing: Standing, currency: str, *, is_open: bool) -> str:
    """Return how much is used, in brackets: for those who may know it."""
    return f" ({used_text(standing, currency).removesuffix(_when(standing))}used)" if is_open else ""


def renewal_text(standing: Standing) -> str:
    """Return when the next period begins, in words."""
    return f"the next period begins on {next_day_text(standing)}"


def next_day_text(standing: Standing) -> str:
    """Return the day on which the next period begins, with its time zone: ``2026-12-01 (UTC)``."""
    budget = standing.budget
    return f"{format_day(local_day(standing.window.end_ns, budget.zone))} ({budget.time_zone or 'UTC'})"


FORECAST_DAYS = 7
"""How many days before today a forecast looks at."""
FACTOR = 3
"""How many times the usual is an alarm."""
RUNS_MIN = 5
RUNS_MAX = 50
"""How many earlier runs of a name say what is usual, at least and at most."""
HOURS_MIN = 24
HOURS = 28 * 24
"""How many hours say what is usual for a team, at least, and how far back they go."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The expected use at the end of a period."""

    amount: int  # what will be used at its end, in the unit of the limit
    per_day: int  # the rate that this rests on
    reached_ns: int | None  # when the limit is used up at that rate, nanoseconds since 1970; None: not in this period
    basis: str  # what it rests on, in words


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A spend rate far above the usual one."""

    rate: int  # in an hour, now
    usual: int  # in an hour, the median
    count: int  # how many runs, or hours, that is the median of


def forecast(standing: Standing, by_day: Mapping[int, int], now_ns: int) -> Forecast:
    """Return where a budget's period ends."""
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
    """Return an alarm when a rate is far above the median of earlier ones, where there are enough of them."""
    past = [one for one in earlier if one > 0]
    if len(past) < max(1, least):
        return None
    usual = statistics.median_low(past)
    return Alarm(rate=rate, usual=usual, count=len(past)) if rate > FACTOR * usual else None


def spread(amount: int, start_ns: int, end_ns: int) -> dict[int, int]:
    """Divide an amount evenly over the hours since 1970 between start and end, at most a day apart."""
    first, last = start_ns // HOUR_NS, max(start_ns, end_ns - 1) // HOUR_NS
    length = max(1, end_ns - start_ns)
    found: dict[int, int] = {}
    given = 0
    for hour in range(first, last + 1):
        until = length if hour == last else (hour + 1) * HOUR_NS - start_ns
        upto = amount * until // length
        found[hour], given = upto - given, upto
    return found
