"""When a run would start, and what is said where nobody can say."""

from __future__ import annotations

from typing import Any

import msgspec

from serverless_gpu.model.scheduling.values import BEST_EFFORT, QueuedRun, QueuePolicy, StartEstimate
from tests.support.golden import golden
from tests.support.model.asking import S, busy, decide, node, wanted

N1 = node("n1", H100=8)


def estimate(asked: QueuedRun, queue: list[QueuedRun], *held: tuple[str, int, float | None]) -> StartEstimate:
    """Return when a run would start on one node of 8, some of which are in use: by whom, how many, for how long."""
    runs = [busy(N1, count, title, limit_s=limit_s) for title, count, limit_s in held]
    return decide(queue, runs).planner.estimate(asked, 1000)


def test_who_is_behind_somebody_without_a_known_time_reads_whose_timeout_is_missing() -> None:
    found = estimate(wanted("r2", 8), [wanted("r1", 8, title="root/big")], ("root/one", 4, 60.0), ("root/two", 4, None))
    assert found.at_ns is None and found.basis == golden("model.estimates.nobody-can-say")


def test_who_is_behind_somebody_who_is_behind_another_reads_the_first_cause() -> None:
    queue = [wanted("r1", 8, title="root/a"), wanted("r2", 8, title="root/b", limit_s=60.0)]
    found = estimate(wanted("r3", 8), queue, ("root/one", 4, 60.0))
    assert golden("model.estimates.nobody-can-say-root") in found.basis


def test_who_is_behind_somebody_who_waits_for_a_drained_node_reads_that() -> None:
    drained = msgspec.structs.replace(N1, away="starts no new runs: root drains it")
    found = decide([wanted("r1", 8, title="root/a")], [drained]).planner.estimate(wanted("r2", 8), 1000)
    assert found.at_ns is None and found.basis == golden("model.estimates.nobody-can-say-root-2")


def test_who_is_to_be_preempted_is_named_with_the_time_before_and_after_it_is_asked() -> None:
    policy = QueuePolicy(preempt_after_s=20.0)
    lower: dict[str, Any] = {"priority": BEST_EFFORT, "preemptible": True, "grace_s": 30.0}
    run = wanted("r1", 8, title="root/hi")
    decided = decide([run], [busy(N1, 8, "root/be", **lower)], policy=policy)
    assert decided.said("r1") == golden("model.estimates.needs-h100-one")
    found = decided.planner.estimate(msgspec.structs.replace(run, run_id="r2", owner="bob"), 1000)
    assert found.wait is not None and found.wait.holders[0].asked_ns == 20 * S
    decided.now_ns = 25 * S
    assert decided.planner.decide(25 * S).preemptions
    assert golden("model.estimates.root-asked-give") in decided.said("r1")
    assert (
        not decide([run], [busy(N1, 8, "root/be", priority=BEST_EFFORT)], policy=policy).wait("r1").holders[0].asked_ns
    )


def test_who_cannot_be_over_before_a_node_changes_hands_reads_what_would_be() -> None:
    theirs = msgspec.structs.replace(N1, owner="alice", turns_ns=3600 * S)
    run = wanted("r1", 1, owner="bob", limit_s=7200.0, beyond_s=391.0)
    told = decide([run], [theirs]).said("r1")
    assert golden("model.estimates.timeout-most-53") in told
    soon = msgspec.structs.replace(theirs, turns_ns=400 * S)
    told = decide([run], [soon]).said("r1")
    assert "would start now" not in told
    assert golden("model.estimates.beside-time-limit") in told


def test_what_people_have_left_out_of_a_node_is_said_with_their_note() -> None:
    less = msgspec.structs.replace(N1, outside={"H100": 1}, left_out="root left out: FAKE-H100-2 (ECC)")
    told = decide([wanted("r1", 8)], [less]).said("r1")
    assert "7 free on n1" in told and golden("model.estimates.root-left-out") in told
    assert "left out" not in decide([wanted("r1", 8), wanted("r2", 1)], [N1]).said("r2")


def test_a_latest_time_that_is_past_is_not_told_again() -> None:
    decided = decide([wanted("r1", 8)], [busy(N1, 8, "root/one", limit_s=60.0)])
    assert golden("model.estimates.starts-second-60") in decided.said("r1")
    decided.now_ns = 61 * S  # nobody has decided since, and it still waits
    assert decided.wait("r1").at_ns is None and "it starts" not in decided.said("r1")


# --- what a cap of days says ------------------------------------------------------------------------------------------

WEEK: dict[str, Any] = {"limit_s": 7 * 86_400.0, "capped": True}


def test_23B8_runs_that_only_a_cap_of_days_ends_make_an_estimate_unknown() -> None:
    decided = decide([], [busy(N1, 8, "root/two", **WEEK)])
    found = decided.planner.estimate(wanted("r1", 8, **WEEK), 1000)
    assert found.at_ns is None
    assert found.basis == golden("model.estimates.timeout-declared-root")
    assert found.wait is not None and found.wait.holders[0].until_ns is None


def test_23B8_a_run_ahead_that_only_a_cap_of_days_ends_makes_an_estimate_unknown() -> None:
    decided = decide([wanted("r1", 8, title="root/big", **WEEK)], [busy(N1, 8, "root/two", limit_s=60.0)])
    found = decided.planner.estimate(wanted("r2", 8, **WEEK), 1000)
    assert found.at_ns is None and golden("model.estimates.timeout-declared-root-big") in found.basis


def test_23B8_what_was_learned_and_what_was_declared_say_when() -> None:
    learned = decide([], [busy(N1, 8, "root/two", expected_s=100.0, **WEEK)])
    assert learned.planner.estimate(wanted("r1", 8, **WEEK), 1000).at_ns == 100 * S
    declared = decide([], [busy(N1, 8, "root/two", limit_s=7 * 86_400.0)])
    assert declared.planner.estimate(wanted("r1", 8, **WEEK), 1000).at_ns == 7 * 86_400 * S
    by_policy = decide([], [busy(N1, 8, "root/two", limit_s=3600.0, capped=True)])
    assert by_policy.planner.estimate(wanted("r1", 8, **WEEK), 1000).at_ns == 3600 * S


def test_23B8_a_wait_and_the_queue_name_no_time_that_only_a_cap_of_days_says() -> None:
    decided = decide([wanted("r1", 8, **WEEK)], [busy(N1, 8, "root/two", **WEEK)])
    assert decided.said("r1") == golden("model.estimates.needs-h100-one-node")
    (kept,) = decided.planner.reservations()
    assert kept.at_ns is not None  # the scheduler keeps its bound
    (told,) = decided.planner.told_reservations(1000)
    assert told.at_ns is None
