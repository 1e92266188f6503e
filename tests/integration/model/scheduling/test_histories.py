"""Whatever happens: nobody has more than there is, gangs are whole, and what was told holds."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CRITICAL,
    NORMAL,
    Arrived,
    Change,
    DevicesTaken,
    Gone,
    Node,
    NodeSeen,
    Placement,
    Promised,
    QueuedRun,
    QueuePolicy,
    RunningRun,
)
from tests.support.model.asking import S

_NODES = st.lists(st.sampled_from([1, 4, 8, 8]), min_size=1, max_size=4)
_RUN = st.tuples(
    st.sampled_from([CRITICAL, NORMAL, NORMAL, BEST_EFFORT]),
    st.sampled_from([1, 1, 2, 4, 8, 12, None]),
    st.sampled_from(["ann", "bob", "cat"]),
    st.sampled_from([None, 60.0, 600.0, 3600.0, 1234.567890123]),  # limit
    st.sampled_from([None, None, 30.0, 900.0]),  # expected
)
_STEP = st.tuples(st.lists(_RUN, max_size=4), st.integers(0, 3), st.integers(0, 900))
_HISTORY = st.lists(_STEP, min_size=1, max_size=10)
_POLICY = QueuePolicy(guard_s=7200.0, whole_node=0)
_LOOKS_NS = 60 * S  # who starts before somebody does so when the planner is asked, which is not at once


class History:
    """A planner, and what has come of what it was told: the floor as an innkeeper would have it."""

    def __init__(self, nodes: list[int], policy: QueuePolicy = _POLICY) -> None:
        self.nodes = [
            Node(id=f"n{number}", name=f"n{number}", total={"H100": count}) for number, count in enumerate(nodes)
        ]
        self.policy, self.planner = policy, Planner(policy)
        self.waiting: dict[str, QueuedRun] = {}
        self.running: dict[str, RunningRun] = {}
        self.now_ns, self._numbers = 1_790_000_000_123_456_789, 0  # a clock as servers have it
        self.wake_ns: int | None = None
        self.planner.apply(NodeSeen(node) for node in self.nodes)

    def come(self, asked: tuple[Any, ...]) -> None:
        """Let a run come."""
        priority, gpus, owner, limit_s, expected_s = asked
        self._numbers += 1
        run = QueuedRun(
            run_id=f"r{self._numbers:03}",
            title=f"{owner}/{self._numbers}",
            owner=owner,
            priority=priority,
            queued_ns=self.now_ns,
            gpus=gpus,
            gpu_type="H100",
            several_nodes=gpus == 12,
            limit_s=limit_s,
            expected_s=expected_s,
        )
        self.waiting[run.run_id] = run
        self.planner.apply([Arrived(run)])

    def end(self, count: int) -> None:
        """Let some end by themselves, and everybody who is at the limit."""
        over = [
            run_id
            for number, (run_id, held) in enumerate(sorted(self.running.items()))
            if number < count or (held.wanted.limit_s and held.since_ns + int(held.wanted.limit_s * S) <= self.now_ns)
        ]
        changes: list[Change] = [Gone(run_id) for run_id in over]
        self.planner.apply(changes)
        for run_id in over:
            del self.running[run_id]

    def pass_time(self, seconds: int) -> None:
        """Let time pass; who is at the limit ends then, not later, and the planner is asked again when it says so."""
        until_ns = self.now_ns + seconds * S
        while True:
            ends = [
                held.since_ns + int(held.wanted.limit_s * S) for held in self.running.values() if held.wanted.limit_s
            ]
            wakes = [] if self.wake_ns is None else [self.wake_ns]
            at_ns = min((*ends, *wakes), default=until_ns)
            if at_ns >= until_ns:
                break
            self.now_ns = max(self.now_ns, at_ns + 1)
            self.end(0)
            self.decide()
        self.now_ns = until_ns

    def decide(self) -> tuple[Placement, ...]:
        """Decide, and look whether that can be."""
        decision = self.planner.decide(self.now_ns)
        placements, self.wake_ns = decision.placements, decision.wake_ns
        for placement in placements:
            run = self.waiting.pop(placement.run_id)
            self.running[run.run_id] = RunningRun(wanted=run, shares=placement.shares, since_ns=self.now_ns)
            counts = [share.count for share in placement.shares]
            sizes = {node.id: node.total["H100"] for node in self.nodes}
            assert sum(counts) == (run.gpus or sizes[placement.shares[0].node_id])
            assert len(counts) == 1 or run.several_nodes
            assert len({share.node_id for share in placement.shares}) == len(counts)
        for node_id, free in self.free().items():
            assert free >= 0, node_id
        return placements

    def free(self) -> dict[str, int]:
        """Return what is free by node."""
        free = {node.id: node.total["H100"] for node in self.nodes}
        for held in self.running.values():
            for share in held.shares:
                free[share.node_id] -= share.count
        return free

    def again(self) -> Planner:
        """Return a planner that is made anew from who waits, who runs, and what was told."""
        made = Planner(self.policy)
        made.apply(NodeSeen(node) for node in self.nodes)
        made.apply(DevicesTaken(held) for held in self.running.values())
        made.apply(Arrived(run) for run in self.waiting.values())
        made.apply(Promised(one) for one in self.planner.promises().values())
        return made

    def play(self, steps: list[Any]) -> list[tuple[Placement, ...]]:
        """Let all of it happen; return what was decided."""
        decided = []
        for runs, ended, seconds in steps:
            self.pass_time(seconds)
            self.end(ended)
            for asked in runs:
                self.come(asked)
            decided.append(self.decide())
        return decided


@settings(deadline=None, max_examples=40)
@given(_NODES, _HISTORY)
def test_nobody_has_more_than_there_is_gangs_are_whole_and_the_same_is_decided_again(
    nodes: list[int], steps: list[Any]
) -> None:
    first, second = History(nodes), History(nodes)
    assert first.play(steps) == second.play(steps)


@settings(deadline=None, max_examples=40)
@given(_NODES, _HISTORY)
def test_what_fits_and_is_kept_for_nobody_is_started(nodes: list[int], steps: list[Any]) -> None:
    history = History(nodes)
    history.play(steps)
    for _ in range(3):
        history.decide()
    assert history.decide() == ()
    kept = {share.node_id for reservation in history.planner.reservations() for share in reservation.shares}
    sizes = {node.id: node.total["H100"] for node in history.nodes}
    for node_id, free in history.free().items():
        for run in history.waiting.values():
            needed = run.gpus or sizes[node_id]
            assert node_id in kept or needed > free, (run, node_id)


_ONE, _FOUR = (CRITICAL, 1, "ann", None, None), (CRITICAL, 4, "cat", None, None)
_WHOLE, _GANG = (BEST_EFFORT, None, "cat", None, None), (NORMAL, 12, "cat", None, None)
_GUESSED_OTHERWISE = [
    ([_ONE, _ONE, _ONE, _FOUR], 0, 0),
    ([_ONE, _ONE, _ONE, _ONE], 0, 1),
    ([], 0, 588),
    ([], 0, 900),
    ([_WHOLE], 0, 542),
    ([_WHOLE, _GANG, _ONE, _ONE], 0, 104),
    ([_WHOLE, (NORMAL, 8, "ann", None, None), _ONE, (CRITICAL, 4, "bob", None, None)], 0, 818),
    ([], 0, 900),
]


@settings(deadline=None, max_examples=40)
@example([1, 1, 4, 4], _GUESSED_OTHERWISE)
@given(_NODES, _HISTORY)
def test_a_planner_made_anew_decides_the_same(nodes: list[int], steps: list[Any]) -> None:
    policy = msgspec.structs.replace(_POLICY, entry_penalty_s=0.0, half_life_s=float("inf"))
    history = History(nodes, policy)
    endless = [([(*asked[:3], None, None) for asked in runs], 0, seconds) for runs, _, seconds in steps]
    history.play(endless)
    again, now_ns = history.again(), history.now_ns
    assert (again.decide(now_ns), history.decide()) == (history.planner.decide(now_ns), ())
    assert again.queue(now_ns, 100) == history.planner.queue(now_ns, 100)
    made_anew, kept = again.reservations(), history.planner.reservations()
    assert [one for one in made_anew if one.at_ns is not None] == [one for one in kept if one.at_ns is not None]
    assert [one.run_id for one in made_anew] == [one.run_id for one in kept]
    # Without a known time a node is guessed, and a guess is kept until it has passed (`HeldDevices.guess`).
    if made_anew == kept:
        for run_id in history.waiting:
            assert again.why(run_id, now_ns) == history.planner.why(run_id, now_ns)
    used, counted = again.usage(now_ns), history.planner.usage(now_ns)
    for name, use in used.items():
        assert use.counted_gpu_s == pytest.approx(counted[name].counted_gpu_s)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(_NODES, _HISTORY, st.sets(st.integers(0, 9)))
def test_F81_a_latest_time_that_was_told_never_moves_later(
    nodes: list[int], steps: list[Any], restarts: set[int]
) -> None:
    history = History(nodes, msgspec.structs.replace(_POLICY, guard_s=float("inf")))
    told: dict[str, int] = {}
    for number, (runs, ended, seconds) in enumerate(steps):
        if number in restarts:
            history.planner = history.again()
        history.pass_time(seconds)
        history.end(ended)
        for priority, *others in runs:
            history.come((NORMAL if priority == CRITICAL else priority, *others))
        history.decide()
        for run_id, at_ns in told.items():
            if run_id in history.waiting and history.waiting[run_id].priority == NORMAL:
                assert history.now_ns <= at_ns + _LOOKS_NS, f"{run_id} was to start by {at_ns}"
        for reservation in history.planner.reservations():
            if reservation.is_bound and reservation.at_ns is not None:
                before = told.get(reservation.run_id, reservation.at_ns)
                if history.waiting[reservation.run_id].priority == NORMAL:
                    assert reservation.at_ns <= before + _LOOKS_NS, reservation
                told[reservation.run_id] = reservation.at_ns
