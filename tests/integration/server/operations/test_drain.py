"""Draining: nothing new is started, what runs goes on, who waits is told, and it outlives the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.ambient import format_clock
from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.records import audit
from serverless_gpu.server.scheduling.scheduler import Scheduler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.server_status import DrainRequest, DrainView
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello, submit
from tests.support.server.late import before_next_write
from tests.support.server.served import served
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

ROOT = Caller(name="root", role="admin", token_id="t")


@pytest.fixture
def node_id(services: Services) -> str:
    add_people(services.database, "node", "alice", "root")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, hello()).node


def tick(services: Services, scheduler: Scheduler) -> None:
    scheduler.tick(services.clock.boottime_ns())


def test_what_runs_goes_on_what_waits_is_told_and_started_afterwards(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    scheduler = make_scheduler(services)
    going = submit(services, 1)
    tick(services, scheduler)
    since_ns = clock.wall_ns()
    view = services.drain.put(ROOT, DrainRequest(on=True, note="new driver"))
    assert view == DrainView(on=True, by="root", since_ns=since_ns, note="new driver", going=1, waiting=0)
    waiting = submit(services, 1)
    for _ in range(2):  # the second one knows what it wants already
        tick(services, scheduler)
        assert (find(services, going).state, find(services, waiting).state) == (State.STARTING, State.QUEUED)
    tick(services, make_scheduler(services))  # of the next server
    assert find(services, waiting).state is State.QUEUED
    assert services.sentences.of(waiting) == golden(
        "server.draining.server-starts-nothing", format_clock=format_clock(since_ns)
    )
    again = services.drain.put(Caller(name="alice", role="operator"), DrainRequest(on=True, note="me too"))
    assert (again.by, again.note) == ("root", "new driver")
    assert services.drain.put(ROOT, DrainRequest(on=False)) == DrainView(on=False, going=1, waiting=1)
    tick(services, scheduler)
    assert find(services, waiting).state is State.STARTING
    found = [entry.action for entry in services.database.read(audit.entries) if entry.action.startswith("server.")]
    assert found == ["server.drain", "server.resume"]


def test_a_placement_that_was_decided_before_is_not_written_after(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(services)
    run_id = submit(services, 1)
    before_next_write(monkeypatch, services.database, lambda: services.drain.put(ROOT, DrainRequest(on=True)))
    tick(services, scheduler)
    assert find(services, run_id).state is State.QUEUED


@pytest.mark.parametrize("note", ["x" * 257, "a\nb", "a\x1b[2J"])
def test_a_note_is_one_line(services: Services, note: str) -> None:
    with pytest.raises(InvalidValue, match="printable"):
        services.drain.put(ROOT, DrainRequest(on=True, note=note))


def test_operators_drain_and_members_see_that_they_do(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        admin = server.connection()
        made = admin.ask("POST", "/users", PrincipalRequest(name="bob", role="member"), answer=TokenMade)
        bob = server.connection(made.secret)
        admin.ask("PUT", "/drain", DrainRequest(on=True, note="n"), answer=DrainView)
        assert bob.ask("GET", "/drain", answer=DrainView).note == "n"
        with pytest.raises(NotAllowed):
            bob.ask("PUT", "/drain", DrainRequest(on=False), answer=DrainView)
    with served(tmp_path) as server:
        assert server.connection().ask("GET", "/drain", answer=DrainView).on
