"""Repository of ledger entries, accounts, uncharged attempts and device utilisation.

Only the charging loop (`charging.py`) adds entries, one transaction after the other. Ledger entries therefore become
visible in the order of their numbers (`seq`), even on PostgreSQL. A reader that remembers the highest number can read
all newer entries without a gap. The server never changes ledger entries.

An account combines the owner of usage with the usage's properties. Charges with equal properties share an account. The
server chooses an attempt's account at the placement. Later changes of the node's pool do not change the attempt's
account. A reversal has the same account as the reversed entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.budget import Subject
from serverless_gpu.model.billing.ledger import EntryKind, LedgerEntry, LedgerLine, standing
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.lifecycle.attempt import ACTIVE
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import account_tags, accounts, attempts, charges, crews, runs, utilisations
from serverless_gpu.server.records import attempts as attempt_rows
from serverless_gpu.server.records import pools
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import CrewId, Gang
from serverless_gpu.server.records.runs import StoredRun

_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode_tags = msgspec.json.Decoder(dict[str, str]).decode
_decode_member_of = msgspec.json.Decoder(tuple[str, ...]).decode


_OF_LINE = LedgerLine.__struct_fields__
_ACTIVE = [state.value for state in ACTIVE]
_WHOSE = (crews.c.run_id, crews.c.fence, crews.c.crew)
_UNCHARGED: sa.ColumnElement[bool] = sa.literal_column("crews.uncharged")


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Owner and properties of usage in the ledger.

    Attributes:
        owner: the user or service.
        team: team of the run, or "".
        pool: pool of the node on which the run was placed.
        reserved: True if that pool was reserved at the placement.
        policy: usage policy of the run, or "".
        gpu_type: type of the run's devices.
        name: name of the run.
        workload: kind of its workload: "function", "command" or "kernel".
        environment: address of the captured environment, or "".
        currency: currency of the prices.
        tags: tags of the run.
        member_of: teams whose budgets count a run without a team.
    """

    owner: str
    gpu_type: str
    team: str = ""
    pool: str = ""
    reserved: bool = False
    policy: str = ""
    name: str = ""
    workload: str = "function"
    environment: str = ""
    currency: str = "USD"
    tags: dict[str, str] = {}
    member_of: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """Return the properties that determine which budgets count the usage."""
        return Subject(
            owner=self.owner,
            team=self.team,
            member_of=self.member_of,
            pool=self.pool,
            policy=self.policy,
            tags=self.tags,
            is_cpu=self.gpu_type == CPU,
        )


def account_of_run(connection: sa.Connection, run: StoredRun, *, gpu_type: str, pool: str, currency: str) -> Account:
    """Return the account for an attempt of a run on one GPU type in a pool."""
    found = pools.find(connection, pool)
    return Account(
        owner=run.owner,
        team=run.team,
        pool=pool,
        reserved=found is not None and found.kind == pools.RESERVED,
        policy=run.spec.policy or "",
        gpu_type=gpu_type,
        name=run.name,
        workload=str(run.spec.payload.__struct_config__.tag),
        environment=run.snapshot,
        currency=currency,
        tags=run.spec.tags,
        member_of=run.member_of,
    )


def ensure_account(connection: sa.Connection, account: Account) -> int:
    """Return the number of an account, and insert the account if it is new.

    The function also inserts the corresponding plain account, which has no tags and environment. Reports that do not
    group by tag or environment use plain accounts.
    """
    fields = msgspec.structs.asdict(account)
    # Omit an empty `member_of`, so that the digest equals digests of older versions without this field.
    if not account.member_of:
        del fields["member_of"]
    digest = hashlib.sha256(_encode_sorted(fields)).hexdigest()
    found: int | None = connection.scalar(sa.select(accounts.c.id).where(accounts.c.sha256 == digest))
    if found is not None:
        return found
    plain = msgspec.structs.replace(account, tags={}, environment="")
    row = msgspec.structs.asdict(account)
    row |= {"sha256": digest, "tags_json": _encode_sorted(row.pop("tags")).decode()}
    row["member_of_json"] = _encode_sorted(row.pop("member_of")).decode()
    row["plain_id"] = 0 if plain == account else ensure_account(connection, plain)
    made = int(connection.execute(accounts.insert().returning(accounts.c.id), row).scalar_one())
    if plain == account:
        connection.execute(accounts.update().where(accounts.c.id == made).values(plain_id=made))
    # Insert a row per tag, because reports group usage by tag. Omit empty tag values, which reports count as no tag.
    # Omit tags with NUL, which PostgreSQL cannot store.
    tags = [(key, value) for key, value in account.tags.items() if value and "\0" not in key + value]
    if tags:
        rows = [{"key": key, "account_id": made, "value": value} for key, value in tags]
        connection.execute(account_tags.insert(), rows)
    return made


