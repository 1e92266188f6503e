"""Pages of runs by filter and order, read through indexes.

    filter, order, cursor ─▶ identifiers, from an index that contains all filtered columns ─▶ rows of one page

The rows of runs are wide. If few runs match, `page` reads the whole index `ix_runs_list` or `ix_runs_ended`, but only
the rows of matching runs. SQLite has no statistics about the values of a column, and would rather sort all runs of a
state than read them in order. A cast of the column prevents that.

A cursor names the run next to a page. It has the form `KEY` for the following page, and `-KEY` for the previous page.
KEY is a run identifier, or `TIME.IDENTIFIER` in the order of end times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import first_run_id
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.db.tables import run_tags
from serverless_gpu.server.db.tables import runs as _runs
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.runs import StoredRun

Sort = Literal["newest", "oldest", "ended"]
SORTS: tuple[Sort, ...] = get_args(Sort)
"""Orders of a list: latest or earliest submission first, or latest end first."""
_SKEW_NS = 86_400_000_000_000
"""Maximum difference between a client's clock, which run identifiers contain, and the server's clock."""
_TIME_MAX_NS = 1 << 62


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for a list of runs, including the caller's access.

    Attributes:
        states: states to include; empty for all.
        tags: tags that a run must all have.
        gpu_types: device types of the current attempt, or requested types; empty for all.
        from_ns: earliest submission time, nanoseconds since 1970.
        to_ns: submission time after the last one to include; None for no limit.
        text: part of the name, identifier or final sentence, without regard to case.
        seen_by: the calling principal, or None for a caller who may see all runs.
        teams: further teams whose runs the caller may see.
    """

    states: tuple[State, ...] = ()
    owner: str = ""
    team: str = ""
    name: str = ""
    tags: dict[str, str] = {}
    gpu_types: tuple[str, ...] = ()
    from_ns: int = 0
    to_ns: int | None = None
    text: str = ""
    seen_by: str | None = None
    teams: tuple[str, ...] = ()


class RunListPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of runs, with the cursors of the following and the previous page, or ""."""

    runs: list[StoredRun]
    following: str = ""
    previous: str = ""


_NOTHING = RunListPage(runs=[])


def page(
    connection: sa.Connection, wished: RunFilter, *, limit: int, cursor: str = "", sort: Sort = "newest"
) -> RunListPage:
    """Return a page of runs.

    Args:
        connection: connection of a transaction.
        wished: filter of the runs.
        limit: maximum number of runs.
        cursor: cursor from an earlier page, or "" for the first page.
        sort: order of the runs.

    Raises:
        InvalidValue: the cursor does not belong to a list in this order.
    """
    texts = (wished.owner, wished.team, wished.name, wished.text, cursor, *wished.gpu_types, *wished.tags.values())
    if any("\0" in text for text in (*texts, *wished.tags)):
        return _NOTHING  # A filter with a NUL character matches no run, because PostgreSQL stores no NUL character.
    is_back, place = cursor.startswith("-"), _place(cursor.removeprefix("-"), sort)
    query = _ordered(_filtered(wished, sort), sort, place, is_back=is_back)
    keys = [_Key(*row) for row in connection.execute(query.limit(limit + 1))]
    if is_back and len(keys) <= limit:
        # The page begins with the first run of the list. Fill the page up.
        return page(connection, wished, limit=limit, sort=sort)
    more, keys = len(keys) > limit, keys[:limit]
    if is_back:
        keys.reverse()
    found = {run.id: run for run in runs.find_many(connection, [key.id for key in keys])}
    return RunListPage(
        runs=[found[key.id] for key in keys],
        following=keys[-1].text(sort) if more or is_back else "",
        previous=f"-{keys[0].text(sort)}" if cursor and keys else "",
    )


def previous_of_name(connection: sa.Connection, run: StoredRun) -> str:
    """Return the identifier of the owner's previous run with the same name, or ""."""
    if not run.name:
        return ""
    wished = _filtered(RunFilter(name=run.name, owner=run.owner))
    query = wished.where(_runs.c.id < run.id).order_by(_runs.c.id.desc()).limit(1)
    return connection.scalar(query) or ""


