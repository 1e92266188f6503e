"""Helpers of the tests of invariants that other tests use as well."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.server.billing import charging
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import audit, events, facts, files, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.files import StoredFile
from tests.support.server.stored import T0, S, new_run, place, tell

WHO = Caller(name="alice")


def submitted(database: Database, **spec: Any) -> str:
    """Write a run as submitting does: its row, its first event, its row of the audit."""
    new = new_run(**spec)

    def write(connection: sa.Connection) -> None:
        runs.insert(connection, new, at_ns=T0)
        events.add(connection, [StoredEvent(run_id=new.id, seq=1, fence=0, at_ns=T0, state=State.QUEUED)])
        audit.record(connection, who=WHO, action=Action.RUN_CREATE, subject=new.id, now_ns=T0)

    database.write(write)
    return new.id


def ledger(run_id: str, fence: int, *kinds: FactKind, at_s: int = 0, device: str = "GPU-0") -> list[Fact]:
    """Return facts a second apart."""
    return [
        Fact(
            attempt=f"{run_id}:{fence}",
            seq=seq,
            kind=kind,
            boot_id="boot-1",
            boottime_ns=(at_s + seq) * S,
            wall_ns=T0,
            gpus=(device,),
            cpus=0,
            memory_bytes=0,
        )
        for seq, kind in enumerate(kinds)
    ]


WHOLE = (FactKind.RESERVED, FactKind.EXEC, FactKind.EXITED, FactKind.FREED)


def finished(database: Database, **spec: Any) -> str:
    """Write the whole life of a run that succeeded at its second attempt."""
    run_id = submitted(database, retries=1, **spec)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True))
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True))
    results = [StoredFile(name=f"results/{rank}.pkl", size=2, inline=b"ok") for rank in range(2)]

    def write(connection: sa.Connection) -> None:
        files.put(connection, run_id, 2, results)
        for fence in (1, 2):
            facts.add(connection, (run_id, fence, 0), ledger(run_id, fence, *WHOLE, at_s=fence * 10))
            receipt = '{"gpu_ms": 2000, "facts": 4}'
            transitions.settle(connection, (run_id, fence, 0), receipt=receipt, at_ns=T0 + 9 * S)
        due = charging.load(connection, [(run_id, 1, 0), (run_id, 2, 0)], currency="USD")
        charging.charge(connection, due, at_ns=T0 + 10 * S, final_before_ns=0)

    database.write(write)
    return run_id
