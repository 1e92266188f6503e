"""The life of a gang, made of the lives of its crews: what an attempt on several nodes is, does and ends with.

    crews: STARTING RUNNING UNREACHABLE STOPPING, halted?, returned?, over?  ── fold ─▶ the attempt's state
                                                                                     ├─ the cause, decided once
                                                                                     ├─ others are told to stop
                                                                                     ├─ all returned: they may exit
                                                                                     └─ all over: how it ended

Each crew tells its own story to the server; this puts them together. With one crew it says what that one says.

- **The cause** is the first crew that failed by itself. One that only says that a peer closed its connection explains
  nothing while another one has more to say, nor does one whose process died while another node is silent: such a word
  is replaced once, by that of a crew that failed itself or was lost. Nothing replaces that one but a GPU that failed.
- **A crew that ended because it was told to** explains nothing, unless the kernel says that it had crashed before it
  was told. Once the run was asked to stop, whatever fails is a consequence of that.
- **An attempt is over when all of its crews are**: another one might meet what is left of it. What its caller is told
  of the cause need not wait for that, where nothing is tried again (`early_reasons`).
- **Ranks that have returned on one node wait for those on others**: rank 0's store is on its node, and closing it is
  what the others would die of. That all may exit is decided once, and only while nothing has failed and nobody asked
  for a stop; from then on the run has succeeded, if only its results come.
- **A crew need not wait for silence**: where all ranks of a crew have returned, and every crew that has not is silent,
  its ranks may exit (`may_leave`). Its devices are free then. How the attempt ends is still for the others to say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp

_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)
_CRASHES = frozenset({Reason.RANK_SIGNAL, Reason.HOST_OOM, Reason.GPU_LOST})
"""What the kernel, or the driver, says of a node: true whatever the crew had been told before."""
_OF_SILENCE = (
    Reason.NODE_GONE,
    Reason.NODE_REBOOTED,
    Reason.NODE_PARTITIONED,
    Reason.SUPERVISOR_LOST,
    Reason.SUPERVISOR_KILLED,
    Reason.TIMEOUT,
)
"""As what a crew may turn out to have ended of which nothing was heard, beside what makes no other attempt either."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a crew ends early, as its supervisor reports it at once.

    Attributes:
        rank: number of the process that failed, or None for the crew as a whole.
        peer_lost: it only says that a peer went away.
        detail: one line for people.
    """

    reason: Reason
    rank: int | None = None
    peer_lost: bool = False
    detail: str = ""


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a crew."""

    reason: Reason
    began: bool = False  # whether user code of its ranks had started
    proven: bool = True  # whether no process of it is left
    given_up: bool = False  # whether that is certain without its word: its node restarted, or never came back
    rank: int | None = None  # this, `peer_lost` and `detail` as in `Halt`
    peer_lost: bool = False
    detail: str = ""


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """One crew, as far as its gang depends on it."""

    number: int
    state: State = State.STARTING  # STARTING, RUNNING, UNREACHABLE or STOPPING; it does not matter once it is over
    before: State | None = None  # what it was when it became UNREACHABLE
    began: bool = False  # whether user code of its ranks has started
    returned: bool = False  # whether all of its ranks have, and wait for the others
    halt: Halt | None = None  # why it ends before its end, once it has said so
    over: Over | None = None  # how it ended


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a gang ends early."""

    # Whose story it is; None where it is the server's: the run was asked to stop, or its nodes did not meet.
    crew: int | None
    reason: Reason
    rank: int | None = None
    detail: str = ""
    final: bool = True  # whether nothing that is heard later replaces it
    # Two crews of which the first does not reach the second, where that is the cause.
    apart: tuple[int, int] | None = None
    silent: bool = False  # a node went silent before any of it could begin


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a gang, folded from its crews."""

    # Of the attempt, while it is not over: the furthest behind of those that start, STOPPING when one stops,
    # UNREACHABLE when one is silent.
    state: State
    before: State | None  # what it would be without those that are silent; None where none is
    began: bool  # whether user code has started anywhere
    cause: Cause | None  # why it ends before its end, or None
    releases: bool  # whether all ranks have returned, and may exit
    # How the attempt ended, once all of its crews have. `GivenUp` says nothing of `began`.
    over: AttemptEnded | GivenUp | None


def fold(
    crews: Sequence[Crew], cause: Cause | None = None, *, stop: StopReason | None = None, released: bool = False
) -> Fold:
    """Return what crews amount to. `crews` are all of a gang, by their numbers."""
    began = any(crew.began or (crew.over is not None and crew.over.began) for crew in crews)
    cause = _cause(crews, cause, stop=stop, released=released)
    is_silent = any(crew.over is None and crew.state is State.UNREACHABLE for crew in crews)
    untroubled = cause is None and stop is None
    releases = released or (untroubled and all(crew.returned or _succeeded(crew) for crew in crews))
    awaited = [crew for crew in crews if not _succeeded(crew)]
    known = _known(crews if releases else awaited or crews)
    return Fold(
        state=State.UNREACHABLE if is_silent else known,
        before=known if is_silent else None,
        began=began,
        cause=cause,
        releases=releases,
        over=_over(crews, cause, began=began) if all(crew.over is not None for crew in crews) else None,
    )


