"""Repository of submitted runs and their states.

Only this module uses the `runs` table. The queries read a run together with its current attempt on all nodes. Only
`transitions.py` changes the state of a run, with the compare-and-set function `change`. Retention removes only complete
runs. A complete run has ended, its attempts are settled, and the ledger contains all of its charges. This module also
lists the blob parts and snapshots in use for garbage collection.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle import run_lifecycle
from serverless_gpu.model.lifecycle.attempt import ACTIVE, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import FAULT_RETRIES_MAX, INFRA_RETRIES_MAX
from serverless_gpu.model.scheduling.values import CLASSES, Reservation
from serverless_gpu.model.spec import BlobReference, Function, RunSpec
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import attempts as attempts_table
from serverless_gpu.server.db.tables import audit, crews, run_tags, runs
from serverless_gpu.server.db.tables import crews as crews_table
from serverless_gpu.server.records import attempts, files, policies
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.audit import Action
from serverless_gpu.wire.runs import Target

_SAID_CHARACTERS = 200
_TYPE_CHARACTERS = 40
_LEFT_S_MIN = 1.0
"""Minimum time limit of an attempt in seconds, because a limit of 0 would mean no limit."""
_decode_spec = msgspec.json.Decoder(RunSpec).decode
_decode_promise = msgspec.json.Decoder(Reservation).decode
_decode_target = msgspec.json.Decoder(Target).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


_JSON = ("spec", "target", "member_of")
_decode_arguments = msgspec.json.Decoder(dict[str, str]).decode
_decode_member_of = msgspec.json.Decoder(tuple[str, ...]).decode
_CURRENT = sa.and_(attempts_table.c.run_id == runs.c.id, attempts_table.c.fence == runs.c.fence)
_EXISTS = sa.select(runs.c.id).where(runs.c.id == sa.bindparam("run_id"))
_UNSETTLED = sa.exists().where(
    crews.c.run_id == runs.c.id,
    sa.or_(crews.c.settled_ns.is_(None), crews.c.uncharged),
)
_OVER = sa.and_(
    runs.c.state.in_([state.value for state in TERMINAL]),
    runs.c.ended_ns.is_not(None),
    runs.c.settled_ns.is_not(None),
    sa.not_(_UNSETTLED),
)


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a new run after all checks.

    Attributes:
        pool: name of the pool that the run or its policy requires, or "" for any on-demand pool.
        request_sha256: `Keys.fingerprint` of the whole request, which detects another request with the same run
            identifier.
        context_sealed: the caller's context, encrypted.
        call: the pickled call, if the request contained it.
        member_of: current teams of the owner.
        arguments: arguments of the call as text, or None if the client sent no arguments.
    """

    id: str
    owner: str
    spec: RunSpec
    target: Target
    request_sha256: str
    context_sealed: bytes
    call: bytes | None = None
    snapshot: str = ""
    client_version: str = ""
    pool: str = ""
    member_of: tuple[str, ...] = ()
    arguments: dict[str, str] | None = None


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Stored run with its current attempt, without its payload.

    Attributes:
        priority: priority class; the scheduler serves class 0 first.
        detail: details in addition to the reason.
        fence: fence of the current attempt; 0 before the first attempt.
        queued_ns: time when the run entered the queue; unchanged if the run waits again.
        events: number of the run's last event.
        tracked: link to the MLflow run of all attempts; "" until a node reports the link.
        restored_ns: time when an operator restored the server from a backup during the run. A restored run gets no
            other attempt.
        saved: fence of the newest attempt with a saved checkpoint; 0 for none.
        unsaved: number of consecutive ended attempts, up to the last attempt, without a checkpoint.
        ran: number of ended attempts that count against the maximum of the usage policy.
        ran_ms: time for which user code of earlier attempts ran.
        member_of: teams of the owner at submission, if the run names no team (`model/billing/budget.py`).
        attempt: the current or last attempt.
    """

    id: str
    owner: str
    team: str
    name: str
    pool: str
    priority: int
    state: State
    reason: Reason | None
    detail: str
    fence: int
    stop: StopReason | None
    retries_used: int
    infra_retries_used: int
    fault_retries_used: int
    created_ns: int
    queued_ns: int
    started_ns: int | None
    ended_ns: int | None
    settled_ns: int | None
    events: int
    request_sha256: str
    spec: RunSpec
    target: Target
    snapshot: str
    tracked: str
    restored_ns: int | None
    saved: int
    unsaved: int
    ran: int
    ran_ms: int
    attempt: StoredAttempt | None
    member_of: tuple[str, ...] = ()

    @property
    def spec_now(self) -> RunSpec:
        """Return the spec of the next attempt.

        The remaining total time under the usage policy may reduce the attempt's time limit.
        """
        left_s = self.left_s
        if left_s is None:
            return self.spec
        return msgspec.structs.replace(self.spec, max_run_s=min(left_s, self.spec.max_run_s or left_s))

    @property
    def left_s(self) -> float | None:
        """Return the remaining seconds of user code for all further attempts, or None without a limit."""
        total_s = self.spec.total_run_s
        return None if total_s is None else max(_LEFT_S_MIN, total_s - self.ran_ms / 1e3)

    @property
    def is_last(self) -> bool:
        """Return True if the next attempt's time limit also exhausts the run's total time."""
        return self.left_s is not None and self.left_s <= (self.spec.max_run_s or math.inf)

    @property
    def finished(self) -> bool:
        """Return True if the state, files and receipt of the run are final."""
        return self.state in TERMINAL and self.settled_ns is not None

    @property
    def life(self) -> run_lifecycle.Run:
        """Return the run's state for `run_lifecycle.advance`."""
        attempt = self.attempt if self.state in ACTIVE else None
        return run_lifecycle.Run(
            run_id=self.id,
            fence=self.fence,
            state=self.state,
            reason=self.reason,
            stop=self.stop,
            began=attempt is not None and attempt.began,
            may_resume=self.spec.resume and self.restored_ns is None,
            retries_left=max(0, self.spec.retries - self.retries_used) if self.restored_ns is None else 0,
            infra_left=max(0, INFRA_RETRIES_MAX - self.infra_retries_used) if self.restored_ns is None else 0,
            before=attempt.before if attempt is not None else None,
            faults_left=self._faults_left,
            goes_on_at_limit=self.spec_now.is_capped
            and self.spec.resume
            and self.restored_ns is None
            and not self.is_last,
            saved=self.saved,
            unsaved=self.unsaved,
            unsaved_max=self.spec.unsaved_max,
            ran=self.ran,
            attempts_max=self.spec.attempts_max,
        )

    @property
    def _faults_left(self) -> int:
        if not self.spec.retry_on_infra or self.restored_ns is not None:
            return 0
        return max(0, FAULT_RETRIES_MAX - self.fault_retries_used)


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a run's submission that only the node reads."""

    context_sealed: bytes
    call: bytes | None


