"""Looks at budgets that meet: of several states of the database, and while runs are placed."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from serverless_gpu.errors import BudgetExhausted
from serverless_gpu.model.billing.budget import Standing
from serverless_gpu.model.billing.pricing import Price, Tariff
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import charges, prices, runs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.spent import PER_SECOND, ROOT, UNIT, Spent
from tests.support.server.submitting import ALICE, request

MORNING = 1_794_729_600_000_000_000  # 2026-11-15 08:00 UTC


@pytest.fixture
def spent(database: Database, tmp_path: Path) -> Spent:
    clock = FakeClock(wall_ns=MORNING)
    return Spent(database, made_services(database, tmp_path, clock=clock), clock)


def meanwhile(work: Callable[[], object]) -> None:
    """Do something in another thread while this one is in a transaction."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result(30)


def look(spent: Spent) -> dict[str, Standing]:
    services = spent.services
    return services.database.read(
        lambda connection: services.spending.look(connection, services.budget_admission.as_of())
    )


def test_a_queue_that_was_read_before_a_charge_was_written_makes_nothing_count_twice(
    spent: Spent, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent.set(limit_micros=10_000 * UNIT, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.submit(gpus=9, wait=True)  # budgets are asked only while a run waits
    there: list[int] = []
    real = runs.queue

    def slow(connection: sa.Connection) -> list[tuple[str, int]]:
        found = real(connection)

        def end() -> None:
            spent.end(run_id)
            there.append(look(spent)["llm"].used.micros)

        meanwhile(end)
        return found

    monkeypatch.setattr(runs, "queue", slow)
    spent.scheduler.tick(spent.clock.boottime_ns())
    monkeypatch.undo()
    there.append(spent.services.spending.standings()["llm"].used.micros)
    there.append(look(spent)["llm"].used.micros)
    assert there == [10 * UNIT] * 3


def test_a_budget_that_is_set_while_somebody_looks_is_known_to_the_next_who_looks(spent: Spent) -> None:
    spent.set(limit_micros=10_000 * UNIT)

    def work(connection: sa.Connection) -> dict[str, Standing]:
        as_of = spent.services.budget_admission.as_of()
        connection.scalar(sa.text("SELECT count(*) FROM budgets"))
        meanwhile(lambda: spent.database.write(lambda other: other.execute(sa.text("DELETE FROM budgets"))))
        spent.services.spending.change()
        return spent.services.spending.look(connection, as_of)

    assert spent.database.read(work).keys() == {"llm"}  # it is an older state, and says so
    assert look(spent) == {}


def test_a_look_that_fails_in_the_middle_counts_nothing_twice(spent: Spent, monkeypatch: pytest.MonkeyPatch) -> None:
    spent.set(limit_micros=10_000 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.end(run_id)
    other = spent.submit()

    def broken(connection: sa.Connection, wanted: object) -> object:
        raise OSError("the database is away")

    monkeypatch.setattr("serverless_gpu.server.records.charges.of_attempts", broken)
    with pytest.raises(OSError, match="away"):
        look(spent)
    monkeypatch.undo()
    assert look(spent)["llm"].used.micros == 10 * UNIT
    spent.start(other)


@pytest.mark.parametrize("is_looked", [False, True])
def test_two_that_are_placed_together_do_not_both_get_the_last_of_a_budget(spent: Spent, is_looked: bool) -> None:
    """Whoever looks while they are placed does not see them, and lets nobody forget the first."""
    spent.set(limit_micros=100 * UNIT, hard=True)
    spent.tick()
    asked = [spent.submit(), spent.submit()]

    def enter(connection: sa.Connection) -> list[str]:
        said = []
        for run_id in asked:
            run = runs.find(connection, run_id)
            assert run is not None
            account = charges.account_of_run(connection, run, gpu_type="H100", pool="", currency="USD")
            tariff = Tariff(gpu_micros_per_hour=PER_SECOND)
            now_ns = spent.clock.wall_ns()
            said.append(spent.services.spending.enter(connection, run, account, tariff, gpus=1, now_ns=now_ns))
            if is_looked:
                meanwhile(lambda: look(spent))
        return said

    first, second = spent.database.write(enter)
    assert first == "" and "does not yet cover" in second
    assert look(spent)["llm"].held.micros == 60 * UNIT  # the transaction may not be over yet
    spent.services.spending.entered()
    assert look(spent)["llm"].held.micros == 0  # nothing came of it


def test_who_asks_how_budgets_stand_has_nothing_read_that_goes_on(spent: Spent) -> None:
    spent.set(limit_micros=1_000 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(30, run_id)
    spent.clock.advance(3)
    spent.hear(run_id)
    moment = spent.services.spending.moment()
    (listed,) = spent.services.budgets.view_all(ROOT, "all").budgets
    assert listed.used == spent.services.budgets.view(ROOT, "all", "llm").used == 30 * UNIT
    assert spent.services.spending.moment() == moment
    assert spent.view().used == 33 * UNIT


def price(spent: Spent, resource: str, pool: str = "", *, times: int = 1) -> None:
    row = Price(resource=resource, pool=pool, micros_per_hour=times * PER_SECOND, from_ns=0)
    spent.database.write(lambda connection: prices.insert(connection, row, at_ns=0))


def with_cores(spent: Spent) -> str:
    asked = request(call=b"call", resources=Resources(gpus=1, gpu_type="H100", cpus=8))
    return spent.services.submissions.submit(ALICE, asked).id


def test_a_run_whose_cores_a_budget_has_no_room_for_waits_beside_the_line_and_is_told_so(spent: Spent) -> None:
    spent.set(limit_micros=700 * UNIT, hard=True)
    dear = with_cores(spent)  # nine a second once cores have a price: its first minute is more than what others leave
    first = spent.submit(gpus=3)
    price(spent, "core")
    spent.set(limit_micros=530 * UNIT, hard=True)
    for _ in range(2):
        spent.tick()
        assert golden("server.budgets.budget-llm-room") in spent.services.sentences.of(dear)
        assert spent.find(dear).state is State.QUEUED
    assert spent.find(first).state is State.STARTING  # nothing is kept for who cannot start


def test_a_run_that_cannot_pay_the_first_minute_of_its_cores_is_refused_at_once(spent: Spent) -> None:
    price(spent, "core")
    spent.set(limit_micros=100 * UNIT, hard=True)
    with pytest.raises(BudgetExhausted, match=re.escape(golden("server.budgets.less-left-month"))):
        with_cores(spent)
    spent.submit()


def test_a_run_that_may_come_to_a_pool_is_let_in_for_what_that_pool_costs(spent: Spent) -> None:
    spent.services.pools.put(ROOT, "fast", PoolRequest(nodes=("n1",)))
    price(spent, "H100", "fast", times=5)
    spent.set(limit_micros=100 * UNIT, hard=True)
    run_id = spent.submit()
    for _ in range(2):
        spent.tick()
        assert golden("server.budgets.budget-llm-room") in spent.services.sentences.of(run_id)
