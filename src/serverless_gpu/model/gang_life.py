"""The life of a gang, made of the lives of its crews: what an attempt on several nodes is, does and ends with.

    crews: STARTING RUNNING UNREACHABLE STOPPING, halted?, returned?, over?  ── fold ─▶ the attempt's state
                                                                                     ├─ the cause, decided once
                                                                                     ├─ others are told to stop
                                                                                     ├─ all returned: they may exit
                                                                                     └─ all over: how it ended

Each crew tells its own story to the server; this puts them together. With one crew it says what that one says.

- **The cause** is the first crew that failed by itself. One that only says that a peer closed its connection explains
  nothing while another one has more to say, so its word is replaced once, by that of a crew that failed itself or was
  lost; nothing replaces that. A crew that ended because it was told to explains nothing.
- **An attempt is over when all of its crews are**: another one might meet what is left of it. What its caller is told
  of the cause need not wait for that.
- **A rank that has returned waits for those on other nodes**: rank 0's store is on its node, and closing it is what the
  others would die of. So no crew lets its ranks exit before all have returned everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serverless_gpu.model.attempt import MEANINGS, Reason, State
from serverless_gpu.model.run_lifecycle import Ended, GivenUp

_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)
_FOLLOWED = frozenset({Reason.PEER_FAILED})
"""A crew that ends so was told to: another one is the story."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """Why a crew ends before its end, as its supervisor says at once: its processes may take a while.

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
    """How a crew ended.

    Attributes:
        began: whether user code of its ranks had started.
        proven: whether no process of it is left.
        given_up: whether that is certain without its word: its node restarted, or never came back.
        detail: for people.
    """

    reason: Reason
    began: bool = False
    proven: bool = True
    given_up: bool = False
    detail: str = ""


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """One crew, as far as its gang depends on it.

    Attributes:
        state: STARTING, RUNNING, UNREACHABLE or STOPPING; it does not matter once it is over.
        before: what it was when it became UNREACHABLE.
        began: whether user code of its ranks has started.
        returned: whether all of its ranks have, and wait for the others.
        halt: why it ends before its end, once it has said so.
        over: how it ended.
    """

    number: int
    state: State = State.STARTING
    before: State | None = None
    began: bool = False
    returned: bool = False
    halt: Halt | None = None
    over: Over | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a gang ends before its end.

    Attributes:
        crew: whose story it is.
        final: whether nothing that is heard later replaces it.
    """

    crew: int
    reason: Reason
    rank: int | None = None
    detail: str = ""
    final: bool = True


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """What the crews of a gang amount to.

    Attributes:
        state: of the attempt, while it is not over: the furthest behind of those that start, STOPPING when one stops,
            UNREACHABLE when one is silent.
        before: what it would be without those that are silent; None where none is.
        began: whether user code has started anywhere.
        cause: why it ends before its end, or None.
        releases: whether all ranks have returned, and may exit.
        over: how the attempt ended, once all of its crews have.
    """

    state: State
    before: State | None
    began: bool
    cause: Cause | None
    releases: bool
    over: Ended | GivenUp | None


def fold(crews: Sequence[Crew], cause: Cause | None = None) -> Fold:
    """Return what crews amount to.

    Args:
        crews: all of a gang, by their numbers; at least one.
        cause: as it was decided before, or None.
    """
    began = any(crew.began or (crew.over is not None and crew.over.began) for crew in crews)
    cause = _cause(crews, cause)
    is_silent = any(crew.over is None and crew.state is State.UNREACHABLE for crew in crews)
    known = _known(crews)
    return Fold(
        state=State.UNREACHABLE if is_silent else known,
        before=known if is_silent else None,
        began=began,
        cause=cause,
        releases=all(crew.returned or _succeeded(crew) for crew in crews),
        over=_over(crews, cause, began=began) if all(crew.over is not None for crew in crews) else None,
    )


def told_to_stop(crew: Crew, cause: Cause | None) -> bool:
    """Return whether a crew is to be told that another one failed."""
    return cause is not None and crew.number != cause.crew and crew.over is None and crew.halt is None


def _known(crews: Sequence[Crew]) -> State:
    states = [(crew.before or State.STARTING) if crew.state is State.UNREACHABLE else crew.state for crew in crews]
    if any(crew.over is not None or state is State.STOPPING for crew, state in zip(crews, states, strict=True)):
        return State.STOPPING
    return min(states, key=_ORDER.index)


def _succeeded(crew: Crew) -> bool:
    return crew.over is not None and MEANINGS[crew.over.reason].state is State.SUCCEEDED


def _cause(crews: Sequence[Crew], before: Cause | None) -> Cause | None:
    if before is not None and before.final:
        return before
    found = [cause for crew in crews if (cause := _story(crew)) is not None]
    final = next((cause for cause in found if cause.final), None)
    return final or before or (found[0] if found else None)


def _story(crew: Crew) -> Cause | None:
    """Return what a crew has to say of its own end; nothing of one that was told to end, or goes on, or succeeded."""
    halt, over = crew.halt, crew.over
    if over is not None and over.given_up:
        return Cause(crew=crew.number, reason=over.reason, detail=over.detail)
    if halt is not None and halt.reason not in _FOLLOWED:
        return Cause(crew=crew.number, reason=halt.reason, rank=halt.rank, detail=halt.detail, final=not halt.peer_lost)
    if over is not None and over.reason not in _FOLLOWED and not _succeeded(crew):
        return Cause(crew=crew.number, reason=over.reason, detail=over.detail)
    return None


def _over(crews: Sequence[Crew], cause: Cause | None, *, began: bool) -> Ended | GivenUp:
    ends = [crew.over for crew in crews if crew.over is not None]
    proven = all(over.proven for over in ends)
    if cause is None:
        # All succeeded; or all say that another one failed, and none that it did: what they say, then.
        failed = next((over.reason for over in ends if MEANINGS[over.reason].state is not State.SUCCEEDED), None)
        return Ended(failed or ends[0].reason, began=began, proven=proven)
    lost = crews[cause.crew].over
    if lost is None or lost.given_up:
        is_its_end = lost is not None and lost.reason is cause.reason and proven
        return GivenUp(cause.reason) if is_its_end else Ended(cause.reason, began=began, proven=proven)
    # What was heard while its processes ended may explain it better: a GPU that failed, memory that ran out.
    is_story = lost.reason not in _FOLLOWED and MEANINGS[lost.reason].state is not State.SUCCEEDED
    return Ended(lost.reason if is_story else cause.reason, began=began, proven=proven)
