"""Repository of the parts of attempts on one node.

Only this module uses the `crews` table. The server inserts one row for each node of a new attempt, before it sends any
order. A `crews` row contains the last state that the node reported, or UNREACHABLE if reports stop. A change of a
`crews` row also increases the version of its attempt (`attempts.change`). Two concurrent reports for one attempt
therefore cannot miss each other's changes.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.placement import CrewPlace
from serverless_gpu.server.core.server_key import Keys, sha256
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import crews, nodes

Gang = tuple[str, int]
"""Identity of a gang: run and fence."""
CrewId = tuple[str, int, int]
"""Identity of an attempt's part on one node: run, fence and node rank."""

WITHOUT_REPORT = frozenset({Reason.NODE_GONE, Reason.NODE_REBOOTED})
"""End reasons of attempts that the server abandons without a report from the node."""


class NewCrew(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a new `crews` row.

    Attributes:
        number: rank of the node in the attempt, from 0 on.
        node: the node's name.
        boot_id: current boot of the node. Once the node reports another boot, the attempt has ended on the node.
        first_rank: lowest global rank on the node, if each device has a rank.
        gpus: number of devices on the node.
        token_sha256: hash of the token of this part. The server can compute the token again from its key.
        grace_s: seconds for which the ranks may run without an answer of the server.
    """

    number: int = 0
    node_id: str
    node: str
    boot_id: str
    first_rank: int = 0
    gpus: int
    token_sha256: str
    grace_s: float


class StoredCrew(msgspec.Struct, frozen=True, kw_only=True):
    """Stored part of an attempt on one node, without the possibly large `CrewOutcome`.

    Attributes:
        node: the node's name.
        state: the last state that the node reported; UNREACHABLE while the node sends no reports.
        before: state before UNREACHABLE.
        proven: after the end, True if none of the attempt's processes still exists.
        sentence: the node's message about the attempt.
        lease_ns: the stored time of the last report, up to 15 s old.
        grace_s: the longest time that the server ever allowed the ranks to run without an answer, in seconds.
        leave_ns: announced time when the ranks must leave the node, nanoseconds since 1970.
        started_ns: start of user code.
        halt_json: `gang_lifecycle.Halt` as JSON: the early report of the reason for the end, once received.
        returned: True if all ranks on the node have returned and wait for the ranks of other nodes.
        uncharged: True if the attempt has ended on the node and the ledger lacks its entries.
    """

    run_id: str
    fence: int
    number: int
    node_id: str
    node: str
    boot_id: str
    first_rank: int
    gpus: int
    token_sha256: str
    lease_ns: int
    grace_s: float
    state: State
    before: State | None
    began: bool
    reason: Reason | None
    proven: bool
    sentence: str
    leave_ns: int | None
    started_ns: int | None
    ended_ns: int | None
    settled_ns: int | None
    halt_json: str | None
    returned: bool
    uncharged: bool

    @property
    def id(self) -> CrewId:
        """Return the identifier: run, fence and node rank."""
        return self.run_id, self.fence, self.number

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def place(self) -> CrewPlace:
        """Return the position of the node in the gang."""
        return CrewPlace(number=self.number, node=self.node, first_rank=self.first_rank, gpus=self.gpus)

    @property
    def given_up(self) -> bool:
        """Return True if the server ended the attempt on the node without a report."""
        return self.reason in WITHOUT_REPORT

    def is_stale(self, state: State) -> bool:
        """Return True if the node must stop the attempt, because the server has abandoned or refused it.

        User code of a refused attempt must not begin, because the server may place the run again. An attempt with a
        reported end is not stale, because the server still expects its receipt.
        """
        return self.given_up or (self.reason is Reason.REFUSED and state is not State.STOPPING)


class CrewOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an attempt on one node, as JSON of `node.protocol.Stopped` and `model.receipt.Receipt`."""

    stopped: str | None
    receipt: str | None


_NAMES = [name for name in StoredCrew.__struct_fields__ if name != "node"]
COLUMNS: Sequence[sa.ColumnElement[typing.Any]] = [
    *(crews.c["crew" if name == "number" else name] for name in _NAMES),
    nodes.c.name,
]
"""Columns of `crews` and of the node, for `from_row`."""
_JOINED = crews.outerjoin(nodes, nodes.c.id == crews.c.node_id)
_SELECT = sa.select(*COLUMNS).select_from(_JOINED)


def from_row(row: Sequence[typing.Any]) -> StoredCrew:
    """Return the `StoredCrew` of a row with `COLUMNS`."""
    fields = dict(zip(_NAMES, row, strict=False))
    return StoredCrew(
        **(
            fields
            | {
                "node": row[len(_NAMES)],
                "state": State(fields["state"]),
                "before": State(fields["before"]) if fields["before"] else None,
                "reason": Reason(fields["reason"]) if fields["reason"] else None,
            }
        )
    )


def insert(connection: sa.Connection, run_id: str, fence: int, new: Sequence[NewCrew], *, at_ns: int) -> None:
    """Insert the `crews` rows of a new attempt, one per node."""
    rows = []
    for one in new:
        row = msgspec.structs.asdict(one) | {"run_id": run_id, "fence": fence, "crew": one.number}
        del row["number"], row["node"]
        rows.append(row | {"state": State.STARTING.value, "lease_ns": at_ns})
    connection.execute(crews.insert(), rows)


def find(connection: sa.Connection, run_id: str, fence: int, number: int) -> StoredCrew | None:
    """Return the part of an attempt with a given node rank, or None."""
    row = connection.execute(_SELECT.where(_is(run_id, fence, number))).first()
    return None if row is None else from_row(row)


def on_node(connection: sa.Connection, run_id: str, fence: int, node_id: str) -> StoredCrew | None:
    """Return the part of an attempt on a node with a given identifier, or None."""
    here = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.node_id == node_id)
    row = connection.execute(_SELECT.where(here)).first()
    return None if row is None else from_row(row)


