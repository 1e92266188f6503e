"""The life of a run under a server: every state with every event, and how each ending goes on."""

from __future__ import annotations

import itertools
import re
import typing
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import (
    INFRA_RETRIES_MAX,
    LOST,
    TABLE,
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    IllegalRunTransition,
    Restored,
    Run,
    RunInstruction,
    RunPlaced,
    Silent,
    StopAsked,
    Stopping,
    Unsatisfiable,
    UserCodeStarted,
    advance,
    over_because,
    pause_s,
)
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

SEND_STOP, REQUEUE, CONCLUDE = RunInstruction.SEND_STOP, RunInstruction.REQUEUE, RunInstruction.CONCLUDE
QUEUED = Run(run_id="run-7")
STARTING = msgspec.structs.replace(QUEUED, fence=3, state=State.STARTING)
RUNNING = msgspec.structs.replace(STARTING, state=State.RUNNING, began=True)
STOPPING = msgspec.structs.replace(RUNNING, state=State.STOPPING)
UNREACHABLE = msgspec.structs.replace(RUNNING, state=State.UNREACHABLE, before=State.RUNNING)
ALIVE = (STARTING, RUNNING, UNREACHABLE, STOPPING)
FINAL_STOPS = (StopReason.CANCEL, StopReason.TIMEOUT, StopReason.BUDGET, StopReason.IDLE)
PASSING_STOPS = (StopReason.PREEMPT, StopReason.DRAIN)
INFRA = sorted(reason for reason, meaning in MEANINGS.items() if meaning.may_retry)
SAMPLES: tuple[Event, ...] = (
    RunPlaced(),
    UserCodeStarted(),
    Stopping(),
    Silent(),
    Heard(State.RUNNING),
    StopAsked(StopReason.CANCEL),
    AttemptEnded(Reason.COMPLETED, began=True),
    GivenUp(Reason.NODE_REBOOTED),
    Forgotten(),
    Restored(),
    Unsatisfiable(),
)


def changed(run: Run, **fields: object) -> Run:
    return msgspec.structs.replace(run, **fields)


def requeued(run: Run, **fields: object) -> tuple[Run, tuple[RunInstruction, ...]]:
    return changed(run, state=State.QUEUED, stop=None, began=False, before=None, **fields), (REQUEUE,)


def concluded(run: Run, reason: Reason, **fields: object) -> tuple[Run, tuple[RunInstruction, ...]]:
    return changed(run, state=MEANINGS[reason].state, reason=reason, before=None, **fields), (CONCLUDE,)


def name(value: object) -> str:
    return value.state if isinstance(value, Run) else type(value).__name__ if isinstance(value, Event) else str(value)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_samples_are_one_of_each_event() -> None:
    assert [type(event) for event in SAMPLES] == list(typing.get_args(Event))


def test_every_state_has_a_row_and_terminal_rows_are_empty() -> None:
    assert set(TABLE) == set(State)
    assert {state for state, row in TABLE.items() if not row} == TERMINAL


def test_every_event_has_a_place_and_no_row_knows_another() -> None:
    assert {event for row in TABLE.values() for event in row} == set(typing.get_args(Event))


@pytest.mark.parametrize("event", SAMPLES, ids=name)
@pytest.mark.parametrize("state", State)
def test_every_pair_has_a_row_or_is_refused_by_name(state: State, event: Event) -> None:
    run = changed(RUNNING, state=state)
    before = msgspec.structs.asdict(run)
    if type(event) in TABLE[state]:
        advance(run, event)
    else:
        with pytest.raises(IllegalRunTransition) as caught:
            advance(run, event)
        assert str(caught.value) == golden(
            "model.run_lifecycle.run-run-fence", name__=type(event).__name__, state=state
        )
    assert msgspec.structs.asdict(run) == before


# --- until the end ----------------------------------------------------------------------------------------------------


def test_each_placement_is_an_attempt_with_the_next_number() -> None:
    assert advance(QUEUED, RunPlaced()) == (changed(QUEUED, fence=1, state=State.STARTING), ())
    assert advance(changed(QUEUED, fence=4), RunPlaced()) == (changed(QUEUED, fence=5, state=State.STARTING), ())


def test_user_code_that_starts_makes_it_running() -> None:
    assert advance(STARTING, UserCodeStarted()) == (changed(STARTING, state=State.RUNNING, began=True), ())


def test_user_code_that_started_before_the_stop_arrived_is_remembered() -> None:
    run = changed(STOPPING, began=False, stop=StopReason.PREEMPT)
    assert advance(run, UserCodeStarted()) == (changed(run, began=True), ())


