"""Of those who wait, the self-check finds who was forgotten, and leaves alone who is kept back by a rule."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler, make_self_check
from serverless_gpu.server.records import nodes, runs
from serverless_gpu.testing import FakeClock
from tests.support.server.agents import NODE, find, hello, submit
from tests.support.server.stored import add_people, new_run

pytestmark = pytest.mark.any_database


@pytest.fixture(autouse=True)
def people(services: Services) -> None:
    """Let there be somebody."""
    add_people(services.database, "node", "alice")  # type: ignore[arg-type] # the fixture's is a Database


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said to be wrong with those who wait."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "violated: I11" in line or "violated: I14" in line]


def test_F81_a_run_that_fits_and_of_which_the_scheduler_says_that_there_is_no_room_is_found_after_a_minute(
    services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = submit(services, 2)
    make_scheduler(services).tick(clock.boottime_ns())
    services.agents.hello(NODE, hello())  # and nobody rings the scheduler
    check = make_self_check(services)
    for _ in range(13):
        assert errors(caplog) == []
        services.presence.heard(stored_node_id(services), now_ns=clock.boottime_ns())
        check.tick(clock.boottime_ns())
        clock.advance(5)
    check.tick(clock.boottime_ns())
    (said,) = errors(caplog)
    assert said.startswith(f"invariant violated: I11 run {run_id}: the run still waits, although it could start")
    make_scheduler(services).tick(clock.boottime_ns())
    assert find(services, run_id).state is State.STARTING


def test_F81_who_waits_for_others_that_devices_are_kept_for_is_not_forgotten(
    services: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    services.agents.hello(NODE, hello())
    scheduler = make_scheduler(services)
    busy = submit_with(services, gpus=1)
    scheduler.tick(clock.boottime_ns())
    assert find(services, busy).state is State.STARTING
    clock.advance(5)
    large = submit_with(services, gpus=8)
    clock.advance(1)  # of two that came at once the one whose identifier is the lower is the first
    small = submit_with(services, gpus=1)
    check = make_self_check(services)
    for _ in range(15):
        services.presence.heard(stored_node_id(services), now_ns=clock.boottime_ns())
        services.leases.renew((busy, 1, 0), now_ns=clock.boottime_ns())
        scheduler.tick(clock.boottime_ns())
        check.tick(clock.boottime_ns())
        clock.advance(5)
    assert {find(services, run_id).state for run_id in (large, small)} == {State.QUEUED}  # seven of eight are free
    assert errors(caplog) == []


def submit_with(services: Services, *, gpus: int) -> str:
    """Write a run that waits, and says how long it takes at most."""
    new = new_run(resources=Resources(gpus=gpus, gpu_type="H100"), timeout_s=3_600.0)
    new = msgspec.structs.replace(new, context_sealed=services.sealer.seal(b"{}", about=new.id))
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=services.clock.wall_ns()))
    return new.id


def stored_node_id(services: Services) -> str:
    """Return the identifier of the only node."""
    (node,) = services.database.read(nodes.every)
    return node.id
