"""Helpers of the tests of meetings that other tests use as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.lifecycle.rendezvous import Address, Chosen, CrewReach, Offer, Tried
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import active_runs, attempts
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import ReportAnswer
from tests.support.server.ganged import say

CHOSEN = Chosen(master=("10.0.0.1", 29500), interfaces=("eth0", "eth0"), addresses=("10.0.0.1", "10.0.0.2"))


def offer(crew: int, **changes: Any) -> Offer:
    address = Address(interface="eth0", address=f"10.0.0.{crew + 1}")
    fields = {"crew": crew, "port": 4000 + crew, "rendezvous_port": 0 if crew else 29500, "addresses": (address,)}
    return Offer(**(fields | changes))


def reach(crew: int, *, of: int = 2, took: int | None = 90) -> CrewReach:
    others = (other for other in range(of) if other != crew)
    problem = "" if took is not None else "no route to host"
    return CrewReach(
        crew=crew,
        tried=tuple(
            Tried(crew=other, address=f"10.0.0.{other + 1}", microseconds=took, problem=problem) for other in others
        ),
    )


def start(services: Services, run_id: str, crew: int, **said: Any) -> ReportAnswer:
    return say(services, run_id, crew, State.STARTING, **said)


def meet(services: Services, run_id: str, *numbers: int) -> None:
    """Have crews say all that they have to say."""
    for number in numbers:
        start(services, run_id, number, offer=offer(number), reach=reach(number))


def attempt_of(database: Database, run_id: str, fence: int = 1) -> StoredAttempt:
    found = database.read(lambda connection: attempts.find(connection, run_id, fence))
    assert found is not None
    return found


def look(services: Services, clock: FakeClock, *, after_s: float = 0.0, away: Sequence[str] = ()) -> None:
    """Look after a while in which nodes were heard of, but for some."""
    clock.advance(after_s)
    for node_id in ("node-1", "node-2", "node-3"):
        if node_id not in away:
            services.presence.heard(node_id, now_ns=clock.boottime_ns())
    active = services.database.read(active_runs.active_briefly)
    services.rendezvous.look(active, clock.boottime_ns())
