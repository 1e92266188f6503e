"""Combines the nodes' final reports (endings) into one ending of an attempt.

    one node        its report, unchanged
    several nodes   endings ─▶ `ending_of_gang`, receipts and facts ─▶ `model.gang_receipt.together`
                    the server reports a certain end without a retry early, while other nodes still clean up

Each node reports its ending (`node.protocol.Stopped`). The final report of the node that caused the end becomes the
run's ending. The ending lists failures on other nodes as consequences and names each failure's node.

Failure cases:

- A node of another version sends an ending that the server cannot parse. The server ignores an unparsable ending and
  computes the costs from the attempt's facts.

- The facts of a node contradict each other. The server counts zero usage for a node with contradictory facts, as in the
  ledger.

- The server has lost a node. The run's ending contains the last known state of the lost node's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.model import gang_receipt
from serverless_gpu.model.billing.ledger import Charge, sum_of
from serverless_gpu.model.gang_receipt import CrewAccount, GangOutcome
from serverless_gpu.model.lifecycle import gang_lifecycle
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, Fact, Failure, Reason, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Halt
from serverless_gpu.model.lifecycle.run_lifecycle import surely_ends
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.server.lifecycle import gangs, metering
from serverless_gpu.server.records import crews, facts
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import CrewOutcome, StoredCrew
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.units import format_duration_ms

TAILS_MAX = 8
"""Maximum number of ranks whose last output an ending contains, as on a single node."""
_OF_OTHERS = frozenset({Reason.PEER_FAILED, Reason.COLLECTIVE_HANG})
"""End reasons that every node of a gang reports for the same event."""


T = TypeVar("T")
Quiet = Callable[[StoredCrew], float | None]
"""Returns the seconds since the last report of a possibly lost node, or None."""
NOTHING = CrewOutcome(stopped=None, receipt=None)


class EarlyEnding(msgspec.Struct, frozen=True, kw_only=True):
    """Early ending of a run, before the run has ended on all nodes."""

    state: State
    reason: Reason
    sentence: str
    stopped: str | None


def outcome(connection: sa.Connection, attempt: StoredAttempt | None) -> CrewOutcome:
    """Return an attempt's combined outcome, with a receipt once all nodes have sent their receipts."""
    if attempt is None:
        return NOTHING
    found = crews.outcomes(connection, attempt.run_id, attempt.fence)
    if len(found) == 1:
        return found[0]
    if attempt.reason is None:
        return NOTHING
    stopped = _together(attempt, found, state=attempt.state, reason=attempt.reason)
    if attempt.settled_ns is None:
        return CrewOutcome(stopped=stopped, receipt=None)
    told = facts.of_crews(connection, [crew.id for crew in attempt.crews])
    crew_accounts = [
        _account(attempt, crew, one, told[crew.id]) for crew, one in zip(attempt.crews, found, strict=True)
    ]
    receipt = gang_receipt.together(crew_accounts, _whole(attempt))
    return CrewOutcome(stopped=stopped, receipt=_json(receipt))


def receipt_of_crew(connection: sa.Connection, attempt: StoredAttempt, number: int) -> str | None:
    """Return one node's receipt for an attempt with the ledger's costs, or None."""
    found = crews.outcomes(connection, attempt.run_id, attempt.fence)
    if number >= len(found) or len(found) == 1:
        return found[number].receipt if number < len(found) else None
    crew = attempt.crews[number]
    account = _account(attempt, crew, found[number], facts.of_crew(connection, crew.id))
    return _json(gang_receipt.restated(account, _whole(attempt)))