def of_gangs(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, tuple[StoredCrew, ...]]:
    """Return all parts of several attempts, ordered by node rank."""
    found: dict[Gang, list[StoredCrew]] = {}
    for some in in_chunks(sorted({run_id for run_id, _ in gangs})):
        for row in connection.execute(_SELECT.where(crews.c.run_id.in_(some)).order_by(crews.c.crew)):
            one = from_row(row)
            if (one.run_id, one.fence) in gangs:
                found.setdefault((one.run_id, one.fence), []).append(one)
    return {gang: tuple(own) for gang, own in found.items()}


def open_on(connection: sa.Connection, node_id: str) -> list[StoredCrew]:
    """Return the unfinished parts of attempts on a node."""
    query = _SELECT.where(crews.c.node_id == node_id, crews.c.ended_ns.is_(None))
    rows = connection.execute(query.order_by(crews.c.run_id, crews.c.fence))
    return [from_row(row) for row in rows]


def unsettled(connection: sa.Connection) -> list[StoredCrew]:
    """Return the ended parts of attempts without a receipt."""
    query = _SELECT.where(crews.c.ended_ns.is_not(None), crews.c.settled_ns.is_(None))
    return [from_row(row) for row in connection.execute(query)]


def is_any_unsettled(connection: sa.Connection, run_id: str, fence: int) -> bool:
    """Return True if the attempt still expects a receipt from one of its nodes."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence)
    query = sa.select(crews.c.crew).where(own, crews.c.settled_ns.is_(None))
    return connection.execute(query.limit(1)).first() is not None


def receipts(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, str]:
    """Return the received receipts of attempts."""
    found: dict[CrewId, str] = {}
    query = sa.select(crews.c.run_id, crews.c.fence, crews.c.crew, crews.c.receipt_json)
    for some in in_chunks(sorted({run_id for run_id, _, _ in ids})):
        for run_id, fence, number, receipt in connection.execute(query.where(crews.c.run_id.in_(some))):
            if receipt is not None and (run_id, fence, number) in ids:
                found[run_id, fence, number] = receipt
    return found


def outcomes(connection: sa.Connection, run_id: str, fence: int) -> tuple[CrewOutcome, ...]:
    """Return an attempt's outcomes on all nodes, by node rank."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence)
    query = sa.select(crews.c.stopped_json, crews.c.receipt_json).where(own).order_by(crews.c.crew)
    return tuple(CrewOutcome(stopped=stopped, receipt=receipt) for stopped, receipt in connection.execute(query))