@pytest.mark.parametrize("run", [STARTING, RUNNING, STOPPING], ids=name)
def test_silence_shows_and_ends_nothing(run: Run) -> None:
    assert advance(run, Silent()) == (changed(run, state=State.UNREACHABLE, before=run.state), ())


def test_more_silence_changes_nothing() -> None:
    assert advance(UNREACHABLE, Silent()) == (UNREACHABLE, ())


@pytest.mark.parametrize("heard", [State.STARTING, State.RUNNING, State.STOPPING])
@pytest.mark.parametrize("before", [State.STARTING, State.RUNNING, State.STOPPING])
def test_who_is_heard_again_is_where_it_was_or_further(before: State, heard: State) -> None:
    order = [State.STARTING, State.RUNNING, State.STOPPING]
    silent = changed(UNREACHABLE, before=before)
    expected = order[max(order.index(before), order.index(heard))]
    assert advance(silent, Heard(heard)) == (changed(silent, state=expected, before=None), ())


@pytest.mark.parametrize("run", [STARTING, RUNNING, STOPPING], ids=name)
def test_a_report_of_somebody_who_was_not_missed_changes_nothing(run: Run) -> None:
    assert advance(run, Heard(State.STARTING)) == (run, ())


# --- being asked to stop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", FINAL_STOPS)
def test_a_final_stop_ends_a_waiting_run_at_once(why: StopReason) -> None:
    assert advance(QUEUED, StopAsked(why)) == concluded(QUEUED, STOPPED_BY[why], stop=why)


@pytest.mark.parametrize("why", PASSING_STOPS)
def test_a_waiting_run_has_nothing_to_make_room_with(why: StopReason) -> None:
    assert advance(QUEUED, StopAsked(why)) == (QUEUED, ())


@pytest.mark.parametrize("why", StopReason)
@pytest.mark.parametrize("run", [STARTING, RUNNING, STOPPING], ids=name)
def test_a_stop_is_sent_and_shown(run: Run, why: StopReason) -> None:
    assert advance(run, StopAsked(why)) == (changed(run, state=State.STOPPING, stop=why), (SEND_STOP,))


@pytest.mark.parametrize("why", StopReason)
def test_a_stop_for_a_silent_run_is_sent_and_it_stays_unreachable(why: StopReason) -> None:
    stopped = changed(UNREACHABLE, before=State.STOPPING, stop=why)
    assert advance(UNREACHABLE, StopAsked(why)) == (stopped, (SEND_STOP,))
    assert advance(stopped, Heard(State.RUNNING)) == (changed(stopped, state=State.STOPPING, before=None), ())


@pytest.mark.parametrize(("first", "second"), [*itertools.product(StopReason, StopReason)])
@pytest.mark.parametrize("run", ALIVE, ids=name)
def test_a_second_stop_counts_only_when_it_is_final_and_the_first_is_not(
    run: Run, first: StopReason, second: StopReason
) -> None:
    once, _ = advance(run, StopAsked(first))
    if first in PASSING_STOPS and second in FINAL_STOPS:
        assert advance(once, StopAsked(second)) == (changed(once, stop=second), (SEND_STOP,))
    else:
        assert advance(once, StopAsked(second)) == (once, ())


# --- how it goes on after an attempt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, *StopReason])
@pytest.mark.parametrize("run", ALIVE, ids=name)
def test_a_run_whose_ranks_all_returned_succeeded_whatever_was_asked(run: Run, stop: StopReason | None) -> None:
    run = changed(run, stop=stop, retries_left=5, may_resume=True)
    assert advance(run, AttemptEnded(Reason.COMPLETED, began=True)) == concluded(run, Reason.COMPLETED, began=True)


@pytest.mark.parametrize("reason", INFRA)
def test_what_failed_before_user_code_is_tried_again_three_times_and_then_stands(reason: Reason) -> None:
    run = STARTING
    for left in (2, 1, 0):
        run, instructions = advance(run, AttemptEnded(reason, began=False))
        assert (run, instructions) == requeued(run, infra_left=left)
        run, _ = advance(run, RunPlaced())
    assert run.fence == STARTING.fence + INFRA_RETRIES_MAX
    stands = Reason.GANG_START if reason is Reason.START_FAILED else reason
    assert advance(changed(run, retries_left=5), AttemptEnded(reason, began=False)) == concluded(
        run, stands, retries_left=5
    )


@pytest.mark.parametrize("reason", INFRA)
def test_what_is_known_to_have_begun_counts_as_begun_whatever_the_last_report_says(reason: Reason) -> None:
    assert advance(RUNNING, AttemptEnded(reason, began=False)) == concluded(RUNNING, reason)


