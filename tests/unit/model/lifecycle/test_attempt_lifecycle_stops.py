"""The lifecycle of attempts that are stopped from outside: cancel, time and budget limits, start-up and lost leases."""

from __future__ import annotations

import pytest

from serverless_gpu.model.lifecycle.attempt import (
    STOPPED_BY,
    Attempt,
    Event,
    Failure,
    GangPlaced,
    HangConfirmed,
    LeaseExpired,
    Limits,
    Phase,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    RanksNotStarted,
    Reason,
    State,
    StemLost,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
    stop_word,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import AttemptInstruction
from tests.support.model.lifecycle import (
    CONCLUDE,
    KILL,
    QUEUED,
    RELEASE,
    RUNNING,
    SETTLING,
    STARTING,
    TERMINATE,
    TO_RUNNING,
    S,
    changed,
    drive,
    ended,
    raised,
)


def killed(attempt: Attempt, reason: Reason, at_ns: int, **fields: object) -> Attempt:
    return ended(attempt, state=State.STOPPING, reason=reason, stop_ns=at_ns, phase=Phase.KILLING, **fields)


# --- cancel ----------------------------------------------------------------------------------------------------------

STOPS: list[tuple[Event, Reason, State]] = [
    (StopRequested(StopReason.CANCEL), Reason.CANCELLED, State.CANCELLED),
    (StopRequested(StopReason.PREEMPT), Reason.PREEMPTED, State.CANCELLED),
    (StopRequested(StopReason.TIMEOUT), Reason.TIMEOUT, State.TIMED_OUT),
    (StopRequested(StopReason.BUDGET), Reason.BUDGET, State.BUDGET_STOPPED),
    (StopRequested(StopReason.DRAIN), Reason.DRAINED, State.CANCELLED),
    (StopRequested(StopReason.IDLE), Reason.IDLE, State.TIMED_OUT),
]
stops = pytest.mark.parametrize(("event", "reason", "state"), STOPS, ids=list(StopReason))


@stops
@pytest.mark.parametrize("attempt", [QUEUED, STARTING], ids=["queued", "starting"])
def test_before_user_code_a_stop_kills_at_once(attempt: Attempt, event: Event, reason: Reason, state: State) -> None:
    killing = killed(attempt, reason, 5 * S)
    assert drive(attempt, (5 * S, event)) == (killing, (KILL,))
    assert drive(killing, (6 * S, TreeEmpty())) == (changed(killing, state=state, phase=Phase.NONE), (CONCLUDE,))


@stops
@pytest.mark.parametrize(
    "attempt",
    [RUNNING, SETTLING],
    ids=["running", "settling"],
)
def test_user_code_gets_the_runs_own_grace(attempt: Attempt, event: Event, reason: Reason, state: State) -> None:
    stopping = changed(
        attempt, state=State.STOPPING, phase=Phase.TERMINATING, reason=reason, stop_ns=25 * S, wake_ns=55 * S
    )
    assert drive(attempt, (25 * S, event)) == (stopping, (TERMINATE,))
    assert drive(stopping, (55 * S - 1, Tick())) == (stopping, ())
    after, issued = drive(stopping, (55 * S, Tick()), (56 * S, TreeEmpty()))
    assert after == changed(stopping, state=state, phase=Phase.NONE, wake_ns=None, killed=True)
    assert issued == (KILL, CONCLUDE)


@stops
@pytest.mark.parametrize("phase", [Phase.TERMINATING, Phase.KILLING])
def test_a_second_stop_changes_nothing(phase: Phase, event: Event, reason: Reason, state: State) -> None:
    stopping = changed(
        RUNNING, state=State.STOPPING, phase=phase, reason=Reason.RANK_RAISED, stop_ns=20 * S, wake_ns=22 * S
    )
    assert drive(stopping, (21 * S, event)) == (stopping, ())


PASSING = (StopReason.PREEMPT, StopReason.DRAIN)


@pytest.mark.parametrize("later", StopReason)
@pytest.mark.parametrize("first", StopReason)
def test_a_stop_that_is_final_replaces_one_after_which_the_run_may_go_on(first: StopReason, later: StopReason) -> None:
    stopping, _ = drive(RUNNING, (25 * S, StopRequested(first)))
    decides = later if first in PASSING and later not in PASSING else first
    assert drive(stopping, (26 * S, StopRequested(later))) == (changed(stopping, reason=STOPPED_BY[decides]), ())


def test_every_stop_has_its_own_reason_and_the_word_that_ranks_read() -> None:
    assert set(STOPPED_BY) == set(StopReason)
    assert {why: stop_word(reason) for why, reason in STOPPED_BY.items()} == {why: why.value for why in StopReason}
    assert stop_word(Reason.NODE_PARTITIONED) == "drain"
    assert {stop_word(reason) for reason in Reason if reason not in STOPPED_BY.values()} == {"drain", "failure"}


def test_ranks_that_heed_a_cancel_are_no_failures() -> None:
    after, issued = drive(
        RUNNING,
        (25 * S, StopRequested(StopReason.CANCEL)),
        (26 * S, RankExited(rank=0, signal=15, detail="ended by SIGTERM")),
        (27 * S, RankExited(rank=1, signal=None, detail="exited with code 1")),
        (28 * S, TreeEmpty()),
    )
    assert after == ended(
        RUNNING, state=State.CANCELLED, reason=Reason.CANCELLED, stop_ns=25 * S, exited=frozenset({0, 1})
    )
    assert issued == (TERMINATE, KILL, CONCLUDE)


def test_what_ranks_raise_after_a_cancel_is_kept_and_does_not_change_the_end() -> None:
    late = raised(0, 26 * S)
    after, _ = drive(
        RUNNING,
        (25 * S, StopRequested(StopReason.CANCEL)),
        (26 * S, RankFailed(late)),
        (27 * S, RankExited(rank=1, signal=11, detail="ended by SIGSEGV")),
        (27 * S, RankExited(rank=0, signal=None)),
        (28 * S, TreeEmpty()),
    )
    crash = Failure(rank=1, reason=Reason.RANK_SIGNAL, at_ns=27 * S, signal=11, detail="ended by SIGSEGV")
    assert (after.state, after.reason, after.failures) == (State.CANCELLED, Reason.CANCELLED, (late, crash))


def test_F63_a_cancel_after_the_last_result_comes_too_late() -> None:
    results = ((20 * S, RankReturned(0)), (20 * S, RankReturned(1)))
    exits = ((22 * S, RankExited(rank=0, signal=None)), (22 * S, RankExited(rank=1, signal=None)))
    after, issued = drive(RUNNING, *results, (21 * S, StopRequested(StopReason.CANCEL)), *exits, (23 * S, TreeEmpty()))
    both = frozenset({0, 1})
    assert after == ended(
        RUNNING, state=State.SUCCEEDED, reason=Reason.COMPLETED, stop_ns=20 * S, returned=both, exited=both
    )
    assert issued == (RELEASE, KILL, CONCLUDE)


def test_F63_results_after_a_cancel_are_kept_and_the_run_stays_cancelled() -> None:
    after, issued = drive(
        RUNNING,
        (20 * S, RankReturned(0)),
        (21 * S, StopRequested(StopReason.CANCEL)),
        (22 * S, RankReturned(1)),
        (23 * S, RankExited(rank=0, signal=None)),
        (23 * S, RankExited(rank=1, signal=None)),
        (24 * S, TreeEmpty()),
    )
    both = frozenset({0, 1})
    assert after == ended(
        RUNNING, state=State.CANCELLED, reason=Reason.CANCELLED, stop_ns=21 * S, returned=both, exited=both
    )
    assert issued == (TERMINATE, KILL, CONCLUDE)


# --- time limit ------------------------------------------------------------------------------------------------------


def test_F73_the_grace_lies_inside_the_time_limit() -> None:
    running, _ = drive(QUEUED, *TO_RUNNING)
    assert running.wake_ns == 80 * S  # first user byte at 10 s, limit 100 s, grace 30 s
    assert drive(running, (80 * S - 1, Tick())) == (running, ())
    stopping = changed(
        running,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=Reason.TIMEOUT,
        stop_ns=80 * S,
        wake_ns=110 * S,
    )
    assert drive(running, (80 * S, Tick())) == (stopping, (TERMINATE,))
    after, issued = drive(stopping, (110 * S, Tick()), (110 * S, TreeEmpty()))
    assert after == ended(running, state=State.TIMED_OUT, reason=Reason.TIMEOUT, stop_ns=80 * S, killed=True)
    assert issued == (KILL, CONCLUDE)


def test_F73_of_a_short_time_limit_half_is_for_the_work() -> None:
    short = changed(QUEUED, limits=Limits(timeout_ns=4 * S, grace_ns=30 * S))
    running, _ = drive(short, *TO_RUNNING)
    assert running.wake_ns == 12 * S
    stopping, issued = drive(running, (12 * S, Tick()))
    assert (stopping.reason, stopping.wake_ns, issued) == (Reason.TIMEOUT, 14 * S, (TERMINATE,))


def test_a_run_that_heeds_its_time_limit_ends_early() -> None:
    after, issued = drive(
        RUNNING,
        (80 * S, Tick()),
        (81 * S, RankExited(rank=0, signal=15)),
        (81 * S, RankExited(rank=1, signal=15)),
        (81 * S, TreeEmpty()),
    )
    assert (after.state, after.failures, after.killed) == (State.TIMED_OUT, (), False)
    assert issued == (TERMINATE, KILL, CONCLUDE)


def test_the_time_limit_during_the_wait_for_a_lost_peer_leaves_the_failure_the_reason() -> None:
    lost = raised(0, 80 * S - 5, peer_lost=True)
    settling, _ = drive(RUNNING, (80 * S - 5, RankFailed(lost)))
    assert drive(settling, (80 * S, Tick())) == (settling, ())
    stopping, _ = drive(settling, (81 * S, Tick()))
    assert (stopping.reason, stopping.cause) == (Reason.RANK_RAISED, lost)


# --- start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [QUEUED, STARTING], ids=["queued", "starting"])
@pytest.mark.parametrize("reason", [Reason.START_FAILED, Reason.RENDEZVOUS])
def test_F13_ranks_that_cannot_be_started(attempt: Attempt, reason: Reason) -> None:
    failure = Failure(rank=None, reason=reason, at_ns=5 * S, detail="why")
    killing = killed(attempt, reason, 5 * S, failures=(failure,))
    assert drive(attempt, (5 * S, RanksNotStarted(reason, "why"))) == (killing, (KILL,))
    assert drive(killing, (6 * S, TreeEmpty())) == (changed(killing, state=State.FAILED, phase=Phase.NONE), (CONCLUDE,))


def test_F14_no_user_code_within_the_start_limit() -> None:
    assert drive(STARTING, (300 * S - 1, Tick())) == (STARTING, ())
    detail = "no user code started within 300 s after the attempt got its GPUs"
    failure = Failure(rank=None, reason=Reason.START_FAILED, at_ns=300 * S, detail=detail)
    assert drive(STARTING, (300 * S, Tick())) == (
        killed(STARTING, Reason.START_FAILED, 300 * S, failures=(failure,)),
        (KILL,),
    )
    sleeping = changed(STARTING, wake_ns=None)
    assert drive(sleeping, (10**18, Tick())) == (sleeping, ())


def test_F81_a_queued_attempt_waits_as_long_as_it_takes() -> None:
    assert drive(QUEUED, (10**18, Tick())) == (QUEUED, ())


# --- the stem --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "out_of_memory", "reason"),
    [
        (QUEUED, False, Reason.START_FAILED),
        (STARTING, False, Reason.START_FAILED),
        (RUNNING, False, Reason.RUNTIME_LOST),
        (STARTING, True, Reason.HOST_OOM),
        (RUNNING, True, Reason.HOST_OOM),
    ],
    ids=["queued", "starting", "running", "starting, memory", "running, memory"],
)
def test_the_stem_is_lost(attempt: Attempt, out_of_memory: bool, reason: Reason) -> None:
    failure = Failure(rank=None, reason=reason, at_ns=20 * S, detail="gone")
    killing = killed(attempt, reason, 20 * S, failures=(failure,))
    event = StemLost(detail="gone", out_of_memory=out_of_memory)
    assert drive(attempt, (20 * S, event)) == (killing, (KILL,))
    over = changed(killing, state=State.FAILED, phase=Phase.NONE)
    assert drive(killing, (21 * S, TreeEmpty())) == (over, (CONCLUDE,))


