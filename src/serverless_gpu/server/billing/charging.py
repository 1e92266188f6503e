"""The charging loop, which converts facts into immutable ledger entries.

    report, end, settlement ─▶ `crews.uncharged`, in the same transaction ─▶ wakeup
    settled and uncharged   ─▶ facts ─▶ lines (`metering.py`) ─▶ missing entries (`ledger.post`) ─▶ charges
                                                                   several nodes per transaction ──┘
    end of a UTC day        ─▶ the same for running attempts, except for their last day

The charging loop charges an attempt on each node after the attempt has ended and all reports have arrived. A charge has
one ledger entry per day. Before the charge, usage reports compute an attempt's usage from its facts. The loop charges
an attempt on a silent node provisionally, up to the node's last report. If the node's facts arrive later, the loop
reverses the provisional entries. Before retention removes a run, its provisional entries become final.

The facts, the tariff and the end time of an attempt determine its charges. The charging loop therefore keeps no state
in memory. The column `crews.uncharged` marks rows with missing ledger entries. Each report after an attempt's end
writes `crews.uncharged`, even if the column is already true. On PostgreSQL, a concurrent charging transaction therefore
conflicts. The loop repeats a conflicting transaction.

Failure cases:

- If the server is killed, the database contains each charging transaction completely or not at all.

- If the database is unavailable, the loop retries the charging transaction.

- If a number in the facts is out of bounds, the loop logs and counts the failure. The charging loop skips the attempt
  with the invalid number temporarily and still charges other attempts. Retention does not remove the run of a skipped
  attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.ledger import LedgerEntry, LedgerLine, post
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.model.receipt import observed
from serverless_gpu.server.core.hub import CHARGED, Hub
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.records import attempts, charges, crews, facts, nodes, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.charges import NewEntry, PostedEntry, Utilisation
from serverless_gpu.server.records.crews import CrewId, StoredCrew

EVERY_S = 5.0
TURN_S = 60.0
"""Seconds between checks of attempts that ran at midnight UTC and have not reported since."""
AT_ONCE = 64
FACTS_AT_ONCE = 5_000
"""Maximum numbers of `crews` rows and facts in one transaction. The bounds limit the wait of other writers."""
ASIDE_S = 600.0
ASIDE_MAX = 1_000
DOUBT_S = 60.0
"""Maximum seconds by which a node's device time may exceed the server's time since placement."""
DAYS_MAX = 400
"""Maximum number of days in a charge. The loop skips longer periods, because they indicate a wrong clock."""
_LIMIT = 1 << 62
_log = logging.getLogger(__name__)


class _Use(msgspec.Struct, frozen=True):
    """The validated fields of `model.receipt.DeviceUse`. User code can write the original receipt."""

    samples: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
    busy_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    peak_memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = None


class _Seen(msgspec.Struct, frozen=True):
    """The fields of a receipt (`model.receipt.Receipt`) that the charging loop decodes."""

    facts: int | None = None
    uses: Annotated[tuple[_Use, ...], msgspec.Meta(max_length=10_000)] = ()


class ChargeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a charging transaction."""

    entries: int = 0  # Number of new ledger entries.
    failed: Mapping[CrewId, str] = {}  # Reasons of failed charges, by attempt and node.


