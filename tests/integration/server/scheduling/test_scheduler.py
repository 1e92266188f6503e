"""The scheduler on a database: who is placed, what is written, what an engine may say to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import format_clock, new_run_id
from serverless_gpu.engines.base import EngineNode, Impossible, Waiting
from serverless_gpu.engines.simulated_engine import SimulatedEngine
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import INFRA_PAUSES_S, AttemptEnded, StopAsked
from serverless_gpu.model.spec import Command, Function, Priority, Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import node_key, run_key
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import active_runs, orders, runs
from serverless_gpu.server.scheduling.gang_reservations import EngineReservations
from serverless_gpu.server.scheduling.planner_state import PlannerSync
from serverless_gpu.server.scheduling.queue_snapshot import Reading
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.server.scheduling.scheduler import AT_ONCE, Scheduler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat, Report
from serverless_gpu.wire.nodes import PoolRequest
from serverless_gpu.wire.runs import Target
from tests.support.golden import golden
from tests.support.server.agents import H100, NODE, find, hello, submit, tell
from tests.support.server.late import before_next_write
from tests.support.server.made import made_services
from tests.support.server.stored import T0, add_people, new_run

ROOT = Caller(name="root", role="admin")


@pytest.fixture
def node_id(services: Services) -> str:
    """Let a node with eight H100 join, and return its identifier."""
    add_people(services.database, "node", "alice", "bob")  # type: ignore[arg-type] # the fixture's is a Database
    return services.agents.hello(NODE, hello()).node


def tick(services: Services, scheduler: Scheduler | None = None) -> Scheduler:
    scheduler = scheduler or make_scheduler(services)
    scheduler.tick(services.clock.boottime_ns())
    return scheduler


def engine() -> SimulatedEngine:
    return SimulatedEngine([EngineNode(name="n1", devices=H100)])


def test_a_placement_is_one_attempt_one_order_and_one_event(services: Services, node_id: str) -> None:
    run_id = submit(services)
    seen = {key: services.hub.version(key) for key in (node_key(node_id), run_key(run_id))}
    scheduler = tick(services)
    run = find(services, run_id)
    assert (run.state, run.fence, run.events) == (State.STARTING, 1, 2)
    assert run.attempt is not None
    assert (run.attempt.world_size, run.attempt.num_nodes) == (2, 1)
    (crew,) = run.attempt.crews
    assert (crew.node_id, crew.gpus, crew.first_rank, crew.boot_id) == (node_id, 2, 0, "b1")
    waiting = services.database.read(lambda connection: orders.waiting(connection, node_id))
    assert [(order.kind, order.run_id, order.fence) for order in waiting] == [("start", run_id, 1)]
    assert all(services.hub.version(key) > version for key, version in seen.items())
    tick(services, scheduler)
    assert find(services, run_id).fence == 1


def test_who_waits_reads_why_and_is_woken_when_that_changes(services: Services, node_id: str) -> None:
    first, second = submit(services, 6), submit(services, 4)
    scheduler = tick(services)
    assert services.sentences.of(second) == golden("server.scheduler.needs-h100-one", first=first)
    seen = services.hub.version(run_key(second))
    tick(services, scheduler)
    assert services.hub.version(run_key(second)) == seen
    submit(services, 5)
    tick(services, scheduler)
    assert services.hub.version(run_key(second)) == seen
    services.clock.advance(30)  # type: ignore[attr-defined] # a FakeClock
    tick(services, scheduler)
    assert services.hub.version(run_key(second)) > seen
    since = format_clock(services.clock.wall_ns() - 30 * 10**9)
    assert services.sentences.of(second) == golden("server.scheduler.needs-h100-one-node", since=since)


def test_nothing_is_placed_on_a_node_that_is_not_heard_of(services: Services, node_id: str, clock: FakeClock) -> None:
    clock.advance(60)
    run_id = submit(services)
    scheduler = tick(services)
    assert find(services, run_id).state is State.QUEUED
    services.agents.hello(NODE, hello())
    tick(services, scheduler)
    assert find(services, run_id).state is State.STARTING


def test_a_node_with_a_problem_gets_nothing_and_its_problem_is_said(services: Services, node_id: str) -> None:
    services.agents.hello(NODE, hello(problem="its disk is full"))
    run_id = submit(services)
    tick(services)
    assert services.sentences.of(run_id) == golden("server.scheduler.needs-h100-one-node-2")


@pytest.mark.parametrize(
    ("payload", "snapshot", "machine", "needs"),
    [
        (Function(), "a" * 64, "", True),
        (Command(argv=("./train",)), "a" * 64, "", True),
        (Function(), "", "", True),
        (Function(), "", "m1", False),
        (Command(argv=("./train",)), "", "", False),
    ],
    ids=["function captured", "command captured", "function", "function where it lies", "command"],
)
def test_F58_what_needs_a_version_of_python_waits_for_a_node_that_has_it(
    services: Services, node_id: str, payload: Function | Command, snapshot: str, machine: str, needs: bool
) -> None:
    services.agents.hello(NODE, hello(pythons=("3.10",)))
    new = new_run(resources=Resources(gpus=1, gpu_type="H100"), payload=payload)
    target = Target(python="3.11", platform="linux-x86_64", machine=machine, caller="m9")
    new = msgspec.structs.replace(new, target=target, snapshot=snapshot)
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=services.clock.wall_ns()))
    scheduler = tick(services)
    assert (find(services, new.id).state is State.QUEUED) == needs
    if needs:
        sentence = "needs Python 3.11, and the nodes have 3.10; install it with `uv python install`"
        assert services.sentences.of(new.id).startswith(f"{sentence}; the run waits for a suitable node until ")
        services.agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, pythons=("3.10", "3.11")))
        tick(services, scheduler)
        assert find(services, new.id).state is State.STARTING


def test_a_run_that_was_cancelled_between_the_look_and_the_placement_is_not_placed(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = submit(services)
    read = PlannerSync.read

    def then_cancel(planning: PlannerSync) -> Reading:
        found = read(planning)
        tell(services, run_id, StopAsked(why=StopReason.CANCEL))
        return found

    monkeypatch.setattr(PlannerSync, "read", then_cancel)
    tick(services)
    assert find(services, run_id).state is State.CANCELLED


@pytest.mark.parametrize("what", ["restarted", "forgotten", "moved"])
def test_nothing_is_placed_on_a_node_that_is_not_any_more_what_was_looked_at(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run_id = submit(services)
    scheduler = make_scheduler(services)

    def happen() -> None:
        if what == "restarted":
            services.agents.hello(NODE, hello(boot="b2"))
        elif what == "forgotten":
            services.nodes.forget(ROOT, "n1", known_dead=True)
        else:
            services.pools.put(ROOT, "gold", PoolRequest(kind="reserved", nodes=("n1",)))

    before_next_write(monkeypatch, services.database, happen)
    tick(services, scheduler)
    assert find(services, run_id).state is State.QUEUED
    tick(services, scheduler)
    run = find(services, run_id)
    assert (run.state is State.STARTING) == (what == "restarted")
    if run.attempt is not None:
        assert run.attempt.crews[0].boot_id == "b2"
        services.agents.hello(NODE, hello(boot="b2"))
        assert find(services, run_id).state is State.STARTING


def test_a_restart_and_a_placement_at_the_same_moment_see_each_other(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had neither seen the other, an attempt of the boot before would run in this one, until the next hello ends it."""
    run_id = submit(services)
    restart = threading.Thread(target=services.agents.hello, args=(NODE, hello(boot="b2")))
    place = transitions.place

    def place_while_it_restarts(*args: Any, **named: Any) -> int:
        if restart.ident is None:
            restart.start()
            restart.join(0.3)  # it comes as far as it can before this placement is committed
        return place(*args, **named)

    monkeypatch.setattr(transitions, "place", place_while_it_restarts)
    tick(services)
    restart.join(30)
    run = find(services, run_id)
    assert run.state is State.QUEUED or run.reason is Reason.NODE_REBOOTED