_NAMES = [name for name in StoredRun.__struct_fields__ if name != "attempt"]
_COLUMNS: Sequence[sa.ColumnElement[typing.Any]] = [
    runs.c[f"{name}_json" if name in _JSON else name] for name in _NAMES
]
_SELECT = sa.select(*_COLUMNS, *attempts.COLUMNS).select_from(attempts.joined_to(runs, _CURRENT))
_FIND = _SELECT.where(runs.c.id == sa.bindparam("run_id"))


def insert(connection: sa.Connection, new: NewRun, *, at_ns: int) -> StoredRun:
    """Insert a queued run, and return the stored run."""
    spec = new.spec
    connection.execute(
        runs.insert(),
        {
            "id": new.id,
            "owner": new.owner,
            "team": spec.team or "",
            "name": spec.name,
            "pool": new.pool,
            "priority": CLASSES.index(spec.priority),
            "state": State.QUEUED.value,
            "created_ns": at_ns,
            "queued_ns": at_ns,
            "events": 1,
            "request_sha256": new.request_sha256,
            "spec_json": msgspec.json.encode(spec).decode(),
            "target_json": msgspec.json.encode(new.target).decode(),
            "tags_json": _encode_sorted(spec.tags).decode(),
            "snapshot": new.snapshot,
            "context_sealed": new.context_sealed,
            "call": new.call,
            "client_version": new.client_version,
            "member_of_json": msgspec.json.encode(_member_of(new)).decode(),
            "gpu_type": shortened_type(spec.resources.gpu_type or ""),
            "arguments_json": None if new.arguments is None else msgspec.json.encode(new.arguments).decode(),
        },
    )
    rows = [{"key": key, "value": value, "run_id": new.id} for key, value in spec.tags.items()]
    if rows:
        connection.execute(run_tags.insert(), rows)
    return described(new, at_ns=at_ns)


