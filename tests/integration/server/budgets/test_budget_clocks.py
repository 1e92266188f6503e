"""Budgets and a clock that jumps over the end of a month (F39): no period begins that has not, and none ends twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.loops import BELIEVED_S, SETTLING_S, JumpTolerantClock
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending
from tests.support.server.made import made_services
from tests.support.server.spent import UNIT, Spent
from tests.support.server.stored import T0

MONTH_S = 31 * 86_400


@pytest.mark.any_database
def test_F39_a_clock_that_jumps_begins_no_month_and_one_that_is_believed_does(
    database: Database, tmp_path: Path
) -> None:
    clock = FakeClock(wall_ns=T0)
    spent = Spent(database, made_services(database, tmp_path, clock=JumpTolerantClock(clock)), clock)
    spent.set(limit_micros=10_000 * UNIT, hard=True)
    run_id = spent.submit()
    spent.go_on(SETTLING_S + 10)
    spent.start(run_id)
    spent.go_on(100, run_id)
    before = spent.view()
    assert 100 * UNIT <= before.used <= 101 * UNIT

    for jump_s in (MONTH_S, -2 * MONTH_S, MONTH_S):  # forward, back beyond where it was, and right again
        clock.step_wall(jump_s)
        spent.go_on(10, run_id)
        during = spent.view()
        assert (during.start_ns, during.end_ns) == (before.start_ns, before.end_ns)
    assert 130 * UNIT <= during.used <= 131 * UNIT

    clock.step_wall(MONTH_S)
    for _ in range(round(BELIEVED_S / 10) + 2):
        spent.go_on(10, run_id)
    after = spent.view()
    assert after.start_ns >= before.end_ns
    assert after.used < during.used + (BELIEVED_S + 100) * UNIT


@pytest.mark.parametrize("is_seen_before", [True, False], ids=["seen-ended", "not-seen-ended"])
@pytest.mark.parametrize("by_s", [-7_200, 7_200], ids=["back", "forward"])
def test_F39_what_has_ended_and_is_not_charged_yet_uses_nothing_by_a_clock_that_is_set(
    database: Database, tmp_path: Path, by_s: int, is_seen_before: bool
) -> None:
    clock = FakeClock(wall_ns=T0)
    spent = Spent(database, made_services(database, tmp_path, clock=clock), clock)
    spent.set(limit_micros=10_000 * UNIT, hard=True)
    ended, other = spent.submit(), spent.submit()
    spent.start(ended, other)
    spent.go_on(100, ended, other)
    over = Ending(state=MEANINGS[Reason.BUDGET].state, reason=Reason.BUDGET, began=True)
    spent.hear(ended, State.STOPPING, ending=over)
    if is_seen_before:
        spent.go_on(5, other)
    clock.step_wall(by_s)
    for _ in range(3):
        before = spent.view().used
        spent.go_on(5, other)
        assert 200 * UNIT <= before <= 225 * UNIT
    assert spent.find(other).stop is None


def test_F39_what_had_ended_when_a_server_starts_used_what_its_rows_say(database: Database, tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=T0)
    spent = Spent(database, made_services(database, tmp_path, clock=clock), clock)
    spent.set(limit_micros=10_000 * UNIT, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(100, run_id)
    over = Ending(state=MEANINGS[Reason.BUDGET].state, reason=Reason.BUDGET, began=True)
    spent.hear(run_id, State.STOPPING, ending=over)
    clock.step_wall(-7_200)
    as_of = spent.services.budget_admission.as_of()
    found = database.read(lambda connection: Spending().look(connection, as_of))
    assert found["llm"].used.micros == 100 * UNIT
