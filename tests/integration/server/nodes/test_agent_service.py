"""What agents say and are told: joining, coming back, orders until they are taken."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import INFRA_RETRIES_MAX, AttemptEnded, StopAsked
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import node_key
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.db import tables
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.records import events, nodes, runs
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AgentHello, AttemptSeen, ClockReading, Heartbeat, Start, Stop, StreamedOrder
from serverless_gpu.wire.base import PROTOCOL, PROTOCOLS
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.golden import golden
from tests.support.server.agents import ADMIN, H100, NODE, OTHER, find, hello, placed, tell, token_of
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database


@pytest.fixture
def agents(services: Services) -> AgentService:
    """Return the verbs, and let two nodes' principals and a user exist."""
    add_people(services.database, "node", "other", "alice")  # type: ignore[arg-type] # a Database
    return services.agents


def stored_node(services: Services, node_id: str) -> StoredNode:
    node = services.database.read(lambda connection: nodes.get(connection, node_id))
    assert node is not None
    return node


def test_a_node_joins_once_however_often_it_says_hello(services: Services, agents: AgentService) -> None:
    first = agents.hello(NODE, hello())
    again = agents.hello(NODE, hello(problem="no disk"))
    assert again == first
    assert (first.heartbeat_s, first.partition_grace_s, first.stale) == (5.0, 900.0, ())
    node = stored_node(services, first.node)
    assert (node.name, node.pool, node.hello.problem, node.principal) == ("n1", "default", "no disk", "node")
    assert services.presence.is_there(first.node, now_ns=services.clock.boottime_ns())


def test_a_node_joins_the_pool_it_names_and_stays_where_an_operator_put_it(
    services: Services, agents: AgentService
) -> None:
    services.pools.put(ADMIN, "research", PoolRequest(kind="on-demand"))
    welcome = agents.hello(NODE, hello(pool="research"))
    assert stored_node(services, welcome.node).pool == "research"
    services.pools.put(ADMIN, "fast", PoolRequest(kind="reserved", nodes=("n1",)))
    for asked in ("", "research"):
        agents.hello(NODE, hello(pool=asked))
        assert stored_node(services, welcome.node).pool == "fast"


def test_a_node_makes_no_pool_and_enters_no_reserved_one(services: Services, agents: AgentService) -> None:
    services.pools.put(ADMIN, "fast", PoolRequest(kind="reserved"))
    with pytest.raises(NotAllowed, match=re.escape(golden("server.agents.pool-mine"))):
        agents.hello(NODE, hello(pool="mine"))
    with pytest.raises(NotAllowed, match="reserved pool 'fast'"):
        agents.hello(NODE, hello(pool="fast"))
    assert [pool.name for pool in services.nodes.view_pools()] == ["fast"]
    assert services.database.read(nodes.every) == []


def test_a_token_is_one_nodes_and_says_nothing_for_another(services: Services, agents: AgentService) -> None:
    first, second = (token_of(services, name) for name in ("one", "two"))
    node_id = agents.hello(first, hello("n1", machine="m1")).node
    for machine in ("m1", "m2"):
        with pytest.raises(NotAllowed, match=re.escape(golden("server.agents.token-n2-node"))):
            agents.hello(first, hello("n2", machine=machine))
    agents.hello(second, hello("n2", machine="m2"))
    for say in (
        lambda: agents.heartbeat(second, node_id, Heartbeat(devices=())),
        lambda: agents.waiting(second, node_id),
        lambda: agents.take(second, node_id, (1,)),
    ):
        with pytest.raises(NotFound, match="another token"):
            say()


def test_a_node_may_have_a_new_token(services: Services, agents: AgentService) -> None:
    first, second = (token_of(services, name) for name in ("one", "two"))
    node_id = agents.hello(first, hello()).node
    assert agents.hello(second, hello()).node == node_id
    agents.heartbeat(second, node_id, Heartbeat(devices=H100))
    with pytest.raises(NotFound, match="another token"):
        agents.heartbeat(first, node_id, Heartbeat(devices=H100))


