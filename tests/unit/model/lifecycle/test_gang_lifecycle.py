"""What the crews of a gang amount to: `model/lifecycle/gang_lifecycle.py`, by example and by random lives."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Crew, Halt, Over, fold, must_stop
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp
from tests.support.golden import golden

S, R, U, STOPPING = State.STARTING, State.RUNNING, State.UNREACHABLE, State.STOPPING
LOST_PEER = Halt(reason=Reason.RANK_RAISED, rank=0, peer_lost=True, detail="Connection closed by peer")
RAISED = Halt(reason=Reason.RANK_RAISED, rank=9, detail="ValueError: no")
DONE = Over(reason=Reason.COMPLETED, began=True)
FOLLOWED = Over(reason=Reason.PEER_FAILED, began=True)
GONE = Over(reason=Reason.NODE_GONE, began=True, given_up=True, detail="nothing was heard of n2")


def _crews(*states: State) -> list[Crew]:
    return [Crew(number=number, state=state, began=state is not S) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ((S,), S),
        ((S, R), S),
        ((R, R), R),
        ((R, STOPPING), STOPPING),
        ((STOPPING, S), STOPPING),
        ((R, U), U),
        ((U, U), U),
    ],
)
def test_the_state_is_that_of_the_furthest_behind(states: tuple[State, ...], state: State) -> None:
    """Running means that all run; one that stops, or is silent, is what people are to see."""
    assert fold(_crews(*states)).state is state


def test_what_it_would_be_without_the_silent_ones_is_kept() -> None:
    """So that it goes back to that when they are heard again."""
    silent = Crew(number=1, state=U, before=R, began=True)
    found = fold([Crew(number=0, state=R, began=True), silent])
    assert (found.state, found.before, found.began) == (U, R, True)


def test_user_code_has_begun_when_it_has_on_any_node() -> None:
    """It must not run again without having been asked for, even if it began on one node only."""
    assert not fold(_crews(S, S)).began
    assert fold(_crews(S, R)).began
    assert fold([Crew(number=0), Crew(number=1, over=Over(reason=Reason.RANK_SIGNAL, began=True))]).began


def test_ranks_may_exit_once_all_have_returned_everywhere() -> None:
    """Not before: rank 0's store is what the others would die of."""
    one, two = (Crew(number=n, state=R, began=True, returned=True) for n in range(2))
    assert not fold([one, Crew(number=1, state=R, began=True)]).releases
    assert fold([one, two]).releases
    assert fold([one, msgspec.structs.replace(two, over=DONE)]).releases
    assert not fold([one, msgspec.structs.replace(two, returned=False, over=FOLLOWED)]).releases


def test_the_first_that_failed_by_itself_is_the_cause_and_stays_it() -> None:
    """What is heard later, and is worse, changes nothing."""
    crews = _crews(R, R, R)
    crews[2] = msgspec.structs.replace(crews[2], halt=RAISED)
    found = fold(crews)
    assert found.cause == Cause(crew=2, reason=Reason.RANK_RAISED, rank=9, detail="ValueError: no")
    assert [must_stop(crew, found.cause) for crew in crews] == [True, True, False]  # the last one knows
    crews[0] = msgspec.structs.replace(crews[0], halt=Halt(reason=Reason.GPU_LOST))
    assert fold(crews, found.cause).cause == found.cause


def test_who_only_lost_a_peer_is_replaced_once_by_the_peer() -> None:
    """The connection that closed is heard of before the rank that closed it."""
    crews = _crews(R, R)
    crews[0] = msgspec.structs.replace(crews[0], halt=LOST_PEER)
    first = fold(crews).cause
    assert first is not None and (first.crew, first.final) == (0, False)
    assert must_stop(crews[1], first)
    crews[1] = msgspec.structs.replace(crews[1], halt=RAISED)
    second = fold(crews, first).cause
    assert second is not None and (second.crew, second.final) == (1, True)


def test_a_node_that_is_gone_is_what_the_others_lost_a_peer_for() -> None:
    """Its own story is never told; that it is gone is."""
    crews = [
        Crew(number=0, state=STOPPING, began=True, halt=LOST_PEER, over=Over(reason=Reason.RANK_RAISED, began=True)),
        Crew(number=1, state=U, began=True, over=GONE),
    ]
    found = fold(crews, Cause(crew=0, reason=Reason.RANK_RAISED, final=False))
    assert found.over == GivenUp(Reason.NODE_GONE)
    assert found.cause is not None and found.cause.detail == golden("model.gang_life.nothing-heard-n2")


def test_it_is_over_when_all_are_and_ended_as_its_cause_did() -> None:
    """Also where the cause's own end says more than what it said first."""
    failed = Crew(number=0, halt=RAISED, over=Over(reason=Reason.GPU_LOST, began=True))
    assert fold([failed, Crew(number=1, state=STOPPING)]).over is None
    assert fold([failed, Crew(number=1, over=FOLLOWED)]).over == AttemptEnded(Reason.GPU_LOST, began=True)
    assert fold([Crew(number=0, over=DONE), Crew(number=1, over=DONE)]).over == AttemptEnded(
        Reason.COMPLETED, began=True
    )