def searchable(sentence: str) -> str:
    """Return the beginning of a run's final sentence, as searches compare it."""
    return sentence.lower()[:_SAID_CHARACTERS]


def shortened_type(gpu_type: str) -> str:
    """Return the beginning of a device type, as an index stores the type."""
    return gpu_type[:_TYPE_CHARACTERS]


def arguments(connection: sa.Connection, run_id: str) -> dict[str, str] | None:
    """Return the arguments of a run's call as text, or None if the client sent no arguments."""
    text = connection.scalar(sa.select(runs.c.arguments_json).where(runs.c.id == run_id))
    return None if text is None else _decode_arguments(text)


def described(new: NewRun, *, at_ns: int) -> StoredRun:
    """Return the `StoredRun` of a new queued run without a database query."""
    spec = new.spec
    return StoredRun(
        id=new.id,
        owner=new.owner,
        team=spec.team or "",
        name=spec.name,
        pool=new.pool,
        priority=CLASSES.index(spec.priority),
        state=State.QUEUED,
        reason=None,
        detail="",
        fence=0,
        stop=None,
        retries_used=0,
        infra_retries_used=0,
        fault_retries_used=0,
        created_ns=at_ns,
        queued_ns=at_ns,
        started_ns=None,
        ended_ns=None,
        settled_ns=None,
        events=1,
        request_sha256=new.request_sha256,
        spec=spec,
        target=new.target,
        snapshot=new.snapshot,
        tracked="",
        restored_ns=None,
        saved=0,
        unsaved=0,
        ran=0,
        ran_ms=0,
        attempt=None,
        member_of=_member_of(new),
    )


def _member_of(new: NewRun) -> tuple[str, ...]:
    return () if new.spec.team else new.member_of


def exists(connection: sa.Connection, run_id: str) -> bool:
    """Return True if a run exists. Checking with this function is much faster than calling `find`."""
    return connection.execute(_EXISTS, {"run_id": run_id}).first() is not None


def find(connection: sa.Connection, run_id: str) -> StoredRun | None:
    """Return one run by its identifier, or None."""
    row = connection.execute(_FIND, {"run_id": run_id}).first()
    return None if row is None else _from_rows(connection, [row])[0]


def payload(connection: sa.Connection, run_id: str) -> Payload | None:
    """Return the payload of a run, or None."""
    query = sa.select(runs.c.context_sealed, runs.c.call).where(runs.c.id == run_id)
    row = connection.execute(query).first()
    return None if row is None else Payload(context_sealed=row[0], call=row[1])


def sealed_unfinished(connection: sa.Connection, *, limit: int = 100) -> list[bytes]:
    """Return the sealed contexts of the latest unfinished runs."""
    query = sa.select(runs.c.context_sealed).where(runs.c.state.not_in([state.value for state in TERMINAL]))
    return list(connection.scalars(query.order_by(runs.c.id.desc()).limit(limit)))


