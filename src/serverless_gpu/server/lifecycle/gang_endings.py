"""How a run on several nodes ended, told as one: the words of its supervisors, put together.

Each node tells its own story (`node.protocol.Stopped`). The one of the crew that is the cause is the run's; what failed
on others is a consequence of it, and everything that is said of a rank says on which node that was. A supervisor that
said nothing, because its node is gone, is spoken for by what the server knows. Values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from serverless_gpu.model.gangs.gang_lifecycle import Cause, Halt
from serverless_gpu.model.lifecycle.attempt import Failure, Reason, State
from serverless_gpu.node.base.protocol import Stopped

TAILS_MAX = 8
"""Ranks of which the last output is told, as on one node."""
_OF_OTHERS = frozenset({Reason.PEER_FAILED, Reason.COLLECTIVE_HANG})
"""What every crew says of the same thing, which is no failure of its own."""


class CrewEnding(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the end of one crew.

    Attributes:
        node: the node's name.
        stopped: what its supervisor said, once it has.
        halt: why it said that it ends, before it had.
        reason: why it ended, as the server has it; None while it goes on.
        given_up: whether the server found that out without its word.
    """

    node: str
    stopped: Stopped | None = None
    halt: Halt | None = None
    reason: Reason | None = None
    given_up: bool = False


def together(
    words: Sequence[CrewEnding], cause: Cause | None, *, state: State, reason: Reason, hint: str = ""
) -> Stopped | None:
    """Return how a run ended; None where the server knows more of that than any node.

    Args:
        words: of all its crews, by their numbers.
        cause: why it ended before its end, or None.
        state: as it ended.
        reason: likewise.
        hint: what else its caller is to know.
    """
    own = words[cause.crew] if cause is not None and cause.crew is not None else None
    first = ([own] if own is not None else []) + [word for word in words if word is not own]
    told = next((word for word in first if _says(word, reason)), None)
    if told is not None and told.stopped is not None:
        ended, own = told.stopped, told
    elif own is not None and cause is not None:
        failure = Failure(rank=cause.rank, reason=reason, at_ns=0, detail=cause.detail)
        ended = Stopped(state=state, reason=reason, cause=failure, consequences=())
        if own.stopped is not None and own.stopped.cause is not None and own.stopped.cause.rank == cause.rank:
            ended = msgspec.structs.replace(ended, log_tail=own.stopped.log_tail)
    else:
        return None
    others = [word for word in words if word is not own]
    found = [_at(failure, own.node) for failure in ended.consequences]
    found += [failure for word in others for failure in _failures(word) if failure.reason not in _OF_OTHERS]
    return msgspec.structs.replace(
        ended,
        state=state,
        cause=None if ended.cause is None else _at(ended.cause, own.node),
        consequences=tuple(found),
        tails=_tails(own, others),
        proven=all(word.stopped is None or word.stopped.proven for word in words),
        hint="; ".join(filter(None, (ended.hint, hint))),
    )


def _says(word: CrewEnding, reason: Reason) -> bool:
    return word.stopped is not None and word.stopped.reason is reason


def _at(failure: Failure, node: str) -> Failure:
    return msgspec.structs.replace(failure, node=node)


def _failures(word: CrewEnding) -> Iterator[Failure]:
    """Yield what failed on a node that is not the cause; that another one failed is no failure of its own."""
    found: list[Failure] = []
    if word.stopped is not None:
        found = [*([word.stopped.cause] if word.stopped.cause is not None else []), *word.stopped.consequences]
    elif word.given_up and word.reason is not None:
        found = [Failure(rank=None, reason=word.reason, at_ns=0)]
    elif word.halt is not None:
        halt = word.halt
        found = [Failure(rank=halt.rank, reason=halt.reason, at_ns=0, peer_lost=halt.peer_lost, detail=halt.detail)]
    for failure in found:
        yield _at(failure, word.node)


def _tails(first: CrewEnding, others: Sequence[CrewEnding]) -> dict[int, str]:
    found = [item for word in (first, *others) if word.stopped is not None for item in word.stopped.tails.items()]
    return dict(found[:TAILS_MAX])
