"""The lifecycle: every state with every event, what each reason means, and the stories an attempt can have.

Events are driven through `advance` and whole attempts are compared with the instructions that were issued.
"""

from __future__ import annotations

import typing

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    TERMINAL,
    Event,
    Failure,
    GangPlaced,
    GpuFailed,
    HangConfirmed,
    LeaseExpired,
    Limits,
    Meaning,
    PeerFailed,
    Phase,
    Preparing,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    RanksNotStarted,
    Reason,
    Released,
    State,
    StemLost,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import (
    SETTLE_NS,
    TABLE,
    AttemptInstruction,
    IllegalAttemptTransition,
    advance,
)
from tests.support.golden import golden
from tests.support.model.lifecycle import (
    CONCLUDE,
    KILL,
    LOST,
    QUEUED,
    RELEASE,
    RUNNING,
    SETTLING,
    START,
    STARTING,
    TERMINATE,
    TO_RUNNING,
    S,
    changed,
    drive,
    ended,
    raised,
)

SAMPLES: tuple[Event, ...] = (
    GangPlaced(),
    Preparing(),
    RanksNotStarted(Reason.START_FAILED, "no interpreter"),
    RankExecuting(0),
    RankReturned(0),
    RankFailed(Failure(rank=0, reason=Reason.RANK_RAISED, at_ns=1)),
    RankExited(rank=0, signal=None, detail="exited with code 0"),
    StemLost(detail="gone"),
    StopRequested(StopReason.CANCEL),
    HangConfirmed("rank 1 is elsewhere"),
    GpuFailed("GPU-1: Xid 79, the GPU has fallen off the bus"),
    Tick(),
    TreeEmpty(),
    LeaseExpired(),
    Released(),
    PeerFailed("rank 8 raised ValueError"),
)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_samples_are_one_of_each_event() -> None:
    assert [type(event) for event in SAMPLES] == list(typing.get_args(Event))


def test_every_state_has_a_row_and_those_that_are_final_or_the_servers_own_are_empty() -> None:
    assert list(TABLE) == list(State)
    assert {state for state, row in TABLE.items() if not row} == TERMINAL | {State.UNREACHABLE}


def test_every_event_has_a_place_and_no_row_knows_another() -> None:
    events = set(typing.get_args(Event))
    assert {event for row in TABLE.values() for event in row} == events


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", State)
def test_every_pair_has_a_row_or_is_refused_by_name(state: State, event: Event) -> None:
    attempt = changed(RUNNING, run_id="run-7", fence=3, state=state)
    before = msgspec.structs.asdict(attempt)
    if type(event) in TABLE[state]:
        after, instructions = advance(attempt, event, 20 * S)
        assert after.run_id == "run-7" and set(instructions) <= set(AttemptInstruction)
    else:
        with pytest.raises(IllegalAttemptTransition) as caught:
            advance(attempt, event, 20 * S)
        assert str(caught.value) == golden(
            "model.lifecycle.run-run-fence", name__=type(event).__name__, value=state.value
        )
    assert msgspec.structs.asdict(attempt) == before


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_F63_F64_nothing_happens_to_what_has_ended(state: State, event: Event) -> None:
    with pytest.raises(IllegalAttemptTransition):
        advance(changed(RUNNING, state=state), event, 20 * S)


# What thin code may deliver late, whatever else happened: none of it may be a surprise while the run is stopping.
LATE = (
    Preparing,
    RanksNotStarted,
    RankExecuting,
    RankReturned,
    RankFailed,
    RankExited,
    GpuFailed,
    StemLost,
    StopRequested,
    Tick,
    TreeEmpty,
)


@pytest.mark.parametrize(
    "event", [event for event in SAMPLES if isinstance(event, LATE)], ids=lambda e: type(e).__name__
)
def test_a_stopping_attempt_takes_every_late_word(event: Event) -> None:
    stopping = ended(STARTING, state=State.STOPPING, reason=Reason.CANCELLED, stop_ns=5 * S, phase=Phase.KILLING)
    after, _ = advance(stopping, event, 6 * S)
    assert after.reason is Reason.CANCELLED


