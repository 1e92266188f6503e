"""Devices with their holders and measured values: what each reader sees, and for how long values count as current."""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import NotFound
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.model.telemetry import GpuSample
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.nodes.device_samples import FRESH_S
from serverless_gpu.server.nodes.node_service import WITHOUT, NodeCommand
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import DeviceSample, Heartbeat
from serverless_gpu.wire.nodes import DeviceView, ForgetRequest, QuarantineRequest
from tests.support.server.agents import H100, NODE, hello
from tests.support.server.stored import add_people, add_run, place

ROOT = Caller(name="root", role="admin")
ALICE = Caller(name="alice", role="member")
BOB = Caller(name="bob", role="member")
BUSY = GpuSample(busy_percent=87.0, memory_bytes=70 << 30, temperature_celsius=61.0, power_watts=640.0)


@pytest.fixture
def node_id(services: Services) -> str:
    add_people(services.database, "node", "alice", "bob", "root")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, hello(takes=(WITHOUT,))).node


def beat(services: Services, node_id: str, *samples: DeviceSample) -> None:
    services.agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, samples=samples))


def devices(services: Services, who: Caller = ROOT, node: str = "") -> dict[str, DeviceView]:
    return {device.uuid: device for device in services.device_views.view(who, node=node).devices}


def hold(services: Services, node_id: str, *uuids: str, owner: str = "alice") -> str:
    """Place a run whose node has reported its reservation."""
    database = services.database
    run = add_run(database, owner=owner)  # type: ignore[arg-type] # the fixture's is a Database
    place(database, run, node_id=node_id)  # type: ignore[arg-type]  # alike
    fact = Fact(
        attempt=f"{run}:1",
        seq=1,
        kind=FactKind.RESERVED,
        boot_id="b1",
        boottime_ns=1,
        wall_ns=1,
        gpus=uuids,
        cpus=0,
        memory_bytes=0,
    )
    row = {"run_id": run, "fence": 1, "crew": 0, "seq": 1, "fact_json": msgspec.json.encode(fact).decode()}
    database.write(lambda connection: connection.execute(tables.facts.insert(), row))
    return run


def test_a_device_shows_its_values_until_they_are_old(services: Services, clock: FakeClock, node_id: str) -> None:
    beat(services, node_id, DeviceSample(uuid=H100[0].uuid, sample=BUSY))
    assert devices(services)[H100[0].uuid].sample == BUSY
    assert devices(services)[H100[1].uuid].sample is None
    clock.advance(FRESH_S + 1)
    beat(services, node_id)
    assert devices(services)[H100[0].uuid].sample is None
    history = services.device_views.history("n1").devices
    assert [one.series["busy_percent"] for one in history if one.uuid == H100[0].uuid] == [(87.0, None)]


def test_a_holder_is_named_to_everybody_but_the_run_only_to_those_who_may_see_it(
    services: Services, node_id: str
) -> None:
    run = hold(services, node_id, H100[0].uuid, H100[1].uuid)
    for who, shown in ((ROOT, run), (ALICE, run), (BOB, "")):
        holder = devices(services, who)[H100[1].uuid].holder
        assert holder is not None
        assert (holder.owner, holder.run) == ("alice", shown)
    assert devices(services)[H100[0].uuid].state == "held"
    assert devices(services)[H100[2].uuid].state == "free"


def test_a_device_of_an_ended_run_has_no_holder(services: Services, node_id: str) -> None:
    run = hold(services, node_id, H100[0].uuid)
    ended = sa.update(tables.crews).where(tables.crews.c.run_id == run).values(ended_ns=1)
    services.database.write(lambda connection: connection.execute(ended))
    assert devices(services)[H100[0].uuid].holder is None


def test_states_of_devices(services: Services, clock: FakeClock, node_id: str) -> None:
    asked = NodeCommand(who=ROOT, reach="all", node="n1")
    services.node_rules.quarantine(asked, QuarantineRequest(uuid=H100[3].uuid, on=True, note="XID 79"))
    services.agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, unavailable=(H100[4].uuid,)))
    there = devices(services, node="n1")
    assert (there[H100[3].uuid].state, there[H100[3].uuid].note) == ("quarantined", "XID 79")
    assert there[H100[4].uuid].state == "outside"
    clock.advance(3600)
    assert {device.state for device in devices(services).values()} == {"away"}


def test_a_forgotten_node_leaves_no_values(services: Services, clock: FakeClock, node_id: str) -> None:
    beat(services, node_id, DeviceSample(uuid=H100[0].uuid, sample=BUSY))
    clock.advance(3600)
    services.nodes.forget(ROOT, "n1", known_dead=ForgetRequest(i_know_it_is_dead=True).i_know_it_is_dead)
    assert services.device_samples.latest(wall_ns=clock.wall_ns()) == {}
    with pytest.raises(NotFound):
        services.device_views.history("n1")