def test_a_name_is_one_principals_and_one_machines(services: Services, agents: AgentService, clock: FakeClock) -> None:
    agents.hello(NODE, hello())
    with pytest.raises(NotAllowed, match="principal node"):
        agents.hello(OTHER, hello())
    with pytest.raises(NotAllowed, match=re.escape(golden("server.agents.another-machine"))):
        agents.hello(NODE, hello(machine="m2"))
    clock.advance(60)  # it went away: its name may be taken over
    agents.hello(NODE, hello(machine="m2"))


def test_two_homes_under_one_name_are_not_one_node(services: Services, agents: AgentService, clock: FakeClock) -> None:
    node_id = agents.hello(NODE, hello(instance="one")).node
    assert agents.hello(NODE, hello(instance="one")).node == node_id
    with pytest.raises(NotAllowed, match=re.escape(golden("server.agents.n1-connected-another"))):
        agents.hello(NODE, hello(instance="two"))
    clock.advance(60)
    assert agents.hello(NODE, hello(instance="two")).node == node_id
    heartbeat = Heartbeat(devices=H100, instance="one")
    for ask in (lambda: agents.heartbeat(NODE, node_id, heartbeat), lambda: agents.waiting(NODE, node_id, "one")):
        with pytest.raises(NotFound, match=re.escape(golden("server.agents.another-home-now"))):
            ask()
    assert agents.waiting(NODE, node_id, "two") == []
    agents.heartbeat(NODE, node_id, msgspec.structs.replace(heartbeat, instance="two"))


@pytest.mark.parametrize(
    "other",
    [hello(instance="two"), hello(machine="m2", boot="b2", instance="two"), hello(machine="m2", boot="b2")],
    ids=["another home", "another machine", "another machine, of an unknown home"],
)
def test_nobody_takes_the_name_of_a_node_whose_runs_may_be_going_on(
    services: Services, agents: AgentService, clock: FakeClock, other: AgentHello
) -> None:
    node_id = agents.hello(NODE, hello(instance="one")).node
    run_id = placed(services)
    agents.waiting(NODE, node_id)  # its order leaves the server
    clock.advance(60)
    with pytest.raises(NotAllowed, match=re.escape(golden("server.agents.runs-may-going"))) as caught:
        agents.hello(NODE, other)
    assert golden("server.agents.sgpu-node-forget") in caught.value.hint
    assert find(services, run_id).state is State.STARTING
    services.nodes.forget(NODE, "n1", known_dead=True)
    assert agents.hello(NODE, other).node == node_id
    assert find(services, run_id).reason is Reason.NODE_GONE