class _Key(NamedTuple):
    id: str
    ended_ns: int | None

    def text(self, sort: Sort) -> str:
        return f"{self.ended_ns}.{self.id}" if sort == "ended" else self.id


def _filtered(wished: RunFilter, sort: Sort = "newest") -> sa.Select[Any]:
    query = sa.select(_runs.c.id)
    owner = _uncounted(_runs.c.owner) if sort == "ended" else _runs.c.owner
    if wished.seen_by is not None:
        own = owner == wished.seen_by
        query = query.where(sa.or_(own, _runs.c.team.in_(wished.teams)) if wished.teams else own)
    if wished.states:
        query = query.where(_uncounted(_runs.c.state).in_([state.value for state in wished.states]))
    for column, value in ((_runs.c.team, wished.team), (_runs.c.name, wished.name)):
        if value:
            query = query.where(column == value)
    if wished.gpu_types:
        query = query.where(_runs.c.gpu_type.in_([runs.shortened_type(kind) for kind in wished.gpu_types]))
    if wished.owner:
        query = query.where(owner == wished.owner)
    if wished.text:
        # SQLite lowers only ASCII letters.
        columns = (sa.func.lower(_runs.c.name), _runs.c.said, _runs.c.id)
        alike = [column.contains(wished.text.lower(), autoescape=True) for column in columns]
        query = query.where(sa.or_(*alike, _runs.c.name.contains(wished.text, autoescape=True)))
    for key, value in wished.tags.items():
        tagged = sa.select(run_tags.c.run_id).where(run_tags.c.key == key, run_tags.c.value == value)
        query = query.where(_uncounted(_runs.c.id).in_(tagged))
    if wished.from_ns:
        query = query.where(_runs.c.created_ns >= wished.from_ns)
    if wished.to_ns is not None:
        query = query.where(_runs.c.created_ns < wished.to_ns)
    return query if sort == "ended" else _near(query, wished)


def _near(query: sa.Select[Any], wished: RunFilter) -> sa.Select[Any]:
    """Add bounds of identifiers, so that the database skips most runs outside of a time range."""
    if wished.from_ns:
        query = query.where(_runs.c.id >= first_run_id(wished.from_ns - _SKEW_NS))
    if wished.to_ns is not None:
        query = query.where(_runs.c.id < first_run_id(wished.to_ns + _SKEW_NS))
    return query


def _uncounted(column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return a column for a condition on which SQLite chooses no index."""
    return sa.cast(column, sa.String)


def _ordered(query: sa.Select[Any], sort: Sort, place: _Key | None, *, is_back: bool) -> sa.Select[Any]:
    """Return a query in the order of a list, or in the opposite order, after a place."""
    is_rising = (sort == "oldest") != is_back
    columns: Sequence[sa.ColumnElement[Any]] = [_runs.c.id]
    row: Any = _runs.c.id
    bounds: Any = place.id if place is not None else ""
    if sort == "ended":
        query = query.add_columns(_runs.c.ended_ns).where(_runs.c.ended_ns.is_not(None))
        columns = [_runs.c.ended_ns, _runs.c.id]
        row, bounds = sa.tuple_(*columns), sa.tuple_(*(place.ended_ns, place.id) if place is not None else (0, ""))
    else:
        query = query.add_columns(sa.null())
    if place is not None:
        query = query.where(row > bounds if is_rising else row < bounds)
    return query.order_by(*(column if is_rising else column.desc() for column in columns))


def _place(text: str, sort: Sort) -> _Key | None:
    if not text:
        return None
    time, dot, identifier = text.rpartition(".")
    if sort != "ended" and not dot:
        return _Key(identifier, None)
    if sort == "ended" and time.isascii() and time.isdigit() and int(time) < _TIME_MAX_NS:
        return _Key(identifier, int(time))
    raise InvalidValue(f"{text[:60]!r} is not a cursor of this list", hint="open the list without a cursor")
