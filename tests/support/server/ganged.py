"""A gang on two nodes, for tests of the server: what its crews say, and what is written of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.rendezvous import Chosen
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs
from serverless_gpu.server.invariants.run_invariants import violations
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import attempts, events, orders, runs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File, Report, ReportAnswer
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, place_gang

FINISHED = Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=msgspec.Raw(b"{}"))
RAISED = Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=msgspec.Raw(b'{"a":2}'))


def services_of_nodes(database: Database, home: Path, clock: FakeClock, *, nodes: int) -> Services:
    """Return the parts of a server that has a person and nodes n1, n2 …"""
    add_people(database, "alice")
    for number in range(1, nodes + 1):
        add_node(database, f"node-{number}", name=f"n{number}")
    (home / "server").mkdir()
    return made_services(database, home, clock=clock)


def place_met(database: Database, run_id: str, *gpus: int) -> None:
    """Place a run on node-1, node-2 …, whose crews have met: user code may begin."""
    fence = place_gang(database, run_id, *gpus)
    addresses = tuple(f"10.0.0.{number + 1}" for number in range(len(gpus)))
    chosen = Chosen(master=("10.0.0.1", 29500), interfaces=("eth0",) * len(gpus), addresses=addresses)
    text = msgspec.json.encode(chosen).decode()
    database.write(lambda connection: attempts.note(connection, run_id, fence, chosen_json=text))


def say(services: Services, run_id: str, crew: int, state: State = State.RUNNING, **said: Any) -> ReportAnswer:
    who = Caller(kind="attempt", attempt=(run_id, 1, crew))
    return services.reports.receive(who, run_id=run_id, fence=1, said=Report(state=state, **said))


def began(services: Services, run_id: str) -> None:
    say(services, run_id, 0, exec_ns=T0 + 2 * S)
    say(services, run_id, 1, exec_ns=T0 + 3 * S)


def result(rank: int) -> File:
    return File(name=f"results/{rank}.pkl", size=2, inline=b"ok")


def happened(database: Database, run_id: str, number: int, *what: Any, **note: Any) -> TransitionResult:
    """Let something happen to a crew."""

    def write(connection: sa.Connection) -> TransitionResult:
        run = runs.find(connection, run_id)
        assert run is not None
        return transitions.apply_to_crew(connection, run, number, *what, note=Note(at_ns=T0 + 5 * S, **note))

    return database.write(write)


def told_of(database: Database, run_id: str) -> list[tuple[State, str]]:
    found = database.read(lambda connection: events.after(connection, run_id, 1))
    return [(event.state, event.sentence) for event in found]


def waiting(database: Database, node_id: str) -> list[orders.StoredOrder]:
    return database.read(lambda connection: orders.waiting(connection, node_id))


def wrong(database: Database) -> list[str]:
    """Return what is wrong with the crews of what is written; nobody is said to have asked for these runs."""
    found = violations(database.read(invariant_inputs.load))
    return [one.sentence for one in found if one.invariant != "I8"]