def test_a_home_that_was_made_anew_in_a_reboot_or_moved_to_another_container_is_the_same_node(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    node_id = agents.hello(NODE, hello(instance="one")).node
    run_id = placed(services)
    agents.waiting(NODE, node_id)  # its order leaves the server
    clock.advance(60)
    agents.hello(NODE, hello(machine="m2", instance="one"))
    assert find(services, run_id).state is State.STARTING
    agents.hello(NODE, hello(machine="m2", boot="b2", instance="two"))
    assert find(services, run_id).reason is Reason.NODE_REBOOTED


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (hello(protocol=PROTOCOL + 1), f"uses protocol {PROTOCOL + 1}, but this server supports 1 and {PROTOCOL}"),
        (hello(protocol=PROTOCOLS[0] - 1), f"uses protocol {PROTOCOLS[0] - 1}"),
        (hello(name=""), "cannot be named ''"),
        (hello(name="a\x1b[2J"), "cannot be named"),
        (hello(name="a" * 300), "cannot be named"),
        (hello(pool="p" * 65), "a pool cannot be named"),
        (hello(machine="m" * 65), "at most 64 characters each"),
        (hello(instance="i" * 65), "at most 64 characters each"),
        (hello(pythons=("3.11",) * 65), "at most 64 Python versions"),
        (hello(pythons=("3" * 17,)), "at most 64 Python versions"),
        (hello(unavailable=("x",) * 1025), "at most 1024 devices"),
        (hello(attempts=(AttemptSeen(run_id="r", fence=1, state=State.RUNNING),) * 10_001), "at most 10000 attempts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(agents: AgentService, said: AgentHello, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        agents.hello(NODE, said)


def test_F53_the_side_that_is_too_old_is_named(agents: AgentService) -> None:
    with pytest.raises(InvalidValue) as newer:
        agents.hello(NODE, hello(protocol=PROTOCOL + 1))
    assert newer.value.hint == golden("server.upgrade.upgrade-serverless-gpu")
    with pytest.raises(InvalidValue) as older:
        agents.hello(NODE, hello(protocol=PROTOCOLS[0] - 1))
    assert older.value.hint == golden("server.agents.upgrade-serverless-gpu-node")
    for protocol in PROTOCOLS:
        assert agents.hello(NODE, hello(protocol=protocol)).node


def test_F30_how_far_a_node_says_its_clock_is_off_is_seen_of_it(agents: AgentService, services: Services) -> None:
    welcome = agents.hello(NODE, hello())
    assert welcome.at_ns == services.clock.wall_ns() and services.nodes.view_nodes()[0].clock is None
    off = ClockReading(ahead_ns=-3_600 * 10**9, error_ns=10**6)
    answer = agents.heartbeat(NODE, welcome.node, Heartbeat(devices=(), clock=off))
    assert answer.at_ns == services.clock.wall_ns() and services.nodes.view_nodes()[0].clock == off
    agents.heartbeat(NODE, welcome.node, Heartbeat(devices=()))
    assert services.nodes.view_nodes()[0].clock is None


def test_a_heartbeat_of_a_node_that_is_not_known_asks_for_a_hello(agents: AgentService) -> None:
    welcome = agents.hello(NODE, hello())
    for who, node_id in ((NODE, "gone"), (OTHER, welcome.node)):
        with pytest.raises(NotFound):
            agents.heartbeat(who, node_id, Heartbeat(devices=H100))


def test_a_heartbeat_writes_what_is_new_and_otherwise_seldom(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    node_id = agents.hello(NODE, hello()).node
    clock.advance(5)
    agents.heartbeat(NODE, node_id, Heartbeat(devices=H100))
    assert stored_node(services, node_id).seen_ns == clock.wall_ns() - 5 * 10**9
    agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, unavailable=("FAKE-H100-0",)))
    node = stored_node(services, node_id)
    assert (node.seen_ns, node.hello.unavailable) == (clock.wall_ns(), ("FAKE-H100-0",))
    clock.advance(16)
    agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, unavailable=("FAKE-H100-0",)))
    assert stored_node(services, node_id).seen_ns == clock.wall_ns()