POINTLESS = (Reason.SECRET_MISSING, Reason.UNSATISFIABLE, Reason.NO_PROGRESS)
RESULT_TROUBLES = (Reason.RESULT_UNSERIALISABLE, Reason.RESULT_TOO_LARGE, Reason.RESULT_UPLOAD)
USER_FAILURES = sorted(
    reason
    for reason, meaning in MEANINGS.items()
    if meaning.state is State.FAILED and reason not in (*LOST, *RESULT_TROUBLES, *POINTLESS)
)


@pytest.mark.parametrize("reason", USER_FAILURES)
def test_user_code_that_failed_runs_again_only_as_often_as_was_asked(reason: Reason) -> None:
    ended = AttemptEnded(reason, began=True)
    assert advance(RUNNING, ended) == concluded(RUNNING, reason)
    assert advance(changed(RUNNING, may_resume=True), ended) == concluded(RUNNING, reason, may_resume=True)
    assert advance(changed(RUNNING, retries_left=2), ended) == requeued(RUNNING, retries_left=1, ran=1)


def test_F70_a_run_whose_secret_is_missing_does_not_run_again() -> None:
    run = changed(STARTING, retries_left=2, may_resume=True)
    assert advance(run, AttemptEnded(Reason.SECRET_MISSING, began=False)) == concluded(run, Reason.SECRET_MISSING)


@pytest.mark.parametrize("reason", RESULT_TROUBLES)
def test_user_code_that_ran_to_its_end_does_not_run_again(reason: Reason) -> None:
    run = changed(RUNNING, retries_left=2)
    assert advance(run, AttemptEnded(reason, began=True)) == concluded(run, reason)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.DRAINED])
def test_who_made_room_goes_on_elsewhere_if_it_can_resume(reason: Reason) -> None:
    run = changed(STOPPING, stop=StopReason.PREEMPT, may_resume=True)
    assert advance(run, AttemptEnded(reason, began=True)) == requeued(run)
    for retries in (0, 2):  # a retry begins anew, which nobody asked for here
        run = changed(STOPPING, stop=StopReason.PREEMPT, retries_left=retries)
        assert advance(run, AttemptEnded(reason, began=True)) == concluded(run, reason)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.DRAINED])
def test_who_made_room_before_it_began_has_nothing_to_resume_and_waits_again(reason: Reason) -> None:
    run = changed(STOPPING, stop=StopReason.DRAIN, began=False, infra_left=0)
    assert advance(run, AttemptEnded(reason, began=False)) == requeued(run)


@pytest.mark.parametrize("reason", sorted(LOST))
@pytest.mark.parametrize("run", ALIVE[1:], ids=name)
def test_a_lost_run_goes_on_if_it_can_resume_or_has_retries(run: Run, reason: Reason) -> None:
    for event in (AttemptEnded(reason, began=True), GivenUp(reason)):
        assert advance(run, event) == concluded(run, reason)
        assert advance(changed(run, may_resume=True), event) == requeued(run, may_resume=True, ran=1, unsaved=1)
        assert advance(changed(run, retries_left=2), event) == requeued(run, retries_left=1, ran=1)


@pytest.mark.parametrize("reason", sorted(LOST))
def test_a_run_that_is_lost_time_and_again_before_it_begins_ends(reason: Reason) -> None:
    run = changed(STARTING, may_resume=True)
    assert advance(run, GivenUp(reason)) == requeued(run, infra_left=2)
    run = changed(run, infra_left=0)
    assert advance(run, GivenUp(reason)) == concluded(run, reason)


@pytest.mark.parametrize("run", ALIVE, ids=name)
def test_a_forgotten_node_is_a_node_that_is_gone(run: Run) -> None:
    assert advance(run, Forgotten()) == advance(run, GivenUp(Reason.NODE_GONE))
    assert over_because(Forgotten()) is Reason.NODE_GONE


@pytest.mark.parametrize("reason", Reason)
def test_no_attempt_follows_a_final_stop(reason: Reason) -> None:
    for run, stop, began in itertools.product(ALIVE, FINAL_STOPS, [False, True]):
        run = changed(run, stop=stop, may_resume=True, retries_left=5)
        after, instructions = advance(run, AttemptEnded(reason, began=began))
        assert instructions == (CONCLUDE,), (run, began)
        # Where it would have gone on by itself, the stop is what ended it. All else is told as it was.
        by_itself = reason in (Reason.PREEMPTED, Reason.DRAINED) or (reason in INFRA and not after.began)
        assert after.reason is (STOPPED_BY[stop] if by_itself else reason), (run, began)