def test_the_reconciler_forgets_no_order_that_was_made_while_it_read(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = engine()
    cluster.answers = [Impossible(sentence="no licence for n1")]
    run_id = submit(services)
    scheduler = make_scheduler(services, engine=cluster)
    active, hold = active_runs.active_briefly, services.deliveries.hold
    reconciler = services.make(Reconciler, scheduler=scheduler)
    sent: list[bool] = []

    def held_and_reconciled(*gang: Any) -> bool:
        """The order is held; before the end of its attempt is written, the node's stream looks at it."""
        held = hold(*gang)
        reconcile.set()
        reconciled.wait(30)
        sent.append(services.deliveries.send(*gang))
        return held

    def read_then_wait(connection: sa.Connection) -> list[active_runs.ActiveRun]:
        found = active(connection)
        looked.set()
        reconcile.wait(30)
        return found

    looked, reconcile, reconciled = threading.Event(), threading.Event(), threading.Event()

    def tick_reconciler() -> None:
        reconciler.tick(services.clock.boottime_ns())
        reconciled.set()

    with monkeypatch.context() as slow:
        slow.setattr("serverless_gpu.server.scheduling.reconciler.active_runs.active_briefly", read_then_wait)
        thread = threading.Thread(target=tick_reconciler)
        thread.start()
        assert looked.wait(30)
        slow.undo()
    monkeypatch.setattr(services.deliveries, "hold", held_and_reconciled)
    tick(services, scheduler)
    thread.join(30)
    assert (sent, find(services, run_id).state) == ([False], State.QUEUED)


def test_the_engine_is_asked_after_the_intent_is_durable(services: Services, node_id: str) -> None:
    cluster = engine()
    run_id = submit(services)
    tick(services, make_scheduler(services, engine=cluster))
    assert cluster.recover() == [f"{run_id}:1"]


def test_F31_what_a_server_that_was_killed_did_not_ask_the_engine_for_the_next_one_does(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = engine()
    run_id = submit(services)
    killed = make_scheduler(services, engine=cluster)
    with monkeypatch.context() as patched:
        patched.setattr(EngineReservations, "ask", lambda *_: None)
        tick(services, killed)
    assert (find(services, run_id).state, cluster.recover()) == (State.STARTING, [])
    tick(services, make_scheduler(services, engine=cluster))
    assert cluster.recover() == [f"{run_id}:1"]


def test_what_an_engine_can_never_do_is_given_back_also_when_the_database_is_away_at_that_moment(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = engine()
    cluster.answers = [Impossible(sentence="no licence for n1")] * 2
    run_id = submit(services)
    scheduler = make_scheduler(services, engine=cluster)
    write = services.database.write
    writes: list[object] = []

    def once_placed_away(work: Callable[[sa.Connection], object]) -> object:
        writes.append(work)
        if len(writes) == 2:
            raise ServerUnavailable("the database does not answer")
        return write(work)

    monkeypatch.setattr(services.database, "write", once_placed_away)
    with pytest.raises(ServerUnavailable):
        tick(services, scheduler)
    assert find(services, run_id).state is State.STARTING
    tick(services, scheduler)
    assert find(services, run_id).state is State.QUEUED


def test_a_node_that_the_engine_does_not_know_has_joined_by_itself(services: Services, node_id: str) -> None:
    cluster = SimulatedEngine([EngineNode(name="other", devices=H100)])
    run_id = submit(services)
    tick(services, make_scheduler(services, engine=cluster))
    assert find(services, run_id).state is State.STARTING
    assert cluster.recover() == []


def test_what_an_engine_can_never_do_goes_back_to_the_queue_and_ends_after_three_more(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    cluster = engine()
    cluster.answers = [Impossible(sentence="no licence for n1")] * 4
    run_id = submit(services)
    scheduler = make_scheduler(services, engine=cluster)
    for fence, pause_s in enumerate(INFRA_PAUSES_S, start=1):
        tick(services, scheduler)
        run = find(services, run_id)
        assert (run.state, run.fence, run.infra_retries_used) == (State.QUEUED, fence, fence)
        clock.advance(pause_s)
        services.agents.hello(NODE, hello())
    tick(services, scheduler)
    run = find(services, run_id)
    assert (run.state, run.reason, run.detail) == (State.FAILED, Reason.REFUSED, golden("server.scheduler.licence-n1"))
    assert services.database.read(lambda connection: orders.waiting(connection, node_id)) == []


def test_what_did_not_start_is_left_alone_for_a_while_and_others_go_first(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    run_id = submit(services, 8)
    scheduler = tick(services)
    tell(services, run_id, AttemptEnded(reason=Reason.START_FAILED, began=False))
    clock.advance(0.25)
    now_ns = clock.boottime_ns()
    assert scheduler.tick(now_ns) == now_ns + 750_000_000
    at = format_clock(clock.wall_ns() + 750_000_000)
    held = f"attempt 1 did not start on n1; the scheduler retries at {at}"
    assert services.sentences.of(run_id) == held
    other = submit(services, 2)
    clock.step_wall(-3600)  # nobody waits for a clock that was set back
    tick(services, scheduler)
    assert (find(services, run_id).state, find(services, other).state) == (State.QUEUED, State.STARTING)
    following = make_scheduler(services)  # a server that was started again knows it, too
    following.tick(clock.boottime_ns())
    assert golden("server.scheduler.tried-again") in services.sentences.of(run_id)
    tell(services, other, StopAsked(why=StopReason.CANCEL))
    tell(services, other, AttemptEnded(reason=Reason.CANCELLED, began=False))
    clock.advance(0.75)
    tick(services, scheduler)
    assert (find(services, run_id).state, find(services, run_id).fence) == (State.STARTING, 2)


@pytest.mark.parametrize(
    ("reason", "began"), [(Reason.PREEMPTED, False), (Reason.DRAINED, True), (Reason.RANK_RAISED, True)]
)
def test_who_made_room_or_failed_by_its_own_code_is_placed_again_at_once(
    services: Services, node_id: str, reason: Reason, began: bool
) -> None:
    run_id = _submit_patient(services)
    scheduler = tick(services)
    tell(services, run_id, AttemptEnded(reason=reason, began=began))
    assert find(services, run_id).state is State.QUEUED
    tick(services, scheduler)
    assert find(services, run_id).fence == 2


def _submit_patient(services: Services) -> str:
    new = new_run(resources=Resources(gpus=1, gpu_type="H100"), retries=1, resume=True)
    new = msgspec.structs.replace(new, context_sealed=services.sealer.seal(b"{}", about=new.id))
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=services.clock.wall_ns()))
    return new.id


def test_what_an_engine_cannot_do_now_is_asked_for_again_and_said(services: Services, node_id: str) -> None:
    cluster = engine()
    cluster.answers = [Waiting(sentence="n1 is being started")]
    run_id = submit(services)
    scheduler = tick(services, make_scheduler(services, engine=cluster))
    run = find(services, run_id)
    assert run.attempt is not None
    assert (run.state, run.attempt.sentence) == (State.STARTING, golden("server.scheduler.n1-being-started"))
    assert cluster.recover() == []
    tick(services, scheduler)
    assert cluster.recover() == [f"{run_id}:1"]


def test_what_was_cancelled_while_the_engine_was_not_ready_is_not_asked_for_any_more(
    services: Services, node_id: str
) -> None:
    cluster = engine()
    cluster.answers = [Waiting(sentence="n1 is being started")]
    run_id = submit(services)
    scheduler = tick(services, make_scheduler(services, engine=cluster))
    tell(services, run_id, AttemptEnded(reason=Reason.CANCELLED, began=False))
    tick(services, scheduler)
    assert cluster.recover() == []


def test_F31_killed_after_the_intent_the_next_server_delivers_the_order(
    services: Services, node_id: str, database: Database, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(place: str) -> None:
        raise Killed(place)

    run_id = submit(services)
    monkeypatch.setattr(faults, "crash", kill)
    monkeypatch.setenv(faults.VARIABLE, "after_commit_before_launch")
    with pytest.raises(Killed):
        tick(services)
    monkeypatch.undo()
    home = services.settings.home
    following = made_services(database, home, clock=services.clock)
    assert following.agents.hello(NODE, hello()).node == node_id
    tick(following)
    (order,) = following.agents.waiting(NODE, node_id)
    assert (order.run_id, order.fence) == (run_id, 1)
    assert find(following, run_id).fence == 1


def test_many_placements_are_made_in_portions(services: Services, node_id: str) -> None:
    services.agents.hello(NODE, hello(devices=hello_many(AT_ONCE + 3)))
    for _ in range(AT_ONCE + 3):
        submit(services, 1)
    scheduler = make_scheduler(services)
    now_ns = services.clock.boottime_ns()
    assert scheduler.tick(now_ns) == now_ns
    assert scheduler.tick(now_ns) > now_ns  # type: ignore[operator] # a number, as it always has a next time
    waiting = services.database.read(runs.queue)
    assert waiting == []


def hello_many(count: int) -> tuple[object, ...]:
    return tuple(msgspec.structs.replace(H100[0], uuid=f"FAKE-H100-{number}", index=number) for number in range(count))


@pytest.mark.any_database
@pytest.mark.slow
def test_ten_thousand_runs_wait_and_a_new_server_schedules(
    services: Services, node_id: str, database: Database
) -> None:
    base = runs.NewRun.__struct_fields__  # the columns are those of one inserted run, ten thousand times
    assert "id" in base
    one = new_run(resources=Resources(gpus=8, gpu_type="H100"), priority=Priority.NORMAL, name="queued")
    database.write(lambda connection: runs.insert(connection, one, at_ns=T0))
    row = dict(database.read(lambda connection: connection.execute(sa.select(tables.runs)).mappings().one()))
    many = [row | {"id": new_run_id(), "queued_ns": T0 + number} for number in range(1, 10_000)]
    database.write(lambda connection: connection.execute(tables.runs.insert(), many))
    following = made_services(database, services.settings.home, clock=services.clock)
    following.agents.hello(NODE, hello())
    scheduler = make_scheduler(following)
    scheduler.tick(following.clock.boottime_ns())
    assert find(following, one.id).state is State.STARTING
    waiting = database.read(
        lambda connection: connection.scalar(
            sa.select(sa.func.count()).select_from(tables.runs).where(tables.runs.c.state == State.QUEUED)
        )
    )
    assert waiting == 9_999


def test_F43_devices_of_a_run_that_only_sends_results_are_free(services: Services, node_id: str) -> None:
    first, second = submit(services, 6), submit(services, 4)
    scheduler = tick(services)
    assert find(services, second).state is State.QUEUED
    who = Caller(kind="attempt", attempt=(first, 1, 0))
    said = Report(state=State.STOPPING, exec_ns=1, sentence="results do not get to the server", freed=True)
    services.reports.receive(who, run_id=first, fence=1, said=said)
    assert [(node.busy, node.runs) for node in services.nodes.view_nodes()] == [(0, ())]
    tick(services, scheduler)
    assert find(services, first).state is State.STOPPING and find(services, second).state is State.STARTING
