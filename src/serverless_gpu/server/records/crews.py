"""Crews: repository of the parts of attempts on one node. No other module reads or writes the table.

The server inserts a crew with its attempt, before any node knows of it. The state of a crew is the state that its node
reports, or UNREACHABLE during silence. The server changes a crew together with the version of its attempt
(`attempts.change`). So two concurrent reports of crews cannot both miss the news of the other crew.
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
"""Run and fence."""
CrewId = tuple[str, int, int]
"""Run, fence and number of the crew."""

WITHOUT_REPORT = frozenset({Reason.NODE_GONE, Reason.NODE_REBOOTED})
"""Reasons with which the server gives up a crew or attempt without a report. Later reports are too late."""


class NewCrew(msgspec.Struct, frozen=True, kw_only=True):
    """A crew to insert.

    Attributes:
        number: from 0 on.
        node: the node's name.
        boot_id: current boot of the node. The crew is over once the node has another one.
        first_rank: its lowest global rank, if each device has a rank.
        gpus: number of its devices.
        token_sha256: hash of its own token. The server computes the token again from its key when it needs the token.
        grace_s: how long it may run without an answer of the server, in seconds.
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
    """The row of a crew. `CrewOutcome` contains the outcome separately, because that may be large.

    Attributes:
        node: the node's name.
        state: the state that its node reports; UNREACHABLE while it is silent.
        before: its state before it became UNREACHABLE.
        proven: for a crew that ended, True if none of its processes remains.
        sentence: the message of the node about it.
        lease_ns: the last stored time of a report, up to 15 s old.
        grace_s: the longest time that the server ever allowed it to run without an answer, in seconds.
        leave_ns: when it must leave its node, as its owner was notified; nanoseconds since 1970.
        started_ns: when its user code began.
        halt_json: `gang_lifecycle.Halt`, its early report of why it ends, once that has arrived.
        returned: True if all of its ranks have returned and wait for the ranks of other crews.
        uncharged: True if it has ended and its entries in the ledger are incomplete.
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
        """Return run, fence and crew number."""
        return self.run_id, self.fence, self.number

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def place(self) -> CrewPlace:
        """Return the position of the crew in its gang."""
        return CrewPlace(number=self.number, node=self.node, first_rank=self.first_rank, gpus=self.gpus)

    @property
    def given_up(self) -> bool:
        """Return True if the server ended the crew without a report."""
        return self.reason in WITHOUT_REPORT

    def is_stale(self, state: State) -> bool:
        """Return True if the node must stop a crew that it sees in this state: the server has ended it.

        A refused crew never began, so the server may place the run again. If a node has that crew anyway, its user code
        must
        not begin. A crew that ended by itself is not stale, because the server still expects its receipt.
        """
        return self.given_up or (self.reason is Reason.REFUSED and state is not State.STOPPING)


class CrewOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a crew, as JSON of `node.protocol.Stopped` and `model.receipt.Receipt`, or None."""

    stopped: str | None
    receipt: str | None


_NAMES = [name for name in StoredCrew.__struct_fields__ if name != "node"]
COLUMNS: Sequence[sa.ColumnElement[typing.Any]] = [
    *(crews.c["crew" if name == "number" else name] for name in _NAMES),
    nodes.c.name,
]
"""The columns of a crew and its node, for `from_row`."""
_JOINED = crews.outerjoin(nodes, nodes.c.id == crews.c.node_id)  # The join begins with the crews.
_SELECT = sa.select(*COLUMNS).select_from(_JOINED)


def from_row(row: Sequence[typing.Any]) -> StoredCrew:
    """Return the crew of `COLUMNS`."""
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
    """Insert the crews of a new attempt."""
    rows = []
    for one in new:
        row = msgspec.structs.asdict(one) | {"run_id": run_id, "fence": fence, "crew": one.number}
        del row["number"], row["node"]
        rows.append(row | {"state": State.STARTING.value, "lease_ns": at_ns})
    connection.execute(crews.insert(), rows)


def find(connection: sa.Connection, run_id: str, fence: int, number: int) -> StoredCrew | None:
    """Return one crew, or None."""
    row = connection.execute(_SELECT.where(_is(run_id, fence, number))).first()
    return None if row is None else from_row(row)


def on_node(connection: sa.Connection, run_id: str, fence: int, node_id: str) -> StoredCrew | None:
    """Return the crew of an attempt on a node, or None. There is at most one."""
    here = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.node_id == node_id)
    row = connection.execute(_SELECT.where(here)).first()
    return None if row is None else from_row(row)


def of_gangs(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, tuple[StoredCrew, ...]]:
    """Return all crews of some attempts, by crew number."""
    found: dict[Gang, list[StoredCrew]] = {}
    for some in in_chunks(sorted({run_id for run_id, _ in gangs})):
        for row in connection.execute(_SELECT.where(crews.c.run_id.in_(some)).order_by(crews.c.crew)):
            one = from_row(row)
            if (one.run_id, one.fence) in gangs:
                found.setdefault((one.run_id, one.fence), []).append(one)
    return {gang: tuple(own) for gang, own in found.items()}