def test_a_stem_lost_during_a_stop_ends_the_waiting() -> None:
    stopping, _ = drive(RUNNING, (20 * S, StopRequested(StopReason.CANCEL)))
    killing = killed(RUNNING, Reason.CANCELLED, 20 * S)
    assert drive(stopping, (21 * S, StemLost(detail="gone"))) == (killing, (KILL,))


# --- words that come late --------------------------------------------------------------------------------------------


def test_an_empty_tree_means_nothing_before_the_kill() -> None:
    stopping, _ = drive(RUNNING, (20 * S, StopRequested(StopReason.CANCEL)))
    assert drive(stopping, (21 * S, TreeEmpty())) == (stopping, ())


def test_late_exits_during_the_kill_are_only_noted() -> None:
    killing = killed(RUNNING, Reason.CANCELLED, 20 * S)
    late = ((21 * S, RankExited(rank=0, signal=9)), (21 * S, RankExited(rank=1, signal=9)), (21 * S, RankExecuting(1)))
    assert drive(killing, *late) == (changed(killing, exited=frozenset({0, 1})), ())


def test_a_rank_killed_for_memory_during_a_stop_is_a_failure_of_its_own() -> None:
    stopping, _ = drive(RUNNING, (20 * S, StopRequested(StopReason.CANCEL)))
    after, _ = drive(stopping, (21 * S, RankExited(rank=0, signal=9, out_of_memory=True, detail="ended by SIGKILL")))
    assert after.failures == (
        Failure(rank=0, reason=Reason.HOST_OOM, at_ns=21 * S, signal=9, detail="ended by SIGKILL"),
    )