def plain_ids(connection: sa.Connection, numbers: Collection[int]) -> dict[int, int]:
    """Return the number of the plain account for each account."""
    found: dict[int, int] = {}
    for some in in_chunks(sorted(set(numbers))):
        query = sa.select(accounts.c.id, accounts.c.plain_id).where(accounts.c.id.in_(some))
        found |= {row.id: row.plain_id for row in connection.execute(query)}
    return found


def find_accounts(connection: sa.Connection, numbers: Collection[int]) -> dict[int, Account]:
    """Return accounts by their numbers."""
    found: dict[int, Account] = {}
    for some in in_chunks(sorted(set(numbers))):
        for row in connection.execute(sa.select(accounts).where(accounts.c.id.in_(some))):
            found[row.id] = account_from_row(row)
    return found


def account_from_row(row: sa.Row[Any]) -> Account:
    """Return the account of a row with all columns of the table."""
    names = [name for name in Account.__struct_fields__ if name not in ("tags", "member_of")]
    return Account(
        **{name: row._mapping[name] for name in names},
        tags=_decode_tags(row.tags_json),
        member_of=_decode_member_of(row.member_of_json or "[]"),
    )


class PostedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Stored ledger entry.

    Attributes:
        seq: number of the entry, which increases with time.
        account_id: account of the entry; all entries of an attempt have the same account.
        posted_ns: time when the entry was written, nanoseconds since 1970.
        queued_ms: wall time for which the run waited for this attempt. Only one row of the attempt has this value. The
            reversal of that row has the negative value.
    """

    seq: int
    run_id: str
    fence: int
    crew: int
    account_id: int
    posted_ns: int
    queued_ms: int
    entry: LedgerEntry


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """Observed utilisation of an attempt's devices on one node, from its receipt.

    Attributes:
        day: the day on which the attempt ended on that node.
        gpu_ms: device-milliseconds that the attempt used.
        observed_ms: observed device-milliseconds. `busy_ms` counts the observed device-milliseconds with a working
            device.
        peak_memory_bytes: maximum memory use of one device; None if unknown.
    """

    day: int
    gpus: int
    gpu_ms: int
    observed_ms: int
    busy_ms: int
    peak_memory_bytes: int | None


class LedgerSum(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the ledger entries of one account and day.

    Attributes:
        unpriced_ms: billed device-milliseconds without a price.
        micros: costs of the device-milliseconds with a price.
    """

    account_id: int
    day: int
    billed_ms: int
    unpriced_ms: int
    micros: int


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger entries to insert for an attempt on one node.

    Attributes:
        posted: the entries that the ledger already contains.
        queued_ms: time for which the run waited for the attempt; 0 for all nodes except the first.
        entries: the entries to insert.
    """

    crew: CrewId
    account_id: int
    posted: Sequence[PostedEntry]
    queued_ms: int
    entries: Sequence[LedgerEntry]


def insert(connection: sa.Connection, new: Sequence[NewEntry], *, at_ns: int) -> int:
    """Insert ledger entries, and return their number."""
    rows = [row for one in new for row in _rows(one, at_ns)]
    if rows:
        connection.execute(charges.insert(), rows)
    return len(rows)


def _rows(new: NewEntry, at_ns: int) -> Iterable[dict[str, Any]]:
    # A reversal subtracts the reversed entry's waiting time, which the next valid entry adds again.
    waits = {one.entry.line.day: one.queued_ms for one in new.posted if one.entry.kind is not EntryKind.REVERSAL}
    total_ms = sum(one.queued_ms for one in new.posted)
    run_id, fence, number = new.crew
    for entry in new.entries:
        is_reversal = entry.kind is EntryKind.REVERSAL
        queued_ms = -waits.pop(entry.line.day, 0) if is_reversal else new.queued_ms - total_ms
        if not is_reversal:
            waits[entry.line.day] = queued_ms
        total_ms += queued_ms
        yield {
            "run_id": run_id,
            "fence": fence,
            "crew": number,
            "number": entry.number,
            "kind": entry.kind.value,
            "provisional": entry.provisional,
            "account_id": new.account_id,
            "posted_ns": at_ns,
            "queued_ms": queued_ms,
            **msgspec.structs.asdict(entry.line),
        }


def of_crews(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, list[PostedEntry]]:
    """Return the ledger entries of each attempt on each node, in order."""
    found: dict[CrewId, list[PostedEntry]] = {crew: [] for crew in ids}
    for one in of_runs(connection, sorted({run_id for run_id, _, _ in ids})):
        if (one.run_id, one.fence, one.crew) in found:
            found[one.run_id, one.fence, one.crew].append(one)
    return found


def of_attempts(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, list[PostedEntry]]:
    """Return the ledger entries of attempts, by attempt and node rank."""
    found: dict[Gang, list[PostedEntry]] = {gang: [] for gang in gangs}
    for one in of_runs(connection, sorted({run_id for run_id, _ in gangs})):
        if (one.run_id, one.fence) in found:
            found[one.run_id, one.fence].append(one)
    return found


def of_runs(connection: sa.Connection, run_ids: Sequence[str]) -> list[PostedEntry]:
    """Return the ledger entries of runs, by run, attempt, node rank and number."""
    found: list[PostedEntry] = []
    for some in in_chunks(run_ids):
        query = sa.select(charges).where(charges.c.run_id.in_(some))
        rows = connection.execute(query.order_by(charges.c.run_id, charges.c.fence, charges.c.crew, charges.c.number))
        found += [posted_from_row(row) for row in rows]
    return found


def of_run(connection: sa.Connection, run_id: str) -> dict[tuple[int, int], list[PostedEntry]]:
    """Return the ledger entries of a run by fence and node rank."""
    found: dict[tuple[int, int], list[PostedEntry]] = {}
    for one in of_runs(connection, [run_id]):
        found.setdefault((one.fence, one.crew), []).append(one)
    return found


def after(connection: sa.Connection, seq: int, *, limit: int) -> list[PostedEntry]:
    """Return ledger entries after number `seq`, in order of their numbers."""
    query = sa.select(charges).where(charges.c.seq > seq).order_by(charges.c.seq).limit(limit)
    return [posted_from_row(row) for row in connection.execute(query)]


def newest_seq(connection: sa.Connection) -> int:
    """Return the number of the last ledger entry, or 0."""
    return connection.scalar(sa.select(sa.func.max(charges.c.seq))) or 0


def sums(connection: sa.Connection, *, from_day: int = 0, after_seq: int = 0) -> list[LedgerSum]:
    """Return the sums of ledger entries by account and day.

    Args:
        connection: connection of any transaction. The caller must read open attempts in the same transaction, or an
            attempt may count twice.
        from_day: first day to include.
        after_seq: number of the last entry to exclude.
    """
    unpriced = sa.case((charges.c.micros.is_(None), charges.c.billed_ms), else_=0)
    totals = (sa.func.sum(summed) for summed in (charges.c.billed_ms, unpriced, charges.c.micros))
    query = sa.select(charges.c.account_id, charges.c.day, *totals).where(charges.c.day >= from_day)
    if after_seq:
        query = query.where(charges.c.seq > after_seq)
    # PostgreSQL returns a BIGINT sum as a Decimal. A sum of only NULLs is None.
    rows = connection.execute(query.group_by(charges.c.account_id, charges.c.day))
    return [
        LedgerSum(
            account_id=account_id,
            day=day,
            billed_ms=int(billed_ms or 0),
            unpriced_ms=int(unpriced_ms or 0),
            micros=int(micros or 0),
        )
        for account_id, day, billed_ms, unpriced_ms, micros in rows
    ]


def before(
    connection: sa.Connection, at_ns: int, *, after_seq: int = 0
) -> tuple[list[LedgerSum], list[tuple[int, LedgerLine]]]:
    """Return a UTC day's usage before a time, as sums by account and entries that cross the time.

    Args:
        connection: connection of any transaction.
        at_ns: the time, nanoseconds since 1970. Only entries of the same UTC day can cross this time.
        after_seq: number of the last entry to exclude.
    """
    day = at_ns // DAY_NS
    unpriced = sa.case((charges.c.micros.is_(None), charges.c.billed_ms), else_=0)
    totals = (sa.func.sum(summed) for summed in (charges.c.billed_ms, unpriced, charges.c.micros))
    of_day = sa.and_(charges.c.day == day, charges.c.seq > after_seq)
    query = sa.select(charges.c.account_id, *totals).where(of_day, charges.c.end_ns <= at_ns)
    whole = [
        LedgerSum(
            account_id=account_id,
            day=day,
            billed_ms=int(billed_ms or 0),
            unpriced_ms=int(unpriced_ms or 0),
            micros=int(micros or 0),
        )
        for account_id, billed_ms, unpriced_ms, micros in connection.execute(query.group_by(charges.c.account_id))
    ]
    crossing = sa.select(charges).where(of_day, charges.c.start_ns < at_ns, charges.c.end_ns > at_ns)
    posted = [posted_from_row(row) for row in connection.execute(crossing)]
    return whole, [(one.account_id, one.entry.line) for one in posted]


def is_any_since(connection: sa.Connection, at_ns: int, gpu_types: Sequence[str] | None) -> bool:
    """Return True if runs used one of some GPU types (None for any) after a time. Removed runs count."""
    query = sa.select(charges.c.seq).join(accounts).where(charges.c.day >= at_ns // DAY_NS, charges.c.end_ns >= at_ns)
    if gpu_types is not None:
        query = query.where(accounts.c.gpu_type.in_(gpu_types))
    return connection.execute(query.limit(1)).first() is not None


def is_provisional(connection: sa.Connection, run_id: str) -> bool:
    """Return True if the ledger has a provisional entry for a run."""
    return any(may_change(own) for own in of_run(connection, run_id).values())


def may_change(posted: Iterable[PostedEntry]) -> bool:
    """Return True if the ledger has a provisional entry for an attempt on a node."""
    return any(entry.provisional for entry in standing(one.entry for one in posted).values())


def put_utilisations(connection: sa.Connection, seen: Mapping[CrewId, tuple[int, Utilisation]]) -> None:
    """Insert or replace the utilisation of attempts on nodes."""
    if not seen:
        return
    own = sa.and_(
        utilisations.c.run_id == sa.bindparam("of_run"),
        utilisations.c.fence == sa.bindparam("of_fence"),
        utilisations.c.crew == sa.bindparam("of_crew"),
    )
    whose = [{"of_run": run_id, "of_fence": fence, "of_crew": number} for run_id, fence, number in seen]
    connection.execute(utilisations.delete().where(own), whose)
    plain = plain_ids(connection, {account_id for account_id, _ in seen.values()})
    rows = [
        {"run_id": run_id, "fence": fence, "crew": number, "account_id": account_id, "plain_id": plain[account_id]}
        | msgspec.structs.asdict(one)
        for (run_id, fence, number), (account_id, one) in seen.items()
    ]
    connection.execute(utilisations.insert(), rows)


def posted_from_row(row: sa.Row[Any]) -> PostedEntry:
    """Return the entry of a row with all columns of the table."""
    values = row._mapping
    return PostedEntry(
        seq=row.seq,
        run_id=row.run_id,
        fence=row.fence,
        crew=row.crew,
        account_id=row.account_id,
        posted_ns=row.posted_ns,
        queued_ms=row.queued_ms,
        entry=LedgerEntry(
            number=row.number,
            kind=EntryKind(row.kind),
            provisional=row.provisional,
            line=LedgerLine(**{name: values[name] for name in _OF_LINE}),
        ),
    )


class UnpostedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Unfinished attempt, or ended attempt with missing ledger entries."""

    attempt: StoredAttempt
    is_stopping: bool