# --- every ending, whatever came before -------------------------------------------------------------------------------


def test_every_ending_is_final_with_a_reason_or_a_new_place_in_the_queue() -> None:
    choices = itertools.product(
        ALIVE, [None, *StopReason], [False, True], [False, True], [0, 1], [0, 1], Reason, [False, True]
    )
    for run, stop, known, may_resume, retries, infra, reason, began in choices:
        run = changed(run, stop=stop, began=known, may_resume=may_resume, retries_left=retries, infra_left=infra)
        after, instructions = advance(run, AttemptEnded(reason, began=began))
        assert after.fence == run.fence and after.before is None
        if instructions == (REQUEUE,):
            assert (after.state, after.reason, after.stop, after.began) == (State.QUEUED, None, None, False)
            spent = (run.retries_left - after.retries_left, run.infra_left - after.infra_left)
            assert spent in {(0, 0), (1, 0), (0, 1)}
            # User code runs again only if that was asked for.
            assert spent[0] or may_resume or not (known or began)
        else:
            assert instructions == (CONCLUDE,)
            assert after.reason is not None and after.state is MEANINGS[after.reason].state
            assert (after.retries_left, after.infra_left) == (retries, infra)


def test_F73_who_reached_the_longest_time_of_an_attempt_goes_on_with_another_and_that_costs_no_retry() -> None:
    run = changed(STOPPING, may_resume=True, goes_on_at_limit=True, retries_left=1)
    ended = AttemptEnded(Reason.TIMEOUT, began=True)
    assert advance(run, ended) == requeued(run, ran=1, unsaved=1)
    # The user's own limit is final, and so is what they ask for: it is what ended the run then.
    own = changed(run, goes_on_at_limit=False)
    assert advance(own, ended) == concluded(own, Reason.TIMEOUT)
    for stop in FINAL_STOPS:
        asked = changed(run, stop=stop)
        assert advance(asked, ended) == concluded(asked, STOPPED_BY[stop])
    for stop in PASSING_STOPS:
        assert advance(changed(run, stop=stop), ended) == requeued(run, ran=1, unsaved=1)
    left = AttemptEnded(Reason.TIMEOUT, began=True, proven=False)  # a process of it might run beside the next one
    assert advance(run, left) == concluded(run, Reason.TIMEOUT)


@pytest.mark.parametrize("reason", Reason)
def test_what_the_platform_failed_waits_longer_each_time_and_nothing_else_waits(reason: Reason) -> None:
    displaced = reason in (Reason.PREEMPTED, Reason.DRAINED)
    pauses = [pause_s(used, reason, began=False) for used in range(5)]
    assert pauses == ([0, 0, 0, 0, 0] if displaced else [0, 1, 5, 30, 0])
    assert [pause_s(used, reason, began=True) for used in range(5)] == [0] * 5
    assert pause_s(1, None, began=False) == 0


def test_the_reference_says_when_another_attempt_follows() -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    table = page.partition("### Further attempts")[2].partition("\n## ")[0]
    said: dict[str, list[bool]] = {}
    for reasons, *cells in re.findall(r"^\| (.*?)" + r" \| (yes|no)" * 4 + r" \|$", table, re.MULTILINE):
        said |= {name: [cell == "yes" for cell in cells] for name in re.findall(r"`(\w+)`", reasons) or [""]}
    for reason in Reason:
        automatic, resume, retry_on_infra, retries = said.get(reason, said[""])

        def follows(*, reason: Reason = reason, began: bool = True, **given: object) -> bool:
            return REQUEUE in advance(changed(RUNNING, began=began, **given), AttemptEnded(reason, began=began))[1]

        assert follows(retries_left=1) == retries, reason
        assert follows(faults_left=1) == retry_on_infra, reason
        assert follows(may_resume=True) == resume, reason
        assert follows(began=False) == automatic, reason
        assert follows(began=False, infra_left=0) == (reason in ("preempted", "drained")), reason
        assert not follows(), reason


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("began", [True, False])
def test_F09_there_is_no_other_attempt_beside_what_is_left_of_one(reason: Reason, began: bool) -> None:
    for stop in (None, *StopReason):
        run = changed(STOPPING, began=began, stop=stop, retries_left=5, may_resume=True)
        after, instructions = advance(run, AttemptEnded(reason, began=began, proven=False))
        assert instructions == (CONCLUDE,) and after.state in TERMINAL


# --- resume that makes no progress ---