def test_a_failure_of_a_rank_that_already_said_so_is_not_counted_twice() -> None:
    failure = raised(0, 20 * S)
    after, _ = drive(RUNNING, (20 * S, RankFailed(failure)), (20 * S + 1, RankExited(rank=0, signal=11)))
    assert after.failures == (failure,)
    after, issued = drive(SETTLING, (20 * S + 1, RankExited(rank=0, signal=None)))
    assert (after, issued) == (changed(SETTLING, exited=frozenset({0})), ())


# --- leases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [RUNNING, SETTLING])
def test_F18_an_expired_lease_stops_the_ranks_and_soon(attempt: Attempt) -> None:
    for grace_s, given_s in ((5, 5), (600, 30)):
        patient = changed(attempt, limits=Limits(grace_ns=grace_s * S))
        after, issued = drive(patient, (20 * S, LeaseExpired()))
        assert (after.state, after.phase, after.reason) == (State.STOPPING, Phase.TERMINATING, Reason.NODE_PARTITIONED)
        assert after.wake_ns == (20 + given_s) * S
        assert issued == (TERMINATE,)
    after, _ = drive(after, (60 * S, Tick()), (61 * S, TreeEmpty()))
    assert (after.state, after.reason) == (State.LOST, Reason.NODE_PARTITIONED)


