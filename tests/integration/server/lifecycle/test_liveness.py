"""An attempt is given up while it reports: whoever is told to go on is not given up, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest

from serverless_gpu.errors import ServerStorageFull, ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from tests.support.server.late import before_next_write
from tests.support.server.reporting import clock, fact, run_id, say, services
from tests.support.server.stored import T0, stored, tell

pytestmark = pytest.mark.any_database

__all__ = ["clock", "run_id", "services"]


def test_F18_an_attempt_that_is_given_up_while_it_reports_is_told_so_whatever_the_wall_clock_says(
    services: Services, database: Database, clock: FakeClock, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(services, run_id, exec_ns=T0)
    clock.advance(3600)
    clock.step_wall(-3600)
    before_next_write(monkeypatch, database, lambda: tell(database, run_id, GivenUp(Reason.NODE_GONE)))
    assert say(services, run_id, exec_ns=T0).stale


def test_F18_an_attempt_that_reports_in_the_last_moment_is_not_given_up(
    services: Services, database: Database, clock: FakeClock, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(services, run_id, exec_ns=T0)
    clock.advance(3600)
    write = database.write

    def write_late(work: Any) -> Any:
        services.leases.renew((run_id, 1, 0), now_ns=clock.boottime_ns())  # as a report does, before it reads
        return write(work)

    reconciler = services.make(Reconciler, scheduler=make_scheduler(services))
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", write_late)
        reconciler.tick(clock.boottime_ns())
    assert stored(database, run_id).state is State.RUNNING
    clock.advance(3600)
    reconciler.tick(clock.boottime_ns())
    assert stored(database, run_id).reason is Reason.NODE_GONE


def test_F36_a_full_database_tells_nobody_to_go_on_who_was_given_up(
    services: Services, database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node takes "the disk is full" for an answer: the server has heard of its attempt."""

    def full(_work: object) -> None:
        raise ServerStorageFull("the disk of the database is full")

    say(services, run_id, exec_ns=T0)
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", full)
        with pytest.raises(ServerStorageFull):
            say(services, run_id, exec_ns=T0, facts=(fact(run_id, 0),))
    tell(database, run_id, GivenUp(Reason.NODE_GONE))
    monkeypatch.setattr(database, "write", full)
    with pytest.raises(ServerUnavailable):
        say(services, run_id, exec_ns=T0, facts=(fact(run_id, 0),))
    assert say(services, run_id, exec_ns=T0).stale  # nothing is to be written for that
