"""Hang detection for gangs on several nodes: combines the observations of all crews.

    crew: Silence ─▶ heard ─▶ all are silent for half of the limit ─▶ Ask: each looks at its ranks, over one window
    crew: Seen ────▶ heard ─▶ all have answered, the limit is over ─▶ Judgement: a warning, or the end, of all ranks

The rules are those of `hang_detection.py`, over the ranks of all nodes: a rank that waits for one that works on another
node is no hang. What lives here: values and decisions, on the clock of the decider. Nodes say how long ago
something was, never when, so their clocks do not matter; a silence has a number, so that it is the same one however
late its word is.

Failure cases: a crew that is not heard of stops the judgement, since the state of its ranks is unknown. The decider may
forget everything: crews say all of it again, and at worst a warning comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from serverless_gpu.model.hangs import hang_detection
from serverless_gpu.model.hangs.hang_detection import HangAction, HangDeadline, RankSeen, RunProgress
from serverless_gpu.model.hangs.hang_report import STACKS_TOLD, hang_sentence, ranks_on
from serverless_gpu.model.lifecycle.attempt import Hang, Limits
from serverless_gpu.model.placement import CrewPlace, numbered

_WINDOW_NS_MIN = 500_000_000
_EARLY = 4  # crews say that they are silent when looks are due, and the way here takes a moment


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """A crew whose ranks have said nothing for a while.

    Attributes:
        number: of the silence: each has another one.
        ms: how long it has lasted.
    """

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 52)]


class InspectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A crew is to look at its ranks for so long, and to say under this number what it saw."""

    number: int
    window_ms: int


class CrewObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A crew's observation of its ranks.

    Attributes:
        number: of the `InspectionRequest`.
        ranks: that have not returned.
        returned: those that have.
        stacks: Python stacks of a few of them, by rank.
    """

    number: int
    ranks: tuple[RankSeen, ...]
    returned: tuple[int, ...] = ()
    stacks: dict[int, str] = {}


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict that all crews get.

    Attributes:
        number: from 1 on; files with stacks have it in their names.
        sentence: who waits for whom, on which nodes; "" once a warning is taken back.
        ends: whether the run is ended for it.
        hang: the same for programs.
    """

    number: int
    sentence: str
    ends: bool = False
    hang: Hang | None = None


class CrewSilent(msgspec.Struct, frozen=True):
    """A crew that says nothing: since when, and when it was heard of, by the clock of the decider."""

    number: int
    since_ns: int
    heard_ns: int
    returned: bool


class GangWatch(msgspec.Struct, frozen=True, kw_only=True):
    """The known progress of a gang."""

    # Crews whose ranks were silent for a while, by number; the others are at work.
    silent: Mapping[int, CrewSilent] = msgspec.field(default_factory=dict)
    watch: RunProgress = RunProgress(since_ns=0, seen_ns=0)  # warnings so far; its looks are the nodes'
    ask: InspectionRequest | None = None  # what crews are to look for
    seen: Mapping[int, CrewObservation] = msgspec.field(default_factory=dict)  # what they saw, by number
    judgement: Judgement | None = None


def with_observation(
    gang: GangWatch, crew: int, silence: Silence | None, seen: CrewObservation | None, *, returned: bool, now_ns: int
) -> GangWatch:
    """Return what is known after a crew was heard of."""
    before = gang.silent.get(crew)
    others = {number: one for number, one in gang.silent.items() if number != crew}
    if silence is None and not returned:
        return _at_work(msgspec.structs.replace(gang, silent=others), now_ns) if before is not None else gang
    number, since_ns = (0, now_ns) if silence is None or returned else (silence.number, now_ns - silence.ms * 1_000_000)
    is_same = before is not None and (before.number, before.returned) == (number, returned)
    if is_same and before is not None:
        since_ns = min(since_ns, before.since_ns)  # its first word may have been faster than this one
    now = CrewSilent(number, since_ns, now_ns, returned)
    gang = msgspec.structs.replace(gang, silent={**others, crew: now})
    if not is_same:
        gang = _at_work(gang, gang.watch.since_ns)
    if seen is not None and gang.ask is not None and seen.number == gang.ask.number:
        gang = msgspec.structs.replace(gang, seen={**gang.seen, crew: seen})
    return gang


