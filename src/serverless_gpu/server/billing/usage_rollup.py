"""Adds up charges by account and day in a loop, so that reports need not read every charge.

    charges ── the next few thousand ─▶ by account and day ─▶ added to `used_days`
                                        by plain account   ─▶ added to `used_plain_days`
               the number of the last charge               ─▶ `folded`, in the same transaction

The loop adds each ledger entry once, because entries never change and become visible in the order of their numbers. A
report reads the sums and all later ledger entries. The amounts in a report therefore do not depend on the progress of
this loop. After a crash, the loop continues with the first ledger entry that it has not added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from serverless_gpu.model.billing.usage_report import Amounts, added
from serverless_gpu.server.db.database import Transactions, in_chunks
from serverless_gpu.server.db.tables import charges, folded, used_days, used_plain_days
from serverless_gpu.server.records.charges import plain_ids
from serverless_gpu.server.records.usage import FOLDED, SUMS, folded_seq, sums_of_rows

EVERY_S = 60.0
AT_ONCE = 10_000


class UsageRollup:
    """Adds up charges by account and day."""

    def __init__(self, *, database: Transactions) -> None:
        self._database = database

    def tick(self, now_ns: int) -> int | None:
        """Add up some charges, and return the time of the next tick."""
        newer = sa.select(charges.c.seq).limit(1)
        is_done = self._database.read(
            lambda connection: connection.scalar(newer.where(charges.c.seq > folded_seq(connection))) is None
        )
        if is_done:
            return now_ns + round(EVERY_S * 1e9)
        is_more = self._database.write(fold)
        return now_ns if is_more else now_ns + round(EVERY_S * 1e9)


def fold(connection: sa.Connection, *, limit: int = AT_ONCE) -> bool:
    """Add some ledger entries to the sums, and return True if more entries may follow."""
    after = folded_seq(connection)
    some = sa.select(charges.c.seq).where(charges.c.seq > after).order_by(charges.c.seq).limit(limit)
    seqs = list(connection.scalars(some))
    if not seqs:
        return False
    query = (
        sa.select(charges.c.day, charges.c.account_id, *sums_of_rows())
        .where(charges.c.seq > after, charges.c.seq <= seqs[-1])
        .group_by(charges.c.day, charges.c.account_id)
    )
    new = {(row[0], row[1]): _amounts(row) for row in connection.execute(query)}
    plain_of = plain_ids(connection, {account_id for _, account_id in new})
    plain: dict[tuple[int, int], Amounts] = defaultdict(Amounts)
    for (day, account_id), amounts in new.items():
        plain[day, plain_of[account_id]] = added(plain[day, plain_of[account_id]], amounts)
    _add(connection, used_days, new)
    _add(connection, used_plain_days, plain)
    if connection.execute(folded.update().where(folded.c.name == FOLDED).values(seq=seqs[-1])).rowcount == 0:
        connection.execute(folded.insert(), {"name": FOLDED, "seq": seqs[-1]})
    return len(seqs) == limit


def _add(connection: sa.Connection, table: sa.Table, new: Mapping[tuple[int, int], Amounts]) -> None:
    """Add amounts to the sums of a table, by day and account."""
    there = _there(connection, table, sorted(new))
    made = [{"day": day, "account_id": of} | _row(one) for (day, of), one in new.items() if (day, of) not in there]
    if made:
        connection.execute(table.insert(), made)
    changed = [{"on": day, "of": of} | _row(added(one, new[day, of])) for (day, of), one in there.items()]
    if changed:
        own = sa.and_(table.c.day == sa.bindparam("on"), table.c.account_id == sa.bindparam("of"))
        connection.execute(table.update().where(own), changed)


def _there(connection: sa.Connection, table: sa.Table, keys: list[tuple[int, int]]) -> dict[tuple[int, int], Amounts]:
    """Return the stored sums with one query per day, so that SQLite and PostgreSQL use the index."""
    found: dict[tuple[int, int], Amounts] = {}
    columns = [table.c[name] for name in SUMS]
    by_day: dict[int, list[int]] = defaultdict(list)
    for day, account_id in keys:
        by_day[day].append(account_id)
    for day, account_ids in by_day.items():
        for some in in_chunks(account_ids):
            here = sa.and_(table.c.day == day, table.c.account_id.in_(some))
            query = sa.select(table.c.day, table.c.account_id, *columns).where(here)
            found |= {(row[0], row[1]): _amounts(row) for row in connection.execute(query)}
    return found


def _amounts(row: sa.Row[Any]) -> Amounts:
    # PostgreSQL returns a sum as a Decimal.
    values: dict[str, Any] = dict(zip(SUMS, row[2:], strict=True))
    micros = values.pop("micros")
    numbers = {name: int(value or 0) for name, value in values.items()}
    return Amounts(**numbers, micros=None if micros is None else int(micros))


def _row(amounts: Amounts) -> dict[str, Any]:
    return {name: getattr(amounts, name) for name in SUMS}
