"""What runs cost by now, and what one would: from the ledger, from facts beyond it, from the price book."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import NotFound
from serverless_gpu.model.billing.pricing import Price
from serverless_gpu.model.cost import Cost, CostEstimate
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import FactKind, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp, UserCodeStarted
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.server.billing import run_costs
from serverless_gpu.server.billing.run_costs import CostRequest
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle.metering import Now
from serverless_gpu.server.records import crews, facts, prices, runs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.runs import CostView, EstimateRequest, RunPage
from tests.support.golden import golden
from tests.support.server.charged import charge_all
from tests.support.server.charging import begun, end, fact, used, write_facts
from tests.support.server.made import made_services
from tests.support.server.served import Served
from tests.support.server.spent import UNIT, Spent
from tests.support.server.stored import T0, TARGET, S, add_node, add_people, add_run, place, tell
from tests.support.server.submitting import ALICE

HOUR_S = 3_600


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice")
    add_node(database)
    return made_services(database, tmp_path, clock=FakeClock(wall_ns=T0))


def cost(database: Database, run_id: str, *, now_ns: int = T0 + HOUR_S * S, at: Now | None = None) -> Cost:
    def read(connection: Any) -> Cost:
        run = runs.find(connection, run_id)
        assert run is not None
        return run_costs.cost_of(connection, run, at or Now(wall_ns=now_ns))

    return database.read(read)


# --- by now -----------------------------------------------------------------------------------------------------------


def test_a_run_that_waits_has_waited_and_used_nothing(services: Services, database: Database) -> None:
    run_id = add_run(database)
    found = cost(database, run_id, now_ns=T0 + 90 * S)
    assert (found.micros, found.gpu_ms, found.queued_ms, found.attempts) == (None, 0, 90_000, 0)
    assert not found.is_final and str(found) == golden("server.costing.nothing-used-so")


def test_what_goes_on_counts_up_to_when_it_was_heard_of_last(services: Services, database: Database) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=0)[:2])
    assert cost(database, run_id).gpu_ms == 0
    database.write(lambda connection: crews.note(connection, (run_id, 1, 0), lease_ns=T0 + 45 * S))
    found = cost(database, run_id)
    assert (found.gpu_ms, found.micros, found.is_final) == (90_000, 90_000, False)
    # What is written of that is up to 15 s behind; what is remembered is not, and a server that starts remembers less.
    services.leases.renew((run_id, 1, 0), now_ns=107 * S)
    heard = Now(wall_ns=T0 + 60 * S, boot_ns=117 * S, leases=services.leases)
    assert cost(database, run_id, at=heard).gpu_ms == 100_000
    services.leases.renew((run_id, 1, 0), now_ns=10 * S)
    assert cost(database, run_id, at=heard).gpu_ms == 90_000
    # A fact that is newer than the lease that was written says more; one that is older does not take anything back.
    write_facts(database, run_id, [fact(run_id, 2, FactKind.ALIVE, T0 + 60 * S)])
    assert cost(database, run_id).gpu_ms == 120_000
    write_facts(database, run_id, [fact(run_id, 3, FactKind.FREED, T0 + 61 * S)])
    database.write(lambda connection: crews.note(connection, (run_id, 1, 0), lease_ns=T0 + 90 * S))
    assert cost(database, run_id).gpu_ms == 122_000


def test_before_and_after_it_is_charged_a_run_costs_the_same(services: Services, database: Database) -> None:
    run_id = begun(database)
    write_facts(database, run_id, used(run_id, seconds=HOUR_S))
    end(database, run_id, at_ns=T0 + HOUR_S * S)
    before = cost(database, run_id)
    charge_all(services)
    after = cost(database, run_id)
    assert (after.micros, after.gpu_ms, after.queued_ms) == (7_200_000, 7_200_000, 2_000)
    assert after == msgspec.structs.replace(before, is_final=True)
    assert after.is_final and not before.is_final


def test_signs_of_life_of_a_week_are_not_read(services: Services, database: Database) -> None:
    run_id = begun(database)
    alive = [fact(run_id, 2 + minute, FactKind.ALIVE, T0 + 60 * minute * S) for minute in range(1, 1_000)]
    write_facts(database, run_id, [*used(run_id, seconds=0)[:2], *alive])
    read = database.read(lambda connection: facts.ends_of_crews(connection, [(run_id, 1, 0)]))[run_id, 1, 0]
    assert len(read) == 100 and [one.seq for one in read] == sorted(one.seq for one in read)
    assert cost(database, run_id).gpu_ms == 2 * 999 * 60_000


def test_what_the_platform_lost_is_counted_and_costs_nothing(services: Services, database: Database) -> None:
    run_id = begun(database, retry_on_infra=True)
    write_facts(database, run_id, used(run_id, seconds=600, until=FactKind.ALIVE))
    tell(database, run_id, GivenUp(reason=Reason.NODE_GONE), at_ns=T0 + 900 * S)
    charge_all(services)
    place(database, run_id, at_ns=T0 + 1_000 * S)
    tell(database, run_id, UserCodeStarted(), at_ns=T0 + 1_010 * S, exec_ns=T0 + 1_010 * S)
    found = cost(database, run_id)
    assert (found.attempts, found.gpu_ms, found.billed_ms, found.micros) == (2, 1_200_000, 0, 0)
    assert found.amount() == "0.00 USD" and not found.is_final


def test_a_run_that_is_tried_again_has_waited_since_its_last_attempt_ended(
    services: Services, database: Database
) -> None:
    run_id = begun(database, retry_on_infra=True)
    write_facts(database, run_id, used(run_id, seconds=600))
    end(database, run_id, Reason.GPU_LOST, at_ns=T0 + 1_000 * S)
    assert cost(database, run_id, now_ns=T0 + 1_005 * S).queued_ms == 7_000
    place(database, run_id, at_ns=T0 + 1_010 * S)
    assert cost(database, run_id, now_ns=T0 + 1_100 * S).queued_ms == 12_000
    charge_all(services)
    assert cost(database, run_id, now_ns=T0 + 1_100 * S).queued_ms == 12_000


def test_of_whom_one_may_not_see_the_run_one_learns_no_cost(server: Served) -> None:
    with pytest.raises(NotFound):
        server.connection().ask("GET", "/runs/01ARZ3NDEKTSV4RRFFQ69G5FAV/cost", answer=CostView)


def test_a_page_of_runs_says_what_each_costs_if_that_is_asked_for(server: Served) -> None:
    connection = server.connection()
    assert connection.ask("GET", "/runs?costs=true", answer=RunPage) == RunPage(runs=())


# --- before it runs ---------------------------------------------------------------------------------------------------


def add_devices(database: Database, name: str, pool: str, gpu_type: str, count: int) -> None:
    """Write a node with devices, in a pool."""
    devices = tuple(
        Device(uuid=f"{name}-{index}", index=index, type=gpu_type, memory_bytes=80 << 30, kind=DeviceKind.FAKE)
        for index in range(count)
    )
    hello = AgentHello(
        name=name,
        machine=name,
        boot_id="b",
        version="1",
        protocol=2,
        python="3.11",
        platform="linux-x86_64",
        devices=devices,
    )
    node = {
        "id": name,
        "name": name,
        "machine": name,
        "boot_id": "b",
        "principal": "alice",
        "pool": pool,
        "hello_json": msgspec.json.encode(hello).decode(),
        "seen_ns": T0,
    }
    database.write(lambda connection: connection.execute(tables.nodes.insert(), node))


@pytest.fixture
def book(database: Database) -> None:
    """Write prices, and nodes: two H100 in each of two on-demand pools, an A10, and eight H100 that are reserved."""
    pools = [("dear", "on-demand"), ("cheap", "on-demand"), ("own", "reserved")]
    add_people(database, "alice")
    told = [{"name": name, "kind": kind, "created_ns": T0} for name, kind in pools]
    database.write(lambda connection: connection.execute(tables.pools.insert(), told))
    for node, pool, gpu_type, count in (
        ("n2", "dear", "H100", 2),
        ("n3", "cheap", "H100", 2),
        ("n4", "cheap", "A10", 1),
        ("n5", "own", "H100", 8),
    ):
        add_devices(database, node, pool, gpu_type, count)
    own = [
        Price(resource="H100", micros_per_hour=3_000_000),
        Price(resource="H100", pool="cheap", micros_per_hour=2_000_000),
        Price(resource="H100", pool="own", micros_per_hour=1_000_000),
        Price(resource="core", micros_per_hour=40_000),
    ]

    def write(connection: Any) -> None:
        for price in own:
            prices.insert(connection, price, at_ns=T0)

    database.write(write)


def would_cost(database: Database, *, pool: str = "", node: str = "", **spec: Any) -> CostEstimate:
    asked = RunSpec(remote=True, **{"resources": Resources(gpus=2, gpu_type="H100"), **spec})
    wish = CostRequest(spec=asked, pool=pool, node=node)
    return database.read(lambda connection: run_costs.estimate(connection, wish, now_ns=T0, currency="EUR"))


_WISHES: list[tuple[dict[str, Any], int | None]] = [
    ({"pool": "cheap"}, 4_000_000),
    ({"pool": "own"}, 2_000_000),
    ({"node": "n3"}, 4_000_000),
    ({"node": "n2"}, 6_000_000),
    ({}, 6_000_000),  # nobody knows where yet: the dearest
    ({"node": "n5"}, 2_000_000),  # what it borrows in a reserved pool
    ({"node": "n2", "resources": Resources(gpus=None, gpu_type="H100", cpus=10)}, 6_400_000),
    ({"pool": "cheap", "resources": Resources(gpus=99, gpu_type="H100")}, 198_000_000),
    ({"resources": Resources(gpus=1, gpu_type="A10")}, None),
    ({"resources": Resources(gpus=1)}, None),  # an A10 would do, which has no price: nobody is told less than it is
    ({"resources": Resources(gpus=1, gpu_type="B200")}, None),
]


@pytest.mark.usefixtures("book")
def test_the_price_is_that_of_the_devices_it_would_get(database: Database) -> None:
    found = [(asked, would_cost(database, **asked).micros_per_hour) for asked, _ in _WISHES]
    assert found == _WISHES


@pytest.mark.usefixtures("book")
def test_an_estimate_says_what_it_rests_on(database: Database) -> None:
    found = would_cost(database, timeout_s=1_800.0, max_run_s=600.0, retries=1)
    assert (found.at_timeout_micros, found.currency) == (2_000_000, "EUR")
    assert found.basis == golden("server.costing.h100-00-eur")
    unpriced = would_cost(database, resources=Resources(gpus=1, gpu_type="A10"))
    assert golden("server.costing.a10-unpriced-sgpu") in unpriced.basis
    assert would_cost(database, resources=Resources()).text().startswith("unknown: ")


def test_an_estimate_says_what_is_left_of_the_budgets_it_would_count_for(database: Database, tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=T0)
    spent = Spent(database, made_services(database, tmp_path, clock=clock), clock)
    spent.set("own", kind="user", scope="alice", limit_micros=100 * UNIT)
    spent.set("all", limit_gpu_ms=3_600_000)
    spent.set("bobs", kind="user", scope="bob", limit_micros=UNIT)
    spent.start(spent.submit())
    asked = EstimateRequest(spec=RunSpec(remote=True, resources=Resources(gpus=1, gpu_type="H100")), target=TARGET)
    view = spent.services.estimates.make(ALICE, asked)
    # The minute ahead of the run that goes on is not left; whose budget it is not is told no amounts.
    assert view.budgets == (golden("server.costing.all-used-up"), golden("server.costing.own-40-00"))
    boss = msgspec.structs.replace(ALICE, role="operator")
    assert golden("server.costing.all-3540-gpu") in spent.services.estimates.make(boss, asked).budgets
    assert view.cost is not None and view.cost.micros_per_hour == 3_600 * UNIT and view.policy == ""


def test_an_estimate_says_that_a_budget_has_no_room_now_for_what_would_wait(database: Database, tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=T0)
    spent = Spent(database, made_services(database, tmp_path, clock=clock), clock)
    spent.set("own", kind="user", scope="alice", limit_micros=100 * UNIT, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    asked = EstimateRequest(spec=RunSpec(remote=True, resources=Resources(gpus=1, gpu_type="H100")), target=TARGET)
    view = spent.services.estimates.make(ALICE, asked)
    waits = spent.submit()  # just like it
    spent.go_on(1, run_id)
    assert (view.at_ns, view.basis) == (None, spent.services.sentences.of(waits))
    assert golden("server.costing.budget-own-room") in view.basis
