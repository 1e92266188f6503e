"""An attempt's life on one of several nodes: its ranks wait for those elsewhere, and end when those fail."""

from __future__ import annotations

import pytest

from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Event,
    Failure,
    GangPlaced,
    GpuFailed,
    HangConfirmed,
    Limits,
    PeerFailed,
    Phase,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    Reason,
    Released,
    State,
    StemLost,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import AttemptInstruction, advance

S = 1_000_000_000
RANKS = (8, 9)  # of the second node


def _play(*events: Event, timeout_ns: int | None = None) -> tuple[Attempt, list[AttemptInstruction]]:
    """Return an attempt of two ranks after events that come a second apart, and what was to be done."""
    limits = Limits(timeout_ns=timeout_ns)
    attempt = Attempt(run_id="r", fence=1, world_size=len(RANKS), limits=limits, has_peers=True)
    done: list[AttemptInstruction] = []
    for at_s, event in enumerate(events, start=1):
        attempt, instructions = advance(attempt, event, at_s * S)
        done += instructions
    return attempt, done


RUNNING: tuple[Event, ...] = (GangPlaced(), *(RankExecuting(rank) for rank in RANKS))
RETURNED: tuple[Event, ...] = (*RUNNING, *(RankReturned(rank) for rank in RANKS))


def test_ranks_that_have_returned_wait_for_those_of_other_nodes() -> None:
    """Their store, and their collectives, are still needed there."""
    attempt, done = _play(*RETURNED)
    assert (attempt.state, attempt.phase) == (State.RUNNING, Phase.RETURNED)
    assert AttemptInstruction.RELEASE_RANKS not in done
    attempt, done = _play(*RETURNED, Released())
    assert (attempt.state, attempt.reason) == (State.STOPPING, Reason.COMPLETED)
    assert done[-1] is AttemptInstruction.RELEASE_RANKS


def test_one_that_dies_while_it_waits_has_returned_all_the_same() -> None:
    """Its result was durable before it said so; and nobody is waited for that is not there."""
    died = tuple(RankExited(rank=rank, signal=9) for rank in RANKS)
    attempt, done = _play(*RETURNED, *died, Released())
    assert (attempt.phase, attempt.reason, done[-1]) == (Phase.KILLING, Reason.COMPLETED, AttemptInstruction.KILL_TREE)
    attempt, _ = _play(*RETURNED, *died, Released(), TreeEmpty())
    assert attempt.state is State.SUCCEEDED


@pytest.mark.parametrize(
    "gone", [tuple(RankExited(rank=rank, signal=None) for rank in RANKS), (StemLost(detail="gone"),)]
)
def test_22C8_a_node_whose_ranks_have_returned_and_exited_waits_for_no_other_node(gone: tuple[Event, ...]) -> None:
    """Nothing of the attempt is left there to use its devices."""
    attempt, done = _play(*RETURNED, *gone[:-1])
    assert (attempt.state, attempt.phase) == (State.RUNNING, Phase.RETURNED)
    attempt, done = _play(*RETURNED, *gone)
    assert (attempt.phase, attempt.reason, done[-1]) == (Phase.KILLING, Reason.COMPLETED, AttemptInstruction.KILL_TREE)
    attempt, _ = _play(*RETURNED, *gone, TreeEmpty())
    assert attempt.state is State.SUCCEEDED


def test_what_waits_is_still_stopped_and_still_has_its_limit() -> None:
    """A peer that hangs does not keep this node for ever."""
    attempt, done = _play(*RETURNED, StopRequested(StopReason.CANCEL))
    assert (attempt.reason, done[-1]) == (Reason.CANCELLED, AttemptInstruction.TERMINATE_RANKS)
    attempt, _ = _play(*RETURNED, *[Tick()] * 80, timeout_ns=100 * S)
    assert attempt.reason is Reason.TIMEOUT


@pytest.mark.parametrize(
    ("before", "instruction"),
    [
        ((), AttemptInstruction.KILL_TREE),
        ((GangPlaced(),), AttemptInstruction.KILL_TREE),
        (RUNNING, AttemptInstruction.TERMINATE_RANKS),
        (RETURNED, AttemptInstruction.TERMINATE_RANKS),
    ],
)
def test_a_failure_elsewhere_ends_it(before: tuple[Event, ...], instruction: AttemptInstruction) -> None:
    """Whatever it was in the middle of; nothing is waited for before user code has begun."""
    attempt, done = _play(*before, PeerFailed("rank 0 raised ValueError"))
    assert (attempt.state, attempt.reason, done[-1]) == (State.STOPPING, Reason.PEER_FAILED, instruction)
    assert attempt.cause is not None and attempt.cause.detail == "rank 0 raised ValueError"


def test_what_its_ranks_say_of_that_is_a_consequence() -> None:
    """Also where one of them lost its connection a moment before the word came."""
    lost = RankFailed(Failure(rank=8, reason=Reason.RANK_RAISED, at_ns=4 * S, peer_lost=True))
    attempt, _ = _play(
        *RUNNING, lost, PeerFailed("rank 0"), RankFailed(Failure(rank=9, reason=Reason.RANK_RAISED, at_ns=6 * S))
    )
    assert attempt.cause is not None and attempt.cause.reason is Reason.PEER_FAILED


def test_a_crash_that_is_reaped_after_the_word_of_a_peer_is_the_story() -> None:
    """The peer lost its connection to a rank that the kernel had ended here; that is heard of a moment later."""
    killed = RankExited(rank=8, signal=9, out_of_memory=True)
    attempt, _ = _play(*RUNNING, PeerFailed("rank 0 lost a peer"), killed)
    assert attempt.cause is not None and attempt.cause.reason is Reason.HOST_OOM


def test_nothing_touches_ranks_that_have_all_returned() -> None:
    """Their results are durable: ranks that wait for other nodes do not stand still, and lose nothing with a GPU."""
    for event in (HangConfirmed("rank 0 is elsewhere"), GpuFailed("GPU-1: Xid 79")):
        attempt, done = _play(*RETURNED, event, *[Tick()] * 70)
        assert (attempt.state, attempt.phase) == (State.RUNNING, Phase.RETURNED), event
        assert AttemptInstruction.TERMINATE_RANKS not in done and AttemptInstruction.KILL_TREE not in done


def test_its_own_failure_comes_first() -> None:
    """Whoever has failed already, or is done, learns nothing from another node."""
    own = RankFailed(Failure(rank=8, reason=Reason.RANK_RAISED, at_ns=4 * S))
    attempt, _ = _play(*RUNNING, own, PeerFailed("rank 0"))
    assert attempt.reason is Reason.RANK_RAISED
    attempt, _ = _play(*RETURNED, Released(), PeerFailed("rank 0"))
    assert attempt.reason is Reason.COMPLETED


def test_a_release_that_comes_too_early_changes_nothing() -> None:
    """A server that is wrong about this node lets no rank go."""
    befores: list[tuple[Event, ...]] = [(), (GangPlaced(),), RUNNING, (*RUNNING, RankReturned(8))]
    for before in befores:
        assert _play(*before, Released()) == _play(*before)
