"""What is kept from pass to pass saves looks and changes no decision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from serverless_gpu.model.scheduling import cleared_devices, preemption
from serverless_gpu.model.scheduling.availability_timeline import DeviceTimeline
from serverless_gpu.model.scheduling.capacity import NodeGroup, NodeOrder
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CRITICAL,
    NORMAL,
    Arrived,
    Change,
    Decision,
    DevicesTaken,
    Gone,
    Node,
    NodeSeen,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    Reservation,
    RunningRun,
)
from tests.support.model.asking import S, node, planner, wanted

_POLICY = QueuePolicy(preempt_after_s=30.0, preemptions_max=3, reservations=4, patience_s=100.0, guard_s=3_000.0)
_NODES = st.lists(st.sampled_from(["", "", "", "search", "~ann"]), min_size=2, max_size=6)
_RUN = st.fixed_dictionaries(
    {
        "priority": st.sampled_from([CRITICAL, NORMAL, NORMAL, BEST_EFFORT, BEST_EFFORT]),
        "gpus": st.sampled_from([None, 1, 2, 2, 4, 8, 12, 16]),
        "owner": st.sampled_from(["ann", "bob", "cat"]),
        "pool": st.sampled_from(["", "", "", "search"]),
        "preemptible": st.sampled_from([True, True, False]),
        "limit_s": st.sampled_from([None, None, 60.0, 600.0]),
        "expected_s": st.sampled_from([None, None, 30.0]),
    }
)
_TICK = st.fixed_dictionaries(
    {
        "comes": st.lists(_RUN, max_size=6),
        "ended": st.integers(0, 2),
        "outside": st.sampled_from([0, 0, 0, 1, 4]),
        "away": st.sampled_from(["", "", "", "is drained"]),
        "passed_s": st.sampled_from([0, 5, 40, 700]),
    }
)
_Told = tuple[Decision, tuple[Reservation, ...]]


class _World:
    """Nodes, runs and a planner; who is asked to leave has left at the next tick, and waits again."""

    def __init__(self, owners: list[str]) -> None:
        self.planner, self.now_ns, self._number = Planner(_POLICY), 10_000 * S, 0
        self._nodes = [_node(f"n{at}", owner) for at, owner in enumerate(owners)]
        self._waiting: dict[str, QueuedRun] = {}
        self._running: dict[str, RunningRun] = {}
        self.planner.apply([PoolSeen(Pool(name="search", reserved=True, lends=True, return_s=60.0))])
        self.planner.apply(NodeSeen(one) for one in self._nodes)

    def tick(self, happens: dict[str, Any]) -> _Told:
        """Let something happen; return what is decided then, and what is kept for whom."""
        self.now_ns += happens["passed_s"] * S
        changes: list[Change] = []
        for held in [one for one in self._running.values() if one.is_leaving]:
            changes.append(self._waits(msgspec.structs.replace(held.wanted, preemptions=held.wanted.preemptions + 1)))
        for run_id in sorted(self._running)[: happens["ended"]]:
            del self._running[run_id]
            changes.append(Gone(run_id))
        for asked in happens["comes"]:
            self._number += 1
            base = wanted(f"r{self._number}", several_nodes=(asked["gpus"] or 0) > 8, queued_ns=self.now_ns)
            changes.append(self._waits(msgspec.structs.replace(base, **asked)))
        first = self._nodes[self._number % len(self._nodes)]
        changes.append(
            NodeSeen(msgspec.structs.replace(first, outside={"H100": happens["outside"]}, away=happens["away"]))
        )
        self.planner.apply(changes)
        decision = self.planner.decide(self.now_ns)
        for placed in decision.placements:
            run = self._waiting.pop(placed.run_id)
            self._running[run.run_id] = RunningRun(wanted=run, shares=placed.shares, since_ns=self.now_ns)
        for asked_to in decision.preemptions:
            leaving = msgspec.structs.replace(self._running[asked_to.run_id], is_leaving=True)
            self._running[asked_to.run_id] = leaving
            self.planner.apply([DevicesTaken(leaving)])
        return decision, self.planner.reservations()

    def _waits(self, run: QueuedRun) -> Arrived:
        self._running.pop(run.run_id, None)
        self._waiting[run.run_id] = run
        return Arrived(run)


def _node(name: str, whose: str) -> Node:
    base = Node(id=name, name=name, machine=name, total={"H100": 8})
    if whose.startswith("~"):
        return msgspec.structs.replace(base, owner=whose[1:], owner_first=True)
    return msgspec.structs.replace(base, pool=whose)


def _looks_at_everything(patch: pytest.MonkeyPatch) -> None:
    """Have planners remember nothing of what they look up: each order, profile and class is looked at anew."""
    patch.setattr(
        NodeGroup, "rows", lambda group, _type, _key, look, now_ns: NodeOrder(group.members, look).rows(now_ns)
    )
    patch.setattr(DeviceTimeline, "earliest", DeviceTimeline._found)
    classes = range(BEST_EFFORT + 1, CRITICAL, -1)
    patch.setattr(
        preemption._Search, "levels", lambda search, _: [one for one in classes if one > search.wanted.priority]
    )


@settings(deadline=None, max_examples=150)
@given(_NODES, st.lists(_TICK, min_size=1, max_size=12))
def test_22C6_what_is_decided_is_what_a_planner_decides_that_looks_at_everything(
    owners: list[str], ticks: list[dict[str, Any]]
) -> None:
    quick = _World(owners)
    found = [quick.tick(happens) for happens in ticks]
    with pytest.MonkeyPatch.context() as patch:
        _looks_at_everything(patch)
        slow = _World(owners)
        assert found == [slow.tick(happens) for happens in ticks]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 4)), max_size=40))
def test_22C6_an_order_says_what_a_look_at_every_node_would_say(steps: list[tuple[int, int, int]]) -> None:
    members: dict[str, list[int]] = {str(number): [number] for number in range(6)}

    def look(entry: list[int], now_ns: int) -> tuple[tuple[int, int] | None, float]:
        if entry[0] == 0:
            return None, float("inf")
        return (entry[0] + now_ns // 10, id(entry)), (now_ns // 10 + 1) * 10.0

    order, now_ns = NodeOrder(members, look), 0
    for number, value, passed in steps:
        now_ns += passed
        if value == 9:
            members.pop(str(number), None)
        else:
            members.setdefault(str(number), [0])[0] = value
        order.mark(str(number))
        rows = [row for entry in members.values() if (row := look(entry, now_ns)[0]) is not None]
        assert order.rows(now_ns) == sorted(rows)


@pytest.mark.parametrize("lends", [False, True])
def test_22C6_who_may_leave_is_asked_by_shapes_not_by_runs(monkeypatch: pytest.MonkeyPatch, lends: bool) -> None:
    looks = Counter[str]()
    for name in ("_site", "_search", "_order"):
        _count(monkeypatch, cleared_devices.Clearing, name, looks)
    _count(monkeypatch, cleared_devices, "_serving", looks)
    assert _decided(10, looks, lends=lends) == _decided(200, looks, lends=lends)


def test_22C6_where_nobody_may_be_asked_that_is_found_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counter[str]()
    _count(monkeypatch, cleared_devices.Clearing, "_search", looks)
    assert _decided(50, looks, lends=False, preemptions_max=0) == {"_search": 4}


def _decided(owners: int, looks: Counter[str], *, lends: bool, preemptions_max: int = 3) -> Counter[str]:
    """Return what was looked at where each of so many owners has runs of four shapes that could ask others to leave."""
    pool = "search" if lends else "default"
    there = [msgspec.structs.replace(node(f"n{at:02}", H100=8), pool=pool) for at in range(40)]
    fill = [wanted(f"r{at}", 8, priority=BEST_EFFORT, preemptible=True) for at in range(40)]
    policy = msgspec.structs.replace(_POLICY, patience_s=float("inf"), preemptions_max=preemptions_max)
    made = planner(there, fill, policy)
    made.apply([PoolSeen(Pool(name="search", reserved=True, lends=True))])
    assert len(made.decide(1_000 * S).placements) == 40
    asking = "search" if lends else ""
    for at in range(owners):
        for gpus in (1, 2, 4, 8):
            run = wanted(f"r{1000 + 10 * at + gpus}", gpus, owner=f"u{at}", priority=CRITICAL, preemptible=True)
            made.apply([Arrived(msgspec.structs.replace(run, pool=asking))])
    looks.clear()
    assert bool(made.decide(2_000 * S).preemptions) is bool(preemptions_max)
    return looks.copy()


def _count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, looks: Counter[str]) -> None:
    """Count how often something is called."""
    real = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        looks[name] += 1
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
