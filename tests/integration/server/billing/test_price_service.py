"""The price book: what is in force, since when, and that no past changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu.cli import program
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.billing.pricing import MICROS_MAX, Tariff
from serverless_gpu.server.billing import price_service
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, prices
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.billing import PriceRequest, PriceSet
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.served import Served
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place

WHO = Caller(name="alice", kind="user")
HOUR = 3600 * S


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice")
    add_node(database)
    return made_services(database, tmp_path, clock=clock)


def put(
    services: Services, resource: str = "H100", micros: int = 3_000_000, *, pool: str = "", at: int | None = None
) -> PriceSet:
    return services.prices.set(WHO, resource, PriceRequest(micros_per_hour=micros, pool=pool, from_ns=at))


def paid(database: Database, at_ns: int, *, gpu_type: str = "H100", pool: str = "default") -> int | None:
    return database.read(lambda connection: prices.tariff(connection, gpu_type, pool, at_ns, "USD")).gpu_micros_per_hour


def windows(services: Services) -> list[tuple[int, int | None, int]]:
    """Return from, until and amount of each row, in hours after T0."""
    rows = services.prices.view(past=True).prices
    return [
        ((row.from_ns - T0) // HOUR, None if row.until_ns is None else (row.until_ns - T0) // HOUR, row.micros_per_hour)
        for row in rows
    ]


def test_a_price_ends_the_one_before_and_is_what_is_paid_from_then_on(
    services: Services, database: Database, clock: FakeClock
) -> None:
    assert paid(database, T0) is None
    put(services, "h-100", 1)
    clock.advance(2 * 3600)
    done = put(services, micros=2)
    assert [view.micros_per_hour for view in done.ended] == [1] and done.withdrawn == ()
    assert windows(services) == [(0, 2, 1), (2, None, 2)]
    assert [paid(database, T0 + hours * HOUR) for hours in (0, 1, 2, 9)] == [1, 1, 2, 2]
    assert [view.in_force for view in services.prices.view().prices] == [True]


def test_a_price_is_planned_replaced_and_withdrawn(services: Services, database: Database, clock: FakeClock) -> None:
    put(services, micros=1)
    put(services, micros=5, at=T0 + 10 * HOUR)
    put(services, micros=3, at=T0 + 4 * HOUR)
    assert windows(services) == [(0, 4, 1), (4, 10, 3), (10, None, 5)]
    done = put(services, micros=6, at=T0 + 10 * HOUR)  # the first was a slip of the finger
    assert [view.micros_per_hour for view in done.withdrawn] == [5]
    assert windows(services) == [(0, 4, 1), (4, 10, 3), (10, None, 6)]
    clock.advance(3600)
    done = services.prices.end(WHO, "H100", until_ns=T0 + 2 * HOUR)
    assert [view.micros_per_hour for view in done.withdrawn] == [3, 6]
    assert windows(services) == [(0, 2, 1)]
    assert [paid(database, T0 + hours * HOUR) for hours in (1, 2)] == [1, None]
    with pytest.raises(NotFound, match="has no price"):
        services.prices.end(WHO, "H100", until_ns=T0 + 2 * HOUR)


def test_a_book_that_is_full_can_still_be_corrected(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_service, "PRICES_MAX", 1)
    put(services, micros=1)
    put(services, micros=2)
    assert [row.micros_per_hour for row in services.prices.view().prices] == [2]
    with pytest.raises(InvalidValue, match="rows, the maximum"):
        put(services, "A10")


def test_the_past_is_refused_once_something_was_placed_that_could_have_paid(
    services: Services, database: Database, clock: FakeClock
) -> None:
    clock.advance(2 * 3600)
    put(services, micros=1, at=T0)  # nothing was: it may be
    place(database, add_run(database, at_ns=T0 + HOUR), at_ns=T0 + HOUR)  # two H100
    for resource in ("H100", "core", "memory"):
        with pytest.raises(InvalidValue, match=re.escape(golden("server.pricing.cannot-change-past"))):
            put(services, resource, 2, at=T0 + HOUR // 2)
    with pytest.raises(InvalidValue, match=re.escape(golden("server.pricing.cannot-change-past"))):
        services.prices.end(WHO, "H100", until_ns=T0 + HOUR // 2)
    put(services, "A10", 2, at=T0 + HOUR // 2)
    put(services, micros=2, at=T0 + HOUR + 1)
    assert [paid(database, T0 + HOUR + more) for more in (0, 1)] == [1, 2]


def test_a_pool_has_prices_of_its_own_and_a_price_may_be_made_of_dbus(services: Services, database: Database) -> None:
    made = PriceRequest(dbu_micros_per_hour=8_884_000, micros_per_dbu=700_000)
    view = services.prices.set(WHO, "H100", made).price
    assert view is not None and (view.micros_per_hour, view.dbu_micros_per_hour) == (6_218_800, 8_884_000)
    put(services, micros=1, pool="default")
    put(services, "core", 40_000)

    def pays(pool: str) -> Tariff:
        return database.read(lambda connection: prices.tariff(connection, "H100", pool, T0, "EUR"))

    assert [pays("default"), pays("other")] == [
        Tariff(gpu_micros_per_hour=1, core_micros_per_hour=40_000, currency="EUR"),
        Tariff(
            gpu_micros_per_hour=6_218_800, core_micros_per_hour=40_000, dbu_micros_per_hour=8_884_000, currency="EUR"
        ),
    ]


@pytest.mark.parametrize(
    ("resource", "asked", "why"),
    [
        ("H100", PriceRequest(), "contains no price"),
        ("H100", PriceRequest(micros_per_hour=1, micros_per_dbu=1), "two prices"),
        ("H100", PriceRequest(dbu_micros_per_hour=1), "contains no price"),
        ("core", PriceRequest(dbu_micros_per_hour=1, micros_per_dbu=1), "cannot have a price in DBUs"),
        ("H100", PriceRequest(dbu_micros_per_hour=MICROS_MAX, micros_per_dbu=MICROS_MAX), "would be over"),
        ("H100", PriceRequest(micros_per_hour=1, pool="none"), "there is no pool"),
        ("\x1b[31m", PriceRequest(micros_per_hour=1), "is not a valid resource name"),
        ("  ", PriceRequest(micros_per_hour=1), "is not a valid resource name"),
    ],
)
def test_what_is_no_price_is_refused_and_nothing_is_written(
    services: Services, resource: str, asked: PriceRequest, why: str
) -> None:
    with pytest.raises(InvalidValue, match=why):
        services.prices.set(WHO, resource, asked)
    assert services.prices.view(past=True).prices == ()


def test_every_change_has_its_row_in_the_audit(services: Services, database: Database) -> None:
    put(services)
    services.prices.end(WHO, "H100", until_ns=T0 + HOUR)
    found = database.read(audit.entries)
    assert [(row.principal, row.action, row.subject) for row in found] == [
        ("alice", "price.set", "H100"),
        ("alice", "price.end", "H100"),
    ]
    assert found[0].detail == {"micros_per_hour": 3_000_000, "dbu_micros_per_hour": 0, "pool": "", "from_ns": T0}


Said = Callable[..., str]


@pytest.fixture
def said(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """Yield what runs `sgpu` as the administrator and returns what it printed."""
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", server.token)

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(program.sgpu, arguments, catch_exceptions=status != 1, prog_name="sgpu")
        assert done.exit_code == status, done.output
        return done.output

    yield run


def test_prices_are_set_listed_and_ended_by_command(server: Served, said: Said) -> None:
    assert said("price", "list") == golden("server.pricing.nothing-price-used")
    server.connection().ask("PUT", "/pools/lab", PoolRequest(), answer=PoolView)
    assert said("price", "set", "h100", "3.49") == golden("server.pricing.h100-49-usd")
    planned = said("price", "set", "H100", "2.99", "--from", "2096-12-01")
    assert planned.splitlines()[0] == golden("server.pricing.h100-99-usd")
    assert planned.splitlines()[1].startswith("before it: H100: 3.49 USD per device and hour, since ")
    said("price", "set", "memory", "0.005")
    made = said("price", "set", "H100", "--pool", "lab", "--dbu-per-gpu-hour", "8.884", "--usd-per-dbu", "0.70")
    assert made == golden("server.pricing.h100-pool-lab")
    assert golden("server.pricing.neither-catalogue-nor") in said("price", "set", "H1000", "1")
    lines = said("price", "list").splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["WHAT", "POOL", "PRICE"],
        ["H100", "every", "3.49"],
        ["H100", "every", "2.99"],
        ["H100", "lab", "6.2188"],
        ["H1000", "every", "1.00"],
        ["memory", "every", "0.005"],
    ]
    assert [line.rsplit("  ", 1)[1].strip() for line in lines[1:3]] == ["in force", "planned"]
    assert '"is_known"' in said("price", "end", "H1000", "--json")
    ends = said("price", "end", "memory", "--at", "2096-12-01").splitlines()
    assert ends[0].startswith("ends 2096-12-01T00:00:00Z: memory: 0.005 USD per GiB and hour, since ")
    ended = said("price", "end", "H100").splitlines()
    assert ended[0].startswith("ended: H100: 3.49") and ended[1].startswith("withdrawn: H100: 2.99")
    assert "2.99" not in said("price", "list", "--all")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("H100",), "the price is missing"),
        (("H100", "1", "--dbu-per-gpu-hour", "1"), "specify either AMOUNT"),
        (("H100", "1", "--dbu-per-gpu-hour", "1", "--usd-per-dbu", "1"), "specify either AMOUNT"),
        (("H100", "1000000"), "not an amount from 0 to 100,000"),
        (("H100", "--dbu-per-gpu-hour", "1"), "the price is missing"),
        (("H100", "NaN"), "not an amount"),
        (("H100", "dear"), "not a number"),
        (("H100", "0.0000001"), "six digits"),
        (("H100", "1", "--from", "tomorrow"), "not a time"),
        (("H100", "1", "--from", "1969-01-01"), "not between"),
    ],
)
def test_a_command_that_says_no_price_is_told_how_to(arguments: tuple[str, ...], why: str) -> None:
    done = CliRunner().invoke(program.sgpu, ("price", "set", *arguments), prog_name="sgpu")
    assert done.exit_code == 2 and why in done.output
