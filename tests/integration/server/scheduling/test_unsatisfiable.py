"""F82: what nothing that has joined can ever serve is told so at once, and ends after a while."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.scheduling.values import WaitReason
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import run_key
from serverless_gpu.server.scheduling.scheduler import Scheduler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.server_status import DrainRequest
from tests.support.server.agents import NODE, OTHER, find, hello, submit
from tests.support.server.made import recomposed
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

ROOT = Caller(name="root", role="admin")
HOUR = 3_600


@pytest.fixture
def scheduler(services: Services) -> Scheduler:
    """Let two nodes join, one with eight H100 and one with two, and return their scheduler."""
    add_people(services.database, "node", "other", "alice", "bob")  # type: ignore[arg-type] # a Database
    join(services)
    return make_scheduler(services)


def join(services: Services) -> None:
    """Let both nodes say that they are there."""
    services.agents.hello(NODE, hello())
    small = hello("n2", machine="m2")
    services.agents.hello(OTHER, msgspec.structs.replace(small, devices=small.devices[:2]))


def hours(services: Services, scheduler: Scheduler, count: float) -> None:
    """Let time pass, and the scheduler look every hour and at the end."""
    while count > 0:
        services.clock.advance(min(1.0, count) * HOUR)  # type: ignore[attr-defined] # a FakeClock
        scheduler.tick(services.clock.boottime_ns())
        count -= 1


def test_F82_a_run_whose_node_leaves_the_pool_is_told_at_once_and_ends_after_a_day(
    services: Services, scheduler: Scheduler
) -> None:
    busy, run_id = submit(services, 8), submit(services, 8)
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, busy).state is State.STARTING
    services.nodes.forget(ROOT, "n1", known_dead=True)
    scheduler.tick(services.clock.boottime_ns())
    wait = services.sentences.wait(run_id)
    assert wait is not None and wait.reason is WaitReason.UNSATISFIABLE
    sentence = "needs 8 H100 on one node, and the largest has 2 (n2)"
    until = "the run waits for a suitable node until 16 Jan 08:00 at the latest"
    assert services.sentences.of(run_id) == f"{sentence}; {until}"
    services.clock.advance(31)  # type: ignore[attr-defined] # a FakeClock
    scheduler.tick(services.clock.boottime_ns())
    hours(services, scheduler, 23.9)
    assert find(services, run_id).state is State.QUEUED
    seen = services.hub.version(run_key(run_id))
    hours(services, scheduler, 0.2)
    run = find(services, run_id)
    assert (run.state, run.reason, run.detail) == (State.FAILED, Reason.UNSATISFIABLE, sentence)
    assert run.finished and services.hub.version(run_key(run_id)) > seen


def test_F82_a_run_that_can_be_served_again_counts_from_the_beginning(services: Services, scheduler: Scheduler) -> None:
    busy, run_id = submit(services, 8), submit(services, 8)
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, busy).state is State.STARTING
    services.nodes.forget(ROOT, "n1", known_dead=True)
    hours(services, scheduler, 20)
    join(services)
    services.drain.put(ROOT, DrainRequest(on=True))  # it is not placed; it could be
    hours(services, scheduler, 1)
    services.nodes.forget(ROOT, "n1", known_dead=True)
    hours(services, scheduler, 20)
    assert find(services, run_id).state is State.QUEUED
    hours(services, scheduler, 6)
    assert find(services, run_id).reason is Reason.UNSATISFIABLE


def test_F82_it_waits_for_ever_where_that_is_the_policy(services: Services, scheduler: Scheduler) -> None:
    settings = msgspec.structs.replace(services.settings, unsatisfiable_after_s=0.0)
    services = recomposed(services, settings=settings)
    scheduler = make_scheduler(services)
    run_id = submit(services, 64)
    hours(services, scheduler, 72)
    assert find(services, run_id).state is State.QUEUED


def test_a_node_that_is_silent_can_still_come_back(services: Services, scheduler: Scheduler, clock: FakeClock) -> None:
    run_id = submit(services, 8)
    clock.advance(HOUR)  # neither is heard of any more
    hours(services, scheduler, 48)
    assert find(services, run_id).state is State.QUEUED
