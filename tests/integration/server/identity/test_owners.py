"""Owners who are shut out while runs of theirs go on and wait (F68): what was decided happens, and is written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http import routing
from serverless_gpu.server.invariants import self_check
from serverless_gpu.server.records import audit
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalChange, PrincipalRequest, PrincipalView, TokenMade
from serverless_gpu.wire.runs import RunView, StreamMessage
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello, submit
from tests.support.server.late import before_next_write
from tests.support.server.made import made_services
from tests.support.server.measures import value
from tests.support.server.principals import Api
from tests.support.server.served import served
from tests.support.server.stored import add_people
from tests.support.server.submitting import request


@pytest.fixture
def api(services: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(services, database, clock)
    made.user("alice")
    add_people(database, "other")
    services.agents.hello(NODE, hello())
    with made.client:
        yield made
    # Runs are written here as rows: nobody asked for them, so the audit (I8) does not say so.
    assert [one for one in self_check.check(database.read).violations if one.invariant != "I8"] == []


def look(services: Services) -> None:
    """Let scheduler and reconciler have a look."""
    scheduler = make_scheduler(services)
    services.make(Reconciler, scheduler=scheduler).tick(services.clock.boottime_ns())
    scheduler.tick(services.clock.boottime_ns())


def shut_out(api: Api, **how: object) -> None:
    api.do(api.admin, "PATCH", "/users/alice", how or {"disabled": True})


@pytest.mark.parametrize("how", [{"disabled": True}, {"role": "viewer"}], ids=["disabled", "role"])
def test_F68_what_runs_finishes_and_what_waits_is_kept_back(
    services: Services, api: Api, how: dict[str, object]
) -> None:
    going = submit(services)
    look(services)
    waiting = submit(services)
    shut_out(api, **how)
    look(services)
    assert find(services, going).state is State.STARTING and find(services, going).stop is None
    assert find(services, waiting).state is State.QUEUED
    assert services.sentences.of(waiting).startswith("alice may not start runs now")
    again: dict[str, object] = {"disabled": False} if "disabled" in how else {"role": "member"}
    shut_out(api, **again)
    look(services)
    assert find(services, waiting).state is State.STARTING


def test_F68_what_runs_and_what_waits_is_stopped_where_that_was_decided(services: Services, api: Api) -> None:
    going = submit(services)
    look(services)
    waiting = submit(services)
    shut_out(api, disabled=True, runs="stop")
    look(services)
    assert (find(services, going).state, find(services, going).stop) == (State.STOPPING, StopReason.CANCEL)
    ended = find(services, waiting)
    assert (ended.state, ended.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert ended.detail == golden("server.owners.alice-may-start")
    entries = [one for one in api.database.read(audit.entries) if one.action in ("run.stop", "user.change")]
    stopped = sorted([going, waiting])
    assert [(one.principal, one.subject) for one in entries] == [
        ("root", "alice"),
        *(("server", run_id) for run_id in stopped),
    ]
    assert entries[0].detail["runs"] == "stop" and entries[1].detail["because"] == ended.detail
    assert services.owner_suspension.stop_some() == 0  # asked once
    assert value(services.measures, "sgpu_runs_ended_total", reason="cancelled") == 1


def test_F68_the_servers_setting_holds_and_stays_what_it_was_when_it_was_decided(
    database: Database, api: Api, services: Services, clock: FakeClock, tmp_path: Path
) -> None:
    strict = made_services(database, tmp_path, clock=clock, on_owner_disabled="stop")
    run_id = submit(services)
    look(services)
    shut_out(api)  # with the lenient setting
    look(strict)
    assert find(services, run_id).stop is None
    shut_out(api, runs="stop")  # said once more, of somebody who is shut out already
    look(services)
    assert find(services, run_id).stop is StopReason.CANCEL


def test_F68_what_is_to_become_of_runs_is_not_said_of_somebody_who_may_start_more(api: Api) -> None:
    status, said = api.ask(api.admin, "PATCH", "/users/alice", {"runs": "stop"})
    assert (status, said["code"]) == (400, "invalid_value")
    status, said = api.ask(api.admin, "PATCH", "/users/alice", {"disabled": False, "runs": "stop"})
    assert status == 400


def test_F68_a_placement_and_a_ban_at_the_same_moment_see_each_other(
    services: Services, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)
    before_next_write(monkeypatch, services.database, lambda: shut_out(api))
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.QUEUED


def test_F68_no_new_submits_and_streams_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "CHECKED_S", 0.1)
    monkeypatch.setattr("serverless_gpu.server.runs.run_stream.IDLE_S", 0.1)
    with served(home) as server:
        root = server.connection()
        made = root.ask("POST", "/users", PrincipalRequest(name="ada"), answer=TokenMade)
        ada = server.connection(made.secret)
        view = ada.ask("POST", "/runs", request(), answer=RunView)
        begun, ended = threading.Event(), threading.Event()

        def read() -> None:
            for _ in ada.stream("GET", f"/runs/{view.id}/events", answer=StreamMessage):
                begun.set()
            ended.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert begun.wait(30)
        root.ask("PATCH", "/users/ada", PrincipalChange(disabled=True), answer=PrincipalView)
        assert ended.wait(30), "the stream of somebody who was shut out goes on"
        with pytest.raises(NotAuthenticated):
            server.connection(made.secret).ask("POST", "/runs", request(), answer=RunView)