def unposted(connection: sa.Connection) -> dict[Gang, UnpostedAttempt]:
    """Return unfinished attempts, and ended attempts with missing ledger entries."""
    is_current = sa.and_(runs.c.id == attempts.c.run_id, runs.c.fence == attempts.c.fence)
    going = (
        sa.select(*attempt_rows.COLUMNS, runs.c.stop)
        .select_from(attempt_rows.joined_to(runs, is_current))
        .where(runs.c.state.in_(_ACTIVE))
    )
    rows = list(connection.execute(going))
    left = {(run_id, fence) for run_id, fence in connection.execute(sa.select(*_WHOSE[:2]).where(_UNCHARGED))}
    others = sa.select(*attempt_rows.COLUMNS, runs.c.stop).select_from(attempt_rows.JOINED.outerjoin(runs, is_current))
    for some in in_chunks(sorted({run_id for run_id, _ in left})):
        rows += connection.execute(others.where(attempts.c.run_id.in_(some)))
    found = [(attempt, row[-1] is not None) for row in rows if (attempt := attempt_rows.from_row(row))]
    stopping = {(attempt.run_id, attempt.fence) for attempt, is_stopping in found if is_stopping}
    there = {(one.run_id, one.fence): one for one in attempt_rows.whole(connection, [attempt for attempt, _ in found])}
    return {
        gang: UnpostedAttempt(attempt=attempt, is_stopping=gang in stopping)
        for gang, attempt in there.items()
        if gang in left or attempt.ended_ns is None
    }