def test_what_is_left_of_one_crew_is_left_of_the_attempt() -> None:
    """There is no other attempt beside a process that cannot be ended, whoever else ended in order."""
    stuck = Over(reason=Reason.PEER_FAILED, began=True, proven=False)
    over = fold(
        [Crew(number=0, halt=RAISED, over=Over(reason=Reason.RANK_RAISED, began=True)), Crew(number=1, over=stuck)]
    ).over
    assert over == AttemptEnded(Reason.RANK_RAISED, began=True, proven=False)
    over = fold([Crew(number=0, over=GONE), Crew(number=1, over=stuck)]).over
    assert over == AttemptEnded(Reason.NODE_GONE, began=True, proven=False)


def test_a_failure_that_was_told_outlives_its_node() -> None:
    """What the user's code raised is the reason, though its node never came back to say how it ended."""
    crews = [Crew(number=0, halt=RAISED, over=GONE), Crew(number=1, over=FOLLOWED)]
    cause = Cause(crew=0, reason=Reason.RANK_RAISED)
    assert fold(crews, cause).over == AttemptEnded(Reason.RANK_RAISED, began=True)


def test_one_crew_says_what_the_attempt_is() -> None:
    """A gang on one node is as it was before there were others."""
    for reason in set(Reason) - {Reason.PEER_FAILED}:
        over = Over(reason=reason, began=True)
        assert fold([Crew(number=0, over=over)]).over == AttemptEnded(reason, began=True)
        gone = Over(reason=reason, began=True, given_up=True)
        assert fold([Crew(number=0, over=gone)]).over == GivenUp(reason)


def test_a_stop_that_reaches_one_node_first_is_the_story_of_what_fails_on_the_other() -> None:
    """NCCL's watchdog ends the ranks of the node that has not heard of it: that is no failure of the run."""
    crews = _crews(R, STOPPING)
    assert fold(crews, stop=StopReason.PREEMPT).cause is None
    crews[0] = msgspec.structs.replace(crews[0], halt=Halt(reason=Reason.RANK_SIGNAL, rank=0))
    cause = fold(crews, stop=StopReason.PREEMPT).cause
    assert cause == Cause(crew=None, reason=Reason.PREEMPTED)
    crews = [
        msgspec.structs.replace(crews[0], over=Over(reason=Reason.RANK_SIGNAL, began=True)),
        msgspec.structs.replace(crews[1], over=Over(reason=Reason.PREEMPTED, began=True)),
    ]
    assert fold(crews, cause, stop=StopReason.PREEMPT).over == AttemptEnded(Reason.PREEMPTED, began=True)
    before = fold([msgspec.structs.replace(crews[0], over=None), crews[1]]).cause
    assert before is not None and before.reason is Reason.RANK_SIGNAL, "it failed before anybody asked for a stop"


def test_what_is_proven_of_a_node_is_not_asked_why() -> None:
    """A node that is gone, or a GPU that failed, is the story of a run that was asked to stop, too."""
    gone = Crew(number=1, state=U, began=True, over=GONE)
    cause = fold([Crew(number=0, state=STOPPING, began=True), gone], stop=StopReason.DRAIN).cause
    assert cause is not None and cause.reason is Reason.NODE_GONE


def test_release_and_failure_exclude_each_other() -> None:
    """Who has returned beside a crew that failed is told that, and not to exit as if all were well."""
    returned = Crew(number=0, state=R, began=True, returned=True)
    failed = Crew(number=1, state=STOPPING, began=True, returned=True, halt=Halt(reason=Reason.RUNTIME_LOST))
    assert not fold([returned, failed]).releases
    assert not fold([returned, Crew(number=1, state=STOPPING, returned=True, over=GONE)]).releases
    assert not fold([returned, msgspec.structs.replace(returned, number=1)], stop=StopReason.CANCEL).releases
    assert fold([returned, failed], released=True).releases


def test_once_all_may_exit_only_results_that_do_not_come_are_a_failure() -> None:
    """What a supervisor says of ranks that had returned is no story; that its node is lost, with results, is."""
    late = Crew(number=1, state=STOPPING, began=True, returned=True, halt=Halt(reason=Reason.RUNTIME_LOST))
    assert fold([Crew(number=0, over=DONE), late], released=True).cause is None
    lost = msgspec.structs.replace(late, over=GONE)
    assert fold([Crew(number=0, over=DONE), lost], released=True).over == GivenUp(Reason.NODE_GONE)


