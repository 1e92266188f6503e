"""The verdict finds each kind of wrong in a history that has it, and nothing in one that has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.chaos import plan
from tests.e2e.chaos.verdict import Evidence, Execution, Seen, Strike, Told, wrongs

CALL = plan.Call(number=0, kind="value", gpus=1, seconds=1.0)
TOLD = Told(name="c0-0", call=CALL, run="r1", outcome="value", reason="")
RAN = Execution("c0-0", "r1", fence=1, rank=0, pid=7, crew=0, gpu="G0", begin_ns=10, end_ns=20)
SEEN = Seen("r1", "c0-0", "SUCCEEDED", "completed", {1: ("n1",)}, {(1, 0): 8}, 8)
GOOD = Evidence(told=(TOLD,), executions=(RAN,), seen={"r1": SEEN}, strikes=())
OTHER = SEEN._replace(run="r2", name="c0-1")


pytestmark = pytest.mark.spot


def test_a_history_without_a_wrong_has_none() -> None:
    assert wrongs(GOOD) == []


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        ("lost", lambda: GOOD._replace(seen={})),
        ("lost", lambda: GOOD._replace(told=(TOLD._replace(outcome=""),))),
        ("lost", lambda: GOOD._replace(seen={"r1": SEEN._replace(state="FAILED")})),
        ("lost", lambda: GOOD._replace(seen={"r1": SEEN, "r2": OTHER._replace(state="RUNNING")})),
        ("lost", lambda: GOOD._replace(executions=(RAN, RAN._replace(run="r9", begin_ns=30, end_ns=40)))),
        ("doubled", lambda: GOOD._replace(executions=(RAN, RAN._replace(pid=8, begin_ns=30, end_ns=40)))),
        ("doubled", lambda: GOOD._replace(seen={"r1": SEEN, "r2": OTHER._replace(name="c0-0")})),
        (
            "doubled",
            lambda: GOOD._replace(
                seen={"r1": SEEN._replace(nodes={1: ("n1",), 2: ("n1",)})},
                executions=(RAN, RAN._replace(fence=2, begin_ns=30, end_ns=40)),
            ),
        ),
        (
            "overlapping",
            lambda: GOOD._replace(
                seen={"r1": SEEN, "r2": OTHER}, executions=(RAN, RAN._replace(run="r2", begin_ns=15, end_ns=40))
            ),
        ),
        (
            "overlapping",
            lambda: GOOD._replace(
                seen={"r1": SEEN._replace(nodes={1: ("n1",), 2: ("n2",)})},
                executions=(RAN, RAN._replace(fence=2, begin_ns=15, end_ns=40)),
            ),
        ),
        (
            "unexplained",
            lambda: GOOD._replace(
                told=(TOLD._replace(outcome="NodeLost"),), seen={"r1": SEEN._replace(state="FAILED")}
            ),
        ),
        ("ledger", lambda: GOOD._replace(seen={"r1": SEEN._replace(charged_ms=9)})),
        ("ledger", lambda: GOOD._replace(executions=(RAN._replace(end_ns=10**9),))),
        ("orphan", lambda: GOOD._replace(complaints=("orphan 7",))),
    ],
)
def test_a_planted_wrong_is_found(kind: str, planted: Callable[[], Evidence]) -> None:
    assert any(wrong.startswith(kind) for wrong in wrongs(planted()))


def test_a_fault_at_a_run_explains_its_end_and_one_at_another_does_not() -> None:
    failed = GOOD._replace(told=(TOLD._replace(outcome="NodeLost"),), seen={"r1": SEEN._replace(state="FAILED")})
    assert wrongs(failed._replace(strikes=(Strike(15, "supervisor", "r1"),))) == []
    assert wrongs(failed._replace(strikes=(Strike(15, "supervisor", "r2"),))) != []
    assert wrongs(failed._replace(strikes=(Strike(15, "agent", ""),))) != [], "a run that runs outlives its agent"


def test_the_same_seed_is_the_same_history() -> None:
    def first(seed: int) -> list[object]:
        faults, calls = plan.faults(seed), plan.calls(seed, 0)
        return [item for _ in range(50) for item in (next(faults), next(calls))]

    assert first(3) == first(3) != first(4)
    assert all(1.0 <= fault.after_s <= 20.0 for fault in first(3) if isinstance(fault, plan.Fault))


def test_so_many_seconds_have_the_same_faults_on_every_machine() -> None:
    minute = list(plan.faults_within(20962, 60.0))
    assert {fault.victim for fault in minute} == set(plan.VICTIMS)
    assert sum(fault.after_s + fault.lasts_s for fault in minute[:-1]) + minute[-1].after_s <= 60.0
    assert list(plan.faults_within(20962, 600.0))[: len(minute)] == minute


@pytest.mark.parametrize("seed", [7, 8])
def test_three_minutes_of_the_seeds_of_the_long_tests_have_each_kind_of_fault(seed: int) -> None:
    assert {fault.victim for fault in plan.faults_within(seed, 180.0)} == set(plan.VICTIMS)