class Charging:
    """Charges attempts for their device usage on each node."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, hub: Hub, measures: ServerMetrics
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._measures = measures
        self._aside: dict[CrewId, int] = {}
        self._day: int | None = None
        self._turning: dict[CrewId, int] = {}
        self._turn_ns = 0

    def tick(self, now_ns: int) -> int | None:
        """Charge some due attempts, and return the time of the next tick."""
        self._aside = {crew: until_ns for crew, until_ns in self._aside.items() if until_ns > now_ns}
        due = self._due()
        if due:
            self._charge(due, now_ns)
            faults.reach("after_charges_before_more")
            # After very many failed charges, a failed attempt can become due again immediately.
            return now_ns + (round(EVERY_S * 1e9) if len(self._aside) >= ASIDE_MAX else 0)
        if self._turn(now_ns):
            return now_ns
        return now_ns + round(EVERY_S * 1e9)

    def _due(self) -> list[CrewId]:
        """Return attempts on nodes that are ready for charging, with a bounded total number of facts."""
        limit = AT_ONCE + len(self._aside)

        def work(connection: sa.Connection) -> tuple[list[CrewId], Mapping[CrewId, int]]:
            due = [one for one in charges.due_crews(connection, limit=limit) if one not in self._aside][:AT_ONCE]
            return due, facts.counts(connection, due) if due else {}

        due, counts = self._database.read(work)
        return _some(due, counts)

    def _turn(self, now_ns: int) -> bool:
        """Charge past days of running attempts, and return True if more attempts are pending."""
        day = self._clock.wall_ns() // DAY_NS
        if day != self._day:
            going_on = self._database.read(
                lambda connection: charges.crews_going_on(connection, before_ns=day * DAY_NS)
            )
            self._day, self._turning, self._turn_ns = day, dict.fromkeys(going_on, -1), 0
        if not self._turning or now_ns < self._turn_ns:
            return False
        counts = self._database.read(lambda connection: facts.counts(connection, list(self._turning)))
        news = [one for one, seen in self._turning.items() if counts.get(one, 0) != seen and one not in self._aside]
        some = _some(news[:AT_ONCE], counts)
        if not some:
            self._turn_ns = now_ns + round(TURN_S * 1e9)
            return False
        done = self._charge(some, now_ns)
        for crew in some:
            if crew in done:
                self._turning.pop(crew, None)
            else:
                self._turning[crew] = counts.get(crew, 0)
        return True

    def _charge(self, ids: Sequence[CrewId], now_ns: int) -> frozenset[CrewId]:
        """Charge attempts on nodes, and return the attempts whose past days are now charged."""
        at_ns = self._clock.wall_ns()
        final_before_ns = at_ns - round(self._settings.retention_s * 1e9)

        def work(connection: sa.Connection) -> tuple[ChargeOutcome, frozenset[CrewId]]:
            found = load(connection, ids, currency=self._settings.currency)
            charged = charge(connection, found, at_ns=at_ns, final_before_ns=final_before_ns)
            return charged, frozenset(one for one in ids if one not in found or found[one].is_past(at_ns))

        charged, past = self._database.write(work)
        for crew, why in charged.failed.items():
            _log.error("could not charge attempt %s: %s", _named(crew), why)
            self._measures.charge_failures.inc()
            if len(self._aside) < ASIDE_MAX:
                self._aside[crew] = now_ns + round(ASIDE_S * 1e9)
        if charged.entries:
            self._measures.charges.inc(charged.entries)
            self._hub.touch(CHARGED)
        return past


class ChargeableCrew(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt on one node, with all data that its charges depend on."""

    attempt: StoredAttempt
    crew: StoredCrew
    account_id: int
    queued_ms: int  # Queue time of the run before this attempt; 0 except for the attempt's first node.
    facts: Sequence[Fact]
    posted: Sequence[PostedEntry]
    seen: _Seen | None  # The validated fields of the receipt; None without a receipt.

    @property
    def is_over(self) -> bool:
        """Return True if the attempt's end is known and the server expects no more reports."""
        return self.crew.settled_ns is not None and self.attempt.ended_ns is not None

    def is_past(self, at_ns: int) -> bool:
        """Return True if the node reported on or after this day, so that all earlier days are complete."""
        if self.is_over:
            return True
        last = metering.on_our_calendar(self.attempt, self.crew, self.facts)[-1:]
        return bool(last) and last[0].wall_ns // DAY_NS >= at_ns // DAY_NS

    def is_final(self, before_ns: int) -> bool:
        """Return True if the facts are complete: devices released, all facts received, or ended long ago."""
        if not self.facts or self.facts[-1].kind is FactKind.FREED:
            return True
        told = self.seen.facts if self.seen is not None else None
        is_whole = told is not None and len(self.facts) >= told
        return is_whole or (self.crew.ended_ns is not None and self.crew.ended_ns < before_ns)


def charge(
    connection: sa.Connection, due: Mapping[CrewId, ChargeableCrew], *, at_ns: int, final_before_ns: int
) -> ChargeOutcome:
    """Write the missing ledger entries of attempts on nodes."""
    new: list[NewEntry] = []
    failed: dict[CrewId, str] = {}
    seen: dict[CrewId, tuple[int, Utilisation]] = {}
    done: list[CrewId] = []
    for crew, one in due.items():
        try:
            lines = metering.used(one.attempt, one.crew, one.facts)
            posted = [each.entry for each in one.posted]
            if one.is_over:
                entries = post(posted, lines, final=one.is_final(final_before_ns))
            else:  # The last day of the attempt has not ended.
                entries = post(posted, lines[:-1], final=True)
            _check(lines, entries)
            if one.is_over and one.seen is not None and lines:
                seen[crew] = (one.account_id, _utilisation(lines, one.seen.uses))
        except (InvalidValue, ValueError, OverflowError) as error:
            failed[crew] = str(error)
            continue
        if entries:
            new.append(
                NewEntry(
                    crew=crew,
                    account_id=one.account_id,
                    posted=one.posted,
                    queued_ms=one.queued_ms,
                    entries=entries,
                )
            )
        if one.is_over:
            done.append(crew)
            _doubt(one, lines, at_ns)
    written = charges.insert(connection, new, at_ns=at_ns)
    charges.put_utilisations(connection, seen)
    charges.note_charged(connection, done)
    faults.reach("in_charging")
    return ChargeOutcome(entries=written, failed=failed)