# --- what reasons mean -----------------------------------------------------------------------------------------------

ENDINGS = {
    State.SUCCEEDED: {Reason.COMPLETED},
    State.CANCELLED: {Reason.CANCELLED, Reason.SESSION_ENDED, Reason.PREEMPTED, Reason.DRAINED},
    State.TIMED_OUT: {Reason.TIMEOUT, Reason.IDLE},
    State.BUDGET_STOPPED: {Reason.BUDGET},
    State.LOST: {
        Reason.SUPERVISOR_LOST,
        Reason.SUPERVISOR_KILLED,
        Reason.NODE_LOST,
        Reason.NODE_PARTITIONED,
        Reason.NODE_GONE,
        Reason.SERVER_RESTORED,
    },
}


def test_every_reason_has_a_meaning_that_ends() -> None:
    assert list(MEANINGS) == list(Reason)
    assert {meaning.state for meaning in MEANINGS.values()} == TERMINAL
    sentences = [meaning.sentence for meaning in MEANINGS.values()]
    assert all(sentences) and len(set(sentences)) == len(sentences)


def test_which_reason_ends_where() -> None:
    named = {reason: state for state, reasons in ENDINGS.items() for reason in reasons}
    assert {reason: meaning.state for reason, meaning in MEANINGS.items()} == {
        reason: named.get(reason, State.FAILED) for reason in Reason
    }


def test_only_what_ran_nothing_of_the_user_may_be_retried_and_faults_of_the_platform_are_not_billed() -> None:
    never_started = {
        Reason.START_FAILED,
        Reason.RENDEZVOUS,
        Reason.NODE_DISK,
        Reason.ENV_CORRUPT,
        Reason.ENV_UNAVAILABLE,
        Reason.GANG_START,
        Reason.REFUSED,
        Reason.NODES_APART,
    }
    assert {reason for reason, m in MEANINGS.items() if m.may_retry} == never_started
    assert {reason for reason, m in MEANINGS.items() if not m.is_billed} == never_started | {
        Reason.GPU_LOST,
        Reason.PEER_FAILED,
        Reason.SECRET_MISSING,
        Reason.UNSATISFIABLE,
        Reason.SESSION_ENDED,
        Reason.SUPERVISOR_LOST,
        Reason.NODE_LOST,
        Reason.NODE_PARTITIONED,
        Reason.NODE_REBOOTED,
        Reason.NODE_GONE,
        Reason.SERVER_RESTORED,
    }


def test_one_meaning_whole() -> None:
    assert MEANINGS[Reason.COMPLETED] == Meaning(State.SUCCEEDED, False, True, "every rank returned")


# --- limits and small things -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout_s", "grace_s", "expected_s"),
    [(None, 30, 30), (100, 30, 30), (60, 30, 30), (59, 30, 29.5), (10, 30, 5), (1, 0.25, 0.25)],
)
def test_F73_the_grace_fits_into_the_time_limit(timeout_s: int | None, grace_s: float, expected_s: float) -> None:
    timeout_ns = None if timeout_s is None else timeout_s * S
    assert Limits(timeout_ns=timeout_ns, grace_ns=round(grace_s * S)).stop_grace_ns() == expected_s * S


def test_a_gang_is_named_by_run_and_fence() -> None:
    assert changed(QUEUED, run_id="abc", fence=4).gang == "abc:4"


# --- success ---------------------------------------------------------------------------------------------------------


def test_placed_and_executing() -> None:
    assert drive(QUEUED, (0, GangPlaced())) == (STARTING, (START,))
    assert drive(QUEUED, *TO_RUNNING) == (RUNNING, (START,))


