"""Many runs at once: placements share transactions, and attempts with nothing to say are heard of less often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.model.scheduling.values import Decision
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.scheduling.planner_state import PlannerSync
from serverless_gpu.wire.agents import Report
from tests.support.server.agents import NODE, find, hello, submit, tell
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database


@pytest.fixture
def node_id(services: Services) -> str:
    """Let a node with eight H100 join, and return its identifier."""
    add_people(services.database, "node", "alice", "bob")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, hello()).node


def test_placements_share_transactions_and_one_that_is_cancelled_meanwhile_hinders_no_other(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [submit(services, 1) for _ in range(5)]
    writes: list[object] = []
    scheduler, decide, write = make_scheduler(services), PlannerSync.decide, services.database.write

    def cancelled_first(planning: PlannerSync) -> Decision:
        decision = decide(planning)
        tell(services, waiting[2], StopAsked(why=StopReason.CANCEL))
        monkeypatch.setattr(services.database, "write", counted)
        return decision

    def counted(work: Callable[[sa.Connection], Any]) -> Any:
        writes.append(work)
        return write(work)

    monkeypatch.setattr(PlannerSync, "decide", cancelled_first)
    scheduler.tick(services.clock.boottime_ns())
    states = [find(services, run_id).state for run_id in waiting]
    assert states == [State.STARTING, State.STARTING, State.CANCELLED, State.STARTING, State.STARTING]
    assert len(writes) == 1


def test_attempts_with_nothing_to_say_are_heard_of_less_often_where_there_are_thousands(
    services: Services, node_id: str
) -> None:
    run_id = submit(services, 1)
    make_scheduler(services).tick(services.clock.boottime_ns())

    def heartbeat_s(count: int) -> float:
        for number in range(count):
            services.leases.renew((f"run-{number}", 1, 0), now_ns=services.clock.boottime_ns())
        who = Caller(kind="attempt", attempt=(run_id, 1, 0))
        said = Report(state=State.RUNNING)
        return services.reports.receive(who, run_id=run_id, fence=1, said=said).heartbeat_s

    settings = services.settings
    assert heartbeat_s(400) == settings.heartbeat_s
    assert heartbeat_s(1_199) == 12.0  # and this one
    assert heartbeat_s(100_000) == settings.soft_expiry_s / 4
