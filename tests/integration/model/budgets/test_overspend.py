"""A hard budget is not overspent while server and nodes talk, else by partition_grace of the devices of a run at most.

A small world in virtual time: runs come, begin, end, are stopped and heed it at once or with the last second of their
grace; nodes are cut off and end their ranks by themselves; charges are written late. The budget is looked at every five
seconds at most, as the server does, and decides by what the server can know. What was really used is reckoned apart.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serverless_gpu.model.billing.budget import (
    NOTHING,
    Budget,
    BudgetUse,
    Period,
    Scope,
    Spender,
    Standing,
    first_hold,
    judge,
    may_start,
    window,
)
from serverless_gpu.model.billing.ledger import LedgerLine, lines
from serverless_gpu.model.billing.pricing import Tariff, rate
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind

USD = 1_000_000
MS = 1_000_000
SECOND = 1_000_000_000
LOOK_S, WAY_S, HEARTBEAT_S = 5.0, 9.0, 5.0
DAY_S = 86_400
BEGIN_NS = 20_000 * DAY_S * SECOND


@dataclasses.dataclass
class Job:
    """A run that has devices, as it really is."""

    name: str
    gpu_type: str
    gpus: int
    cpus: int
    memory_bytes: int
    tariff: Tariff
    grace_s: float
    lasts_s: float
    heeds_s: float
    gate_s: float
    alone_s: float
    longest_s: float | None = None
    placed_ns: int = 0
    exec_ns: int = 0
    cut: tuple[int, int] = (0, 0)
    seen_ns: int = 0
    is_known: bool = False
    stop_ns: int | None = None
    told_ns: int | None = None
    asked_ns: int | None = None
    exited_ns: int | None = None
    freed_ns: int | None = None
    heard_ns: int | None = None
    charged_ns: int | None = None
    charges: tuple[LedgerLine, ...] = ()

    @functools.cached_property
    def rate(self) -> int | None:
        """What the server takes it to cost in an hour."""
        given = {"gpus": self.gpus, "cpus": self.cpus, "memory_bytes": self.memory_bytes}
        return rate(self.tariff, gpu_type=self.gpu_type, **given)

    def is_cut(self, at_ns: int) -> bool:
        return self.cut[0] <= at_ns < self.cut[1]

    def spender(self) -> Spender:
        return Spender(
            run_id=self.name,
            fence=1,
            gpus=self.gpus,
            micros_per_hour=self.rate,
            placed_ns=self.placed_ns,
            started_ns=self.exec_ns if self.is_known else None,
            seen_ns=self.seen_ns if self.heard_ns is None or self.freed_ns is None else self.freed_ns,
            grace_s=self.grace_s,
            alone_s=self.alone_s,
            stop_ns=self.stop_ns,
            is_over=self.heard_ns is not None,
            longest_s=self.longest_s,
        )

    def charge(self) -> None:
        """Write into the ledger what its facts say, in the order in which it happened."""
        assert self.exited_ns is not None and self.freed_ns is not None
        told = [(FactKind.RESERVED, self.placed_ns), (FactKind.EXEC, self.exec_ns)]
        told += [] if self.asked_ns is None else [(FactKind.STOPPING, self.asked_ns)]
        told += [(FactKind.EXITED, self.exited_ns), (FactKind.FREED, self.freed_ns)]
        told.sort(key=lambda each: each[1])
        facts = [self._fact(seq, kind, at_ns) for seq, (kind, at_ns) in enumerate(told, 1)]
        self.charges = lines(facts, self.tariff)

    def _fact(self, seq: int, kind: FactKind, at_ns: int) -> Fact:
        named = "CPU" if self.gpu_type == CPU else "GPU"
        return Fact(
            attempt=f"{self.name}:1",
            seq=seq,
            kind=kind,
            boot_id="b",
            boottime_ns=at_ns - BEGIN_NS,
            wall_ns=at_ns,
            gpus=tuple(f"{named}-{index}" for index in range(self.gpus)),
            cpus=self.cpus,
            memory_bytes=self.memory_bytes,
            grace_ms=round(1000 * self.grace_s) if kind is FactKind.STOPPING else None,
        )

    def really_used(self, start_ns: int, end_ns: int) -> Fraction:
        """What is to be paid of it between two moments: user code and what follows, until its grace is over."""
        until = end_ns if self.freed_ns is None else min(self.freed_ns, end_ns)
        if self.asked_ns is not None:
            until = min(until, self.asked_ns + round(self.grace_s * SECOND))
        first, last = max(0, start_ns - self.exec_ns) // MS, max(0, until - self.exec_ns) // MS
        return self.price_of_hour() * max(0, last - first) / 3_600_000

    def alone(self) -> Fraction:
        """What it costs at most after the server was heard of last: its node's patience, and a minute or its grace."""
        return self.price_of_hour() * Fraction(self.alone_s + max(60.0, self.grace_s + 15.0)) / 3_600

    def longer(self) -> Fraction:
        """What it costs at most after it took longer than earlier ones: a look, the way to it and its grace."""
        if self.longest_s is None or self.grace_s > 60.0:
            return Fraction(0)
        return self.price_of_hour() * Fraction(self.grace_s + 15.0) / 3_600

    def price_of_hour(self) -> Fraction:
        """What an hour of it costs, micros; a CPU slot is a device and brings its own core."""
        if self.tariff.gpu_micros_per_hour is None:
            return Fraction(0)
        cores = max(0, self.cpus - self.gpus) if self.gpu_type == CPU else self.cpus
        gib = Fraction(self.memory_bytes // 2**20, 1024)
        beside = cores * (self.tariff.core_micros_per_hour or 0) + gib * (self.tariff.memory_micros_per_hour or 0)
        return self.gpus * self.tariff.gpu_micros_per_hour + beside

    def live(self, at_ns: int) -> None:
        """Let happen what has happened by a moment."""
        heeds_ns, alone_ns = round(self.heeds_s * SECOND), self.cut[0] + round(self.alone_s * SECOND)
        ends: list[tuple[int, int | None]] = [(self.exec_ns + round(self.lasts_s * SECOND), None)]
        if self.told_ns is not None and self.told_ns <= at_ns and not self.is_cut(self.told_ns):
            ends.append((max(self.exec_ns, self.told_ns + heeds_ns), self.told_ns))
        if alone_ns < self.cut[1]:  # the node ends it by itself
            ends.append((alone_ns + heeds_ns, alone_ns))
        exited_ns, asked_ns = min(ends, key=lambda end: end[0])
        if self.exited_ns is None and exited_ns <= at_ns:
            self.exited_ns, self.asked_ns = exited_ns, asked_ns
            self.freed_ns = exited_ns + round(self.gate_s * SECOND)
        if not self.is_cut(at_ns):
            if self.told_ns is not None and self.is_cut(self.told_ns):
                self.told_ns = at_ns  # it hears that it is to stop as soon as it hears anything
            self.is_known = self.is_known or self.exec_ns <= at_ns
            self.seen_ns = at_ns - at_ns % round(HEARTBEAT_S * SECOND)
            if self.freed_ns is not None and self.freed_ns <= at_ns and self.heard_ns is None:
                self.heard_ns = at_ns


class World:
    """One history."""

    def __init__(self, seed: int, *, cuts: bool, period: Period = Period.MONTH, learned: bool = False) -> None:
        self.learned = learned
        self.rng = random.Random(seed)
        self.cuts = cuts
        self.now_ns = BEGIN_NS + self.rng.randrange(DAY_S) * SECOND
        self.jobs: list[Job] = []
        self.waiting: list[Job] = []
        limit = self.rng.randrange(10, 3_000) * 1_000_000
        self.budget = Budget(scope=Scope(kind="everything"), period=period, limit_micros=limit, hard=True)
        self.standing = judge(self.budget, NOTHING, [], self.now_ns)

    def submit(self) -> None:
        rng = self.rng
        grace_s = rng.choice([0.0, 5.0, 30.0, 45.0, 120.0])
        prices = {name: rng.choice([None, 0, 40_000, 20 * USD + 1]) for name in ("core", "memory")}
        lasts_s = rng.choice([3.0, 60.0, 600.0, 1e6])
        longest_s = rng.choice([None, lasts_s / 2, lasts_s, 2 * lasts_s]) if self.learned else None
        self.waiting.append(
            Job(
                longest_s=longest_s,
                name=f"run{len(self.jobs) + len(self.waiting)}",
                gpu_type=rng.choice(["H100", "H100", CPU]),
                gpus=rng.randint(1, 8),
                cpus=rng.choice([0, 0, 1, 8, 64]),
                memory_bytes=rng.choice([0, 0, 3 * 2**20 - 1, 10**9, 512 * 2**30]),
                tariff=Tariff(
                    gpu_micros_per_hour=rng.choice([None, 0, 36 * USD, 360 * USD, 3_600 * USD, 36_000 * USD]),
                    core_micros_per_hour=prices["core"],
                    memory_micros_per_hour=prices["memory"],
                ),
                grace_s=grace_s,
                lasts_s=lasts_s,
                heeds_s=rng.choice([0.0, grace_s / 2, grace_s]),
                gate_s=rng.choice([0.0, 0.3, 4.0]),
                alone_s=rng.choice([60.0, 300.0]),
            )
        )

    def place(self) -> None:
        for job in list(self.waiting):
            standing = self.look()
            hold = first_hold(job.grace_s, gpus=job.gpus, micros_per_hour=job.rate, longest_s=job.longest_s)
            if not may_start(standing, hold):
                continue
            self.waiting.remove(job)
            job.placed_ns = job.seen_ns = self.now_ns
            job.exec_ns = self.now_ns + round(self.rng.choice([0.2, 5.0, 40.0]) * SECOND)
            if self.cuts and self.rng.random() < 0.4:
                begin = self.now_ns + round(self.rng.choice([0.0, 10.0, 100.0]) * SECOND)
                job.cut = (begin, begin + round(self.rng.choice([20.0, 200.0, 2_000.0]) * SECOND))
            self.jobs.append(job)

    def look(self) -> Standing:
        within = window(self.budget.period, self.now_ns)
        posted = NOTHING
        for job in self.jobs:
            if job.charged_ns is not None and job.charged_ns <= self.now_ns:
                posted += BudgetUse(micros=sum(line.micros or 0 for line in job.charges if line.day in within.days))
        going = [job.spender() for job in self.jobs if job.charged_ns is None or job.charged_ns > self.now_ns]
        return judge(self.budget, posted, going, self.now_ns)

    def tick(self) -> None:
        self.now_ns += round(self.rng.uniform(0.1, LOOK_S) * SECOND)
        for job in self.jobs:
            job.live(self.now_ns)
            if job.heard_ns is not None and job.charged_ns is None:
                job.charged_ns = self.now_ns + round(self.rng.choice([0.0, 30.0]) * SECOND)
                job.charge()
        if self.rng.random() < 0.2:
            self.submit()
        stop = self.look().stop
        for job in self.jobs:
            if job.name in stop:
                assert job.stop_ns is None
                job.stop_ns = self.now_ns
                job.told_ns = self.now_ns + round(self.rng.uniform(0.0, WAY_S) * SECOND)
        self.place()

    def windows(self) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield what was really used in each period, and what the runs that were cut off may have used beyond."""
        at_ns = BEGIN_NS
        while at_ns <= self.now_ns:
            within = window(self.budget.period, at_ns)
            used = sum(
                (job.really_used(within.start_ns, min(within.end_ns, self.now_ns)) for job in self.jobs), Fraction(0)
            )
            yield used, sum((job.alone() for job in self.jobs if job.cut != (0, 0)), Fraction(0))
            at_ns = within.end_ns


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_nothing_is_overspent_while_server_and_nodes_talk(seed: int) -> None:
    world = World(seed, cuts=False)
    for _ in range(250):
        world.tick()
    for used, _ in world.windows():
        assert used <= world.budget.limit, f"SEED={seed}: {float(used)} of {world.budget.limit}"


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_22D6_only_runs_that_take_longer_than_their_like_overspend_by_their_grace(seed: int) -> None:
    world = World(seed, cuts=False, learned=True)
    for _ in range(250):
        world.tick()
    beyond = sum((job.longer() for job in world.jobs), Fraction(0))
    for used, _ in world.windows():
        assert used <= world.budget.limit + beyond, f"SEED={seed}: {float(used)} of {world.budget.limit}"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_F71_whoever_is_cut_off_overspends_by_the_time_it_is_alone_at_most(seed: int) -> None:
    world = World(seed, cuts=True)
    for _ in range(250):
        world.tick()
    for used, alone in world.windows():
        assert used <= world.budget.limit + alone, (
            f"SEED={seed}: {float(used)} of {world.budget.limit} and {float(alone)}"
        )


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32))
@example(0)
def test_the_turn_of_a_day_lets_nobody_overspend(seed: int) -> None:
    world = World(seed, cuts=False, period=Period.DAY)
    world.now_ns = BEGIN_NS + (DAY_S - world.rng.randrange(600)) * SECOND
    for _ in range(300):
        world.tick()
    for used, _ in world.windows():
        assert used <= world.budget.limit, f"SEED={seed}: {float(used)} of {world.budget.limit}"


def test_the_world_stops_runs_and_uses_most_of_its_budgets() -> None:
    """A property of a world in which nothing happens would hold as well."""
    stopped, shares = 0, []
    for seed in range(12):
        world = World(seed, cuts=False)
        for _ in range(250):
            world.tick()
        stopped += sum(job.stop_ns is not None for job in world.jobs)
        ((used, _),) = world.windows()
        shares.append(used / world.budget.limit)
    assert stopped > 6 and sum(share > 0.5 for share in shares) > 3, (stopped, shares)