def test_a_crash_that_is_reaped_after_the_word_of_a_peer_is_the_story() -> None:
    """The connection that closed was heard of, and told, before the kernel's word about who closed it."""
    lost = Crew(number=0, halt=LOST_PEER, over=Over(reason=Reason.RANK_RAISED, began=True, peer_lost=True))
    told = Halt(reason=Reason.PEER_FAILED)
    crashed = Crew(number=1, halt=told, over=Over(reason=Reason.HOST_OOM, began=True, rank=9))
    cause = fold([lost, Crew(number=1, state=STOPPING, halt=told)]).cause
    assert fold([lost, crashed], cause).over == AttemptEnded(Reason.HOST_OOM, began=True)


def test_a_gpu_that_failed_on_one_node_explains_what_another_raised() -> None:
    """As on one node, whoever was heard of first."""
    raised = Crew(number=0, halt=RAISED, over=Over(reason=Reason.RANK_RAISED, began=True))
    gpu = Crew(number=1, halt=Halt(reason=Reason.PEER_FAILED), over=Over(reason=Reason.GPU_LOST, began=True))
    assert fold([raised, gpu], fold([raised, Crew(number=1)]).cause).over == AttemptEnded(Reason.GPU_LOST, began=True)


def test_a_process_that_died_beside_a_silent_node_is_believed_once_that_speaks() -> None:
    """The node may have been off for a minute, and the process have died of it."""
    crews = [
        Crew(number=0, state=STOPPING, began=True, halt=Halt(reason=Reason.RANK_SIGNAL, rank=0)),
        Crew(number=1, state=U, before=R, began=True),
    ]
    cause = fold(crews).cause
    assert cause is not None and not cause.final
    gone = msgspec.structs.replace(crews[1], over=GONE)
    ended = msgspec.structs.replace(crews[0], over=Over(reason=Reason.RANK_SIGNAL, began=True))
    assert fold([ended, gone], cause).over == GivenUp(Reason.NODE_GONE)


def test_who_dies_after_it_said_why_is_believed() -> None:
    """Its caller was told; that its supervisor was killed afterwards changes nothing."""
    crew = Crew(number=0, halt=RAISED, over=Over(reason=Reason.SUPERVISOR_KILLED, began=True))
    assert fold([crew, Crew(number=1, over=FOLLOWED)]).over == AttemptEnded(Reason.RANK_RAISED, began=True)


def test_that_it_failed_elsewhere_is_no_end_of_a_run() -> None:
    """Where no crew says that it was the one, the platform does not know; nobody is told of another node."""
    assert fold([Crew(number=0, over=FOLLOWED), Crew(number=1, over=FOLLOWED)]).over == AttemptEnded(
        Reason.RUNTIME_LOST, began=True
    )
    unbegun = Over(reason=Reason.PEER_FAILED)
    assert fold([Crew(number=0, over=unbegun), Crew(number=1, over=unbegun)]).over == AttemptEnded(
        Reason.GANG_START, began=False
    )


def test_both_nodes_that_do_not_reach_each_other_are_told() -> None:
    """The server's own story blames nobody."""
    cause = Cause(crew=None, reason=Reason.NODES_APART, detail="n1 does not reach n2")
    assert all(must_stop(crew, cause) for crew in _crews(S, S))


_OVERS = st.builds(
    Over,
    reason=st.sampled_from([Reason.COMPLETED, Reason.PEER_FAILED, Reason.RANK_RAISED, Reason.NODE_GONE]),
    began=st.booleans(),
    proven=st.booleans(),
) | st.just(GONE)
_HALTS = st.builds(Halt, reason=st.sampled_from([Reason.RANK_RAISED, Reason.PEER_FAILED]), peer_lost=st.booleans())
_LIVES = st.builds(
    Crew,
    number=st.just(0),
    state=st.sampled_from([S, R, U, STOPPING]),
    before=st.sampled_from([S, R, STOPPING]),
    began=st.booleans(),
    returned=st.booleans(),
    halt=st.none() | _HALTS,
    over=st.none() | _OVERS,
)


@given(st.lists(_LIVES, min_size=1, max_size=5))
def test_whatever_crews_say_the_promises_hold(lives: list[Crew]) -> None:
    """Property: over iff all are; success iff all succeeded; a final cause stays; nobody is told to stop needlessly."""
    crews = [msgspec.structs.replace(crew, number=number) for number, crew in enumerate(lives)]
    found = fold(crews)
    assert (found.over is not None) == all(crew.over is not None for crew in crews)
    if found.over is not None:
        all_done = all(crew.over is not None and crew.over.reason is Reason.COMPLETED for crew in crews)
        has_story = found.cause is not None
        assert (found.over.reason is Reason.COMPLETED) == (all_done and not has_story)
    if found.cause is not None and found.cause.final:
        assert fold(crews, found.cause).cause == found.cause
    for crew in crews:
        if must_stop(crew, found.cause):
            assert crew.over is None and crew.halt is None