def due_crews(connection: sa.Connection, *, limit: int) -> list[CrewId]:
    """Return settled parts of ended attempts with missing ledger entries.

    The result excludes unfinished attempts, because charges for a node depend on the end of the whole attempt.
    """
    own = sa.and_(attempts.c.run_id == crews.c.run_id, attempts.c.fence == crews.c.fence)
    query = sa.select(*_WHOSE).select_from(crews.join(attempts, own))
    query = query.where(_UNCHARGED, crews.c.settled_ns.is_not(None), attempts.c.ended_ns.is_not(None))
    # SQLite would use the primary key for this order and read every row, instead of the index of uncharged rows.
    rows = connection.execute(query.order_by(crews.c.run_id.concat(""), *_WHOSE[1:]).limit(limit))
    return [(run_id, fence, number) for run_id, fence, number in rows]


def crews_going_on(connection: sa.Connection, *, before_ns: int) -> list[CrewId]:
    """Return parts of attempts that were placed before a time and are unsettled or unfinished."""
    own = sa.and_(crews.c.run_id == attempts.c.run_id, crews.c.fence == attempts.c.fence)
    query = sa.select(*_WHOSE).select_from(attempts.join(crews, own))
    more = sa.or_(crews.c.settled_ns.is_(None), attempts.c.ended_ns.is_(None))
    # With a join instead of a list, SQLite would read every row of `crews`.
    unsettled = sa.select(runs.c.id).where(runs.c.settled_ns.is_(None))
    query = query.where(attempts.c.run_id.in_(unsettled), more, attempts.c.created_ns < before_ns)
    return [(run_id, fence, number) for run_id, fence, number in connection.execute(query)]


def count_uncharged(connection: sa.Connection) -> int:
    """Return the number of ended parts of attempts with missing ledger entries."""
    return connection.scalar(sa.select(sa.func.count()).select_from(crews).where(_UNCHARGED)) or 0


def note_charged(connection: sa.Connection, ids: Sequence[CrewId]) -> None:
    """Mark parts of attempts as charged in the ledger."""
    if ids:
        names = ("of_run", "of_fence", "of_crew")
        one = sa.and_(*(column == sa.bindparam(name) for column, name in zip(_WHOSE, names, strict=True)))
        rows = [dict(zip(names, crew, strict=True)) for crew in ids]
        connection.execute(crews.update().where(one).values(uncharged=False), rows)


def charge_again(connection: sa.Connection, run_id: str) -> None:
    """Mark a run's attempts as uncharged, so that the charging loop charges the attempts again."""
    connection.execute(crews.update().where(crews.c.run_id == run_id).values(uncharged=True))
