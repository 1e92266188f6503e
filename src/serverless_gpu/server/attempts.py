"""Attempts: the query room of the tries at a run. Nobody else reads or writes their table.

An attempt is written when the scheduler decides, before anybody is told (the intent); its state follows the run's as
long as it is the current one, and its end is its own: the run may go on with another.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.attempt import Reason, State
from serverless_gpu.model.pricing import Tariff
from serverless_gpu.model.secrets import Pinned
from serverless_gpu.serialized import from_json
from serverless_gpu.server.portions import portions
from serverless_gpu.server.tables import attempts, nodes

Gang = tuple[str, int]
"""Run and fence."""

WITHOUT_REPORT = frozenset({Reason.NODE_GONE, Reason.NODE_REBOOTED})
"""An attempt of such an end was given up: whatever still comes of it is too late."""


class NewAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Where an attempt is to run.

    Attributes:
        gpu_type: of all its devices.
        world_size: how many.
        token_sha256: of its own token; the token itself is made again from the server's key when it is needed.
        boot_id: of the node now. When the node has another one, the attempt is over.
        grace_s: how long it may go on without an answer of the server, in seconds.
        secrets_json: which versions of secrets it gets.
        tariff_json: what it pays.
        account_id: as what it is counted.
    """

    node_id: str
    gpu_type: str
    world_size: int
    token_sha256: str
    boot_id: str
    grace_s: float
    secrets_json: str = "[]"
    tariff_json: str = "{}"
    account_id: int | None = None


class StoredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt as it is written down; what it ended with is `outcome`, which may be large.

    Attributes:
        node: the node's name.
        before: what it was when it became UNREACHABLE.
        sentence: what the node says about it.
        lease_ns: its last sign of life that was written; up to 15 s behind.
        grace_s: the longest it was ever allowed to go on without an answer, whatever the server grants now; in seconds.
        started_ns: when its user code began.
        leave_ns: when it has to leave its node, as its owner was told; nanoseconds since 1970.
        tariff_json: what it pays, as was in force when it was placed.
        account_id: of `accounts.py`, as what it is counted; None for one that was made by an older server.
        uncharged: whether it has ended, and the ledger does not say all of it.
    """

    run_id: str
    fence: int
    node_id: str
    node: str
    gpu_type: str
    world_size: int
    state: State
    before: State | None
    reason: Reason | None
    began: bool
    sentence: str
    token_sha256: str
    boot_id: str
    created_ns: int
    lease_ns: int
    grace_s: float
    started_ns: int | None
    ended_ns: int | None
    settled_ns: int | None
    secrets_json: str = "[]"
    leave_ns: int | None = None
    tariff_json: str = "{}"
    account_id: int | None = None
    uncharged: bool = False

    @property
    def tariff(self) -> Tariff:
        """Return what it pays."""
        return _decode_tariff(self.tariff_json)

    @property
    def secrets(self) -> tuple[Pinned, ...]:
        """Return which versions of secrets it has."""
        return () if self.secrets_json == "[]" else from_json(self.secrets_json, tuple[Pinned, ...])

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def given_up(self) -> bool:
        """Return whether the server ended it without a report."""
        return self.reason in WITHOUT_REPORT

    def is_stale(self, state: State) -> bool:
        """Return whether a node that sees it in a state has to stop it, because for the server it is over.

        One that was refused never began, so the run may be placed again: should a node have it all the same, nothing of
        it may begin. What has come to its own end is not stale: its receipt is still to come.
        """
        return self.given_up or (self.reason is Reason.REFUSED and state is not State.STOPPING)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt ended with, as JSON: `node.protocol.Stopped` and `model.receipt.Receipt`, or None."""

    stopped: str | None
    receipt: str | None


_decode_tariff = msgspec.json.Decoder(Tariff).decode
_NAMES = [name for name in StoredAttempt.__struct_fields__ if name != "node"]
COLUMNS: Sequence[sa.ColumnElement[typing.Any]] = [*(attempts.c[name] for name in _NAMES), nodes.c.name]
"""What a query selects of an attempt and its node for `from_row`."""
JOINED = attempts.join(nodes, nodes.c.id == attempts.c.node_id)