def reseal(connection: sa.Connection, old: Sealer, new: Sealer, after: str, at_most: int) -> tuple[str, int]:
    """Seal the contexts of one batch of unfinished runs with a new key.

    Args:
        connection: connection of the transaction.
        old: the previous key.
        new: the new key.
        after: identifier of the last run of the previous call, "" for the first call.
        at_most: maximum number of runs in this call.

    Returns:
        Identifier of the last run of this call, or "" if no more runs follow, and the number of sealed contexts.
    """
    going_on = sa.and_(runs.c.state.not_in([state.value for state in TERMINAL]), runs.c.id > after)
    query = sa.select(runs.c.id, runs.c.context_sealed).where(going_on).order_by(runs.c.id).limit(at_most)
    rows = connection.execute(query).all()
    count = 0
    for row in rows:
        if old.is_mine(row.context_sealed):
            again = new.seal(old.unseal(row.context_sealed, about=row.id), about=row.id)
            connection.execute(runs.update().where(runs.c.id == row.id).values(context_sealed=again))
            count += 1
    return (rows[-1].id if len(rows) == at_most else ""), count


def queue(connection: sa.Connection, *, limit: int | None = None) -> list[tuple[str, int]]:
    """Return waiting runs by priority class and age, each with the fence of its last attempt."""
    query = sa.select(runs.c.id, runs.c.fence).where(runs.c.state == State.QUEUED.value)
    query = query.order_by(runs.c.priority, runs.c.queued_ns, runs.c.id).limit(limit)
    return [(run_id, fence) for run_id, fence in connection.execute(query)]


def promise(connection: sa.Connection, promises: Mapping[str, Reservation | None]) -> None:
    """Store or remove the latest start times that the server has promised to waiting runs."""
    change = runs.update().where(runs.c.id == sa.bindparam("run")).values(promised_json=sa.bindparam("json"))
    rows = [{"run": run_id, "json": one and msgspec.json.encode(one).decode()} for run_id, one in promises.items()]
    connection.execute(change, rows)


def promised(connection: sa.Connection) -> list[Reservation]:
    """Return the promised latest start times of waiting runs."""
    query = sa.select(runs.c.promised_json).where(runs.c.state == State.QUEUED.value, runs.c.promised_json.is_not(None))
    return [_decode_promise(text) for text in connection.scalars(query)]


def waiting(connection: sa.Connection, *, limit: int, owner: str | None = None) -> list[str]:
    """Return the identifiers of waiting runs, by priority class and age."""
    query = sa.select(runs.c.id).where(runs.c.state == State.QUEUED.value)
    if owner is not None:
        query = query.where(runs.c.owner == owner)
    return list(connection.scalars(query.order_by(runs.c.priority, runs.c.queued_ns, runs.c.id).limit(limit)))


def find_many(connection: sa.Connection, run_ids: Sequence[str]) -> list[StoredRun]:
    """Return existing runs with these identifiers, in any order."""
    parts = (connection.execute(_SELECT.where(runs.c.id.in_(some))) for some in in_chunks(run_ids))
    return _from_rows(connection, (row for part in parts for row in part))


def asked_ns(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int]:
    """Return the submission times of runs, at which the wait for the first attempt begins."""
    query = sa.select(runs.c.id, runs.c.created_ns)
    found = (connection.execute(query.where(runs.c.id.in_(some))) for some in in_chunks(list(run_ids)))
    return {run_id: asked_ns for rows in found for run_id, asked_ns in rows}


def active(connection: sa.Connection) -> list[StoredRun]:
    """Return the runs with an unfinished attempt."""
    query = _SELECT.where(runs.c.state.in_([state.value for state in ACTIVE]))
    return _from_rows(connection, connection.execute(query))