def test_what_gets_on_has_time_to_start() -> None:
    """Restoring gigabytes takes as long as it takes; what stands still for `start_ns` has failed."""
    waiting, _ = drive(STARTING, (299 * S, Preparing()), (500 * S, Tick()))
    assert waiting == changed(STARTING, wake_ns=599 * S)
    failed, issued = drive(waiting, (599 * S, Tick()))
    assert (failed.reason, issued) == (Reason.START_FAILED, (KILL,))
    assert drive(RUNNING, (20 * S, Preparing())) == (RUNNING, ())


def test_without_a_time_limit_nothing_wakes_a_running_attempt() -> None:
    unlimited = changed(QUEUED, limits=Limits())
    running, _ = drive(unlimited, *TO_RUNNING)
    assert running.wake_ns is None
    assert drive(running, (10**18, Tick())) == (running, ())


def test_success() -> None:
    returned = ended(RUNNING, state=State.STOPPING, reason=Reason.COMPLETED, stop_ns=21 * S, returned=frozenset({0, 1}))
    stopping = changed(returned, phase=Phase.TERMINATING, wake_ns=51 * S)
    assert drive(RUNNING, (20 * S, RankReturned(1)), (21 * S, RankReturned(0))) == (stopping, (RELEASE,))
    killing = changed(returned, phase=Phase.KILLING, exited=frozenset({0, 1}))
    gone = (RankExited(rank=0, signal=None), RankExited(rank=1, signal=None))
    assert drive(stopping, (22 * S, gone[1]), (23 * S, gone[0])) == (killing, (KILL,))
    over = changed(killing, state=State.SUCCEEDED, phase=Phase.NONE)
    assert drive(killing, (24 * S, TreeEmpty())) == (over, (CONCLUDE,))


def test_a_rank_that_exits_after_it_returned_changes_nothing_for_the_others() -> None:
    after, issued = drive(RUNNING, (20 * S, RankReturned(0)), (21 * S, RankExited(rank=0, signal=11)))
    assert after == changed(RUNNING, returned=frozenset({0}), exited=frozenset({0}))
    assert issued == ()


def test_a_rank_that_returned_and_dies_at_its_end_has_still_returned() -> None:
    after, issued = drive(
        RUNNING,
        (20 * S, RankReturned(0)),
        (20 * S, RankReturned(1)),
        (21 * S, RankExited(rank=0, signal=11, detail="ended by SIGSEGV")),
        (21 * S, RankExited(rank=1, signal=None)),
        (22 * S, TreeEmpty()),
    )
    both = frozenset({0, 1})
    assert after == ended(
        RUNNING, state=State.SUCCEEDED, reason=Reason.COMPLETED, stop_ns=20 * S, returned=both, exited=both
    )
    assert issued == (RELEASE, KILL, CONCLUDE)


def test_a_rank_that_returned_and_never_exits_is_killed_after_its_grace_and_the_run_succeeds() -> None:
    returned = ((20 * S, RankReturned(0)), (20 * S, RankReturned(1)))
    before, issued = drive(RUNNING, *returned, (50 * S - 1, Tick()))
    assert (before.phase, issued) == (Phase.TERMINATING, (RELEASE,))
    after, issued = drive(before, (50 * S, Tick()), (50 * S, TreeEmpty()))
    assert after == ended(
        RUNNING,
        state=State.SUCCEEDED,
        reason=Reason.COMPLETED,
        stop_ns=20 * S,
        returned=frozenset({0, 1}),
        killed=True,
    )
    assert issued == (KILL, CONCLUDE)


def test_a_stem_lost_after_every_result_is_durable_loses_nothing() -> None:
    returned = ((20 * S, RankReturned(0)), (20 * S, RankReturned(1)))
    after, issued = drive(RUNNING, *returned, (21 * S, StemLost(detail="gone")), (22 * S, TreeEmpty()))
    assert (after.state, after.failures, issued) == (State.SUCCEEDED, (), (RELEASE, KILL, CONCLUDE))