def from_row(row: Sequence[typing.Any]) -> StoredAttempt | None:
    """Return the attempt of `COLUMNS`, or None when an outer join found none."""
    if row[0] is None:
        return None
    fields = dict(zip(_NAMES, row, strict=False))
    return StoredAttempt(
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


def insert(connection: sa.Connection, run_id: str, fence: int, *, new: NewAttempt, at_ns: int) -> None:
    """Write down an attempt that is to be made."""
    row = msgspec.structs.asdict(new) | {
        "run_id": run_id,
        "fence": fence,
        "state": State.STARTING.value,
        "created_ns": at_ns,
        "lease_ns": at_ns,
    }
    connection.execute(attempts.insert(), row)


def find(connection: sa.Connection, run_id: str, fence: int) -> StoredAttempt | None:
    """Return one attempt."""
    query = sa.select(*COLUMNS).select_from(JOINED).where(_is(run_id, fence))
    row = connection.execute(query).first()
    return None if row is None else from_row(row)


def of_run(connection: sa.Connection, run_id: str) -> list[StoredAttempt]:
    """Return all attempts of a run, in order."""
    query = sa.select(*COLUMNS).select_from(JOINED).where(attempts.c.run_id == run_id).order_by(attempts.c.fence)
    return [attempt for row in connection.execute(query) if (attempt := from_row(row))]


def of_runs(connection: sa.Connection, run_ids: Sequence[str]) -> dict[Gang, StoredAttempt]:
    """Return all attempts of some runs."""
    found: dict[Gang, StoredAttempt] = {}
    query = sa.select(*COLUMNS).select_from(JOINED)
    for some in portions(list(run_ids)):
        for row in connection.execute(query.where(attempts.c.run_id.in_(some))):
            if attempt := from_row(row):
                found[attempt.run_id, attempt.fence] = attempt
    return found


def open_attempts(connection: sa.Connection, *, node_id: str | None = None) -> list[StoredAttempt]:
    """Return the attempts that have not ended, of one node or of all."""
    query = sa.select(*COLUMNS).select_from(JOINED).where(attempts.c.ended_ns.is_(None))
    if node_id is not None:
        query = query.where(attempts.c.node_id == node_id)
    query = query.order_by(attempts.c.created_ns, attempts.c.run_id)
    return [attempt for row in connection.execute(query) if (attempt := from_row(row))]


def unsettled(connection: sa.Connection) -> list[StoredAttempt]:
    """Return the attempts that have ended and whose receipt has not come."""
    query = sa.select(*COLUMNS).select_from(JOINED)
    query = query.where(attempts.c.ended_ns.is_not(None), attempts.c.settled_ns.is_(None))
    return [attempt for row in connection.execute(query) if (attempt := from_row(row))]


def is_any_since(connection: sa.Connection, at_ns: int, gpu_types: Sequence[str] | None) -> bool:
    """Return whether an attempt was placed since then, on devices of one of these types; None for any."""
    query = sa.select(attempts.c.run_id).where(attempts.c.created_ns >= at_ns)
    if gpu_types is not None:
        query = query.where(attempts.c.gpu_type.in_(gpu_types))
    return connection.execute(query.limit(1)).first() is not None


def receipts(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, str]:
    """Return the receipts of attempts that have one."""
    found: dict[Gang, str] = {}
    query = sa.select(attempts.c.run_id, attempts.c.fence, attempts.c.receipt_json)
    for some in portions(sorted({run_id for run_id, _ in gangs})):
        for run_id, fence, receipt in connection.execute(query.where(attempts.c.run_id.in_(some))):
            if receipt is not None and (run_id, fence) in gangs:
                found[run_id, fence] = receipt
    return found


def failed_nodes(connection: sa.Connection, run_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, by run, the nodes on which an attempt of it was lost, or ended before its user code began."""
    found: dict[str, set[str]] = {}
    query = sa.select(attempts.c.run_id, attempts.c.node_id)
    lost = sa.or_(attempts.c.began.is_(sa.false()), attempts.c.state == State.LOST.value)
    query = query.where(attempts.c.ended_ns.is_not(None), lost)
    for some in portions(list(run_ids)):
        for run_id, node_id in connection.execute(query.where(attempts.c.run_id.in_(some))):
            found.setdefault(run_id, set()).add(node_id)
    return {run_id: frozenset(ids) for run_id, ids in found.items()}


def outcome(connection: sa.Connection, run_id: str, fence: int) -> Outcome:
    """Return what an attempt ended with; nothing, when there is no such attempt."""
    query = sa.select(attempts.c.stopped_json, attempts.c.receipt_json).where(_is(run_id, fence))
    row = connection.execute(query).first()
    return Outcome(stopped=row[0] if row else None, receipt=row[1] if row else None)


def change(connection: sa.Connection, attempt: StoredAttempt, **values: object) -> None:
    """Change an attempt that is still as it was read.

    Raises:
        StaleAttempt: it is not; nothing was changed.
    """
    unchanged = sa.and_(_is(attempt.run_id, attempt.fence), attempts.c.state == attempt.state.value)
    if connection.execute(attempts.update().where(unchanged).values(**values)).rowcount != 1:
        raise StaleAttempt(f"attempt {attempt.gang} is not {attempt.state} any more")


def note(connection: sa.Connection, run_id: str, fence: int, **values: object) -> None:
    """Write what does not depend on the attempt's state: its lease, its sentence, how many ranks it has."""
    connection.execute(attempts.update().where(_is(run_id, fence)).values(**values))


def stay(connection: sa.Connection, node_id: str) -> list[str]:
    """Take back that attempts on a node were told to leave it; return their runs."""
    told = sa.and_(attempts.c.node_id == node_id, attempts.c.ended_ns.is_(None), attempts.c.leave_ns.is_not(None))
    found = list(connection.scalars(sa.select(attempts.c.run_id).where(told)))
    if found:
        connection.execute(attempts.update().where(told).values(leave_ns=None))
    return found


def note_late(connection: sa.Connection, run_id: str, fence: int, *, reason: str) -> bool:
    """Write how the node of an attempt that was given up says it ended; return False when that was written before."""
    first = sa.and_(_is(run_id, fence), attempts.c.late_reason.is_(None))
    return connection.execute(attempts.update().where(first).values(late_reason=reason)).rowcount == 1


def settle(connection: sa.Connection, run_id: str, fence: int, *, receipt: str | None, at_ns: int) -> bool:
    """Write the receipt of an attempt that ended, or that none will come; return False when that was done before.

    A receipt that comes although none was awaited any more is kept, too.
    """
    first = attempts.c.settled_ns.is_(None) if receipt is None else attempts.c.receipt_json.is_(None)
    values: dict[str, object] = {"settled_ns": sa.func.coalesce(attempts.c.settled_ns, at_ns), "uncharged": True}
    if receipt is not None:
        values["receipt_json"] = receipt
    ended = sa.and_(_is(run_id, fence), attempts.c.ended_ns.is_not(None), first)
    return connection.execute(attempts.update().where(ended).values(**values)).rowcount == 1


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the attempts of a run, of which nothing is left that refers to them."""
    connection.execute(attempts.delete().where(attempts.c.run_id == run_id))


def _is(run_id: str, fence: int) -> sa.ColumnElement[bool]:
    return sa.and_(attempts.c.run_id == run_id, attempts.c.fence == fence)