@pytest.mark.parametrize("attempt", [QUEUED, STARTING])
def test_F18_an_expired_lease_ends_at_once_what_has_not_begun(attempt: Attempt) -> None:
    after, issued = drive(attempt, (20 * S, LeaseExpired()), (21 * S, TreeEmpty()))
    assert (after.state, after.reason) == (State.LOST, Reason.NODE_PARTITIONED)
    assert issued == (KILL, CONCLUDE)


def test_F18_an_expired_lease_leaves_a_stop_its_reason_and_less_time() -> None:
    patient = changed(RUNNING, limits=Limits(grace_ns=600 * S))
    stopping, _ = drive(patient, (20 * S, StopRequested(StopReason.CANCEL)))
    assert stopping.wake_ns == 620 * S
    assert drive(stopping, (25 * S, LeaseExpired())) == (changed(stopping, wake_ns=55 * S), ())
    assert drive(stopping, (600 * S, LeaseExpired())) == (stopping, ())
    killing, _ = drive(stopping, (620 * S, Tick()))
    assert drive(killing, (621 * S, LeaseExpired())) == (killing, ())


def test_every_instruction_is_issued_in_one_life_or_another() -> None:
    begin: list[tuple[int, Event]] = [(0, GangPlaced()), (10 * S, RankExecuting(0))]
    end: list[tuple[int, Event]] = [(60 * S, Tick()), (61 * S, TreeEmpty())]
    _, cancelled = drive(QUEUED, *begin, (20 * S, StopRequested(StopReason.CANCEL)), *end)
    _, returned = drive(QUEUED, *begin, (20 * S, RankReturned(0)), (20 * S, RankReturned(1)), *end)
    assert cancelled == tuple(each for each in AttemptInstruction if each is not RELEASE)
    assert returned == tuple(each for each in AttemptInstruction if each is not TERMINATE)


# --- a run that stands still ----------------------------------------------------------------------------------------


def test_F04_a_run_that_hangs_fails_with_the_short_grace() -> None:
    failure = Failure(rank=None, reason=Reason.COLLECTIVE_HANG, at_ns=20 * S, detail="rank 1 is elsewhere")
    stopping = changed(
        RUNNING,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=Reason.COLLECTIVE_HANG,
        stop_ns=20 * S,
        wake_ns=22 * S,
        failures=(failure,),
    )
    assert drive(RUNNING, (20 * S, HangConfirmed("rank 1 is elsewhere"))) == (stopping, (TERMINATE,))
    consequence = raised(0, 20 * S + 1)
    after, issued = drive(
        stopping,
        (20 * S + 2, RankFailed(consequence)),
        (20 * S + 3, RankExited(rank=1, signal=15, detail="ended by SIGTERM")),
        (20 * S + 3, RankExited(rank=0, signal=None)),
        (20 * S + 4, TreeEmpty()),
    )
    assert (after.state, after.reason, after.cause) == (State.FAILED, Reason.COLLECTIVE_HANG, failure)
    assert issued == (KILL, CONCLUDE)


def test_F05_what_returned_before_a_hang_stays_returned() -> None:
    after, _ = drive(RUNNING, (15 * S, RankReturned(0)), (20 * S, HangConfirmed("rank 0 has returned")))
    assert (after.state, after.returned) == (State.STOPPING, frozenset({0}))