# --- failures --------------------------------------------------------------------------------------------------------


def test_F06_the_first_failure_stops_the_others() -> None:
    first = raised(1, 20 * S - 5)
    stopping = changed(
        RUNNING,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=Reason.RANK_RAISED,
        stop_ns=20 * S,
        wake_ns=22 * S,
        failures=(first,),
    )
    assert drive(RUNNING, (20 * S, RankFailed(first))) == (stopping, (TERMINATE,))
    consequence = raised(0, 20 * S + 1)
    after, issued = drive(
        stopping,
        (20 * S + 2, RankFailed(consequence)),
        (20 * S + 3, RankExited(rank=1, signal=None)),
        (20 * S + 4, RankExited(rank=0, signal=None)),
        (20 * S + 5, TreeEmpty()),
    )
    assert after == ended(
        RUNNING,
        state=State.FAILED,
        reason=Reason.RANK_RAISED,
        stop_ns=20 * S,
        failures=(first, consequence),
        exited=frozenset({0, 1}),
    )
    assert (after.cause, issued) == (first, (KILL, CONCLUDE))


def test_F08_a_rank_that_ignores_the_end_of_a_failed_run_is_killed_after_the_short_grace() -> None:
    stopping, _ = drive(RUNNING, (20 * S, RankFailed(raised(0, 20 * S))))
    assert drive(stopping, (22 * S - 1, Tick())) == (stopping, ())
    killing = changed(stopping, phase=Phase.KILLING, wake_ns=None, killed=True)
    assert drive(stopping, (22 * S, Tick())) == (killing, (KILL,))
    assert drive(killing, (99 * S, Tick())) == (killing, ())


def test_a_failure_heard_later_that_happened_earlier_is_the_reason() -> None:
    heard, earlier = raised(0, 19 * S), Failure(rank=1, reason=Reason.GPU_OOM, at_ns=18 * S)
    after, _ = drive(
        RUNNING,
        (20 * S, RankFailed(heard)),
        (20 * S + 1, RankFailed(earlier)),
        (21 * S, StemLost(detail="gone")),
        (21 * S, TreeEmpty()),
    )
    assert (after.state, after.reason, after.cause) == (State.FAILED, Reason.GPU_OOM, earlier)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (RankExited(rank=1, signal=11, detail="ended by SIGSEGV"), Reason.RANK_SIGNAL),
        (RankExited(rank=1, signal=9, detail="ended by SIGKILL", out_of_memory=True), Reason.HOST_OOM),
        (RankExited(rank=1, signal=None, detail="exited with code 0"), Reason.NO_RESULT),
        (RankExited(rank=1, signal=None, detail="exited with code 137"), Reason.NO_RESULT),
    ],
    ids=["F01 signal", "F02 memory", "F07 no result", "F02 exit code 137 is not memory"],
)
def test_F01_F02_F07_a_rank_that_leaves_without_a_word(event: RankExited, reason: Reason) -> None:
    failure = Failure(rank=1, reason=reason, at_ns=20 * S, signal=event.signal, detail=event.detail)
    assert drive(RUNNING, (20 * S, event)) == (
        changed(
            RUNNING,
            state=State.STOPPING,
            phase=Phase.TERMINATING,
            reason=reason,
            stop_ns=20 * S,
            wake_ns=22 * S,
            exited=frozenset({1}),
            failures=(failure,),
        ),
        (TERMINATE,),
    )


def test_when_the_last_rank_leaves_without_a_word_nobody_is_left_to_ask() -> None:
    after, issued = drive(
        RUNNING,
        (20 * S, RankReturned(0)),
        (21 * S, RankExited(rank=0, signal=None)),
        (22 * S, RankExited(rank=1, signal=None)),
    )
    assert (after.state, after.phase, after.reason, issued) == (
        State.STOPPING,
        Phase.KILLING,
        Reason.NO_RESULT,
        (KILL,),
    )