def on_node(connection: sa.Connection, node_id: str) -> list[StoredRun]:
    """Return the runs whose attempts have not ended on a node."""
    own = crews_table.alias()
    here = sa.select(own.c.run_id).where(own.c.node_id == node_id, own.c.ended_ns.is_(None))
    query = _SELECT.where(runs.c.id.in_(here), runs.c.state.in_([state.value for state in ACTIVE]))
    return _from_rows(connection, connection.execute(query.order_by(runs.c.id)))


def active_of(connection: sa.Connection, owner: str) -> list[StoredRun]:
    """Return an owner's runs with an unfinished attempt."""
    theirs = sa.and_(runs.c.owner == owner, runs.c.state.in_([state.value for state in ACTIVE]))
    return _from_rows(connection, connection.execute(_SELECT.where(theirs)))


def waiting_of(connection: sa.Connection, owner: str, *, at_most: int) -> int:
    """Return the number of an owner's waiting runs, but not more than `at_most`."""
    query = sa.select(runs.c.id).where(runs.c.state == State.QUEUED.value, runs.c.owner == owner).limit(at_most)
    return connection.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()


def queued_by_pool(connection: sa.Connection) -> dict[str, int]:
    """Return the number of waiting runs by requested pool. The key "" counts runs that request no pool."""
    query = sa.select(runs.c.pool, sa.func.count()).where(runs.c.state == State.QUEUED.value).group_by(runs.c.pool)
    return {pool: count for pool, count in connection.execute(query)}


def count_unended(connection: sa.Connection) -> tuple[int, int]:
    """Return the number of active runs and the number of waiting runs."""
    unended = [state.value for state in (State.QUEUED, *ACTIVE)]
    query = sa.select(runs.c.state, sa.func.count()).where(runs.c.state.in_(unended)).group_by(runs.c.state)
    counts = {state: count for state, count in connection.execute(query)}
    waiting = counts.pop(State.QUEUED.value, 0)
    return sum(counts.values()), waiting


def change(connection: sa.Connection, run: StoredRun, **values: object) -> None:
    """Change a run unless its row has changed since the read. Only `transitions.py` calls this function.

    Raises:
        StaleAttempt: the row has changed since the read; the function wrote nothing.
    """
    unchanged = sa.and_(runs.c.id == run.id, runs.c.fence == run.fence, runs.c.state == run.state.value)
    if connection.execute(runs.update().where(unchanged).values(**values)).rowcount != 1:
        raise StaleAttempt(f"run {run.id} has changed and is no longer {run.state} in attempt {run.fence}")


def note_tracked(connection: sa.Connection, run_id: str, url: str) -> None:
    """Store the MLflow link of a run."""
    connection.execute(runs.update().where(runs.c.id == run_id).values(tracked=url))


def note_saved(connection: sa.Connection, run_id: str, fence: int) -> None:
    """Store the newest attempt with a checkpoint, and reset the count of attempts without checkpoints."""
    connection.execute(runs.update().where(runs.c.id == run_id).values(saved=fence, unsaved=0))


def hold(connection: sa.Connection, run_ids: Sequence[str], *, at_ns: int) -> None:
    """Mark active runs of a restored server, so that they get no further attempt."""
    connection.execute(runs.update().where(runs.c.id.in_(run_ids)).values(restored_ns=at_ns))


def settle(connection: sa.Connection, run_id: str, fence: int, *, at_ns: int) -> bool:
    """Mark an ended run as settled after its last attempt, and return True if the run was unsettled."""
    last = sa.and_(runs.c.id == run_id, runs.c.fence == fence, runs.c.settled_ns.is_(None))
    ended = runs.c.state.in_([state.value for state in TERMINAL])
    return connection.execute(runs.update().where(last, ended).values(settled_ns=at_ns)).rowcount == 1


