"""Clocks that are wrong: a node's (F30) decides nothing, the server's (F39) is not believed at once when it jumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.simulated_engine import SimulatedWork
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.loops import SETTLING_S, JumpTolerantClock
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.auth_middleware import Authenticator
from serverless_gpu.server.lifecycle import endings
from serverless_gpu.server.records import attempts, principals
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.server.runs.retention import FIRST_S, Retention
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Report
from tests.support.server import simulation
from tests.support.server.made import made_services
from tests.support.server.simulation import World
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, stored

pytestmark = pytest.mark.any_database


@pytest.mark.parametrize(("said_ns", "taken_ns"), [(T0 - 3_600 * S, T0 + S), (T0 + 3_600 * S, T0 + 5 * S)])
def test_F30_a_node_whose_clock_is_an_hour_off_cannot_say_that_user_code_began_before_or_after_it_can_have(
    database: Database, tmp_path: Path, said_ns: int, taken_ns: int
) -> None:
    services = made_services(database, tmp_path, clock=FakeClock(wall_ns=T0 + 5 * S))
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database)
    fence = place(database, run_id)
    who = Caller(kind="attempt", attempt=(run_id, fence, 0))
    said = Report(state=State.RUNNING, exec_ns=said_ns)
    services.reports.receive(who, run_id=run_id, fence=fence, said=said)
    assert stored(database, run_id).started_ns == taken_ns


@pytest.fixture
def world(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a server with the clock that a real one has, past its start, and a node."""

    def steadily(database: Database, home: Path, *, clock: Clock, **settings: Any) -> Services:
        return made_services(database, home, clock=JumpTolerantClock(clock), **settings)

    monkeypatch.setattr(simulation, "made_services", steadily)
    made = World(database, tmp_path, {"n1": "H100:4"}, partition_grace_s=60.0, partition_margin_s=10.0)
    made.run_for(SETTLING_S + 10, step_s=5)
    return made


@pytest.mark.parametrize("jump_s", [86_400.0, -3_600.0])
def test_F39_no_run_ends_and_no_lease_expires_when_the_clock_of_the_server_jumps(world: World, jump_s: float) -> None:
    world.work = lambda start: SimulatedWork(run_s=120)
    run_id = world.submit()
    world.run_for(30)
    world.clock.step_wall(jump_s)
    world.run_for(60)
    assert world.states(run_id) == ["STARTING", "RUNNING"]
    world.clock.step_wall(-jump_s)
    world.run_for(60)
    assert world.states(run_id) == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    run = world.run(run_id)
    assert run.reason is Reason.COMPLETED and run.finished
    assert run.ended_ns is not None and 0 <= world.clock.wall_ns() - run.ended_ns < 120 * S
    assert world.services
    found = world.services.database.read(lambda it: endings.outcome(it, attempts.find(it, run_id, 1)))
    assert found.receipt, "it was not settled without what its node had to say"


@pytest.mark.parametrize("jump_s", [86_400.0, -3_600.0])
def test_F39_a_receipt_is_waited_for_as_long_as_ever_when_the_clock_of_the_server_jumps(
    world: World, jump_s: float
) -> None:
    world.work = lambda start: SimulatedWork(run_s=1, gate_s=1_000)
    run_id = world.submit()
    world.run_for(5)
    world.clock.step_wall(jump_s)
    world.run_for(65)
    assert not world.run(run_id).finished
    world.run_for(150)
    assert world.run(run_id).finished


@pytest.mark.parametrize("jump_s", [86_400.0, -3_600.0])
def test_F39_tokens_are_judged_and_runs_kept_as_if_the_clock_had_not_jumped(world: World, jump_s: float) -> None:
    run_id = world.submit()
    world.run_for(10)
    services = world.services
    assert services is not None and world.run(run_id).finished
    now_ns = services.clock.wall_ns()
    good, ended = (principals.new_secret() for _ in range(2))

    def make(connection: Any) -> None:
        for secret, left_s in ((good, 7_200), (ended, -60)):
            token = NewToken(principal="alice", expires_ns=now_ns + left_s * S)
            principals.create_token(connection, token, secret=secret, now_ns=now_ns - 120 * S)

    services.database.write(make)
    world.clock.step_wall(jump_s)
    admission = Authenticator(services.database, clock=services.clock)
    assert admission.authenticate(good).name == "alice"
    with pytest.raises(NotAuthenticated):
        admission.authenticate(ended)
    retention = services.make(Retention)
    world.clock.advance(FIRST_S)
    retention.tick(services.clock.boottime_ns())
    assert world.run(run_id).finished
