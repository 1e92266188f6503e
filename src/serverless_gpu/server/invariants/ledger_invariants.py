"""I7: facts, receipts and the entries of the ledger agree.

    facts in order ─▶ lines at the attempt's tariff ═ the entries that stand ═ the receipt, to the micro
    entries        numbered without a gap; a reversal takes back one that stands, whole; one stands for each day
    provisional    none stands, and they add up to nothing, once everything about the attempt is known

A crew that goes on, or that is to be charged (`crews.uncharged`), has only entries of days that are over, which are
checked by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.ledger import EntryKind, LedgerLine, charge, reversed_line, standing, sum_of
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind, Reason
from serverless_gpu.server.invariants.invariant_inputs import OfCrew, RecordedRun, SeenReceipt, Violation, violation_of
from serverless_gpu.server.lifecycle.metering import used
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.charges import PostedEntry
from serverless_gpu.server.records.crews import StoredCrew


def ledger(recorded: RecordedRun) -> Iterator[Violation]:
    """Yield what is wrong with the facts, receipts and entries of a run."""
    all_crews = [_OfCrew(attempt=attempt, crew=crew) for attempt in recorded.attempts for crew in attempt.crews]
    ended = {one.key for one in all_crews if one.crew.ended_ns is not None}
    for fence, _ in sorted(set(recorded.receipts) - ended):
        yield violation_of(recorded, "I7", f"attempt {fence} has a receipt, and has not ended")
    for one in all_crews:
        own = recorded.facts.get(one.key, ())
        for fact, following in pairwise(own):
            if fact.boot_id == following.boot_id and following.boottime_ns < fact.boottime_ns:
                sentence = f"fact {following.seq} of {one.name} is older than fact {fact.seq}"
                yield violation_of(recorded, "I7", sentence)
        posted = recorded.charges.get(one.key, ())
        for sentence in _entries(posted):
            yield violation_of(recorded, "I7", f"{one.name}: {sentence}")
        if one.key in recorded.unread:
            continue  # nothing to compare
        for sentence in (*_receipt(one, own, recorded), *_charged(one, own, posted, recorded)):
            yield violation_of(recorded, "I7", sentence)


class _OfCrew(msgspec.Struct, frozen=True, kw_only=True):
    """A crew, and its attempt."""

    attempt: StoredAttempt
    crew: StoredCrew

    @property
    def key(self) -> OfCrew:
        return self.crew.fence, self.crew.number

    @property
    def name(self) -> str:
        number = self.crew.number
        return f"attempt {self.crew.fence}{f' (crew {number})' if number else ''}"


def _receipt(one: _OfCrew, own: Sequence[Fact], recorded: RecordedRun) -> Iterator[str]:
    receipt = recorded.receipts.get(one.key)
    if receipt is None or receipt.gpu_ms is None or receipt.facts is None:
        return
    if len(own) < receipt.facts:
        yield f"{len(own)} of the {receipt.facts} facts of {one.name} are there"
    elif (charged := _charge_ms(own, one.attempt.gpu_type)) != receipt.gpu_ms:
        yield f"{one.name} is charged {receipt.gpu_ms} ms, facts say {charged}"


def _charge_ms(own: Iterable[Fact], gpu_type: str) -> int | str:
    try:
        return charge(own, gpu_type=gpu_type).gpu_ms
    except InvalidValue as error:
        return error.message


def _entries(posted: Sequence[PostedEntry]) -> Iterator[str]:
    """Yield what cannot be, whatever the facts are."""
    if [one.entry.number for one in posted] != list(range(1, len(posted) + 1)):
        yield f"its entries are numbered {', '.join(str(one.entry.number) for one in posted)}"
    if len({one.account_id for one in posted}) > 1:
        yield "its entries are of more than one account"
    there: dict[int, PostedEntry] = {}
    for one in posted:
        entry = one.entry
        before = there.pop(entry.line.day, None)
        if entry.kind is EntryKind.REVERSAL:
            if before is None:
                yield f"entry {entry.number} takes back what is not there"
            elif not _takes_back(one, before):
                yield f"entry {entry.number} does not take back what entry {before.entry.number} says"
            continue
        if before is not None:
            yield f"entries {before.entry.number} and {entry.number} are both of day {entry.line.day}"
        there[entry.line.day] = one


def _takes_back(one: PostedEntry, before: PostedEntry) -> bool:
    is_same = one.entry.provisional == before.entry.provisional and one.queued_ms == -before.queued_ms
    return is_same and one.entry.line == reversed_line(before.entry.line)


def _charged(of: _OfCrew, own: Sequence[Fact], posted: Sequence[PostedEntry], recorded: RecordedRun) -> Iterator[str]:
    """Yield what is not charged as facts and tariff say."""
    if of.crew.settled_ns is None or of.crew.uncharged:
        return
    try:
        wanted = used(of.attempt, of.crew, own)
    except InvalidValue as error:
        yield f"{of.name} cannot be charged: {error.message}"
        return
    stands = standing(one.entry for one in posted).values()
    if [entry.line for entry in stands] != list(wanted):
        yield f"{of.name} is charged {_told(entry.line for entry in stands)}, facts say {_told(wanted)}"
        return
    receipt = recorded.receipts.get(of.key)
    is_whole = receipt is not None and receipt.facts is not None and len(own) >= receipt.facts
    if (is_whole or (own[-1:] and own[-1].kind is FactKind.FREED)) and any(entry.provisional for entry in stands):
        yield f"{of.name} has said everything, and is charged provisionally"
    if receipt is not None and is_whole and _is_alike(of, receipt):
        micros = sum_of(wanted, of.attempt.tariff).micros
        if micros != receipt.micros:
            yield f"the receipt of {of.name} says {receipt.micros} micros, and the ledger {micros}"


def _is_alike(of: _OfCrew, receipt: SeenReceipt) -> bool:
    """Return whether a receipt can be compared: of a node that knows the tariff, for an end that the server knows so.

    One that was given up and has come to its own end has two ends, and the server's counts. Who pays for a crew
    follows from how all of its gang ended, and a node says what follows from its own end.
    """
    own, whole = of.crew.reason, of.attempt.reason
    if own is None or whole is None or MEANINGS[own].is_billed is not MEANINGS[whole].is_billed:
        return False
    reason = None if own is Reason.COMPLETED else own.value
    return receipt.bill is not msgspec.UNSET and receipt.reason == reason


def _told(lines: Iterable[LedgerLine]) -> str:
    """Return lines in few words."""
    return ", ".join(f"{line.gpu_ms} ms ({line.micros} micros) on day {line.day}" for line in lines) or "nothing"
