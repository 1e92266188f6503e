"""The loop that adds charges up by account and day, so that a report does not read each of them.

    charges ── some thousands after the last that was added ─▶ by account and day ─▶ added to `used_days`
                                     `folded` says how far that is, in the same transaction ┘

Entries are only added, and become visible in the order of their numbers, so each is added once. A report takes the
sums, and the entries after them as they are: it says the same whether this loop is behind or not, only faster. Killed
anywhere, it goes on where it was.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa

from serverless_gpu.server.portions import portions
from serverless_gpu.server.services import Services
from serverless_gpu.server.tables import charges, folded, used_days
from serverless_gpu.server.usage_sums import SUMS, folded_seq, sums_of_rows

EVERY_S = 60.0
AT_ONCE = 10_000
_NAME = "charges"


class Folding:
    """Adds charges up.

    Args:
        services: the server's.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    def tick(self, now_ns: int) -> int | None:
        """Add up some charges; return when to look again.

        Args:
            now_ns: boottime, nanoseconds.
        """
        if self._services.database.read(_is_done):
            return now_ns + round(EVERY_S * 1e9)
        is_more = self._services.database.write(fold)
        return now_ns if is_more else now_ns + round(EVERY_S * 1e9)


def fold(connection: sa.Connection, *, limit: int = AT_ONCE) -> bool:
    """Add some entries to the sums; return whether there may be more.

    Args:
        connection: of a transaction that may write.
        limit: how many, at most.
    """
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
    new = {(row[0], row[1]): _numbers(row) for row in connection.execute(query)}
    there = _there(connection, sorted(new))
    changed = [_added(there[key], numbers) | _key(key, "b_") for key, numbers in new.items() if key in there]
    made = [numbers | _key(key) for key, numbers in new.items() if key not in there]
    if changed:
        own = sa.and_(used_days.c.day == sa.bindparam("b_day"), used_days.c.account_id == sa.bindparam("b_account_id"))
        marks: dict[str, Any] = {name: sa.bindparam(f"v_{name}") for name in SUMS}
        rows = [{key if key.startswith("b_") else f"v_{key}": value for key, value in row.items()} for row in changed]
        connection.execute(used_days.update().where(own).values(**marks), rows)
    if made:
        connection.execute(used_days.insert(), made)
    if connection.execute(folded.update().where(folded.c.name == _NAME).values(seq=seqs[-1])).rowcount == 0:
        connection.execute(folded.insert(), {"name": _NAME, "seq": seqs[-1]})
    return len(seqs) == limit


def _is_done(connection: sa.Connection) -> bool:
    after = folded_seq(connection)
    return connection.scalar(sa.select(charges.c.seq).where(charges.c.seq > after).limit(1)) is None


def _there(connection: sa.Connection, keys: list[tuple[int, int]]) -> dict[tuple[int, int], dict[str, int | None]]:
    """Return the sums that are there; day by day, so that both databases look them up in the index."""
    found: dict[tuple[int, int], dict[str, int | None]] = {}
    columns = [used_days.c[name] for name in SUMS]
    by_day: dict[int, list[int]] = defaultdict(list)
    for day, account_id in keys:
        by_day[day].append(account_id)
    for day, account_ids in by_day.items():
        for some in portions(account_ids):
            here = sa.and_(used_days.c.day == day, used_days.c.account_id.in_(some))
            query = sa.select(used_days.c.day, used_days.c.account_id, *columns).where(here)
            found |= {(row[0], row[1]): _numbers(row) for row in connection.execute(query)}
    return found


def _numbers(row: sa.Row[Any]) -> dict[str, int | None]:
    # A sum is a Decimal on PostgreSQL.
    values: list[Any] = list(row[2:])
    return {
        name: None if value is None and name == "micros" else int(value or 0)
        for name, value in zip(SUMS, values, strict=True)
    }


def _added(one: dict[str, int | None], other: dict[str, int | None]) -> dict[str, int | None]:
    if one["micros"] is None and other["micros"] is None:
        return {name: (one[name] or 0) + (other[name] or 0) for name in SUMS} | {"micros": None}
    return {name: (one[name] or 0) + (other[name] or 0) for name in SUMS}


def _key(key: tuple[int, int], prefix: str = "") -> dict[str, int | None]:
    return {f"{prefix}day": key[0], f"{prefix}account_id": key[1]}