def must_stop(crew: Crew, cause: Cause | None) -> bool:
    """Return whether a crew is to be told that the gang ends; one that says so itself knows."""
    return cause is not None and crew.over is None and crew.halt is None


def may_leave(crew: Crew, crews: Sequence[Crew]) -> bool:
    """Return whether the ranks of a crew may exit though others have not returned: nothing is heard of those."""
    awaited = [other for other in crews if not other.returned and not _succeeded(other)]
    are_silent = all(other.over is None and other.state is State.UNREACHABLE for other in awaited)
    return crew.returned and bool(awaited) and are_silent


def early_reasons(crews: Sequence[Crew], cause: Cause | None, quiet: Collection[int] = ()) -> tuple[Reason, ...]:
    """Return as what a gang may end, the likeliest first, where that can be told before all of its crews have ended.

    That is so once the crew whose story it is has ended, and nothing replaces its word; or once all crews that are
    heard of have ended, and of the others nothing is heard any more: who fails because a node is gone need not wait
    until that is proven. The caller makes sure before that none of these makes another attempt.

    Returns no reasons where it cannot be told yet, or where the server decided the end.
    """
    if cause is None or cause.crew is None:
        return ()
    own = crews[cause.crew]
    reasons = (_explained(crews, cause), Reason.GPU_LOST)  # that a GPU failed may be heard of later, and replaces all
    if cause.final and own.over is not None:
        return reasons
    are_over = all(crew.over is not None or crew.number in quiet for crew in crews)
    return (*reasons, *_OF_SILENCE) if are_over else ()


def _known(crews: Sequence[Crew]) -> State:
    states = [(crew.before or State.STARTING) if crew.state is State.UNREACHABLE else crew.state for crew in crews]
    if any(crew.over is not None or state is State.STOPPING for crew, state in zip(crews, states, strict=True)):
        return State.STOPPING
    return min(states, key=_ORDER.index)


def _succeeded(crew: Crew) -> bool:
    return crew.over is not None and MEANINGS[crew.over.reason].state is State.SUCCEEDED


def _cause(crews: Sequence[Crew], before: Cause | None, *, stop: StopReason | None, released: bool) -> Cause | None:
    if before is not None and before.final:
        return before
    found = [cause for crew in crews if (cause := _story(crew, crews, released=released)) is not None]
    if stop is not None and before is None:
        # Whatever fails from now on may fail of that; what is proven of a node is not asked why.
        given_up = {crew.number for crew in crews if crew.over is not None and crew.over.given_up}
        proofs = [cause for cause in found if cause.reason is Reason.GPU_LOST or cause.crew in given_up]
        asked = Cause(crew=None, reason=STOPPED_BY[stop])
        return proofs[0] if proofs else asked if found else None
    final = next((cause for cause in found if cause.final), None)
    return final or before or (found[0] if found else None)


def _story(crew: Crew, crews: Sequence[Crew], *, released: bool) -> Cause | None:
    """Return what a crew has to say of its own end; nothing of one that was told to end, or goes on, or succeeded."""
    halt, over = crew.halt, crew.over
    has_said = halt is not None and halt.reason is not Reason.PEER_FAILED
    if over is not None and over.given_up and not (has_said and halt is not None and not halt.peer_lost):
        return Cause(crew=crew.number, reason=over.reason, detail=over.detail)
    if has_said and halt is not None and not (released and crew.returned):
        # The process of a rank may have died of a node of which nothing is heard.
        doubtful = halt.reason is Reason.RANK_SIGNAL and any(other.state is State.UNREACHABLE for other in crews)
        final = not halt.peer_lost and not doubtful
        return Cause(crew=crew.number, reason=halt.reason, rank=halt.rank, detail=halt.detail, final=final)
    if over is None or _succeeded(crew) or over.reason is Reason.PEER_FAILED:
        return None
    return Cause(crew=crew.number, reason=over.reason, rank=over.rank, detail=over.detail, final=not over.peer_lost)


def _over(crews: Sequence[Crew], cause: Cause | None, *, began: bool) -> AttemptEnded | GivenUp:
    ends = [crew.over for crew in crews if crew.over is not None]
    proven = all(over.proven for over in ends)
    if cause is None:
        if all(_succeeded(crew) for crew in crews):
            return AttemptEnded(ends[0].reason, began=began, proven=proven)
        # All say that it failed on another node, and none that it was the one.
        return AttemptEnded(Reason.RUNTIME_LOST if began else Reason.GANG_START, began=began, proven=proven)
    lost = ends[cause.crew] if cause.crew is not None else None
    if lost is not None and lost.given_up and lost.reason is cause.reason and proven:
        return GivenUp(cause.reason)
    return AttemptEnded(_explained(crews, cause), began=began, proven=proven, uncounted=cause.silent and not began)


def _explained(crews: Sequence[Crew], cause: Cause) -> Reason:
    """Return the reason that explains an end best: what was heard while processes ended may say more than the cause."""
    if any(crew.over is not None and crew.over.reason is Reason.GPU_LOST for crew in crews):
        return Reason.GPU_LOST
    over = crews[cause.crew].over if cause.crew is not None else None
    if over is None or over.given_up or MEANINGS[over.reason].state is State.SUCCEEDED:
        return cause.reason
    says_more = not cause.final and over.reason is not Reason.PEER_FAILED
    return over.reason if says_more or over.reason in _CRASHES else cause.reason