def decide(
    gang: GangWatch, limits: Limits, crews: Sequence[CrewPlace], *, per_node: bool, now_ns: int, fresh_ns: int
) -> GangWatch:
    """Return what is known after what is due now was decided.

    A crew that was silent for longer than `fresh_ns` counts as silent itself.
    """
    if gang.judgement is not None and gang.judgement.ends:
        return gang
    known = [gang.silent.get(crew.number) for crew in crews]
    silent = [one for one in known if one is not None and now_ns - one.heard_ns <= fresh_ns]
    if len(silent) < len(crews) or all(one.returned for one in silent):
        return gang
    watch = msgspec.structs.replace(
        gang.watch, since_ns=max(gang.watch.since_ns, *(one.since_ns for one in silent)), seen_ns=now_ns
    )
    gang = msgspec.structs.replace(gang, watch=watch)
    due = hang_detection.due_of(watch, limits)
    if due is None or now_ns < due.at_ns - due.window_ns - due.window_ns // _EARLY:
        return gang
    if gang.ask is None:
        window_ns = max(_WINDOW_NS_MIN, due.at_ns - now_ns if now_ns < due.at_ns else due.window_ns)
        # By the time, so that no answer to a decider that has forgotten everything is taken for one to this.
        asked = InspectionRequest(number=now_ns, window_ms=window_ns // 1_000_000)
        return msgspec.structs.replace(gang, ask=asked, seen={})
    awaited = {crew.number for crew, one in zip(crews, silent, strict=True) if not one.returned}
    if now_ns < due.at_ns or not awaited <= gang.seen.keys():
        return gang
    return _judged(gang, due, crews, per_node=per_node, now_ns=now_ns)


def _judged(
    gang: GangWatch, due: HangDeadline, crews: Sequence[CrewPlace], *, per_node: bool, now_ns: int
) -> GangWatch:
    ranks = [rank for seen in gang.seen.values() for rank in seen.ranks]
    if not ranks or not hang_detection.are_still(ranks):
        return _at_work(gang, now_ns)
    watch = gang.watch
    at_work = due.action is HangAction.END and any(rank.moving for rank in ranks)
    if at_work:
        watch = hang_detection.spared(watch, now_ns)
    gang = msgspec.structs.replace(gang, ask=None, watch=watch)
    if at_work and watch.warned:
        return gang  # said already, and nothing else is to be done
    returned = [
        number for crew in crews if gang.silent[crew.number].returned for number in numbered(crew, per_node=per_node)
    ]
    returned += [number for seen in gang.seen.values() for number in seen.returned]
    waiting, elsewhere = hang_detection.divided(ranks, returned)
    # The stacks of the few ranks that explain it most: those elsewhere, else those that wait.
    stacks = {rank: text for seen in gang.seen.values() for rank, text in seen.stacks.items()}
    explaining = [rank for rank in elsewhere if rank in stacks] or [rank for rank in waiting if rank in stacks]
    named = ranks_on(crews, per_node=per_node)
    silent_ms = (now_ns - watch.since_ns) // 1_000_000
    number = 1 if gang.judgement is None else gang.judgement.number + 1
    judgement = Judgement(
        number=number,
        sentence=hang_sentence(ranks, waiting, elsewhere, silent_ms, named),
        ends=due.action is HangAction.END and not at_work,
        hang=Hang(
            waiting=tuple(waiting),
            elsewhere=tuple(elsewhere),
            stacks={rank: stacks[rank] for rank in explaining[:STACKS_TOLD]},
            file=f"hang-*-{number}.txt",
        ),
    )
    return msgspec.structs.replace(gang, watch=hang_detection.warned(watch), judgement=judgement)


def _at_work(gang: GangWatch, since_ns: int) -> GangWatch:
    """Return the watch after a sign of progress: asks start over, and a standing warning is withdrawn."""
    judgement = gang.judgement
    if judgement is not None and not judgement.ends and judgement.sentence:
        judgement = Judgement(number=judgement.number, sentence="")
    return GangWatch(silent=gang.silent, watch=hang_detection.progressed(gang.watch, since_ns), judgement=judgement)
