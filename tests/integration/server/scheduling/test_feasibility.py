"""What no known node could ever serve is refused before it is queued."""

from __future__ import annotations

import re

import msgspec
import pytest

from serverless_gpu.engines.base import EngineNode
from serverless_gpu.errors import NoSuitableNode
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import Command, Resources, RunSpec
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.records import runs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.runs import RunRequest, RunView, Target
from serverless_gpu.wire.server_status import DrainRequest
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello
from tests.support.server.made import recomposed
from tests.support.server.stored import add_people, new_run

pytestmark = pytest.mark.any_database

ALICE = Caller(name="alice", role="member")
ROOT = Caller(name="root", role="admin")


@pytest.fixture(autouse=True)
def people(services: Services) -> None:
    """Let those who ask exist."""
    add_people(services.database, "node", "alice", "root")  # type: ignore[arg-type] # a Database


def join(services: Services, devices: str = "H100:2") -> str:
    return services.agents.hello(NODE, hello(devices=parse_fake(devices))).node


def request(gpus: int = 1, gpu_type: str | None = "H100", *, wait: bool = False) -> RunRequest:
    new = new_run()
    spec = RunSpec(
        resources=Resources(gpus=gpus, gpu_type=gpu_type),
        payload=Command(argv=("true",)),
        environment="live",
        wait=wait,
    )
    target = Target(machine="m1", caller="m1", python="3.11", platform="linux-x86_64")
    return RunRequest(id=new.id, spec=spec, target=target, context=msgspec.Raw(b"{}"))


def submit(services: Services, asked: RunRequest) -> RunView:
    return services.submissions.submit(ALICE, asked)


def test_23B1_a_run_that_no_node_could_serve_is_refused_and_not_written_down(services: Services) -> None:
    join(services)
    asked = request(4)
    with pytest.raises(NoSuitableNode, match=golden("server.feasibility.largest-only-node")) as refused:
        submit(services, asked)
    assert (refused.value.gpus, refused.value.gpu_type) == (4, "H100")
    assert {"gpus": 2} in refused.value.choices
    assert services.database.read(lambda connection: runs.find(connection, asked.id)) is None


def test_23B1_with_wait_it_is_queued_and_reads_until_when(services: Services) -> None:
    join(services)
    run_id = submit(services, request(4, wait=True)).id
    make_scheduler(services).tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.QUEUED
    assert golden("server.feasibility.waits-node-could") in services.sentences.of(run_id)


def test_23B1_drained_and_silent_nodes_count_for_a_day(services: Services, clock: FakeClock) -> None:
    join(services)
    services.drain.put(ROOT, DrainRequest(on=True))
    clock.advance(23 * 3_600)
    assert submit(services, request(2)).state is State.QUEUED
    clock.advance(2 * 3_600)
    services.agents.hello(Caller(name="root", role="admin"), hello("n2", machine="m2", devices=parse_fake("CPU:4")))
    with pytest.raises(NoSuitableNode, match=re.escape(golden("server.feasibility.files-lie-machine"))):
        submit(services, request(2))


def test_23B1_the_same_request_again_finds_its_run_though_the_node_is_gone(services: Services) -> None:
    join(services)
    asked = request(2)
    submit(services, asked)
    services.agents.hello(Caller(name="root", role="admin"), hello("n2", machine="m2", devices=parse_fake("CPU:4")))
    services.nodes.forget(ROOT, "n1", known_dead=True)
    assert submit(services, asked).deduplicated


def test_23B1_a_server_that_knows_no_node_yet_queues_and_decides_once_one_has_joined(services: Services) -> None:
    scheduler = make_scheduler(services)
    could, never = submit(services, request(2)).id, submit(services, request(4)).id
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, never).state is State.QUEUED
    join(services)
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, could).state is State.STARTING
    run = find(services, never)
    assert (run.state, run.reason) == (State.FAILED, Reason.UNSATISFIABLE)


def test_23B1_while_a_node_of_the_engine_has_not_said_hello_nothing_is_refused(services: Services) -> None:
    known = [EngineNode(name="n1"), EngineNode(name="own")]
    services = recomposed(services, engine_nodes=lambda: known)
    join(services)
    scheduler = make_scheduler(services)
    run_id = submit(services, request(4)).id
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.QUEUED
    del known[1]
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, run_id).reason is Reason.UNSATISFIABLE