def early(connection: sa.Connection, run: StoredRun, quiet: Quiet) -> EarlyEnding | None:
    """Return a run's early but certain ending, or None."""
    attempt = run.attempt
    if attempt is None or attempt.num_nodes == 1 or attempt.ended_ns is not None or run.state not in ACTIVE:
        return None
    cause = attempt.cause
    if cause is None or cause.crew is None:
        return None
    silent = {crew.number: seconds for crew in attempt.open_crews if (seconds := quiet(crew)) is not None}
    lives = gangs.lives(attempt.crews)
    reasons = gang_lifecycle.early_reasons(lives, cause, silent)
    if not reasons or not surely_ends(run.life, reasons, began=attempt.began):
        return None
    reason, state = reasons[0], MEANINGS[reasons[0]].state
    names = {crew.number: crew.node for crew in attempt.crews}
    hint = "; ".join(
        f"node {names[number]} has been silent for {format_duration_ms(round(seconds * 1000))}; the server keeps "
        "its devices reserved until it knows that no process of the run remains there"
        for number, seconds in silent.items()
    )
    found = crews.outcomes(connection, run.id, run.fence)
    stopped = _together(attempt, found, state=state, reason=reason, hint=hint)
    return EarlyEnding(state=state, reason=reason, sentence=gangs.cause_sentence(cause, attempt), stopped=stopped)


def may_be_early(run: StoredRun) -> bool:
    """Return True if a node's silence may soon decide the run's ending."""
    attempt = run.attempt
    if attempt is None or attempt.ended_ns is not None or attempt.num_nodes == 1 or run.state not in ACTIVE:
        return False
    cause = attempt.cause
    return cause is not None and cause.crew is not None and surely_ends(run.life, (cause.reason,), began=attempt.began)


class CrewEnding(msgspec.Struct, frozen=True, kw_only=True):
    """Known ending of an attempt on one node.

    Attributes:
        node: the node's name.
        stopped: the final report of its supervisor, once it has arrived.
        halt: the early report of the supervisor with the reason for the end.
        reason: reason for the end according to the server; None while the ranks run.
        given_up: True if the server declared the end without a final report from the node.
    """

    node: str
    stopped: Stopped | None = None
    halt: Halt | None = None
    reason: Reason | None = None
    given_up: bool = False


def ending_of_gang(
    words: Sequence[CrewEnding], cause: Cause | None, *, state: State, reason: Reason, hint: str = ""
) -> Stopped | None:
    """Return the combined ending of a run, or None without a known cause."""
    own = words[cause.crew] if cause is not None and cause.crew is not None else None
    first = ([own] if own is not None else []) + [word for word in words if word is not own]
    told = next((word for word in first if word.stopped is not None and word.stopped.reason is reason), None)
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
    tails = [item for word in (own, *others) if word.stopped is not None for item in word.stopped.tails.items()]
    return msgspec.structs.replace(
        ended,
        state=state,
        cause=None if ended.cause is None else _at(ended.cause, own.node),
        consequences=tuple(found),
        tails=dict(tails[:TAILS_MAX]),
        proven=all(word.stopped is None or word.stopped.proven for word in words),
        hint="; ".join(filter(None, (ended.hint, hint))),
    )


def _at(failure: Failure, node: str) -> Failure:
    return msgspec.structs.replace(failure, node=node)


def _failures(word: CrewEnding) -> Iterator[Failure]:
    """Yield a node's reported failures, or the server's reason for abandoning the node's attempt."""
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


def _together(
    attempt: StoredAttempt, found: Sequence[CrewOutcome], *, state: State, reason: Reason, hint: str = ""
) -> str | None:
    words = [
        CrewEnding(
            node=crew.node,
            stopped=_read(one.stopped, Stopped),
            halt=_read(crew.halt_json, Halt),
            reason=crew.reason,
            given_up=crew.given_up,
        )
        for crew, one in zip(attempt.crews, found, strict=True)
    ]
    return _json(ending_of_gang(words, attempt.cause, state=state, reason=reason, hint=hint))


def _whole(attempt: StoredAttempt) -> GangOutcome:
    return GangOutcome(state=attempt.state.value, reason=attempt.reason)


def _account(attempt: StoredAttempt, crew: StoredCrew, ended: CrewOutcome, own: Sequence[Fact]) -> CrewAccount:
    try:
        used = sum_of(metering.used(attempt, crew, own), attempt.tariff)
    except InvalidValue:
        used = Charge()
    return CrewAccount(node=crew.node, receipt=_read(ended.receipt, Receipt), used=used, gpus=crew.gpus)


def _read(text: str | None, kind: type[T]) -> T | None:
    try:
        return None if text is None else from_json(text, kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _json(value: msgspec.Struct | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
