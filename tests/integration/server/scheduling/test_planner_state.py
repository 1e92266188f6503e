"""What the scheduler tells its planner: what is different, once; and what becomes of what it decides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import format_clock
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, StopAsked
from serverless_gpu.model.scheduling.duration_estimates import LEAVING_S, START_S
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Change,
    DevicesTaken,
    Gone,
    NodeGone,
    NodeSeen,
    PoolSeen,
    Preemption,
    QueuedRun,
    QueuePolicySet,
    Used,
)
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import run_key
from serverless_gpu.server.records import audit, events, pools, runs
from serverless_gpu.server.records.pools import StoredShare
from serverless_gpu.server.scheduling import wait_reasons
from serverless_gpu.server.scheduling.queue_snapshot import FOREVER_NS
from serverless_gpu.server.scheduling.scheduler import AT_ONCE, Scheduler
from serverless_gpu.server.scheduling.wait_reasons import ASKED_S
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.server_status import DrainRequest
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello, submit, tell
from tests.support.server.measures import value
from tests.support.server.planned import Planners, Scripted, decision, placement, waiting
from tests.support.server.stored import add_people, new_run

ROOT = Caller(name="root", role="admin")


@pytest.fixture
def node_id(services: Services) -> str:
    """Let a node with eight H100 join, and return its identifier."""
    add_people(services.database, "node", "alice", "bob")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, hello()).node


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> Planners:
    """Return the planners that schedulers of this test get."""
    return Planners(monkeypatch)


def tick(services: Services, scheduler: Scheduler) -> int:
    """Do one tick; return when the next is due, seconds from now."""
    now_ns = services.clock.boottime_ns()
    return ((scheduler.tick(now_ns) or 0) - now_ns) // 10**9


def submit_with(services: Services, **spec: Any) -> str:
    """Write a run that waits and wants two H100."""
    new = new_run(resources=Resources(gpus=2, gpu_type="H100"), **spec)
    new = msgspec.structs.replace(new, context_sealed=services.sealer.seal(b"{}", about=new.id))
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=services.clock.wall_ns()))
    return new.id


def kinds(changes: list[Change]) -> list[str]:
    """Return what was told, in words."""
    return [type(change).__name__ for change in changes]


def wanted_of(changes: list[Change]) -> list[QueuedRun]:
    """Return what those want who arrived."""
    return [change.wanted for change in changes if isinstance(change, Arrived)]


def test_everything_is_told_once_and_then_what_is_different(
    services: Services, node_id: str, planners: Planners
) -> None:
    first = submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    assert kinds(planners.last.told[0]) == ["Used", "PoolSeen", "NodeSeen", "Arrived"]
    second = submit(services)
    tick(services, scheduler)
    assert [wanted.run_id for wanted in wanted_of(planners.last.told[1])] == [second]
    assert kinds(planners.last.told[1]) == ["Arrived"]
    tell(services, first, StopAsked(why=StopReason.CANCEL))
    tick(services, scheduler)
    assert planners.last.told[2] == [Gone(first)]
    tick(services, scheduler)
    assert planners.last.told[3] == [] and len(planners.made) == 1


def test_what_was_decided_is_not_told_again_and_a_run_that_began_is_told_by_when_it_ends(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    run_id = submit_with(services, timeout_s=3_600.0, grace_s=20.0)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    (wanted,) = wanted_of(planners.last.told[0])
    assert (wanted.limit_s, wanted.grace_s) == (START_S + 3_600 + 20 + LEAVING_S, 20)
    planners.last.decisions.append(decision([placement(run_id, node_id)]))
    tick(services, scheduler)
    run = find(services, run_id)
    assert (run.state, run.attempt is not None and run.attempt.world_size) == (State.STARTING, 2)
    tick(services, scheduler)
    assert planners.last.told[2] == []
    clock.advance(10)
    began_ns = clock.wall_ns()

    def begin(connection: sa.Connection) -> None:
        from_row = runs.find(connection, run_id)
        assert from_row is not None
        connection.execute(
            sa.text("update attempts set started_ns = :at where run_id = :run"), {"at": began_ns, "run": run_id}
        )

    services.database.write(begin)
    tick(services, scheduler)
    (started,) = planners.last.told[3]
    assert isinstance(started, DevicesTaken) and not started.running.is_leaving
    assert started.running.wanted.limit_s == 10 + 3_600 + 20 + LEAVING_S


def test_a_placement_that_does_not_come_about_is_told_back(
    services: Services, node_id: str, planners: Planners
) -> None:
    one, other = submit(services), submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    services.agents.hello(NODE, hello(boot="b2"))
    planners.last.decisions.append(decision([placement(one, node_id), placement(other, "n-gone")]))
    tick(services, scheduler)
    assert find(services, one).state is State.STARTING and find(services, other).state is State.QUEUED
    tick(services, scheduler)
    assert [wanted.run_id for wanted in wanted_of(planners.last.told[-1])] == [other]
    assert "Gone" not in kinds(planners.last.told[-1])  # it has used nothing


def test_many_placements_are_written_in_portions_and_decided_once(
    services: Services, node_id: str, planners: Planners
) -> None:
    waiting_ids = [submit(services, 1) for _ in range(AT_ONCE + 2)]
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision(placement(run_id, node_id, 1) for run_id in waiting_ids))
    assert tick(services, scheduler) == 0
    left = [run_id for run_id in waiting_ids if find(services, run_id).state is State.QUEUED]
    assert len(left) == 2
    tell(services, left[0], StopAsked(why=StopReason.CANCEL))
    assert tick(services, scheduler) > 0
    assert planners.last.told[-1] == [Gone(left[0])]
    assert [find(services, run_id).state for run_id in left] == [State.CANCELLED, State.STARTING]


def test_a_clock_that_is_set_while_placements_are_under_way_has_them_decided_anew(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    waiting_ids = [submit(services, 1) for _ in range(AT_ONCE + 2)]
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision(placement(run_id, node_id, 1) for run_id in waiting_ids))
    assert tick(services, scheduler) == 0
    clock.step_wall(-3_600)
    assert tick(services, scheduler) > 0
    told = planners.last.told[0]
    left = {run_id for run_id in waiting_ids if find(services, run_id).state is State.QUEUED}
    assert len(planners.made) == 2 and {wanted.run_id for wanted in wanted_of(told)} == left and len(left) == 2
    assert kinds(told).count("DevicesTaken") == AT_ONCE


def test_a_tick_that_fails_begins_from_nothing(
    services: Services, node_id: str, planners: Planners, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.waits[run_id] = waiting(run_id, "its devices are in use")
    assert services.sentences.of(run_id) == golden("server.planning.devices-use")
    planners.last.decisions.append(decision([placement(run_id, node_id)]))

    def away(_work: object) -> None:
        raise ServerUnavailable("the database does not answer")

    monkeypatch.setattr(services.database, "write", away)
    with pytest.raises(ServerUnavailable):
        tick(services, scheduler)
    monkeypatch.undo()
    Planners.__init__(planners, monkeypatch)
    assert services.sentences.of(run_id) == ""
    tick(services, scheduler)
    assert len(planners.made) == 1
    assert [wanted.run_id for wanted in wanted_of(planners.last.told[0])] == [run_id]


def test_who_has_to_leave_is_stopped_in_order_told_for_whom_and_waits_again_as_old_as_before(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    victim = submit_with(services, resume=True)
    queued_ns = find(services, victim).queued_ns
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision([placement(victim, node_id)]))
    tick(services, scheduler)
    tick(services, scheduler)
    other = submit(services, 8)
    sentence = "preempted for bob/llama"
    planners.last.decisions.append(decision(preemptions=[Preemption(run_id=victim, for_run=other, sentence=sentence)]))
    tick(services, scheduler)
    run = find(services, victim)
    assert (run.state, run.stop) == (State.STOPPING, StopReason.PREEMPT)
    assert value(services.measures, "sgpu_attempts_preempted_total") == 1
    *_, entry = services.database.read(audit.entries)
    assert (entry.principal, entry.action, entry.subject) == ("server", "run.stop", victim)
    assert entry.detail["because"] == sentence
    tick(services, scheduler)
    assert planners.last.told[-1] == []  # that it leaves is known
    clock.advance(5)
    tell(services, victim, AttemptEnded(reason=Reason.PREEMPTED, began=True))
    tick(services, scheduler)
    assert kinds(planners.last.told[-1]) == ["Gone", "Arrived"]
    (wanted,) = wanted_of(planners.last.told[-1])
    assert (wanted.preemptible, wanted.preemptions, wanted.queued_ns) == (True, 1, queued_ns)
    told = services.database.read(lambda connection: events.after(connection, victim, 0))
    assert any("preempt" in event.sentence for event in told)


def test_nobody_leaves_for_one_that_waits_no_more_and_who_leaves_already_is_not_asked_again(
    services: Services, node_id: str, planners: Planners
) -> None:
    one, leaving = submit_with(services, resume=True), submit_with(services, resume=True)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision([placement(one, node_id), placement(leaving, node_id)]))
    tick(services, scheduler)
    tell(services, leaving, StopAsked(why=StopReason.DRAIN))
    tick(services, scheduler)
    other = submit(services, 8)
    tell(services, other, StopAsked(why=StopReason.CANCEL))
    still = submit(services, 8)
    asked = [
        Preemption(run_id=one, for_run=other, sentence="x"),
        Preemption(run_id=leaving, for_run=still, sentence="x"),
        Preemption(run_id=one, for_run="gone", sentence="x"),
    ]
    planners.last.decisions.append(decision(preemptions=asked))
    tick(services, scheduler)
    assert (find(services, one).stop, find(services, leaving).stop) == (None, StopReason.DRAIN)
    tick(services, scheduler)
    (back,) = planners.last.told[-1]  # it does not leave after all
    assert isinstance(back, DevicesTaken) and back.running.wanted.run_id == one and not back.running.is_leaving


def test_nodes_pools_and_shares_that_change_are_told(services: Services, node_id: str, planners: Planners) -> None:
    submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    services.agents.hello(NODE, hello(problem="its disk is full"))
    services.database.write(
        lambda connection: pools.put_share(connection, StoredShare(kind="team", name="search", weight=70, set_ns=1))
    )
    tick(services, scheduler)
    policy, node = planners.last.told[-1]
    assert isinstance(policy, QueuePolicySet) and policy.policy.team_weights == {"search": 70}
    assert isinstance(node, NodeSeen) and golden("server.planning.disk-full") in node.node.away
    services.nodes.forget(ROOT, "n1", known_dead=True)
    tick(services, scheduler)
    assert planners.last.told[-1] == [NodeGone(node_id)]
    assert not any(isinstance(change, PoolSeen) for change in planners.last.told[-1])


def test_a_drained_server_tells_everybody_once_that_they_are_left_alone_and_once_that_it_is_over(
    services: Services, node_id: str, planners: Planners
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    before = wanted_of(planners.last.told[0])
    from_now = drained(services, on=True)
    for _ in range(3):
        tick(services, scheduler)
    (held,) = wanted_of(planners.last.told[1])
    assert (held.run_id, held.not_before_ns, held.held) == (run_id, FOREVER_NS, from_now)
    assert planners.last.told[2:] == [[], []]
    drained(services, on=False)
    tick(services, scheduler)
    assert wanted_of(planners.last.told[-1]) == before


def drained(services: Services, *, on: bool) -> str:
    """Begin or end to drain the server; return what those who wait are told."""
    from_now = services.clock.wall_ns()
    services.drain.put(ROOT, DrainRequest(on=on, note="new disks"))
    return f"the server starts no new runs: root drains it since {format_clock(from_now)} (new disks)"


def test_a_clock_that_is_set_makes_a_new_planner_and_what_is_left_alone_is_so_for_as_long_as_before(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision([placement(run_id, node_id)]))
    tick(services, scheduler)
    tick(services, scheduler)
    tell(services, run_id, AttemptEnded(reason=Reason.START_FAILED, began=False))
    tick(services, scheduler)
    (held,) = wanted_of(planners.last.told[-1])
    assert held.not_before_ns == clock.wall_ns() + 10**9
    clock.step_wall(-3_600)
    tick(services, scheduler)
    assert len(planners.made) == 2
    (again,) = wanted_of(planners.last.told[0])
    assert again.not_before_ns == clock.wall_ns() + 10**9
    clock.step_wall(0.5)  # so little is nothing
    tick(services, scheduler)
    assert len(planners.made) == 2


def test_the_use_of_those_who_came_before_is_told_at_the_start(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    planners.last.decisions.append(decision([placement(run_id, node_id, 4)]))
    tick(services, scheduler)
    clock.advance(1_000)
    tell(services, run_id, AttemptEnded(reason=Reason.COMPLETED, began=True))
    tick(services, make_scheduler(services))
    (used,) = [change for change in planners.last.told[0] if isinstance(change, Used)]
    assert used.teams == {"~alice": pytest.approx(4_000, rel=0.03)}
    assert used.users == {("~alice", "alice"): pytest.approx(4_000, rel=0.03)}


def test_who_is_asked_about_is_woken_when_they_are_told_something_else_and_nobody_else_is(
    services: Services, node_id: str, planners: Planners, clock: FakeClock
) -> None:
    watched, unwatched = submit(services), submit(services)
    scheduler = make_scheduler(services)

    def woken_by_a_tick() -> list[bool]:
        before = [services.hub.version(run_key(run_id)) for run_id in (watched, unwatched)]
        tick(services, scheduler)
        after = [services.hub.version(run_key(run_id)) for run_id in (watched, unwatched)]
        return [one != other for one, other in zip(before, after, strict=True)]

    assert services.sentences.of(watched) == ""
    tick(services, scheduler)
    for run_id in (watched, unwatched):
        planners.last.waits[run_id] = waiting(run_id, "needs 2 H100")
    assert services.sentences.of(watched) == "needs 2 H100"
    assert woken_by_a_tick() == [False, False]
    for run_id in (watched, unwatched):
        planners.last.waits[run_id] = waiting(run_id, "needs 2 H100", place=1)
    assert woken_by_a_tick() == [True, False]
    assert woken_by_a_tick() == [False, False]
    clock.advance(ASKED_S + 1)
    planners.last.waits[watched] = waiting(watched, "something else")
    assert woken_by_a_tick() == [False, False]


def test_who_asks_while_the_planner_is_told_something_is_answered_by_what_holds_afterwards(
    services: Services, node_id: str, planners: Planners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_reasons, "A_SECOND", 0.001)  # as if so many asked that answers are kept for long
    run_id, other = submit(services), submit(services)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    for one in (run_id, other):
        planners.last.waits[one] = waiting(one, "before")
        assert services.sentences.of(one) == "before"
    planners.last.waits[run_id] = waiting(run_id, "later")
    assert services.sentences.of(run_id) == "before"
    apply = Scripted.apply

    def asked_meanwhile(planner: Scripted, changes: list[Change]) -> None:
        services.sentences.of(run_id)
        apply(planner, changes)
        del planner.waits[run_id]

    monkeypatch.setattr(Scripted, "apply", asked_meanwhile)
    tell(services, run_id, StopAsked(why=StopReason.CANCEL))
    tick(services, scheduler)
    assert services.sentences.of(run_id) == ""


def test_who_used_how_much_is_the_same_after_a_start(services: Services, node_id: str, clock: FakeClock) -> None:
    ended, running = submit(services, 4), submit(services, 2)
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    clock.advance(100_000)
    tell(services, ended, AttemptEnded(reason=Reason.COMPLETED, began=True))
    tick(services, scheduler)
    clock.advance(100_000)
    tick(services, scheduler)
    before = services.sentences.usage()
    assert before["~alice"].used_gpu_s == pytest.approx(800_000, rel=0.2)  # some of it counts less by now
    assert find(services, running).state is State.STARTING
    tick(services, make_scheduler(services))
    after = services.sentences.usage()
    assert after.keys() == {"~alice"}
    assert after["~alice"].used_gpu_s == pytest.approx(before["~alice"].used_gpu_s, rel=0.02)
