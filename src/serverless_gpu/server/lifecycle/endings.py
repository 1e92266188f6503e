"""What attempts ended with, as people and programs are told: an attempt on several nodes tells one story.

    one crew        what its node said, as it came
    several crews   endings ─▶ `gang_endings.together`, receipts and facts ─▶ `model.gang_receipt.together`
                    the end is told early where it is known, and nothing is tried again: others still clean up

Failure cases: a node of another version says what cannot be read here (it counts as having said nothing; of a receipt
the money is known from facts all the same); facts that contradict each other (the crew counts as nothing, as in the
ledger, which says so); a node that is gone (its crew is spoken for by what the server knows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.ledger import Charge, sum_of
from serverless_gpu.model.gangs import gang_lifecycle, gang_receipt
from serverless_gpu.model.gangs.gang_lifecycle import Halt
from serverless_gpu.model.gangs.gang_receipt import CrewAccount, Whole
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, Fact, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import surely_ends
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.server.lifecycle import gang_endings, gangs, metering
from serverless_gpu.server.lifecycle.gang_endings import CrewEnding
from serverless_gpu.server.records.runs import crews, facts
from serverless_gpu.server.records.runs.attempts import StoredAttempt
from serverless_gpu.server.records.runs.crews import CrewOutcome, StoredCrew
from serverless_gpu.server.records.runs.runs import StoredRun
from serverless_gpu.units import format_duration_ms

T = TypeVar("T")
Quiet = Callable[[StoredCrew], float | None]
"""For how many seconds nothing was heard of a crew, where that is so long that it may be gone; else None."""
NOTHING = CrewOutcome(stopped=None, receipt=None)


class Early(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ends whose nodes have not all ended yet.

    Attributes:
        sentence: why, beyond the reason.
        stopped: as `Outcome.stopped`.
    """

    state: State
    reason: Reason
    sentence: str
    stopped: str | None


def outcome(connection: sa.Connection, attempt: StoredAttempt | None) -> CrewOutcome:
    """Return what an attempt ended with; nothing of one that has not, and no receipt while one is still awaited.

    Args:
        connection: of a transaction that reads.
        attempt: with all of its crews; None where a run never had one.
    """
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
    receipt = gang_receipt.together(_accounts(connection, attempt, found), _whole(attempt))
    return CrewOutcome(stopped=stopped, receipt=_json(receipt))


def receipt_of_crew(connection: sa.Connection, attempt: StoredAttempt, number: int) -> str | None:
    """Return the receipt of one node of an attempt, or None; what it costs there is what the ledger has of it."""
    found = crews.outcomes(connection, attempt.run_id, attempt.fence)
    if number >= len(found) or len(found) == 1:
        return found[number].receipt if number < len(found) else None
    crew = attempt.crews[number]
    account = _account(attempt, crew, found[number], facts.of_crew(connection, crew.id))
    return _json(gang_receipt.restated(account, _whole(attempt)))


def early(connection: sa.Connection, run: StoredRun, quiet: Quiet) -> Early | None:
    """Return how a run ends, where that is certain before all of its nodes have ended, and nothing is tried again.

    Args:
        connection: of a transaction that reads.
        run: as it is now.
        quiet: says of which crews nothing is heard.
    """
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
        f"{names[number]} has not been heard of for {format_duration_ms(round(seconds * 1000))}; its devices stay "
        "reserved until it is certain that nothing of the run is left there"
        for number, seconds in silent.items()
    )
    found = crews.outcomes(connection, run.id, run.fence)
    stopped = _together(attempt, found, state=state, reason=reason, hint=hint)
    return Early(state=state, reason=reason, sentence=gangs.words(cause, attempt), stopped=stopped)


def may_be_early(run: StoredRun) -> bool:
    """Return whether an end may be told soon that nothing but time brings: a node falls silent without a word."""
    attempt = run.attempt
    if attempt is None or attempt.ended_ns is not None or attempt.num_nodes == 1 or run.state not in ACTIVE:
        return False
    cause = attempt.cause
    return cause is not None and cause.crew is not None and surely_ends(run.life, (cause.reason,), began=attempt.began)


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
    return _json(gang_endings.together(words, attempt.cause, state=state, reason=reason, hint=hint))


def _whole(attempt: StoredAttempt) -> Whole:
    return Whole(state=attempt.state.value, reason=attempt.reason)


def _accounts(connection: sa.Connection, attempt: StoredAttempt, found: Sequence[CrewOutcome]) -> list[CrewAccount]:
    told = facts.of_crews(connection, [crew.id for crew in attempt.crews])
    return [_account(attempt, crew, one, told[crew.id]) for crew, one in zip(attempt.crews, found, strict=True)]


def _account(attempt: StoredAttempt, crew: StoredCrew, ended: CrewOutcome, own: Sequence[Fact]) -> CrewAccount:
    return CrewAccount(
        node=crew.node,
        receipt=_read(ended.receipt, Receipt),
        used=_used(attempt, crew, own),
        gpus=crew.gpus,
    )


def _used(attempt: StoredAttempt, crew: StoredCrew, own: Sequence[Fact]) -> Charge:
    try:
        return sum_of(metering.used(attempt, crew, own), attempt.tariff)
    except InvalidValue:
        return Charge()


def _read(text: str | None, kind: type[T]) -> T | None:
    try:
        return None if text is None else from_json(text, kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _json(value: msgspec.Struct | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