def test_an_order_has_everything_the_node_needs_and_comes_until_it_is_taken(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    (order,) = agents.waiting(NODE, node_id)
    assert isinstance(order, Start)
    run = find(services, run_id)
    assert run.attempt is not None
    assert (order.run_id, order.fence, order.gpu_type, order.world_size) == (run_id, 1, "H100", 2)
    assert (order.spec, order.call, order.owner) == (run.spec, b"call", "alice")
    assert bytes(order.context) == b'{"environ":{"A":"1"}}'
    assert sha256(order.token) == run.attempt.crews[0].token_sha256
    assert agents.waiting(NODE, node_id) == [order]
    agents.take(NODE, node_id, [order.seq])
    assert agents.waiting(NODE, node_id) == []
    agents.take(NODE, node_id, [order.seq, 12345])


def test_an_order_that_cannot_be_opened_ends_in_a_sentence_and_holds_up_no_other(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    damaged, fine = placed(services), placed(services)
    change = sa.update(tables.runs).where(tables.runs.c.id == damaged).values(context_sealed=b"\x01" + b"x" * 60)
    services.database.write(lambda connection: connection.execute(change))
    assert [order.run_id for order in agents.waiting(NODE, node_id)] == [fine]
    run = find(services, damaged)
    assert (run.state, run.fence) == (State.QUEUED, 1)
    told = services.database.read(lambda connection: events.after(connection, damaged, 0))
    assert golden("server.agents.sealed-another-key") in told[-1].sentence


def test_an_order_that_has_left_and_cannot_be_opened_any_more_is_not_taken_back(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    assert len(agents.waiting(NODE, node_id)) == 1
    change = sa.update(tables.runs).where(tables.runs.c.id == run_id).values(context_sealed=b"")
    services.database.write(lambda connection: connection.execute(change))
    assert agents.waiting(NODE, node_id) == []
    assert find(services, run_id).state is State.STARTING


def test_what_an_order_carries_is_not_read_again_while_it_need_not_come(
    services: Services, agents: AgentService, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = agents.hello(NODE, hello()).node
    first, second = placed(services), placed(services)
    (order,) = [order for order in agents.waiting(NODE, node_id) if order.run_id == first]
    read: list[str] = []
    payload = runs.payload

    def noted(connection: sa.Connection, run_id: str) -> object:
        read.append(run_id)
        return payload(connection, run_id)

    monkeypatch.setattr(runs, "payload", noted)
    assert [one.run_id for one in agents.waiting(NODE, node_id, told={order.seq})] == [second]
    agents.check(NODE, node_id)
    assert read == [second]


def test_orders_are_for_the_nodes_own_principal_only(services: Services, agents: AgentService) -> None:
    node_id = agents.hello(NODE, hello()).node
    placed(services)
    (order,) = agents.waiting(NODE, node_id)
    for ask in (lambda: agents.waiting(OTHER, node_id), lambda: agents.take(OTHER, node_id, [order.seq])):
        with pytest.raises(NotFound):
            ask()
    assert agents.waiting(NODE, node_id) == [order]


def test_one_nodes_word_does_not_take_anothers_order(services: Services, agents: AgentService) -> None:
    first = agents.hello(NODE, hello()).node
    placed(services)
    second = agents.hello(OTHER, hello("n2", machine="m2")).node
    (order,) = agents.waiting(NODE, first)
    agents.take(OTHER, second, [order.seq])
    assert agents.waiting(NODE, first) == [order]


def test_a_stop_is_an_order_too_and_nothing_is_ordered_about_what_has_ended(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    tell(services, run_id, StopAsked(why=StopReason.CANCEL))
    start, stop = agents.waiting(NODE, node_id)
    assert isinstance(start, Start)
    assert stop == Stop(seq=stop.seq, run_id=run_id, fence=1, reason=StopReason.CANCEL)
    tell(services, run_id, AttemptEnded(reason=Reason.CANCELLED, began=False))
    assert agents.waiting(NODE, node_id) == []


def test_F32_an_attempt_that_a_node_has_was_taken_whether_or_not_its_word_arrived(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    seen = AttemptSeen(run_id=run_id, fence=1, state=State.RUNNING)
    assert agents.hello(NODE, hello(attempts=(seen,))).stale == ()
    assert agents.waiting(NODE, node_id) == []
    assert find(services, run_id).state is State.STARTING


def test_F21_another_boot_of_the_machine_ends_its_attempts_at_once(services: Services, agents: AgentService) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    agents.waiting(NODE, node_id)  # its order leaves the server
    seen = AttemptSeen(run_id=run_id, fence=1, state=State.RUNNING)
    welcome = agents.hello(NODE, hello(boot="b2", attempts=(seen,)))
    run = find(services, run_id)
    assert (run.state, run.reason) == (State.FAILED, Reason.NODE_REBOOTED)
    assert welcome.stale == (f"{run_id}:1",)


def test_F21_a_run_whose_order_never_left_waits_again_when_its_node_restarts(
    services: Services, agents: AgentService
) -> None:
    agents.hello(NODE, hello())
    run_id = placed(services)
    node_id = agents.hello(NODE, hello(boot="b2")).node
    run = find(services, run_id)
    assert (run.state, run.life.infra_left) == (State.QUEUED, INFRA_RETRIES_MAX - 1)
    assert agents.waiting(NODE, node_id) == []


def test_F21_the_restart_of_somebody_elses_node_takes_nothing_back(services: Services, agents: AgentService) -> None:
    agents.hello(NODE, hello())
    run_id = placed(services)
    with pytest.raises(NotAllowed):
        agents.hello(OTHER, hello(boot="b2"))
    assert find(services, run_id).state is State.STARTING


def test_F22_a_run_whose_order_never_left_waits_again_when_its_node_is_given_up(
    services: Services, agents: AgentService
) -> None:
    agents.hello(NODE, hello())
    run_id = placed(services)
    services.nodes.forget(NODE, "n1", known_dead=True)
    assert find(services, run_id).state is State.QUEUED


def test_another_machine_under_a_name_proves_nothing_about_the_first(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    """A home whose disk moved, or a clone of it: the first machine may be cut off, and its runs go on."""
    agents.hello(NODE, hello(instance="one"))
    run_id = placed(services)
    clock.advance(60)
    agents.hello(NODE, hello(machine="m2", boot="b2", instance="one"))
    assert find(services, run_id).state is State.STARTING
    agents.hello(NODE, hello(machine="m2", boot="b3", instance="one"))
    assert find(services, run_id).state is State.STARTING


def test_what_was_decided_about_a_node_while_its_heartbeat_was_read_stays_decided(
    services: Services, agents: AgentService, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = agents.hello(NODE, hello()).node

    def meanwhile(decide: Callable[[], object]) -> None:
        """Let something happen between the read and the write of a heartbeat that has news."""
        read = services.database.read

        def then_decide(work: Callable[[sa.Connection], object]) -> object:
            found = read(work)
            monkeypatch.setattr(services.database, "read", read)
            decide()
            return found

        monkeypatch.setattr(services.database, "read", then_decide)
        clock.advance(16)
        agents.heartbeat(NODE, node_id, Heartbeat(devices=H100))

    root = Caller(name="root", role="admin")
    meanwhile(lambda: services.pools.put(root, "gold", PoolRequest(kind="reserved", nodes=("n1",))))
    assert stored_node(services, node_id).pool == "gold"
    meanwhile(lambda: agents.hello(NODE, hello(boot="b2")))
    assert stored_node(services, node_id).boot_id == "b2"
    with pytest.raises(NotFound):
        meanwhile(lambda: services.nodes.forget(root, "n1", known_dead=True))
    assert stored_node(services, node_id).forgotten_ns is not None


def test_an_attempt_that_was_refused_and_runs_all_the_same_is_stale(services: Services, agents: AgentService) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    tell(services, run_id, AttemptEnded(reason=Reason.REFUSED, began=False))
    for state, stale in ((State.STARTING, (f"{run_id}:1",)), (State.RUNNING, (f"{run_id}:1",)), (State.STOPPING, ())):
        seen = (AttemptSeen(run_id=run_id, fence=1, state=state),)
        assert agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, attempts=seen)).stale == stale


def test_attempts_of_other_nodes_and_of_nobody_are_stale(services: Services, agents: AgentService) -> None:
    first = agents.hello(NODE, hello()).node
    run_id = placed(services)
    seen = (
        AttemptSeen(run_id=run_id, fence=1, state=State.RUNNING),
        AttemptSeen(run_id=run_id, fence=2, state=State.RUNNING),
        AttemptSeen(run_id="nobody", fence=1, state=State.RUNNING),
    )
    both = {f"{run_id}:2", "nobody:1"}
    assert set(agents.heartbeat(NODE, first, Heartbeat(devices=H100, attempts=seen)).stale) == both
    second = agents.hello(OTHER, hello("n2", machine="m2", attempts=seen))
    assert set(second.stale) == {f"{run_id}:1", *both}


def test_an_attempt_that_ended_by_its_own_report_is_not_stale_its_receipt_may_come(
    services: Services, agents: AgentService
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)
    tell(services, run_id, AttemptEnded(reason=Reason.COMPLETED, began=True))
    seen = (AttemptSeen(run_id=run_id, fence=1, state=State.STOPPING),)
    assert agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, attempts=seen)).stale == ()


def test_a_stream_says_what_comes_says_it_again_and_ends_with_the_server(
    services: Services, agents: AgentService, clock: FakeClock
) -> None:
    node_id = agents.hello(NODE, hello()).node
    run_id = placed(services)

    async def watch() -> list[StreamedOrder | None]:
        heard: list[StreamedOrder | None] = []
        async for order in services.agents.stream(NODE, node_id):
            heard.append(order)
            if len(heard) == 1:
                await asyncio.to_thread(tell, services, run_id, StopAsked(why=StopReason.CANCEL))
            elif len(heard) == 2:
                clock.advance(16)
                services.hub.touch(node_key(node_id))
            elif len(heard) == 4:
                services.hub.close()
        return heard

    heard = asyncio.run(asyncio.wait_for(watch(), 30))
    kinds = [type(order).__name__ for order in heard if order is not None]
    assert kinds == ["Start", "Stop", "Start", "Stop"]
