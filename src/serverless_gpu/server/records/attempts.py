"""Repository of attempts. Only this module reads and writes the `attempts` table.

The scheduler inserts an attempt before the server sends an order to any node. A run's state follows the state of its
current attempt. After the end of an attempt, the run may continue with another attempt. A row of `crews` contains the
part of an attempt on one node (`crews.py`). One query reads an attempt with the row of its first node. For gangs, a
second query reads the rows of the other nodes.
"""

from __future__ import annotations

import secrets
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import StaleAttempt
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause
from serverless_gpu.model.lifecycle.rendezvous import Chosen
from serverless_gpu.model.secrets import Pinned
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import attempts, nodes
from serverless_gpu.server.db.tables import crews as crews_table
from serverless_gpu.server.records import crews
from serverless_gpu.server.records.crews import Gang, StoredCrew

# End reasons for which the node is not at fault.
_OF_OTHERS = (Reason.PEER_FAILED, Reason.PREEMPTED, Reason.DRAINED)
_SAYING_MAX = 4
"""Maximum number of nodes whose messages an attempt's message contains."""
_NONE: Mapping[int, Mapping[str, object]] = MappingProxyType({})


class NewAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a new attempt."""

    gpu_type: str
    world_size: int
    num_nodes: int = 1
    secrets_json: str = "[]"
    tariff_json: str = "{}"
    account_id: int | None = None


class StoredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Stored attempt with its parts on nodes.

    Attributes:
        num_nodes: number of its nodes.
        before: state of the attempt before UNREACHABLE.
        started_ns: time when user code began on the first of its nodes.
        settled_ns: time when the last of its nodes was settled.
        tariff_json: the prices in force at its placement.
        account_id: account of the attempt in the ledger; None for an attempt of an older server.
        version: increases with each change of the attempt, on any node.
        released: True if all ranks of the attempt have returned and may exit.
        cause_json: `gang_lifecycle.Cause` as JSON, once known.
        nonce: the secret value by which its nodes recognize each other; "" for one node.
        chosen_json: `rendezvous.Chosen` as JSON, once the rendezvous is decided.
        called_off: True if the server called the attempt off before its rendezvous, so that its user code never begins.
        crews: the parts of the attempt on its nodes, by node rank.
    """

    run_id: str
    fence: int
    gpu_type: str
    world_size: int
    num_nodes: int
    state: State
    before: State | None
    reason: Reason | None
    began: bool
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    settled_ns: int | None
    secrets_json: str = "[]"
    tariff_json: str = "{}"
    account_id: int | None = None
    version: int = 0
    released: bool = False
    cause_json: str | None = None
    nonce: str = ""
    chosen_json: str | None = None
    called_off: bool = False
    crews: tuple[StoredCrew, ...]

    @property
    def tariff(self) -> Tariff:
        """Return the prices that apply to the attempt."""
        return _decode_tariff(self.tariff_json)

    @property
    def secrets(self) -> tuple[Pinned, ...]:
        """Return the versions of secrets that the attempt uses."""
        return () if self.secrets_json == "[]" else from_json(self.secrets_json, tuple[Pinned, ...])

    @property
    def cause(self) -> Cause | None:
        """Return the cause of the attempt's early end, or None."""
        return None if self.cause_json is None else from_json(self.cause_json, Cause)

    @property
    def chosen(self) -> Chosen | None:
        """Return the chosen rendezvous of the attempt's nodes, or None."""
        return None if self.chosen_json is None else from_json(self.chosen_json, Chosen)

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def node(self) -> str:
        """Return the names of the attempt's nodes, by node rank."""
        return ", ".join(crew.node for crew in self.crews)

    @property
    def sentence(self) -> str:
        """Return the common message of all nodes, or the different messages with node names."""
        said = [(crew.node, crew.sentence) for crew in self.crews if crew.sentence]
        if len(said) == len(self.crews) and len({text for _, text in said}) == 1:
            return said[0][1]
        more = f"; and {len(said) - _SAYING_MAX} more nodes" if len(said) > _SAYING_MAX else ""
        return "; ".join(f"{node}: {text}" for node, text in said[:_SAYING_MAX]) + more

    @property
    def open_crews(self) -> tuple[StoredCrew, ...]:
        """Return the attempt's rows for nodes on which the attempt has not ended."""
        return tuple(crew for crew in self.crews if crew.ended_ns is None)

    @property
    def uncharged(self) -> bool:
        """Return True if the ledger lacks entries for an ended part of the attempt."""
        return any(crew.uncharged for crew in self.crews)