def _doubt(one: ChargeableCrew, lines: Sequence[LedgerLine], at_ns: int) -> None:
    """Log a warning if a node reports more device time than the elapsed time since placement."""
    held_s = (max(line.end_ns for line in lines) - min(line.start_ns for line in lines)) / 1e9 if lines else 0.0
    there_s = (at_ns - one.attempt.created_ns) / 1e9
    if held_s > there_s + DOUBT_S:
        _log.warning(
            "attempt %s was placed %.0f s ago, but its node reports that it held devices for %.0f s",
            _named(one.crew.id),
            there_s,
            held_s,
        )


def _check(lines: Sequence[LedgerLine], entries: Sequence[LedgerEntry]) -> None:
    """Refuse ledger entries with numbers that are out of bounds."""
    if len(lines) > DAYS_MAX:
        raise InvalidValue(f"the attempt's facts cover {len(lines)} days, over the limit of {DAYS_MAX}")
    for entry in entries:
        for name, value in msgspec.structs.asdict(entry.line).items():
            if value is not None and abs(value) >= _LIMIT:
                raise InvalidValue(f"{name} of day {entry.line.day} would be {value}, which is out of bounds")


def _utilisation(lines: Sequence[LedgerLine], uses: Sequence[_Use]) -> Utilisation:
    """Return the utilisation of the devices, from the telemetry in the receipt."""
    seen = observed(uses)
    return Utilisation(
        day=lines[-1].day,
        gpus=max(line.gpus for line in lines),
        gpu_ms=sum(line.gpu_ms for line in lines),
        **msgspec.structs.asdict(seen),
    )


def load(connection: sa.Connection, ids: Sequence[CrewId], *, currency: str) -> dict[CrewId, ChargeableCrew]:
    """Return attempts on nodes with all data that their charges depend on."""
    run_ids = sorted({run_id for run_id, _, _ in ids})
    tries = attempts.of_runs(connection, run_ids)
    asked = runs.asked_ns(connection, run_ids)
    known, posted = facts.of_crews(connection, ids), charges.of_crews(connection, ids)
    receipts = crews.receipts(connection, ids)
    found: dict[CrewId, ChargeableCrew] = {}
    for run_id, fence, number in ids:
        attempt = tries.get((run_id, fence))
        if attempt is None or number >= len(attempt.crews):
            continue
        crew, before = attempt.crews[number], tries.get((run_id, fence - 1))
        found[crew.id] = ChargeableCrew(
            attempt=attempt,
            crew=crew,
            account_id=_account_id(connection, attempt, currency=currency),
            queued_ms=0 if number else metering.waited_ms(asked[run_id], before, attempt.created_ns),
            facts=known[crew.id],
            posted=posted[crew.id],
            seen=_seen(receipts.get(crew.id)),
        )
    return found


def _account_id(connection: sa.Connection, attempt: StoredAttempt, *, currency: str) -> int:
    """Return the account of an attempt. Attempts from old backups get a new account."""
    if attempt.account_id is not None:
        return attempt.account_id
    run, pool = runs.find(connection, attempt.run_id), nodes.pool_of(connection, attempt.crews[0].node_id)
    assert run is not None
    account = charges.account_of_run(connection, run, gpu_type=attempt.gpu_type, pool=pool, currency=currency)
    number = charges.ensure_account(connection, account)
    attempts.note(connection, attempt.run_id, attempt.fence, account_id=number)
    return number


def _seen(receipt: str | None) -> _Seen | None:
    if receipt is None:
        return None
    try:
        return from_json(receipt, _Seen)
    # The receipt has another version or is invalid. The facts still contain all data for the charge.
    except (msgspec.DecodeError, RecursionError):
        return _Seen()


def _some(ids: Sequence[CrewId], counts: Mapping[CrewId, int]) -> list[CrewId]:
    """Return the first attempts whose facts fit into one transaction, but at least one attempt."""
    some: list[CrewId] = []
    left = FACTS_AT_ONCE
    for crew in ids:
        left -= counts.get(crew, 0)
        if some and left < 0:
            break
        some.append(crew)
    return some


def _named(crew: CrewId) -> str:
    """Return the name of an attempt for log messages, with the node rank unless the rank is 0."""
    run_id, fence, number = crew
    return f"{run_id}:{fence}{f' (crew {number})' if number else ''}"
