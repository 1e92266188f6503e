"""Looks at budgets that meet: of several states of the database, and while runs are placed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from serverless_gpu.model.budget import Standing
from serverless_gpu.model.pricing import Tariff
from serverless_gpu.server import accounts, affording, runs
from serverless_gpu.server.database import Database
from serverless_gpu.testing import FakeClock
from tests.server.made import made_services
from tests.server.spent import PER_SECOND, UNIT, Spent

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
    return services.database.read(lambda connection: services.spending.look(connection, affording.as_of(services)))


def test_a_queue_that_was_read_before_a_charge_was_written_makes_nothing_count_twice(
    spent: Spent, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent.set(limit_micros=10_000 * UNIT, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.submit(gpus=9)  # somebody waits, or nobody asks budgets
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
        as_of = affording.as_of(spent.services)
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

    monkeypatch.setattr("serverless_gpu.server.charges.of_attempts", broken)
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
            account = accounts.of_run(connection, run, gpu_type="H100", pool="", currency="USD")
            tariff = Tariff(gpu_micros_per_hour=PER_SECOND)
            now_ns = spent.clock.wall_ns()
            said.append(spent.services.spending.enter(run, account, tariff, gpus=1, now_ns=now_ns))
            if is_looked:
                meanwhile(lambda: look(spent))
        return said

    first, second = spent.database.write(enter)
    assert first == "" and "has no room" in second
    assert look(spent)["llm"].held.micros == 60 * UNIT  # the transaction may not be over yet
    spent.services.spending.entered()
    assert look(spent)["llm"].held.micros == 0  # nothing came of it