def change(connection: sa.Connection, crew: StoredCrew, values: Mapping[str, object]) -> None:
    """Change a `crews` row unless it has changed since the read.

    Only `attempts.change` calls this function.

    Raises:
        StaleAttempt: the row has changed since the read; the function wrote nothing.
    """
    unchanged = sa.and_(_is(*crew.id), crews.c.state == crew.state.value)
    if connection.execute(crews.update().where(unchanged).values(**values)).rowcount != 1:
        raise StaleAttempt(f"attempt {crew.gang} on node {crew.node} has changed and is no longer {crew.state}")


def note(connection: sa.Connection, crew: CrewId, **values: object) -> None:
    """Store values that do not depend on the attempt's state, such as the lease and the node's message."""
    connection.execute(crews.update().where(_is(*crew)).values(**values))


def note_all(connection: sa.Connection, run_id: str, fence: int, **values: object) -> None:
    """Store the same values for all unfinished parts of an attempt."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.ended_ns.is_(None))
    connection.execute(crews.update().where(own).values(**values))


def stay(connection: sa.Connection, node_id: str) -> list[str]:
    """Cancel all announced times to leave a node, and return the affected runs."""
    told = sa.and_(crews.c.node_id == node_id, crews.c.ended_ns.is_(None), crews.c.leave_ns.is_not(None))
    found = list(connection.scalars(sa.select(crews.c.run_id).where(told)))
    if found:
        connection.execute(crews.update().where(told).values(leave_ns=None))
    return found


def note_late(connection: sa.Connection, crew: CrewId, *, reason: str) -> bool:
    """Store the late end reason of an abandoned attempt, and return False if a reason is already stored."""
    first = sa.and_(_is(*crew), crews.c.late_reason.is_(None))
    return connection.execute(crews.update().where(first).values(late_reason=reason)).rowcount == 1


def settle(connection: sa.Connection, crew: CrewId, *, receipt: str | None, at_ns: int) -> bool:
    """Store a node's receipt or settle without a receipt, and return False if nothing changes.

    The server also stores a receipt that arrives after the attempt was settled without a receipt.
    """
    first = crews.c.settled_ns.is_(None) if receipt is None else crews.c.receipt_json.is_(None)
    values: dict[str, object] = {"settled_ns": sa.func.coalesce(crews.c.settled_ns, at_ns), "uncharged": True}
    if receipt is not None:
        values["receipt_json"] = receipt
    ended = sa.and_(_is(*crew), crews.c.ended_ns.is_not(None), first)
    return connection.execute(crews.update().where(ended).values(**values)).rowcount == 1


def retoken(connection: sa.Connection, keys: Keys, after: CrewId, at_most: int) -> CrewId | None:
    """Replace the token hashes of some `crews` rows with hashes for new keys.

    Args:
        connection: connection of the transaction.
        keys: the new keys.
        after: the last row of the previous call; ``("", 0, 0)`` for the first.
        at_most: maximum number of rows in this call.

    Returns:
        The last row of this call, or None if no more rows follow.
    """
    key = (crews.c.run_id, crews.c.fence, crews.c.crew)
    query = sa.select(*key, crews.c.token_sha256).where(sa.tuple_(*key) > sa.tuple_(*map(sa.literal, after)))
    rows = connection.execute(query.order_by(*key).limit(at_most)).all()
    for row in rows:
        hashed = sha256(keys.attempt_token(row.run_id, row.fence, row.crew))
        if hashed != row.token_sha256:
            values = {"token_sha256": hashed}
            connection.execute(crews.update().where(_is(row.run_id, row.fence, row.crew)).values(values))
    return (rows[-1].run_id, rows[-1].fence, rows[-1].crew) if len(rows) == at_most else None


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove a run's `crews` rows after the caller has removed all rows that refer to them."""
    connection.execute(crews.delete().where(crews.c.run_id == run_id))


def _is(run_id: str, fence: int, number: int) -> sa.ColumnElement[bool]:
    return sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.crew == number)
