"""Budgets on a database: what counts, who is refused, held back, told and stopped; and who may see and set them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import BudgetExhausted, InvalidValue, NotFound
from serverless_gpu.model.billing.budget import Period
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.spec import Command
from serverless_gpu.server.budgets.budget_enforcer import BudgetEnforcer
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs, run_invariants
from serverless_gpu.server.records import audit, budgets, duration_history, principals
from serverless_gpu.server.scheduling.queue_snapshot import queued_run
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import TeamChange
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.billing import BudgetRequest
from tests.support.golden import golden
from tests.support.server.agents import hello
from tests.support.server.made import made_services
from tests.support.server.spent import ROOT, UNIT, Spent
from tests.support.server.stored import rows
from tests.support.server.submitting import ALICE, BOB

NOVEMBER = 1_794_700_800_000_000_000  # 2026-11-15 00:00 UTC
MORNING = NOVEMBER + 8 * 3_600 * 10**9


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=MORNING)


@pytest.fixture
def spent(database: Database, tmp_path: Path, clock: FakeClock) -> Spent:
    return Spent(database, made_services(database, tmp_path, clock=clock), clock)


def actions(database: Database) -> list[str]:
    return [entry.action for entry in database.read(audit.entries) if entry.action.startswith(("budget", "run.stop"))]


def test_what_goes_on_counts_until_it_is_charged_and_then_as_it_is_charged(spent: Spent) -> None:
    spent.set(limit_micros=1_000 * UNIT)
    one, two = spent.submit(), spent.submit(gpus=2)
    spent.start(one, two)
    spent.go_on(10, one, two)
    view = spent.view()
    assert (view.used, view.held, view.going_on) == (30 * UNIT, 180 * UNIT, 2)
    spent.go_on(10, two)  # nothing is heard of the first: what it may use is held
    view = spent.view()
    assert (view.used, view.held) == (50 * UNIT, 190 * UNIT)
    spent.go_on(0, one)
    spent.end(one, Reason.COMMAND_FAILED)
    view = spent.view()
    assert (view.used, view.held, view.going_on) == (60 * UNIT, 120 * UNIT, 1)
    afresh = Spending()  # memory is what the database says, after a start, too
    found = spent.database.read(lambda connection: afresh.look(connection, spent.services.budget_admission.as_of()))
    assert found["llm"].used.micros == 60 * UNIT


def test_F71_a_hard_budget_stops_the_last_first_and_everybody_in_the_end(spent: Spent, clock: FakeClock) -> None:
    spent.set(limit_micros=150 * UNIT, hard=True)
    first, second = spent.submit(), spent.submit(gpus=1)
    spent.start(first, second)
    spent.go_on(10, first, second)
    assert spent.find(second).stop is None
    spent.go_on(6, first, second)  # 32 used, and 118 are less than two minutes
    assert spent.find(second).stop is StopReason.BUDGET and spent.find(first).stop is None
    assert spent.told(second)[-1] == (
        State.STOPPING,
        golden("server.budgets.asked-stop-budget"),
    )
    stop = rows(spent.database, tables.orders)[-1]
    assert (stop["run_id"], stop["kind"], stop["stop"]) == (second, "stop", "budget")
    spent.go_on(2, first)
    spent.end(second)
    ended = spent.find(second)
    assert (ended.state, ended.reason) == (State.BUDGET_STOPPED, Reason.BUDGET)
    for _ in range(20):
        spent.go_on(5, first)
        if spent.find(first).stop is not None:
            break
    spent.go_on(30, first)
    spent.end(first)
    view = spent.view()
    assert 80 * UNIT < view.used <= 150 * UNIT, view.used
    assert actions(spent.database) == [
        *("budget.set", "budget.warning", "budget.warning", "budget.closed"),
        *("run.stop", "run.stop"),
    ]


def test_F72_a_budget_that_is_raised_takes_no_stop_back(spent: Spent) -> None:
    spent.set(limit_micros=65 * UNIT, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(6, run_id)
    assert spent.find(run_id).stop is StopReason.BUDGET
    with pytest.raises(BudgetExhausted, match=golden("server.budgets.less-left-month")):
        spent.submit()
    spent.set(limit_micros=6_500 * UNIT, hard=True)
    spent.go_on(3, run_id)
    run = spent.find(run_id)
    assert (run.state, run.stop) == (State.STOPPING, StopReason.BUDGET)
    spent.end(run_id)
    assert spent.find(run_id).state is State.BUDGET_STOPPED
    again = spent.submit()
    spent.start(again)
    assert spent.find(again).stop is None


def test_what_a_hard_budget_has_stopped_somebody_for_lets_nobody_in(spent: Spent) -> None:
    """What was held is given back, and is not enough for anybody who would be stopped in turn."""
    spent.set(limit_micros=65 * UNIT, hard=True)
    run_id, waits = spent.submit(), spent.submit(grace_s=0.0)
    spent.start(run_id)
    spent.go_on(6, run_id)
    spent.end(run_id)
    for _ in range(3):
        spent.go_on(5)
        assert spent.find(waits).state is State.QUEUED
    assert spent.services.sentences.of(waits).endswith(
        "budget 'llm' has stopped runs this month and is closed; the next period begins on 2026-12-01 (UTC)"
    )


def test_F71_a_soft_budget_warns_and_lets_what_goes_on_finish(spent: Spent, caplog: pytest.LogCaptureFixture) -> None:
    spent.set(kind="user", scope="alice", limit_micros=100 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    waits = spent.submit()
    spent.go_on(79, run_id)
    assert notices_of(spent) == []
    spent.go_on(1, run_id)
    spent.go_on(1, run_id)
    spent.go_on(14, run_id)
    spent.go_on(10, run_id)
    told = [sentence for state, sentence in spent.told(run_id) if "budget" in sentence]
    assert told == [
        golden("server.budgets.budget-llm-80"),
        golden("server.budgets.budget-llm-95"),
        golden("server.budgets.budget-llm-used"),
    ]
    assert [(one["percent"], one["used"]) for one in notices_of(spent)] == [
        (80, 80 * UNIT),
        (95, 95 * UNIT),
        (100, 105 * UNIT),
    ]
    assert actions(spent.database) == ["budget.set", "budget.warning", "budget.warning", "budget.reached"]
    assert [text for text in told if text in caplog.text] == told
    assert spent.find(run_id).stop is None and spent.find(waits).state is State.QUEUED
    with pytest.raises(BudgetExhausted, match=re.escape(golden("server.budgets.budget-llm-used-up"))) as caught:
        spent.submit()
    assert caught.value.hint == golden("server.budgets.next-period-begins")
    other = spent.submit(BOB)  # counts for nothing of alice's
    spent.start(other)


def test_the_marks_are_said_once_whoever_looks_and_anew_when_the_budget_is_another_one(spent: Spent) -> None:
    spent.set(limit_micros=100 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(85, run_id)
    fresh = spent.services.make(BudgetEnforcer)  # after a start
    fresh.tick(spent.clock.boottime_ns())
    spent.set(limit_micros=100 * UNIT)  # the same again
    fresh.tick(spent.clock.boottime_ns())
    assert len(notices_of(spent)) == 1
    spent.set(limit_micros=102 * UNIT)
    fresh.tick(spent.clock.boottime_ns())
    assert len(notices_of(spent)) == 2


def test_nobody_learns_amounts_of_a_budget_that_is_not_theirs(spent: Spent) -> None:
    spent.set(kind="tag", scope="project=llm", limit_micros=100 * UNIT)
    run_id = spent.submit(tags={"project": "llm"})
    spent.start(run_id)
    spent.go_on(90, run_id)
    assert spent.told(run_id)[-1][1] == golden("server.budgets.budget-llm-90")
    spent.go_on(20, run_id)
    with pytest.raises(BudgetExhausted) as caught:
        spent.submit(tags={"project": "llm"})
    assert caught.value.message == golden("server.budgets.budget-llm-used-up-2")
    spent.submit(tags={"project": "other"})


def test_runs_of_one_tick_are_not_let_in_for_the_same_money(spent: Spent) -> None:
    spent.set(limit_micros=130 * UNIT, hard=True)
    waiting = [spent.submit() for _ in range(4)]
    spent.tick()
    assert [spent.find(run_id).state for run_id in waiting] == [State.STARTING] * 2 + [State.QUEUED] * 2
    said = spent.services.sentences.of(waiting[2])
    assert golden("server.budgets.budget-llm-room") in said and "2026-12-01 (UTC)" in said
    for _ in range(3):
        spent.tick()
    assert [spent.find(run_id).state for run_id in waiting] == [State.STARTING] * 2 + [State.QUEUED] * 2


def test_a_run_that_takes_any_device_is_let_in_for_what_the_dearest_costs(spent: Spent) -> None:
    spent.set(limit_micros=59 * UNIT, hard=True)
    run_id = spent.submit(gpu_type=None)
    spent.tick()
    assert spent.find(run_id).state is State.QUEUED
    with pytest.raises(BudgetExhausted, match=re.escape(golden("server.budgets.less-left-month"))):
        spent.submit()
    spent.set(limit_micros=60 * UNIT, hard=True)
    spent.tick()
    assert spent.find(run_id).state is State.STARTING


def test_a_budget_of_a_pool_counts_what_runs_there_and_keeps_out_who_names_none(spent: Spent) -> None:
    spent.set(kind="pool", scope="default", limit_micros=61 * UNIT, hard=True)
    run_id, waits = spent.submit(), spent.submit()
    spent.start(run_id)
    assert spent.find(waits).state is State.QUEUED
    spent.go_on(3, run_id)
    assert spent.find(run_id).stop is StopReason.BUDGET


class WithSlots(Spent):
    """A node that has CPU slots, too."""

    def _hello(self) -> AgentHello:
        slots = [Device(uuid=f"cpu-{at}", index=at, type="CPU", memory_bytes=0, kind=DeviceKind.CPU) for at in range(2)]
        return hello(devices=(*hello().devices, *slots))


def test_cpu_slots_are_no_gpu_hours(database: Database, tmp_path: Path, clock: FakeClock) -> None:
    spent = WithSlots(database, made_services(database, tmp_path, clock=clock), clock)
    spent.set("hours", limit_gpu_ms=1_000, hard=True)
    spent.set("money", limit_micros=1_000 * UNIT, hard=True)
    with pytest.raises(BudgetExhausted, match="budget 'hours'"):
        spent.submit()
    run_id = spent.submit(gpu_type="CPU")
    spent.start(run_id)
    spent.go_on(30, run_id)
    assert spent.find(run_id).stop is None
    for _ in range(2):
        assert (spent.view("hours").used, spent.view("hours").held) == (0, 0)
        assert (spent.view("money").used, spent.view("money").unpriced_ms) == (0, 30_000)
        if spent.find(run_id).state is State.RUNNING:
            spent.end(run_id, Reason.COMMAND_FAILED)  # and as it is charged


def test_time_without_a_price_is_said_and_stops_nobody(database: Database, tmp_path: Path, clock: FakeClock) -> None:
    spent = Spent(database, made_services(database, tmp_path, clock=clock), clock, price=None)
    spent.set(limit_micros=1, hard=True)
    spent.set("hours", limit_gpu_ms=100_000, hard=True)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(30, run_id)
    view = spent.view()
    assert (view.used, view.unpriced_ms) == (0, 30_000)
    assert view.sentence.endswith("30.0 device-seconds have no price and do not count; set a price: sgpu price set")
    assert spent.find(run_id).stop is None
    spent.go_on(11, run_id)
    assert spent.find(run_id).stop is StopReason.BUDGET
    assert "budget 'hours'" in spent.find(run_id).detail


def test_a_new_period_begins_with_nothing_used(spent: Spent, clock: FakeClock) -> None:
    spent.set(limit_micros=100 * UNIT, period=Period.DAY)
    run_id, waits = spent.submit(), spent.submit(name="second")
    spent.start(run_id)
    spent.go_on(120, run_id)
    assert spent.find(waits).state is State.STARTING  # it was let in before anything was used
    late = spent.view().end_ns - clock.wall_ns()
    clock.advance(late / 1e9 - 1)
    spent.go_on(0, run_id)
    spent.end(run_id)
    assert spent.view().used > 1_000 * UNIT
    spent.go_on(2)
    assert spent.view().used == 0 and spent.view().percent == 0


def test_what_a_platform_failed_is_given_back(spent: Spent) -> None:
    spent.set(limit_micros=1_000 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(50, run_id)
    assert spent.view().used == 50 * UNIT
    spent.end(run_id, Reason.GPU_LOST)
    assert spent.view().used == 0


def test_a_remark_goes_to_runs_that_go_on_and_is_no_move(spent: Spent) -> None:
    spent.set(limit_micros=100 * UNIT)
    run_id = spent.submit()
    spent.start(run_id)
    spent.go_on(85, run_id)
    states = [state for state, _ in spent.told(run_id)]
    assert states == [State.QUEUED, State.STARTING, State.RUNNING, State.RUNNING]
    assert run_invariants.violations(spent.database.read(lambda c: invariant_inputs.of_runs(c, [run_id]))) == []


def test_budgets_are_checked(spent: Spent) -> None:
    spent.services.principals.make_team(ROOT, "search")
    bad: list[tuple[dict[str, object], str]] = [
        ({"kind": "user", "scope": "carol", "limit_micros": 1}, "carol"),
        ({"kind": "team", "scope": "serach", "limit_micros": 1}, "serach"),
        ({"kind": "pool", "scope": "fast", "limit_micros": 1}, "no pool 'fast'"),
        ({"kind": "policy", "scope": "night", "limit_micros": 1}, "no policy 'night'"),
        ({"kind": "tag", "scope": "", "limit_micros": 1}, "is not a valid tag"),
        ({"kind": "tag", "scope": "a\x1b[2J", "limit_micros": 1}, "is not a valid tag"),
        ({"kind": "everything", "scope": "alice", "limit_micros": 1}, "must not name a scope"),
        ({"limit_micros": 1, "limit_gpu_ms": 1}, "one limit"),
        ({}, "one limit"),
        ({"kind": "tag", "scope": "=llm", "limit_micros": 1}, "is not a valid tag"),
        ({"limit_micros": -3_000_000}, "a budget cannot be -3.00 USD"),
        ({"limit_gpu_ms": 10**16}, "a budget cannot be 2,777,777,777.8 GPU-hours"),
    ]
    for said, message in bad:
        with pytest.raises((InvalidValue, NotFound), match=re.escape(message)):
            spent.set(**said)  # type: ignore[arg-type]  # what cannot be is of any type
    for name in ("", " a", "a\n", "x" * 65):
        with pytest.raises(InvalidValue, match="cannot be named"):
            spent.set(name, limit_micros=1)
    assert actions(spent.database) == []


def test_who_sees_which_budgets(spent: Spent) -> None:
    spent.services.principals.make_team(ROOT, "search")
    spent.set("all", limit_micros=1)
    spent.set("alice's", kind="user", scope="alice", limit_micros=1)
    spent.set("bob's", kind="user", scope="bob", limit_micros=1)
    spent.set("search", kind="team", scope="search", limit_gpu_ms=5)

    def seen(who: Caller, reach: str) -> list[str]:
        return [each.name for each in spent.services.budgets.view_all(who, reach).budgets]

    assert seen(ROOT, "all") == ["alice's", "all", "bob's", "search"]
    assert seen(ALICE, "team") == ["alice's", "search"]
    assert seen(BOB, "team") == ["bob's"]
    with pytest.raises(NotFound):
        spent.services.budgets.view(BOB, "team", "search")


def test_a_change_is_written_down_with_what_was_before(spent: Spent) -> None:
    spent.set("a", limit_micros=5)
    spent.set("a", limit_gpu_ms=7, hard=True, period=Period.WEEK)
    spent.services.budgets.delete(ROOT, "a")
    with pytest.raises(NotFound):
        spent.services.budgets.delete(ROOT, "a")
    said = [entry for entry in spent.database.read(audit.entries) if entry.action.startswith("budget")]
    before = {"scope": "everything", "period": "month", "hard": False, "limit_micros": 5}
    after = {"scope": "everything", "period": "week", "hard": True, "limit_gpu_ms": 7}
    assert [(one.action, one.detail) for one in said] == [
        ("budget.set", before),
        ("budget.set", {**after, "before": before}),
        ("budget.delete", after),
    ]
    assert all((one.principal, one.subject) == ("root", "a") for one in said)


def test_a_budget_that_is_deleted_is_gone_and_the_others_stay(spent: Spent) -> None:
    spent.set("a", limit_micros=1, hard=True)
    spent.set("b", limit_micros=10**9)
    spent.tick()
    with pytest.raises(BudgetExhausted):
        spent.submit()
    spent.services.budgets.delete(ROOT, "a")
    assert [each.name for each in spent.services.budgets.view_all(ROOT, "all").budgets] == ["b"]
    run_id = spent.submit()
    spent.start(run_id)
    spent.services.budgets.delete(ROOT, "b")
    spent.go_on(1, run_id)
    assert spent.services.budgets.view_all(ROOT, "all").budgets == ()


def test_requests_are_what_people_wrote() -> None:
    text = '{"kind":"tag","scope":"a=b","period":"month","limit_micros":1}'
    assert msgspec.json.decode(text, type=BudgetRequest) == BudgetRequest(
        kind="tag", scope="a=b", period=Period.MONTH, limit_micros=1
    )


def notices_of(spent: Spent) -> list[dict[str, object]]:
    found = spent.database.read(lambda connection: budgets.open_notices(connection, limit=100))
    return [one.document for one in found]


# --- A8: a supervisor that was killed ---------------------------------------------------------------------------------


def test_22A8_a_run_that_kills_its_supervisor_is_billed_and_budgets_see_it(spent: Spent) -> None:
    spent.set(limit_micros=1_000 * UNIT)
    run_id = spent.submit(gpus=2)
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.end(run_id, Reason.SUPERVISOR_KILLED)
    assert spent.find(run_id).reason is Reason.SUPERVISOR_KILLED
    assert (spent.view().used, spent.view().held) == (20 * UNIT, 0)


def test_22A8_a_lost_supervisor_is_free_only_with_evidence(spent: Spent) -> None:
    spent.set(limit_micros=1_000 * UNIT)
    run_id = spent.submit(gpus=2)
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.end(run_id, Reason.SUPERVISOR_LOST)  # as a node says it that is older than the distinction
    assert spent.find(run_id).reason is Reason.SUPERVISOR_KILLED and spent.view().used == 20 * UNIT
    run_id = spent.submit(gpus=2)
    spent.start(run_id)
    spent.go_on(10, run_id)
    stopped = msgspec.Raw(b'{"cause":{"rank":null,"detail":"the machine has restarted since"}}')
    spent.end(run_id, Reason.SUPERVISOR_LOST, stopped=stopped)
    assert spent.find(run_id).reason is Reason.SUPERVISOR_LOST and spent.view().used == 20 * UNIT


# --- A9: the team that is left out ------------------------------------------------------------------------------------


MEMBER = Caller(name="alice", role="member", token_id="t", teams=("search", "vision"))


def test_22A9_a_members_run_without_a_team_counts_for_the_budgets_of_all_their_teams(
    spent: Spent, database: Database
) -> None:
    for team in ("search", "vision"):
        database.write(partial(principals.create_team, name=team, now_ns=0))
    spent.set("search", kind="team", scope="search", limit_micros=100 * UNIT, hard=True)
    spent.set("vision", kind="team", scope="vision", limit_micros=1_000 * UNIT)
    run_id = spent.submit(MEMBER)
    spent.start(run_id)
    spent.go_on(20, run_id)
    assert (spent.view("search").used, spent.view("vision").used) == (20 * UNIT, 20 * UNIT)
    spent.end(run_id, Reason.COMMAND_FAILED)
    assert (spent.view("search").used, spent.view("vision").used) == (20 * UNIT, 20 * UNIT), "of the ledger, too"
    named = spent.submit(MEMBER, team="vision")
    spent.start(named)
    spent.go_on(10, named)
    spent.end(named, Reason.COMMAND_FAILED)
    assert (spent.view("search").used, spent.view("vision").used) == (20 * UNIT, 30 * UNIT)
    other = spent.submit(MEMBER)
    spent.start(other)
    spent.go_on(25, other)
    assert spent.find(other).stop is StopReason.BUDGET, "what is left of the team's budget does not pay for a minute"
    spent.end(other)
    with pytest.raises(BudgetExhausted, match=r"'search'.* used"):  # amounts are told to a member
        spent.submit(MEMBER)
    assert spent.submit(BOB), "others are not concerned"


def test_22A9_a_members_run_without_a_team_uses_the_teams_fair_share(spent: Spent) -> None:
    run = spent.find(spent.submit(MEMBER))
    assert run.team == "" and queued_run(run, now_ns=spent.clock.wall_ns()).team == "search"
    assert queued_run(spent.find(spent.submit(MEMBER, team="vision")), now_ns=0).team == "vision"
    assert queued_run(spent.find(spent.submit(BOB)), now_ns=0).team == ""


def test_22A9_past_use_counts_for_the_same_team_after_a_restart_of_the_server(spent: Spent, database: Database) -> None:
    run_id = spent.submit(MEMBER)
    spent.start(run_id)
    spent.go_on(10, run_id)
    spent.end(run_id, Reason.COMMAND_FAILED)
    found = database.read(
        lambda connection: duration_history.used(connection, now_ns=spent.clock.wall_ns(), half_life_s=86_400)
    )
    assert list(found.teams) == ["search"] and list(found.users) == [("search", "alice")]


# --- D6: what is said, what is held, and a budget that is opened again ------------------------------------------------


def test_22D6_a_hard_budget_warns_closes_with_what_is_used_and_tells_others_that_they_go_on(spent: Spent) -> None:
    spent.set(kind="user", scope="alice", limit_micros=150 * UNIT, hard=True)
    first, second = spent.submit(), spent.submit()
    spent.start(first)
    spent.start(second)
    for _ in range(4):
        spent.go_on(5, first, second)
        if spent.find(second).stop is not None:
            break
    assert spent.find(first).stop is None and spent.find(second).stop is StopReason.BUDGET
    told = spent.database.read(lambda connection: budgets.open_notices(connection, limit=100))
    assert [(one.kind, one.document["percent"]) for one in told[:-1]] == [
        ("budget.warning", 80),
        ("budget.warning", 95),
    ]
    closed = told[-1]
    assert (closed.kind, closed.document["used"]) == ("budget.closed", spent.view().used)
    assert closed.document["percent"] == spent.view().used * 100 // (150 * UNIT) < 30
    assert "100 %" not in closed.text("sentence")
    heard = [sentence for _, sentence in spent.told(first) if "budget 'llm'" in sentence]
    assert golden("server.budgets.one-goes") in heard[-1] and not any("asked to stop" in sentence for sentence in heard)
    assert not any(golden("server.budgets.one-goes") in sentence for _, sentence in spent.told(second))


@pytest.mark.long
@pytest.mark.any_database
def test_22D6_runs_whose_like_are_short_use_most_of_a_small_hard_budget(spent: Spent) -> None:
    """Each would hold a minute; eight at once would close it at a fifth."""
    for _ in range(3):
        run_id = spent.submit(name="short", payload=Command(argv=("true",)))
        spent.start(run_id)
        spent.go_on(4, run_id)
        spent.end(run_id, Reason.COMPLETED)
    spent.services.spending.change()
    spent.set(limit_gpu_ms=600_000, hard=True)
    used = 0
    for _ in range(30):
        try:
            wave = [spent.submit(name="short", payload=Command(argv=("true",))) for _ in range(8)]
        except BudgetExhausted:
            break  # what is left is less than one of them holds
        spent.tick()
        began = [run_id for run_id in wave if spent.find(run_id).state is State.STARTING]
        if not began:
            break
        for run_id in began:
            spent.hear(run_id, exec_ns=spent.clock.wall_ns())
        spent.go_on(4, *began)
        for run_id in began:
            assert spent.find(run_id).stop is None
            spent.end(run_id, Reason.COMPLETED)
        for run_id in set(wave) - set(began):
            spent.services.stops.request(ALICE, "own", run_id=run_id, why=StopReason.CANCEL)
        used = spent.view().used
    assert 540_000 < used <= 600_000 and not spent.view().sentence.count("closed")


def test_22D6_a_closed_budget_is_opened_again_by_an_operator(spent: Spent) -> None:
    spent.set(limit_micros=130 * UNIT, hard=True)
    with pytest.raises(InvalidValue, match="is already open"):
        spent.services.budgets.reopen(ROOT, "llm")
    first, second = spent.submit(), spent.submit()
    spent.start(first)
    spent.start(second)
    spent.go_on(10, first, second)
    assert spent.find(second).stop is StopReason.BUDGET
    spent.end(second)
    spent.end(first, Reason.COMMAND_FAILED)
    spent.tick()
    with pytest.raises(BudgetExhausted, match="has stopped runs"):
        spent.submit()
    assert "closed" in spent.view().sentence
    view = spent.services.budgets.reopen(ROOT, "llm")
    assert "closed" not in view.sentence and actions(spent.database)[-1] == "budget.reopen"
    again = spent.submit()
    spent.start(again)
    spent.go_on(1, again)
    assert spent.find(again).stop is None
    spent.go_on(200, again)
    spent.end(again)
    with pytest.raises(InvalidValue, match="is used up"):
        spent.services.budgets.reopen(ROOT, "llm")
    with pytest.raises(NotFound):
        spent.services.budgets.reopen(ROOT, "none")


def test_22D6_a_day_of_berlin_begins_an_hour_before_that_of_utc(
    spent: Spent, database: Database, clock: FakeClock
) -> None:
    """A run from 22:30 until 23:30 UTC: half of its charge is of the day before, while it goes on and afterwards."""
    spent.set("berlin", limit_micros=100_000 * UNIT, period=Period.DAY, time_zone="Europe/Berlin")
    spent.set("utc", limit_micros=100_000 * UNIT, period=Period.DAY)
    clock.advance((14 * 60 + 30) * 60 + 0.0)  # it is 22:30
    run_id = spent.submit()
    spent.go_on(0)
    spent.start(run_id)
    for _ in range(60):
        spent.go_on(60, run_id)
    going = spent.view("berlin")
    assert (going.used, spent.view("utc").used) == (1_800 * UNIT, 3_600 * UNIT)
    spent.end(run_id, Reason.COMMAND_FAILED)
    over = spent.view("berlin")
    assert (over.used, spent.view("utc").used) == (1_800 * UNIT, 3_600 * UNIT)
    assert (over.start_ns, over.end_ns - over.start_ns) == (NOVEMBER + 23 * 3_600 * 10**9, 86_400 * 10**9)
    assert over.forecast >= over.used and over.time_zone == "Europe/Berlin"
    clock.advance(3_600)
    assert (spent.view("berlin").used, spent.view("utc").used) == (1_800 * UNIT, 0)
    with pytest.raises(InvalidValue, match="no time zone"):
        spent.set("mars", limit_micros=UNIT, time_zone="Mars/Olympus")


def test_22D6_a_budget_of_a_team_follows_the_time_zone_of_the_team(spent: Spent, database: Database) -> None:
    database.write(partial(principals.create_team, name="search", now_ns=0))
    spent.set("search", kind="team", scope="search", limit_micros=100 * UNIT, period=Period.DAY)
    assert (spent.view("search").time_zone, spent.view("search").start_ns) == ("UTC", NOVEMBER)
    changed = spent.services.principals.change_team(ROOT, "search", TeamChange(time_zone="Europe/Berlin"))
    assert changed.time_zone == "Europe/Berlin"
    assert spent.view("search").start_ns == NOVEMBER - 3_600 * 10**9
    spent.set(
        "search", kind="team", scope="search", limit_micros=9 * UNIT, period=Period.DAY, time_zone="Europe/Berlin"
    )
    spent.services.principals.change_team(ROOT, "search", TeamChange(time_zone="Asia/Tokyo"))
    assert spent.view("search").time_zone == "Asia/Tokyo", "what is the team's stays the team's"
    spent.set("search", kind="team", scope="search", limit_micros=9 * UNIT, period=Period.DAY, time_zone="UTC")
    assert (spent.view("search").time_zone, spent.view("search").start_ns) == ("UTC", NOVEMBER)
    with pytest.raises(InvalidValue, match="no time zone"):
        spent.services.principals.change_team(ROOT, "search", TeamChange(time_zone="Mars/Olympus"))
    with pytest.raises(NotFound):
        spent.services.principals.change_team(ROOT, "none", TeamChange(time_zone="UTC"))


def test_history_and_notices_are_those_of_budgets_that_the_caller_may_see(spent: Spent, database: Database) -> None:
    spent.set("all", limit_micros=20 * UNIT)
    spent.set("alice", kind="user", scope="alice", limit_micros=20 * UNIT)
    run = spent.submit()
    spent.start(run)
    spent.go_on(17, run)
    service = spent.services.budgets
    assert [mark.percent for mark in service.history(ALICE, "team", "alice").marks] == [80]
    assert {one.subject for one in service.notices(ROOT, "all").notices} == {"all", "alice"}
    (notice,) = service.notices(ALICE, "team").notices
    assert (notice.subject, notice.kind, notice.sent) == ("alice", "budget.warning", False)
    assert service.notices(BOB, "team").notices == ()
    for name in ("all", "none"):
        with pytest.raises(NotFound):
            service.history(ALICE, "team", name)