def test_a_rank_that_fails_before_any_user_code() -> None:
    failure = raised(0, 5 * S)
    after, issued = drive(STARTING, (5 * S, RankFailed(failure)), (5 * S, RankExecuting(1)))
    assert after == changed(
        STARTING,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=Reason.RANK_RAISED,
        stop_ns=5 * S,
        wake_ns=7 * S,
        failures=(failure,),
    )
    assert issued == (TERMINATE,)


# --- a peer is lost --------------------------------------------------------------------------------------------------


def test_a_lost_peer_is_waited_for() -> None:
    assert drive(RUNNING, (20 * S, RankFailed(LOST))) == (SETTLING, ())
    assert drive(SETTLING, (20 * S + SETTLE_NS - 1, Tick())) == (SETTLING, ())


def test_more_lost_peers_do_not_prolong_the_wait() -> None:
    three = changed(SETTLING, world_size=3)
    again = raised(1, 20 * S + 9, peer_lost=True)
    assert drive(three, (20 * S + 9, RankFailed(again))) == (changed(three, failures=(LOST, again)), ())


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        (
            RankExited(rank=1, signal=11, detail="ended by SIGSEGV"),
            Failure(rank=1, reason=Reason.RANK_SIGNAL, at_ns=20 * S + 7, signal=11, detail="ended by SIGSEGV"),
        ),
        (RankFailed(raised(1, 20 * S + 5)), raised(1, 20 * S + 5)),
    ],
    ids=["crash", "exception"],
)
def test_a_real_failure_overtakes_the_wait(event: Event, failure: Failure) -> None:
    after, issued = drive(SETTLING, (20 * S + 7, event))
    assert (after.state, after.phase, after.reason) == (State.STOPPING, Phase.TERMINATING, failure.reason)
    assert (after.wake_ns, after.failures, after.cause) == (22 * S + 7, (LOST, failure), failure)
    assert issued == (TERMINATE,)


def test_when_every_rank_has_spoken_there_is_nothing_to_wait_for() -> None:
    also = raised(1, 20 * S + 5, peer_lost=True)
    after, issued = drive(SETTLING, (20 * S + 6, RankFailed(also)))
    assert (after.phase, after.cause, issued) == (Phase.TERMINATING, LOST, (TERMINATE,))
    after, issued = drive(changed(RUNNING, returned=frozenset({1})), (20 * S, RankFailed(LOST)))
    assert (after.phase, after.cause, issued) == (Phase.TERMINATING, LOST, (TERMINATE,))


def test_after_the_wait_the_lost_peer_is_the_story_unless_a_crash_turns_up() -> None:
    now_ns = 20 * S + SETTLE_NS
    stopping, issued = drive(SETTLING, (now_ns, Tick()))
    assert stopping == changed(
        SETTLING,
        state=State.STOPPING,
        phase=Phase.TERMINATING,
        reason=Reason.RANK_RAISED,
        stop_ns=now_ns,
        wake_ns=now_ns + 2 * S,
    )
    assert issued == (TERMINATE,)
    crash = RankExited(rank=1, signal=6, detail="ended by SIGABRT")
    after, _ = drive(
        stopping, (now_ns + 1, crash), (now_ns + 2, RankExited(rank=0, signal=None)), (now_ns + 3, TreeEmpty())
    )
    failure = Failure(rank=1, reason=Reason.RANK_SIGNAL, at_ns=now_ns + 1, signal=6, detail="ended by SIGABRT")
    assert (after.state, after.reason, after.cause) == (State.FAILED, Reason.RANK_SIGNAL, failure)


def test_a_result_during_the_wait_does_not_end_it() -> None:
    assert drive(SETTLING, (20 * S + 1, RankReturned(1))) == (changed(SETTLING, returned=frozenset({1})), ())