def lived(run: Run, endings: list[tuple[Event, bool]]) -> Run:
    """Return a run after attempts that began, ended so, and saved something or not; it stops where it has ended."""
    for ended, has_saved in endings:
        if run.state in TERMINAL:
            break
        run, _ = advance(run, RunPlaced())
        run, _ = advance(run, UserCodeStarted())
        if has_saved:
            run = changed(run, saved=run.fence, unsaved=0)
        run, _ = advance(run, ended)
    return run


AT_LIMIT = AttemptEnded(Reason.TIMEOUT, began=True)
LOST_AGAIN = GivenUp(Reason.NODE_GONE)
MADE_ROOM = AttemptEnded(Reason.PREEMPTED, began=True)
RESUMING = changed(QUEUED, may_resume=True, goes_on_at_limit=True)


@pytest.mark.parametrize("ended", [AT_LIMIT, LOST_AGAIN, AttemptEnded(Reason.SUPERVISOR_LOST, began=True)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_22D2_attempts_in_a_row_that_saved_nothing_new_end_the_run(ended: Event, most: int) -> None:
    after = lived(changed(RESUMING, unsaved_max=most), [(ended, False)] * 100)
    assert (after.state, after.reason, after.fence) == (State.FAILED, Reason.NO_PROGRESS, most)


def test_22D2_only_attempts_in_a_row_count_that_nobody_stopped_and_that_saved_nothing() -> None:
    one: list[tuple[Event, bool]] = list(itertools.product([AT_LIMIT, LOST_AGAIN, MADE_ROOM], [True, False]))
    for attempts in itertools.product(one, repeat=4):
        after = lived(changed(RESUMING, unsaved_max=2), list(attempts))
        unsaved, is_over = 0, False
        for ended, has_saved in attempts:
            unsaved = 0 if has_saved else unsaved + (ended is not MADE_ROOM)
            is_over = is_over or unsaved >= 2
        assert (after.reason is Reason.NO_PROGRESS) == is_over, attempts


def test_22D2_what_a_lost_attempt_had_saved_is_heard_from_the_next_one() -> None:
    after = lived(RESUMING, [(LOST_AGAIN, False)] * 2)
    assert (after.state, after.unsaved) == (State.QUEUED, 2)
    heard = changed(after, saved=2, unsaved=0)  # `runs.note_saved`, from a report of the third
    assert lived(heard, [(LOST_AGAIN, False)] * 2).state is State.QUEUED


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ({"goes_on_at_limit": True, "may_resume": True}, AT_LIMIT),
        ({"may_resume": True}, LOST_AGAIN),
        ({"retries_left": 9}, AttemptEnded(Reason.RANK_RAISED, began=True)),
        ({"faults_left": 9}, AttemptEnded(Reason.GPU_LOST, began=True)),
    ],
    ids=str,
)
def test_22D2_a_policy_bounds_attempts_whatever_the_next_one_would_be_for(
    given: dict[str, Any], ended: AttemptEnded
) -> None:
    run = changed(QUEUED, attempts_max=4, unsaved_max=99, **given)
    after = lived(run, [(ended, False)] * 9)
    assert (after.fence, after.reason, after.state in TERMINAL) == (4, over_because(ended), True)
    # Who makes room for others, or does not begin, has not used one of them.
    after = lived(run, [(MADE_ROOM, False)] * 5) if run.may_resume else run
    assert after.state is State.QUEUED and after.ran == 0
    assert lived(changed(run, attempts_max=None), [(ended, False)] * 9).fence == 9


# --- restored from a backup -------------------------------------------------------------------------------------------


def test_a_run_that_waited_in_a_backup_is_lost_whatever_its_user_allows() -> None:
    run = changed(QUEUED, may_resume=True, retries_left=3)
    assert advance(run, Restored()) == concluded(run, Reason.SERVER_RESTORED)


@pytest.mark.parametrize("run", ALIVE, ids=name)
def test_a_run_that_goes_on_in_a_backup_is_heard_of_or_not(run: Run) -> None:
    with pytest.raises(IllegalRunTransition):
        advance(run, Restored())


# --- what nothing can ever serve --------------------------------------------------------------------------------------


def test_F82_what_nothing_can_serve_ends_in_the_queue_whatever_its_user_allows() -> None:
    run = changed(QUEUED, may_resume=True, retries_left=3)
    assert advance(run, Unsatisfiable()) == concluded(run, Reason.UNSATISFIABLE)


@pytest.mark.parametrize("run", ALIVE, ids=name)
def test_F82_what_has_devices_was_served(run: Run) -> None:
    with pytest.raises(IllegalRunTransition):
        advance(run, Unsatisfiable())
