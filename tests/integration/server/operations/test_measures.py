"""What the server counts: transactions and commits on both databases, ticks; and each server by itself."""

from __future__ import annotations

import contextlib
import threading

import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import EnvironmentRejected, NotFound, ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, Event, GivenUp, UserCodeStarted
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.loops import Loop
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.storage.server_stores import MeteredStore
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.server.measures import value
from tests.support.server.stored import add_node, add_people, add_run, place, tell


def one(connection: sa.Connection) -> object:
    return connection.scalar(sa.text("SELECT 1"))


def not_found(connection: sa.Connection) -> None:
    raise NotFound("a work refuses")


def test_transactions_are_counted_and_a_refusal_of_a_work_is_no_failure(database_url: str) -> None:
    measures = ServerMetrics()
    with contextlib.closing(Database(database_url, clock=SystemClock(), measures=measures)) as database:
        database.read(one)
        for _ in range(3):
            database.write(one)
        with pytest.raises(NotFound):
            database.write(not_found)
    assert value(measures, "sgpu_transaction_seconds_count", kind="read") == 1
    assert value(measures, "sgpu_transaction_seconds_count", kind="write") == 4
    assert value(measures, "sgpu_transaction_failures_total", kind="write") == 0
    with pytest.raises(ServerUnavailable):
        database.write(one)
    assert value(measures, "sgpu_transaction_failures_total", kind="write") == 1
    if database.kind == "sqlite":
        assert value(measures, "sgpu_commits_total") == value(measures, "sgpu_commit_works_sum") == 3


def test_calls_to_a_store_are_counted_and_those_that_failed() -> None:
    measures = ServerMetrics()
    store = MeteredStore(MemoryStore(), name="blobs", measures=measures)
    key = f"packs/{'0' * 64}"
    store.put({key: b"123"})
    assert store.get(key) == b"123" and store.present([key]) == {key}
    assert [stored.key for stored in store.list("packs")] == [key]
    store.delete([key])
    with pytest.raises(KeyError):  # is an answer
        store.get(key)
    with pytest.raises(EnvironmentRejected):
        store.get("no key")
    assert value(measures, "sgpu_upload_bytes_total", store="blobs") == 3
    assert value(measures, "sgpu_store_seconds_count", store="blobs", operation="get") == 3
    assert value(measures, "sgpu_store_errors_total", store="blobs", operation="get") == 1
    assert value(measures, "sgpu_store_errors_total", store="blobs", operation="put") == 0


def test_what_becomes_of_runs_is_counted(services: Services) -> None:
    database = services.database
    assert isinstance(database, Database)
    add_people(database, "alice")
    add_node(database)
    done, gone = (add_run(database) for _ in range(2))
    for run_id in (done, gone):
        place(database, run_id)
    endings: dict[str, Event] = {
        done: AttemptEnded(Reason.COMPLETED, began=True),
        gone: GivenUp(reason=Reason.NODE_GONE),
    }
    for run_id, ending in endings.items():
        services.announcer.announce(tell(database, run_id, UserCodeStarted()))
        told = tell(database, run_id, ending)
        services.announcer.announce(told)
    assert value(services.measures, "sgpu_runs_ended_total", reason="completed") == 1
    assert value(services.measures, "sgpu_runs_ended_total", reason="node_gone") == 1
    assert value(services.measures, "sgpu_attempts_given_up_total", reason="node_gone") == 1


def test_two_servers_of_one_process_do_not_count_together() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.submitted.inc()
    assert (value(first, "sgpu_runs_submitted_total"), value(second, "sgpu_runs_submitted_total")) == (1, 0)
    assert b"sgpu_runs_submitted_total 1.0" in first.text()


def test_ticks_are_counted_good_and_failed_ones() -> None:
    measures, ticked, outcomes = ServerMetrics(), threading.Semaphore(0), [KeyError("a mistake"), None]

    def tick(now_ns: int) -> int | None:
        ticked.release()
        error = outcomes.pop(0) if outcomes else None
        if error is not None:
            raise error
        return None

    loop = Loop("scheduler", tick, clock=SystemClock(), measures=measures)
    loop.start()
    for _ in range(2):
        assert ticked.acquire(timeout=30)
    assert loop.stop(timeout_s=30)
    assert value(measures, "sgpu_tick_failures_total", loop="scheduler") == 1
    assert value(measures, "sgpu_tick_seconds_count", loop="scheduler") == 2
    assert value(measures, "sgpu_tick_success_time_seconds", loop="scheduler") > 1e9


def test_a_loop_that_finishes_nothing_says_so() -> None:
    clock = FakeClock()
    loop = Loop("scheduler", lambda _now_ns: None, clock=clock, late_s=60)
    clock.advance(60)
    assert loop.problem() == ""
    clock.advance(5)
    assert loop.problem() == golden("server.measures.scheduler-finished-nothing")
