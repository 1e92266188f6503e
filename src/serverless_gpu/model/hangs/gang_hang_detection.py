"""Hang detection for multi-node gangs, from the combined observations of all nodes.

Each node of a gang has one supervisor, which observes the gang's ranks on the node.

    node: Silence ─▶ server ─▶ all are silent for half of the limit ─▶ request: each node inspects its ranks
    node: Seen ────▶ server ─▶ all have answered, the limit has passed ─▶ Judgement: a warning, or the end, of all ranks

The module applies the rules of `hang_detection.py` to the ranks of all nodes. A rank that waits for a working rank on
another node does not hang. The module contains only values and decisions, and uses the server's clock. Node clocks have
no effect, because nodes report durations instead of times. Each silence of a node has a number, so that a late message
does not start a new silence.

Failure cases: The server makes no decision without a recent message from each node, because the state of a silent
node's ranks is unknown. After a restart of the server, the nodes report their state again. In the worst case, the
restarted server repeats a hang warning.
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
# Divisor of the inspection window. The server sends inspection requests a fourth of the window early, because messages
# need time.
_EARLY = 4


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Silence of a node whose ranks make no progress.

    Attributes:
        number: number of the silence, different for each silence.
        ms: duration of the silence in milliseconds.
    """

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 52)]


class InspectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The server's request that a node inspect its ranks during a time window."""

    number: int
    window_ms: int


class CrewObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A node's observation of its ranks.

    Attributes:
        number: number of the answered `InspectionRequest`.
        ranks: observations of ranks that have not returned.
        returned: ranks that have returned.
        stacks: Python stacks of a few ranks, by rank.
    """

    number: int
    ranks: tuple[RankSeen, ...]
    returned: tuple[int, ...] = ()
    stacks: dict[int, str] = {}


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict that the server sends to all nodes of a gang.

    Attributes:
        number: number of the verdict, counted from 1. The names of stack files contain this number.
        sentence: message about the waiting ranks, the ranks that they wait for, and the nodes. "" withdraws a warning.
        ends: True when the server ends the run because of the hang.
        hang: the information of `sentence` in a structured form.
    """

    number: int
    sentence: str
    ends: bool = False
    hang: Hang | None = None


class CrewSilent(msgspec.Struct, frozen=True):
    """A silent node: start of the silence and time of the last message, on the server's clock."""

    number: int
    since_ns: int
    heard_ns: int
    returned: bool


class GangWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a gang, as reported to the server."""

    # Silences by node number, for nodes without progress. All other nodes make progress.
    silent: Mapping[int, CrewSilent] = msgspec.field(default_factory=dict)
    # Warnings and postponed ends of the gang, without inspections of ranks.
    watch: RunProgress = RunProgress(since_ns=0, seen_ns=0)
    ask: InspectionRequest | None = None  # The current inspection request to all nodes.
    # Observations of each node's ranks, by node number.
    seen: Mapping[int, CrewObservation] = msgspec.field(default_factory=dict)
    judgement: Judgement | None = None


def with_observation(
    gang: GangWatch, crew: int, silence: Silence | None, seen: CrewObservation | None, *, returned: bool, now_ns: int
) -> GangWatch:
    """Return the gang's progress after a message from a node."""
    before = gang.silent.get(crew)
    others = {number: one for number, one in gang.silent.items() if number != crew}
    if silence is None and not returned:
        return _at_work(msgspec.structs.replace(gang, silent=others), now_ns) if before is not None else gang
    number, since_ns = (0, now_ns) if silence is None or returned else (silence.number, now_ns - silence.ms * 1_000_000)
    is_same = before is not None and (before.number, before.returned) == (number, returned)
    if is_same and before is not None:
        # Keep the earliest start, because an earlier message may have had a shorter network delay.
        since_ns = min(since_ns, before.since_ns)
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
    """Return the gang's progress after all decisions that are due now.

    The server makes no decision after `fresh_ns` without a message from a node, because the state of its ranks is
    unknown.
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
        # Use the current time as the request number, so that a restarted server cannot mistake an old answer for a new
        # answer.
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
        return gang  # The server has already sent the same warning to the gang.
    returned = [
        number for crew in crews if gang.silent[crew.number].returned for number in numbered(crew, per_node=per_node)
    ]
    returned += [number for seen in gang.seen.values() for number in seen.returned]
    waiting, elsewhere = hang_detection.divided(ranks, returned)
    # Select the stacks of ranks that do not wait, because those stacks explain the hang best. If all ranks wait, select
    # stacks of waiting ranks.
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
    """Return the gang's progress after a sign of progress, without inspection requests and warnings."""
    judgement = gang.judgement
    if judgement is not None and not judgement.ends and judgement.sentence:
        judgement = Judgement(number=judgement.number, sentence="")
    return GangWatch(silent=gang.silent, watch=hang_detection.progressed(gang.watch, since_ns), judgement=judgement)
