"""A planner through whatever can happen: it gives nothing twice, asks nobody twice, and always has a sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    NodeGone,
    NodeSeen,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    QueuePolicySet,
    RunningRun,
)
from serverless_gpu.model.scheduling.wait_messages import sentence

S = 1_000_000_000
_POLICY = QueuePolicy(preempt_after_s=30.0, preemptions_max=2, reservations=3, patience_s=100.0, guard_s=3_000.0)


class Scheduled(RuleBasedStateMachine):
    """Runs, nodes and an operator, as a server tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(_POLICY)
        self.now_ns = 10_000 * S
        self.changes: list[Change] = [PoolSeen(Pool(name="search", reserved=True, lends=True, return_s=60.0))]
        self.nodes: dict[str, Node] = {}
        self.waiting: dict[str, QueuedRun] = {}
        self.running: dict[str, RunningRun] = {}
        self.by_class = Counter[str]()
        self.number = 0
        for name, others in (("n0", {}), ("n1", {"pool": "search"}), ("n2", {"owner": "ann", "owner_first": True})):
            self.see(Node(id=name, name=name, total={"H100": 8}, **others))

    def see(self, node: Node) -> None:
        """Have a node be as it is from now on."""
        self.nodes[node.id] = node
        self.changes.append(NodeSeen(node))

    @rule(
        priority=st.sampled_from([CRITICAL, NORMAL, BEST_EFFORT]),
        gpus=st.sampled_from([None, 1, 2, 2, 4, 4, 8, 8, 12, 64]),
        owner=st.sampled_from(["ann", "bob", "cat"]),
        pool=st.sampled_from(["", "", "", "", "search", "search", "nowhere"]),
        preemptible=st.booleans(),
        limit_s=st.sampled_from([None, 50.0, 5_000.0]),
        expected_s=st.sampled_from([None, 20.0]),
        after_s=st.sampled_from([0, 0, 0, 100]),
        several=st.booleans(),
    )
    def arrive(self, *, after_s: int, several: bool, **asked: Any) -> None:
        """A run comes."""
        self.number += 1
        run_id = f"r{self.number}"
        not_before = self.now_ns + after_s * S if after_s else 0
        self.waiting[run_id] = wanted = QueuedRun(
            run_id=run_id,
            title=f"{asked['owner']}/{run_id}",
            team="one" if asked["owner"] == "cat" else "",
            queued_ns=self.now_ns,
            gpu_type="H100",
            several_nodes=several,
            not_before_ns=not_before,
            held="it is tried again soon",
            **asked,
        )
        self.changes.append(Arrived(wanted))

    @rule(priority=st.sampled_from([CRITICAL, NORMAL, BEST_EFFORT]), pool=st.sampled_from(["", "search"]))
    def crowd(self, priority: int, pool: str) -> None:
        """More come than there is room for; all of them can leave."""
        for gpus in (2, 2, 4, 8, 8):
            self.arrive(
                priority=priority,
                gpus=gpus,
                owner="bob",
                pool=pool,
                preemptible=True,
                limit_s=None,
                expected_s=None,
                after_s=0,
                several=False,
            )
        self.decide(40)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.waiting)
    def cancel(self, pick: int) -> None:
        """A run waits no longer."""
        run_id = sorted(self.waiting)[pick % len(self.waiting)]
        del self.waiting[run_id]
        self.changes.append(Gone(run_id))

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.running)
    def end(self, pick: int) -> None:
        """A run ends by itself, or has left; who was asked to waits again."""
        run_id = sorted(self.running)[pick % len(self.running)]
        held = self.running.pop(run_id)
        if held.is_leaving:
            again = msgspec.structs.replace(held.wanted, preemptions=held.wanted.preemptions + 1)
            self.waiting[run_id] = again
            self.changes.append(Arrived(again))
        else:
            self.changes.append(Gone(run_id))

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: any(held.is_leaving for held in self.running.values()))
    def stay(self, pick: int) -> None:
        """What was asked of a run was never written: it stays."""
        leaving = sorted(run_id for run_id, held in self.running.items() if held.is_leaving)
        run_id = leaving[pick % len(leaving)]
        self.by_class[run_id] -= 1
        self.running[run_id] = msgspec.structs.replace(self.running[run_id], is_leaving=False)
        self.changes.append(DevicesTaken(self.running[run_id]))

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.running)
    def fail_to_start(self, pick: int) -> None:
        """What was placed could not start: it waits again."""
        run_id = sorted(self.running)[pick % len(self.running)]
        wanted = self.running.pop(run_id).wanted
        self.waiting[run_id] = wanted
        self.changes.append(Arrived(wanted))

    @rule(
        name=st.sampled_from(["n0", "n1", "n2"]),
        away=st.sampled_from(["", "is drained"]),
        outside=st.sampled_from([0, 0, 3]),
        shared=st.booleans(),
        turns_s=st.sampled_from([None, 100]),
    )
    def change(self, name: str, away: str, outside: int, shared: bool, turns_s: int | None) -> None:
        """A node comes again, is another one, or is away."""
        turns_ns = None if turns_s is None else self.now_ns + turns_s * S
        base = Node(id=name, name=name, total={"H100": 8}, pool="search" if name == "n1" else "")
        if name == "n2":
            base = msgspec.structs.replace(base, owner="ann", owner_first=True, shared=shared, turns_ns=turns_ns)
        self.see(msgspec.structs.replace(base, away=away, outside={"H100": outside}))

    @rule(name=st.sampled_from(["n0", "n1", "n2"]))
    def forget(self, name: str) -> None:
        """A node is not there any more."""
        if self.nodes.pop(name, None) is not None:
            self.changes.append(NodeGone(name))

    @rule(lends=st.booleans(), patience_s=st.sampled_from([0.0, 100.0, float("inf")]))
    def decide_otherwise(self, lends: bool, patience_s: float) -> None:
        """The operator changes a pool and the policy."""
        self.changes.append(PoolSeen(Pool(name="search", reserved=True, lends=lends, return_s=60.0)))
        self.changes.append(QueuePolicySet(msgspec.structs.replace(_POLICY, patience_s=patience_s)))

    @rule(passed_s=st.sampled_from([0, 1, 40, 4_000]))
    def decide(self, passed_s: int) -> None:
        """Time passes, and what is decided is done."""
        self.now_ns += passed_s * S
        changes, self.changes = self.changes, []
        self.planner.apply(changes)
        decision = self.planner.decide(self.now_ns)
        placed = [placement.run_id for placement in decision.placements]
        assert len(placed) == len(set(placed))
        for placement in decision.placements:
            wanted = self.waiting.pop(placement.run_id)
            shares = placement.shares
            whole = shares[0].count if wanted.gpus is None else wanted.gpus
            assert sum(share.count for share in shares) == whole
            assert len(shares) == 1 or wanted.several_nodes
            assert not any(self.nodes[share.node_id].away for share in shares)
            self.running[placement.run_id] = RunningRun(wanted=wanted, shares=shares, since_ns=self.now_ns)
        for preemption in decision.preemptions:
            held = self.running[preemption.run_id]
            assert held.wanted.preemptible
            assert not held.is_leaving
            assert preemption.for_run in self.waiting
            if preemption.sentence.startswith("makes room"):
                self.by_class[preemption.run_id] += 1
                assert self.by_class[preemption.run_id] <= _POLICY.preemptions_max
                assert held.wanted.priority > self.waiting[preemption.for_run].priority
                assert self.now_ns - held.since_ns >= _POLICY.preempt_after_s * S
            self.running[preemption.run_id] = msgspec.structs.replace(held, is_leaving=True)
        for run_id in self.waiting:
            wait = self.planner.why(run_id, self.now_ns)
            assert wait is not None
            assert sentence(wait, str)
        assert decision.wake_ns is None or decision.wake_ns > self.now_ns
        assert set(self.planner.queue(self.now_ns, 10**6)) == set(self.waiting)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        """Nobody has what somebody else has."""
        used = Counter[str]()
        for held in self.running.values():
            for share in held.shares:
                used[share.node_id] += share.count
        assert all(count <= 8 for count in used.values())


Scheduled.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduled = Scheduled.TestCase


def test_nobody_is_asked_to_leave_for_a_run_that_starts_in_the_same_decision() -> None:
    one = Scheduled()
    asked: dict[str, Any] = {"priority": CRITICAL, "after_s": 0, "expected_s": None, "limit_s": None, "several": False}
    one.crowd(pool="", priority=BEST_EFFORT)
    one.fail_to_start(pick=0)
    for _ in range(2):
        one.arrive(gpus=None, owner="ann", pool="search", preemptible=False, **asked)
    one.crowd(pool="search", priority=CRITICAL)
    one.arrive(gpus=1, owner="ann", pool="", preemptible=False, **asked)
    one.fail_to_start(pick=3)
    one.arrive(gpus=1, owner="cat", pool="", preemptible=True, **asked)
    one.crowd(pool="", priority=CRITICAL)  # `decide` looks who is asked for whom
    assert one.running["r4"].is_leaving  # not for cat's, which is a guest by then: for a gang that waits
    assert "r14" in one.running
