"""Histories about money, each with what it has to cost: a hard budget, a node that is cut off, the turn of a month.

An H100 costs 1 unit a second here, and a long run has one for 90 s. What was spent is read from the ledger's rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from serverless_gpu.model.billing.budget import Period
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.budgets import budget_enforcer
from serverless_gpu.server.composition import Services
from serverless_gpu.wire.agents import Start
from serverless_gpu.wire.billing import BudgetRequest, PriceRequest
from tests.e2e.simulation.plan import MONTH_ENDS_S, Plan, Step
from tests.e2e.simulation.spending import OPERATOR
from tests.e2e.simulation.steps import DO
from tests.e2e.simulation.supervisor import Work
from tests.e2e.simulation.timeline import EPOCH_S, S
from tests.e2e.simulation.world import Failed, World
from tests.support.reckoning import DAY_NS, totals

pytestmark = [pytest.mark.slow, pytest.mark.spot]
GRACE_S = 12.0
STOPPED_S = 6.0 + 3.0
"""As long as a gang takes to end, and its devices to be looked at."""
LAST_DAY = int(MONTH_ENDS_S) * S // DAY_NS - 1


class Lasting(World):
    """A world whose runs last as long as they are told to."""

    def __init__(self, *parts: Any, run_s: float) -> None:
        super().__init__(*parts)
        self._run_s = run_s

    def _work(self, start: Start) -> Work:
        return dataclasses.replace(super()._work(start), run_s=self._run_s)


def played(
    directory: Path,
    *steps: tuple[float, str],
    budget: BudgetRequest,
    epoch_s: float = EPOCH_S,
    run_s: float = 90.0,
) -> World:
    """Return a world in which all that was done, with a price and a budget, and everything was found to be true."""

    def prepare(services: Services) -> None:
        services.prices.set(OPERATOR, "H100", PriceRequest(micros_per_hour=3_600_000_000))
        services.budgets.put(OPERATOR, "all", budget)

    def begin(world: World, _step: Step) -> None:
        assert world.process is not None
        world.process.serve(prepare)

    done = [Step(after_s=0.0, what="begin", which=0, amount=0.5)]
    done += [Step(after_s=after_s, what=what, which=at, amount=0.35) for at, (after_s, what) in enumerate(steps)]
    plan = Plan(seed=1, grace_s=GRACE_S, retention_s=1e9, mixes=False, steps=tuple(done), epoch_s=epoch_s, spends=False)
    own: dict[str, Callable[[World, Step], None]] = {"begin": begin, "wait": lambda _world, _step: None}
    world = Lasting(plan, directory, {**DO, **own}, run_s=run_s)
    world.run()
    return world


def limit(amount: int, period: Period = Period.DAY) -> BudgetRequest:
    """Return a hard budget of everything."""
    return BudgetRequest(kind="everything", period=period, limit_micros=amount * 1_000_000, hard=True)


def spent(world: World, *dimensions: str) -> dict[tuple[object, ...], float]:
    """Return what the ledger says that was spent, in units, by columns of it."""
    return {key: micros / 1e6 for key, (_, micros) in totals(world.disk.read, *dimensions).items()}


def ends(world: World) -> list[State]:
    """Return how the runs ended, in the order in which they were asked for."""
    return [client.end[0] for client in world.clients if client.end is not None]


def test_F71_a_hard_budget_is_not_overspent_while_everybody_talks(tmp_path: Path) -> None:
    world = played(tmp_path, *[(0.5, "submit a long run")] * 3, (200.0, "wait"), budget=limit(200))
    assert State.BUDGET_STOPPED in ends(world)
    assert 200 / 2 < sum(spent(world, "run_id").values()) <= 200


def test_a_hard_budget_that_stops_nobody_is_found(tmp_path: Path) -> None:
    nobody = mock.patch.object(budget_enforcer.BudgetEnforcer, "_stop", lambda *_: None)
    with nobody, pytest.raises(Failed) as failed:
        played(tmp_path, (0.5, "submit a long run"), (300.0, "wait"), budget=limit(100), run_s=300.0)
    assert "I12" in failed.value.invariants


def test_F71_a_node_that_is_cut_off_overspends_no_more_than_its_grace(tmp_path: Path) -> None:
    steps = [(0.5, "submit a long run")] * 2 + [(8.0, "cut off who works"), (200.0, "wait")]
    world = played(tmp_path, *steps, budget=limit(130))
    assert sum(spent(world, "run_id").values()) <= 130 + 2 * (GRACE_S + STOPPED_S)


@pytest.mark.parametrize("trouble", ["wait", "kill server"])
def test_a_month_that_ends_meanwhile_begins_anew(tmp_path: Path, trouble: str) -> None:
    """300 units would be too much for one month, and are not for two; nor where the server is away in between."""
    steps = [(1.0, "submit a long run"), (145.0, trouble), (400.0, "wait")]
    world = played(tmp_path, *steps, budget=limit(240, Period.MONTH), epoch_s=MONTH_ENDS_S - 150.0, run_s=300.0)
    assert ends(world) == [State.SUCCEEDED]
    by_day = spent(world, "day")
    assert list(by_day) == [(LAST_DAY,), (LAST_DAY + 1,)]
    assert 140 < by_day[LAST_DAY,] < 150 < by_day[LAST_DAY + 1,] < 165


def test_nobody_is_stopped_at_the_end_of_a_month_for_money_of_the_next(tmp_path: Path) -> None:
    """A minute ahead is more than there is left; of the month there is less than a minute left."""
    steps = [(1.0, "submit a long run"), (400.0, "wait")]
    world = played(tmp_path, *steps, budget=limit(170, Period.MONTH), epoch_s=MONTH_ENDS_S - 150.0, run_s=200.0)
    assert ends(world) == [State.SUCCEEDED]