def _from_rows(connection: sa.Connection, rows: Iterable[Sequence[typing.Any]]) -> list[StoredRun]:
    """Decode rows of runs, and complete their attempts with all nodes."""
    found = [_from_row(row) for row in rows]
    gangs = {run.id: run.attempt for run in found if run.attempt is not None and run.attempt.num_nodes > 1}
    if not gangs:
        return found
    whole = {attempt.run_id: attempt for attempt in attempts.whole(connection, list(gangs.values()))}
    return [msgspec.structs.replace(run, attempt=whole.get(run.id, run.attempt)) for run in found]


def _from_row(row: Sequence[typing.Any]) -> StoredRun:
    fields = dict(zip(_NAMES, row, strict=False))
    return StoredRun(
        **(
            fields
            | {
                "state": State(fields["state"]),
                "reason": Reason(fields["reason"]) if fields["reason"] else None,
                "stop": StopReason(fields["stop"]) if fields["stop"] else None,
                "spec": _decode_spec(fields["spec"]),
                "target": _decode_target(fields["target"]),
                "member_of": _decode_member_of(fields["member_of"] or "[]"),
                "attempt": attempts.from_row(row[len(_NAMES) :]),
            }
        )
    )


def over(connection: sa.Connection, *, ended_before_ns: int, limit: int) -> list[str]:
    """Return complete runs that ended before a time, ordered by end time."""
    query = sa.select(runs.c.id).where(_OVER, runs.c.ended_ns < ended_before_ns)
    return list(connection.execute(query.order_by(runs.c.ended_ns, runs.c.id).limit(limit)).scalars())


def endings(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int | None]:
    """Return the end times of existing runs, or None for each incomplete run."""
    query = sa.select(runs.c.id, runs.c.ended_ns, _OVER)
    rows = (row for some in in_chunks(run_ids) for row in connection.execute(query.where(runs.c.id.in_(some))))
    return {run_id: ended_ns if over else None for run_id, ended_ns, over in rows}


def removed(connection: sa.Connection, run_ids: Sequence[str]) -> set[str]:
    """Return the runs that retention has removed, as recorded in the audit."""
    query = sa.select(audit.c.subject).where(audit.c.action == Action.RUN_EXPIRE.value)
    return {
        run_id for some in in_chunks(run_ids) for run_id in connection.scalars(query.where(audit.c.subject.in_(some)))
    }


def remove(connection: sa.Connection, run_id: str) -> bool:
    """Remove a complete run without references, and return True if the run existed."""
    complete = sa.select(runs.c.id).where(runs.c.id == run_id, _OVER)
    connection.execute(run_tags.delete().where(run_tags.c.run_id.in_(complete)))
    return connection.execute(runs.delete().where(runs.c.id == run_id, _OVER)).rowcount == 1


def payload_of(connection: sa.Connection, run_id: str) -> BlobReference | None:
    """Return the blob of a run's pickled call, or None without a blob."""
    run = find(connection, run_id)
    return run.spec.payload.call if run is not None and isinstance(run.spec.payload, Function) else None


def parts_in_use(connection: sa.Connection) -> frozenset[str]:
    """Return the digests of all blob parts that outputs and unfinished runs use."""
    found = set(files.parts_in_use(connection))
    query = sa.select(runs.c.spec_json).where(runs.c.state.not_in([state.value for state in TERMINAL]))
    for text in connection.execute(query).scalars():
        called = _decode_spec(text).payload
        if isinstance(called, Function) and called.call is not None:
            found.update(called.call.parts)
    return frozenset(found)


def snapshots_in_use(connection: sa.Connection, *, since_ns: int) -> frozenset[str]:
    """Return the addresses of snapshots that current runs, recent runs and usage policies use."""
    lately = sa.or_(runs.c.ended_ns.is_(None), runs.c.ended_ns >= since_ns)
    query = sa.select(runs.c.snapshot).where(runs.c.snapshot != "", lately).distinct()
    named = (address for each in policies.every(connection) for address in each.policy.environments)
    return frozenset((*connection.execute(query).scalars(), *named))
