"""Helpers of the tests of charging that other tests use as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import attempts, facts
from serverless_gpu.wire.agents import Report
from tests.support.server.stored import T0, S, add_run, place, tell

HOUR_S = 3600
TARIFF = Tariff(gpu_micros_per_hour=3_600_000)
MIDNIGHT = (T0 // DAY_NS + 1) * DAY_NS


def begun(database: Database, *, at_ns: int = T0, tariff: Tariff = TARIFF, **fields: Any) -> str:
    """Return a run whose attempt was placed 2 s after it was asked for, with two devices, and has begun."""
    run_id = add_run(database, at_ns=at_ns - 2 * S, **fields)
    place(database, run_id, at_ns=at_ns)
    text = msgspec.json.encode(tariff).decode()
    database.write(lambda connection: attempts.note(connection, run_id, 1, tariff_json=text))
    tell(database, run_id, UserCodeStarted(), at_ns=at_ns, exec_ns=at_ns)
    return run_id


def fact(run_id: str, seq: int, kind: FactKind, at_ns: int, *, gpus: Sequence[str] = ("GPU-0", "GPU-1")) -> Fact:
    return Fact(
        attempt=f"{run_id}:1",
        seq=seq,
        kind=kind,
        boot_id="boot-1",
        boottime_ns=at_ns - T0 + 1000 * S,
        wall_ns=at_ns,
        gpus=tuple(gpus),
        cpus=0,
        memory_bytes=0,
    )


def used(run_id: str, *, seconds: int, at_ns: int = T0, until: FactKind = FactKind.FREED) -> list[Fact]:
    """Return the facts of an attempt that used two devices for some time."""
    kinds = (FactKind.RESERVED, FactKind.EXEC, until)
    times = (at_ns, at_ns, at_ns + seconds * S)
    return [fact(run_id, seq, kind, when) for seq, (kind, when) in enumerate(zip(kinds, times, strict=True))]


def write_facts(database: Database, run_id: str, new: Sequence[Fact]) -> None:
    database.write(lambda connection: facts.add(connection, (run_id, 1, 0), new))


def end(database: Database, run_id: str, reason: Reason = Reason.COMPLETED, *, at_ns: int, receipt: str = "{}") -> None:
    tell(database, run_id, AttemptEnded(reason, began=True), at_ns=at_ns)
    database.write(lambda connection: transitions.settle(connection, (run_id, 1, 0), receipt=receipt, at_ns=at_ns))


def late(services: Services, run_id: str, new: Sequence[Fact]) -> None:
    """Have the node say more of an attempt."""
    who = Caller(kind="attempt", attempt=(run_id, 1, 0))
    services.reports.receive(who, run_id=run_id, fence=1, said=Report(state=State.STOPPING, facts=tuple(new)))
