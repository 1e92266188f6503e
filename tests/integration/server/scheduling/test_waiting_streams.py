"""Whoever watches a run that waits is told why, part by part, and told anew when that is something else."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import Resources
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.queue import WaitView
from serverless_gpu.wire.runs import (
    EstimateRequest,
    EstimateView,
    RunPage,
    RunRequest,
    RunView,
    StateMessage,
    StopRequest,
    StreamMessage,
)
from tests.support.server.played import Played
from tests.support.server.runs_api import Reader, request
from tests.support.server.served import Served


def asked(gpus: int, *, name: str = "", timeout_s: float | None = None) -> RunRequest:
    made = request(name=name, timeout_s=timeout_s)
    wide = msgspec.structs.replace(made.spec, resources=Resources(gpus=gpus, gpu_type="CPU"))
    return msgspec.structs.replace(made, spec=wide)


def submit(connection: Connection, gpus: int, *, name: str, timeout_s: float | None = None) -> RunView:
    return connection.ask("POST", "/runs", asked(gpus, name=name, timeout_s=timeout_s), answer=RunView)


def wait_of(reader: Reader, reason: str, place: int) -> WaitView:
    """Return the wait of a reason and a place that a reader is told; others may come before it."""
    for number in range(1, 50):
        told = [each.waiting for each in reader.until(StateMessage, number) if isinstance(each, StateMessage)]
        for wait in told:
            if wait is not None and (wait.reason, wait.place) == (reason, place):
                return wait
    raise AssertionError(f"no wait for {reason} at place {place}: {reader.messages}")


def test_a_stream_tells_what_is_waited_for_and_when_that_changes(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    node.join()
    first = submit(connection, 3, name="bert-ft", timeout_s=600.0)
    assert node.order().run_id == first.id
    second, third = submit(connection, 4, name="second"), submit(connection, 4, name="third")
    reader = Reader(connection.stream("GET", f"/runs/{third.id}/events", answer=StreamMessage))
    told = wait_of(reader, "reserved", 2)
    assert (told.count, told.gpu_type, told.node, told.free) == (4, "CPU", "played", 1)
    assert told.ahead.endswith("/second")
    (holder,) = told.holders
    assert holder.title.endswith("/bert-ft") and holder.count == 3 and holder.is_bound
    assert holder.until_ns is not None and holder.until_ns > first.created_ns + 600 * 10**9
    connection.ask("POST", f"/runs/{second.id}/stop", StopRequest(), answer=RunView)
    told = wait_of(reader, "capacity", 1)
    assert told.ahead == ""
    views = {run.id: run for run in connection.ask("GET", "/runs", answer=RunPage).runs}
    assert views[first.id].waiting is None and views[second.id].waiting is None
    assert views[third.id].waiting is not None and "holds 3 until" in views[third.id].sentence
    connection.ask("POST", f"/runs/{third.id}/stop", StopRequest(), answer=RunView)
    reader.all()


@pytest.mark.parametrize(
    ("gpus", "words"),
    [(1, "enough devices are free"), (4, "ends of the runs that have the devices"), (5, "the largest has 4")],
)
def test_an_estimate_rests_on_what_goes_on_now(server: Served, gpus: int, words: str) -> None:
    connection, node = server.connection(), Played(server)
    node.join()
    first = submit(connection, 3, name="bert-ft", timeout_s=600.0)
    assert node.order().run_id == first.id
    wished = asked(gpus)
    question = EstimateRequest(spec=wished.spec, target=wished.target)
    found = connection.ask("POST", "/estimates", question, answer=EstimateView)
    assert words in found.basis
    assert (found.at_ns is None, found.impossible) == (gpus == 5, gpus == 5)
    if gpus == 4:
        assert found.waiting is not None and found.waiting.holders[0].title.endswith("/bert-ft")
    assert found.place == (1 if gpus == 4 else 0)
    assert not found.is_bound  # nothing is kept for who has not come
    assert connection.ask("GET", "/runs", answer=RunPage).runs[0].state is not State.QUEUED