_decode_tariff = msgspec.json.Decoder(Tariff).decode
_NAMES = [name for name in StoredAttempt.__struct_fields__ if name != "crews"]
COLUMNS: Sequence[sa.ColumnElement[typing.Any]] = [*(attempts.c[name] for name in _NAMES), *crews.COLUMNS]
"""Columns of an attempt and of its first node's row, for `from_row`."""
_FIRST = sa.and_(
    crews_table.c.run_id == attempts.c.run_id, crews_table.c.fence == attempts.c.fence, crews_table.c.crew == 0
)
JOINED = attempts.join(crews_table, _FIRST).outerjoin(nodes, nodes.c.id == crews_table.c.node_id)


def joined_to(other: sa.FromClause, on: sa.ColumnElement[bool]) -> sa.FromClause:
    """Return an outer join of another table with attempts, to select `COLUMNS`."""
    first = other.outerjoin(attempts, on).outerjoin(crews_table, _FIRST)
    return first.outerjoin(nodes, nodes.c.id == crews_table.c.node_id)


def from_row(row: Sequence[typing.Any]) -> StoredAttempt | None:
    """Return the attempt in a row of `COLUMNS` with the first node only (see `whole`), or None."""
    if row[0] is None:
        return None
    fields = dict(zip(_NAMES, row, strict=False))
    return StoredAttempt(
        **(
            fields
            | {
                "state": State(fields["state"]),
                "before": State(fields["before"]) if fields["before"] else None,
                "reason": Reason(fields["reason"]) if fields["reason"] else None,
                "crews": (crews.from_row(row[len(_NAMES) :]),),
            }
        )
    )


def whole(connection: sa.Connection, found: Sequence[StoredAttempt | None]) -> list[StoredAttempt]:
    """Complete attempts of gangs with the rows of all nodes, using a second query."""
    there = [attempt for attempt in found if attempt is not None]
    gangs = {(attempt.run_id, attempt.fence) for attempt in there if attempt.num_nodes > 1}
    if not gangs:
        return there
    own = crews.of_gangs(connection, gangs)
    return [
        msgspec.structs.replace(attempt, crews=own.get((attempt.run_id, attempt.fence), attempt.crews))
        for attempt in there
    ]


def insert(connection: sa.Connection, run_id: str, fence: int, *, new: NewAttempt, at_ns: int) -> None:
    """Insert a new attempt. After this call, the caller inserts the attempt's rows in `crews`."""
    row = msgspec.structs.asdict(new) | {
        "nonce": secrets.token_hex(16) if new.num_nodes > 1 else "",
        "run_id": run_id,
        "fence": fence,
        "state": State.STARTING.value,
        "created_ns": at_ns,
    }
    connection.execute(attempts.insert(), row)


def find(connection: sa.Connection, run_id: str, fence: int) -> StoredAttempt | None:
    """Return one attempt by run and fence, or None."""
    query = sa.select(*COLUMNS).select_from(JOINED).where(_is(run_id, fence))
    row = connection.execute(query).first()
    return None if row is None else next(iter(whole(connection, [from_row(row)])), None)


def of_run(connection: sa.Connection, run_id: str) -> list[StoredAttempt]:
    """Return all attempts of a run, in order."""
    query = sa.select(*COLUMNS).select_from(JOINED).where(attempts.c.run_id == run_id).order_by(attempts.c.fence)
    return whole(connection, [from_row(row) for row in connection.execute(query)])


def of_runs(connection: sa.Connection, run_ids: Sequence[str]) -> dict[Gang, StoredAttempt]:
    """Return all attempts of several runs, by gang."""
    found: list[StoredAttempt | None] = []
    query = sa.select(*COLUMNS).select_from(JOINED)
    for some in in_chunks(list(run_ids)):
        found += [from_row(row) for row in connection.execute(query.where(attempts.c.run_id.in_(some)))]
    return {(attempt.run_id, attempt.fence): attempt for attempt in whole(connection, found)}


def is_any_since(connection: sa.Connection, at_ns: int, gpu_types: Sequence[str] | None) -> bool:
    """Return True if an attempt was placed after a time on one of the given GPU types (None for any type)."""
    query = sa.select(attempts.c.run_id).where(attempts.c.created_ns >= at_ns)
    if gpu_types is not None:
        query = query.where(attempts.c.gpu_type.in_(gpu_types))
    return connection.execute(query.limit(1)).first() is not None


