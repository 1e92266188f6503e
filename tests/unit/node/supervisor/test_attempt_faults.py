"""A GPU fails under an attempt: F23 and F24 of the failure matrix, in the attempt's life and in its run's."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.lifecycle import run_lifecycle
from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Failure,
    GpuFailed,
    Limits,
    RankExited,
    RankFailed,
    RankReturned,
    Reason,
    State,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import FAULT_NS, AttemptInstruction, advance
from serverless_gpu.model.lifecycle.run_lifecycle import FAULT_RETRIES_MAX, AttemptEnded, GivenUp, Run

S = 1_000_000_000
SAID = GpuFailed("GPU-1: Xid 79, the GPU has fallen off the bus")
LIMITS = Limits(timeout_ns=1000 * S, grace_ns=30 * S, failure_grace_ns=2 * S)
STARTING = Attempt(run_id="r", fence=1, world_size=2, limits=LIMITS, state=State.STARTING, wake_ns=300 * S)
RUNNING = msgspec.structs.replace(STARTING, state=State.RUNNING, exec_ns=10 * S, wake_ns=980 * S)


def ended(attempt: Attempt, now_ns: int) -> Attempt:
    """Go on from a stop until nothing is left."""
    for event in (RankExited(rank=0, signal=15), RankExited(rank=1, signal=15)):
        attempt, _ = advance(attempt, event, now_ns)
    return advance(attempt, TreeEmpty(), now_ns)[0]


def test_F23_the_run_goes_on_until_a_rank_dies_and_the_gpu_is_what_it_died_of() -> None:
    attempt, instructions = advance(RUNNING, SAID, 50 * S)
    assert (attempt.state, attempt.fault_ns, attempt.wake_ns, instructions) == (
        State.RUNNING,
        50 * S,
        50 * S + FAULT_NS,
        (),
    )
    raised = Failure(rank=1, reason=Reason.RANK_RAISED, at_ns=51 * S, detail="CUDA error: unspecified")
    attempt, instructions = advance(attempt, RankFailed(raised), 51 * S)
    assert instructions == (AttemptInstruction.TERMINATE_RANKS,)
    attempt = ended(attempt, 52 * S)
    assert (attempt.state, attempt.reason) == (State.FAILED, Reason.GPU_LOST)
    assert attempt.cause is not None and attempt.cause.detail == SAID.detail


def test_F23_a_rank_that_hangs_is_ended_after_a_minute() -> None:
    attempt, _ = advance(RUNNING, SAID, 50 * S)
    for again in (51, 70):  # more of the same, as the driver likes to say it
        attempt, _ = advance(attempt, SAID, again * S)
    assert advance(attempt, Tick(), 50 * S + FAULT_NS - 1) == (attempt, ())
    attempt, instructions = advance(attempt, Tick(), 50 * S + FAULT_NS)
    assert instructions == (AttemptInstruction.TERMINATE_RANKS,)
    assert ended(attempt, 112 * S).reason is Reason.GPU_LOST


def test_F23_the_time_limit_is_not_forgotten() -> None:
    near = msgspec.structs.replace(RUNNING, wake_ns=60 * S)
    attempt, _ = advance(near, SAID, 50 * S)
    assert attempt.wake_ns == 60 * S
    attempt, _ = advance(attempt, Tick(), 60 * S)
    assert ended(attempt, 61 * S).reason is Reason.TIMEOUT


def test_F23_what_the_rank_said_first_is_explained_by_what_the_driver_says_a_moment_later() -> None:
    raised = Failure(rank=1, reason=Reason.RANK_RAISED, at_ns=50 * S, detail="CUDA error: unspecified")
    attempt, _ = advance(RUNNING, RankFailed(raised), 50 * S)
    attempt, _ = advance(attempt, SAID, 50 * S + 1)
    attempt = ended(attempt, 51 * S)
    assert attempt.reason is Reason.GPU_LOST and raised in attempt.failures


def test_a_run_that_returned_all_the_same_has_succeeded() -> None:
    attempt, _ = advance(RUNNING, SAID, 50 * S)
    for rank in (0, 1):
        attempt, _ = advance(attempt, RankReturned(rank), 51 * S)
    assert ended(attempt, 52 * S).state is State.SUCCEEDED


def test_one_that_is_cancelled_meanwhile_was_cancelled() -> None:
    attempt, _ = advance(RUNNING, StopRequested(StopReason.CANCEL), 50 * S)
    attempt, _ = advance(attempt, SAID, 51 * S)
    assert ended(attempt, 52 * S).reason is Reason.CANCELLED


def test_before_user_code_it_is_a_failed_start_which_is_tried_again_elsewhere() -> None:
    attempt, instructions = advance(STARTING, SAID, 20 * S)
    assert instructions == (AttemptInstruction.KILL_TREE,)
    attempt, _ = advance(attempt, TreeEmpty(), 21 * S)
    assert attempt.reason is Reason.START_FAILED
    assert attempt.cause is not None and attempt.cause.detail == SAID.detail


# --- the run --------------------------------------------------------------------------------------------------------

LIVE = Run(run_id="r", fence=1, state=State.RUNNING, began=True)


@pytest.mark.parametrize("event", [AttemptEnded(Reason.GPU_LOST, began=True), GivenUp(Reason.NODE_GONE)])
def test_F23_another_attempt_follows_if_it_was_asked_for_and_retries_stay(event: AttemptEnded | GivenUp) -> None:
    run = msgspec.structs.replace(LIVE, retries_left=2, faults_left=FAULT_RETRIES_MAX)
    for left in (2, 1, 0):
        run, instructions = run_lifecycle.advance(run, event)
        assert instructions == (run_lifecycle.RunInstruction.REQUEUE,)
        assert (run.retries_left, run.faults_left) == (2, left)
        run = msgspec.structs.replace(run, state=State.RUNNING, began=True)
    run, _ = run_lifecycle.advance(run, event)
    assert (run.retries_left, run.faults_left) == (1, 0), "then it is a failure like others"


def test_F23_nothing_follows_by_itself() -> None:
    run, instructions = run_lifecycle.advance(LIVE, AttemptEnded(Reason.GPU_LOST, began=True))
    assert instructions == (run_lifecycle.RunInstruction.CONCLUDE,)
    assert (run.state, run.reason) == (State.FAILED, Reason.GPU_LOST)
    resumed = msgspec.structs.replace(LIVE, may_resume=True)
    assert run_lifecycle.advance(resumed, AttemptEnded(Reason.GPU_LOST, began=True))[1] == (
        run_lifecycle.RunInstruction.CONCLUDE,
    )


def test_F25_user_code_that_fails_is_not_the_infrastructure() -> None:
    run = msgspec.structs.replace(LIVE, faults_left=3)
    assert run_lifecycle.advance(run, AttemptEnded(Reason.RANK_RAISED, began=True))[1] == (
        run_lifecycle.RunInstruction.CONCLUDE,
    )
