"""What attempts have used that the ledger does not say yet: those that go on, and those that ended a moment ago.

    facts, up to the last sign of life ─▶ `metering.so_far` ─▶ less what is posted of them ─▶ lines that reports add

It is computed in the transaction that reads the ledger, so nothing counts twice or not at all. An attempt whose facts
contradict each other counts as nothing, as in the ledger. So many attempts are looked at, and that others are not is
said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.usage_report import Amounts, ReportRow
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.lifecycle.metering import Now
from serverless_gpu.server.records import accounts, charges, nodes
from serverless_gpu.server.records.accounts import Account
from serverless_gpu.server.records.charges import Posted
from serverless_gpu.server.records.runs import attempts, facts, runs, uncharged_crews
from serverless_gpu.server.records.runs.attempts import StoredAttempt
from serverless_gpu.server.records.runs.crews import CrewId, StoredCrew

LIMIT = 1_000
_EVER_NS = 1 << 62
_NUMBERS = (*SEGMENTS, "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "dbu_micros")


class UnpostedDay(msgspec.Struct, frozen=True, kw_only=True):
    """What a crew used on a day, as far as the ledger does not say so.

    Attributes:
        line: the day as it is by now; `amounts` what of it is not in the ledger.
        is_posted: whether the ledger says something of that day.
    """

    run_id: str
    fence: int
    account: Account
    line: LedgerLine
    amounts: Amounts
    is_posted: bool


class UnpostedDays(msgspec.Struct, frozen=True, kw_only=True):
    """All that is not in the ledger yet.

    Attributes:
        attempts: how many there are of them here, each crew of its own.
        is_cut: whether there are more.
    """

    lines: tuple[UnpostedDay, ...] = ()
    attempts: int = 0
    is_cut: bool = False


def find(connection: sa.Connection, at: Now, *, currency: str, limit: int = LIMIT) -> UnpostedDays:
    """Return what the ledger does not say yet.

    Args:
        connection: of the transaction that reads the ledger.
        at: now.
        currency: of the server, for attempts of an older one.
        limit: how many attempts, at most.
    """
    ids = sorted(
        {*uncharged_crews.going_on(connection, before_ns=_EVER_NS), *uncharged_crews.due(connection, limit=limit + 1)}
    )
    shown = ids[:limit]
    tries = attempts.of_runs(connection, sorted({run_id for run_id, _, _ in shown}))
    found = [(tries[run_id, fence], number) for run_id, fence, number in shown if (run_id, fence) in tries]
    known = accounts.find_many(connection, [one.account_id for one, _ in found if one.account_id is not None])
    posted, told = charges.of_crews(connection, shown), facts.ends_of_crews(connection, shown)
    lines: list[UnpostedDay] = []
    for attempt, number in found:
        crew = attempt.crews[number]
        account = known.get(attempt.account_id or 0) or _counted_as(connection, attempt, currency)
        if account is not None:
            used = _used(attempt, crew, told[crew.id], at)
            lines += _lines(crew, account, posted[crew.id], used)
    return UnpostedDays(lines=_first_counted(lines, posted), attempts=len(shown), is_cut=len(ids) > limit)


def groups(lines: Iterable[UnpostedDay], by: Sequence[str]) -> list[ReportRow]:
    """Return what goes on as groups of a report; days of which the ledger says all are in none."""
    return usage_report.together(
        ReportRow(
            key=usage_report.key_of(by, one.account, run_id=one.run_id, day=one.line.day),
            currency=one.account.currency,
            amounts=one.amounts,
        )
        for one in lines
        if one.amounts.runs or any(getattr(one.amounts, name) for name in _NUMBERS)
    )


def _counted_as(connection: sa.Connection, attempt: StoredAttempt, currency: str) -> Account | None:
    """Return as what an attempt will be counted that was placed by an older server."""
    run, pool = runs.find(connection, attempt.run_id), nodes.pool_of(connection, attempt.crews[0].node_id)
    if run is None:
        return None
    return accounts.of_run(connection, run, gpu_type=attempt.gpu_type, pool=pool, currency=currency)


def _used(attempt: StoredAttempt, crew: StoredCrew, told: Sequence[Fact], at: Now) -> Sequence[LedgerLine]:
    try:
        return metering.so_far(attempt, crew, told, at)
    except InvalidValue:
        return ()


def _lines(
    crew: StoredCrew, account: Account, posted: Sequence[Posted], used: Sequence[LedgerLine]
) -> list[UnpostedDay]:
    there: dict[int, list[LedgerLine]] = defaultdict(list)
    for one in posted:
        there[one.entry.line.day].append(one.entry.line)
    return [
        UnpostedDay(
            run_id=crew.run_id,
            fence=crew.fence,
            account=account,
            line=line,
            amounts=_less(line, there.get(line.day, ())),
            is_posted=line.day in there,
        )
        for line in used
    ]


def _less(line: LedgerLine, posted: Sequence[LedgerLine]) -> Amounts:
    """Return a day without what the ledger says of it."""
    numbers = {name: getattr(line, name) - sum(getattr(one, name) for one in posted) for name in _NUMBERS}
    priced = [one.micros for one in posted if one.micros is not None]
    micros = None if line.micros is None and not priced else (line.micros or 0) - sum(priced)
    unpriced = line.billed_ms if line.micros is None else 0
    unpriced -= sum(one.billed_ms for one in posted if one.micros is None)
    return Amounts(**numbers, micros=micros, unpriced_ms=unpriced, going_ms=numbers["gpu_ms"])


def _first_counted(lines: Sequence[UnpostedDay], posted: Mapping[CrewId, Sequence[Posted]]) -> tuple[UnpostedDay, ...]:
    """Return lines in which a run of that the ledger says nothing is counted once, where it began."""
    counted = {run_id for (run_id, fence, _), entries in posted.items() if entries or fence > 1}
    found = []
    for one in sorted(lines, key=lambda line: (line.run_id, line.fence, line.line.day)):
        is_first = one.run_id not in counted
        counted.add(one.run_id)
        found.append(
            msgspec.structs.replace(one, amounts=msgspec.structs.replace(one.amounts, runs=1)) if is_first else one
        )
    return tuple(found)