def failed_nodes(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return, for each run, the nodes that were lost or failed before user code began.

    The result excludes nodes on which an attempt ended because of another node or a server decision.
    """
    found: dict[str, set[str]] = {}
    crew = crews_table.c
    own = sa.and_(crew.run_id == attempts.c.run_id, crew.fence == attempts.c.fence)
    failed = sa.or_(crew.began.is_(sa.false()), crew.state == State.LOST.value)
    query = sa.select(crew.run_id, crew.node_id, crew.reason, attempts.c.called_off, attempts.c.cause_json)
    query = query.select_from(crews_table.join(attempts, own)).where(crew.ended_ns.is_not(None), failed)
    query = query.where(crew.reason.not_in([reason.value for reason in _OF_OTHERS]))
    for some in in_chunks(run_ids):
        for run_id, node_id, reason, called_off, cause in connection.execute(query.where(crew.run_id.in_(some))):
            is_called_off = reason == Reason.REFUSED and called_off
            if is_called_off and (cause is None or from_json(cause, Cause).reason is not Reason.NODES_APART):
                continue  # Nodes of a called-off attempt are at fault only if they could not connect to each other.
            found.setdefault(run_id, set()).add(node_id)
    return {run_id: frozenset(ids) for run_id, ids in found.items()}


def apart_nodes(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, frozenset[tuple[str, str]]]:
    """Return, for each run, the pairs of nodes that could not connect to each other."""
    found: dict[str, set[tuple[str, str]]] = {}
    query = sa.select(attempts.c.run_id, attempts.c.fence, attempts.c.cause_json)
    query = query.where(attempts.c.called_off, attempts.c.cause_json.is_not(None))
    for some in in_chunks(list(run_ids)):
        rows = connection.execute(query.where(attempts.c.run_id.in_(some)))
        pairs = {(run_id, fence): from_json(cause, Cause).apart for run_id, fence, cause in rows}
        apart = {gang: pair for gang, pair in pairs.items() if pair is not None}
        for gang, own in (crews.of_gangs(connection, apart) if apart else {}).items():
            first, second = apart[gang]
            found.setdefault(gang[0], set()).add((own[first].node_id, own[second].node_id))
    return {run_id: frozenset(pairs) for run_id, pairs in found.items()}


def change(
    connection: sa.Connection,
    attempt: StoredAttempt,
    *,
    of_crews: Mapping[int, Mapping[str, object]] = _NONE,
    **values: object,
) -> None:
    """Change the rows of an attempt and its nodes, unless a row has changed since the read.

    Raises:
        StaleAttempt: a row has changed since the read; the function wrote nothing.
    """
    unchanged = sa.and_(_is(attempt.run_id, attempt.fence), attempts.c.version == attempt.version)
    changed = attempts.update().where(unchanged).values(version=attempt.version + 1, **values)
    if connection.execute(changed).rowcount != 1:
        raise StaleAttempt(f"attempt {attempt.gang} has changed and is no longer {attempt.state}")
    for number, own in of_crews.items():
        crews.change(connection, attempt.crews[number], own)


def decide(connection: sa.Connection, attempt: StoredAttempt, **values: object) -> bool:
    """Store the rendezvous of an attempt or mark the attempt as called off, never both.

    Returns:
        False if an earlier call decided the rendezvous, or if the row has changed since the read. The function then
        wrote nothing.
    """
    open_still = sa.and_(attempts.c.chosen_json.is_(None), attempts.c.called_off.is_(sa.false()))
    unchanged = sa.and_(_is(attempt.run_id, attempt.fence), attempts.c.version == attempt.version, open_still)
    changed = attempts.update().where(unchanged).values(version=attempt.version + 1, **values)
    return connection.execute(changed).rowcount == 1


def note(connection: sa.Connection, run_id: str, fence: int, **values: object) -> None:
    """Store values that do not depend on the attempt's state, such as its account."""
    connection.execute(attempts.update().where(_is(run_id, fence)).values(**values))


def settle(connection: sa.Connection, run_id: str, fence: int, *, at_ns: int) -> bool:
    """Mark an attempt as settled and return True if all of its nodes are settled."""
    # Increase the attempt's version even if some nodes are unsettled. With an unchanged version, two concurrent
    # settlements on PostgreSQL could each miss the other node's settlement.
    values: dict[str, object] = {"version": attempts.c.version + 1}
    is_settled = not crews.is_any_unsettled(connection, run_id, fence)
    if is_settled:
        values["settled_ns"] = sa.func.coalesce(attempts.c.settled_ns, at_ns)
    connection.execute(attempts.update().where(_is(run_id, fence)).values(**values))
    return is_settled


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove a run's attempts after the caller has removed all rows that refer to them."""
    crews.remove(connection, run_id)
    connection.execute(attempts.delete().where(attempts.c.run_id == run_id))


def _is(run_id: str, fence: int) -> sa.ColumnElement[bool]:
    return sa.and_(attempts.c.run_id == run_id, attempts.c.fence == fence)