def open_on(connection: sa.Connection, node_id: str) -> list[StoredCrew]:
    """Return the crews on a node that have not ended."""
    query = _SELECT.where(crews.c.node_id == node_id, crews.c.ended_ns.is_(None))
    rows = connection.execute(query.order_by(crews.c.run_id, crews.c.fence))
    return [from_row(row) for row in rows]


def unsettled(connection: sa.Connection) -> list[StoredCrew]:
    """Return the crews that have ended and whose receipts have not arrived."""
    query = _SELECT.where(crews.c.ended_ns.is_not(None), crews.c.settled_ns.is_(None))
    return [from_row(row) for row in connection.execute(query)]


def is_any_unsettled(connection: sa.Connection, run_id: str, fence: int) -> bool:
    """Return True if a crew of the attempt is not settled."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence)
    query = sa.select(crews.c.crew).where(own, crews.c.settled_ns.is_(None))
    return connection.execute(query.limit(1)).first() is not None


def receipts(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, str]:
    """Return the receipts of crews that have sent one."""
    found: dict[CrewId, str] = {}
    query = sa.select(crews.c.run_id, crews.c.fence, crews.c.crew, crews.c.receipt_json)
    for some in in_chunks(sorted({run_id for run_id, _, _ in ids})):
        for run_id, fence, number, receipt in connection.execute(query.where(crews.c.run_id.in_(some))):
            if receipt is not None and (run_id, fence, number) in ids:
                found[run_id, fence, number] = receipt
    return found


def outcomes(connection: sa.Connection, run_id: str, fence: int) -> tuple[CrewOutcome, ...]:
    """Return the outcomes of the crews of an attempt, by crew number."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence)
    query = sa.select(crews.c.stopped_json, crews.c.receipt_json).where(own).order_by(crews.c.crew)
    return tuple(CrewOutcome(stopped=stopped, receipt=receipt) for stopped, receipt in connection.execute(query))


def change(connection: sa.Connection, crew: StoredCrew, values: Mapping[str, object]) -> None:
    """Change a crew if its row is still as it was read. Only `attempts.change` calls this.

    Raises:
        StaleAttempt: the row has changed since it was read; nothing was written.
    """
    unchanged = sa.and_(_is(*crew.id), crews.c.state == crew.state.value)
    if connection.execute(crews.update().where(unchanged).values(**values)).rowcount != 1:
        raise StaleAttempt(f"crew {crew.number} of attempt {crew.gang} is no longer {crew.state}")


def note(connection: sa.Connection, crew: CrewId, **values: object) -> None:
    """Write values that do not depend on the state of the crew, such as its lease and message."""
    connection.execute(crews.update().where(_is(*crew)).values(**values))


def note_all(connection: sa.Connection, run_id: str, fence: int, **values: object) -> None:
    """Write the same values for all crews of an attempt that have not ended."""
    own = sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.ended_ns.is_(None))
    connection.execute(crews.update().where(own).values(**values))


def stay(connection: sa.Connection, node_id: str) -> list[str]:
    """Cancel the requests to leave a node; return the runs of the affected crews."""
    told = sa.and_(crews.c.node_id == node_id, crews.c.ended_ns.is_(None), crews.c.leave_ns.is_not(None))
    found = list(connection.scalars(sa.select(crews.c.run_id).where(told)))
    if found:
        connection.execute(crews.update().where(told).values(leave_ns=None))
    return found


def note_late(connection: sa.Connection, crew: CrewId, *, reason: str) -> bool:
    """Write the reason that the node of a given-up crew reports for its end; return False if one exists."""
    first = sa.and_(_is(*crew), crews.c.late_reason.is_(None))
    return connection.execute(crews.update().where(first).values(late_reason=reason)).rowcount == 1


def settle(connection: sa.Connection, crew: CrewId, *, receipt: str | None, at_ns: int) -> bool:
    """Write the receipt of a crew that ended, or that none will arrive; return False if already written.

    The server also stores a receipt that arrives after it stopped waiting.
    """
    first = crews.c.settled_ns.is_(None) if receipt is None else crews.c.receipt_json.is_(None)
    values: dict[str, object] = {"settled_ns": sa.func.coalesce(crews.c.settled_ns, at_ns), "uncharged": True}
    if receipt is not None:
        values["receipt_json"] = receipt
    ended = sa.and_(_is(*crew), crews.c.ended_ns.is_not(None), first)
    return connection.execute(crews.update().where(ended).values(**values)).rowcount == 1


def retoken(connection: sa.Connection, keys: Keys, after: CrewId, at_most: int) -> CrewId | None:
    """Write the token hashes of some crews as these keys compute them.

    Args:
        connection: of the transaction.
        keys: the new keys.
        after: the last crew of the previous call; ``("", 0, 0)`` for the first.
        at_most: maximum number of crews in this call.

    Returns:
        The last crew of this call, or None if no more crews follow.
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
    """Remove the crews of a run, after everything that refers to them."""
    connection.execute(crews.delete().where(crews.c.run_id == run_id))


def _is(run_id: str, fence: int, number: int) -> sa.ColumnElement[bool]:
    return sa.and_(crews.c.run_id == run_id, crews.c.fence == fence, crews.c.crew == number)
