"""Crews meet through the server: what their reports change, what they are answered, and what time decides."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Halt
from serverless_gpu.model.lifecycle.rendezvous import Address, CrewReach, Tried
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.model.spec import RayCluster
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import rendezvous
from serverless_gpu.server.lifecycle.rendezvous import RendezvousStates
from serverless_gpu.server.records import attempts, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.scheduling.queue_snapshot import QueueSnapshot
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending
from tests.support.golden import golden
from tests.support.server.agents import hello
from tests.support.server.ganged import say, services_of_nodes, told_of, waiting, wrong
from tests.support.server.meetings import CHOSEN, attempt_of, look, meet, offer, reach, start
from tests.support.server.stored import T0, S, add_run, place_gang, stored, tell


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=3)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run with two devices on n1 and one on n2."""
    run_id = add_run(database)
    place_gang(database, run_id, 2, 1)
    return run_id


def again(services: Services) -> None:
    """Start the server again: what it had heard is gone."""
    services.meetings.keep(())


def test_nodes_of_a_ray_cluster_hear_it_at_once_for_its_function_begins_once_all_have_come(
    services: Services, database: Database
) -> None:
    run_id = add_run(database, ray=RayCluster())
    place_gang(database, run_id, 2, 1)
    meet(services, run_id, 0, 1)
    assert [start(services, run_id, number).chosen for number in (1, 0)] == [CHOSEN, CHOSEN]


def test_two_crews_meet(services: Services, database: Database, run_id: str) -> None:
    first = start(services, run_id, 0, offer=offer(0))
    assert (first.offers, first.chosen, services.looks.of("node-2")) == ((), None, ())
    second = start(services, run_id, 1, offer=offer(1))
    assert second.offers == (offer(0), offer(1))
    assert [crew for _, _, crew in services.looks.of("node-1")] == [0]
    assert start(services, run_id, 0, offer=offer(0)).offers == second.offers
    assert services.looks.of("node-1") == ()
    answer = start(services, run_id, 0, offer=offer(0), reach=reach(0))
    assert (answer.offers, answer.chosen) == ((), None)
    answer = start(services, run_id, 1, offer=offer(1), reach=reach(1))
    assert (answer.offers, answer.chosen) == ((), None), (
        "the port of the rendezvous is not free before crew 0 has begun"
    )
    assert [crew for _, _, crew in services.looks.of("node-1")] == [0] and services.looks.of("node-2") == ()
    assert start(services, run_id, 0).chosen == CHOSEN
    assert start(services, run_id, 0).chosen == CHOSEN  # until it runs
    assert start(services, run_id, 1).chosen is None and services.looks.of("node-2") == ()
    assert say(services, run_id, 0, exec_ns=T0 + 9 * S).chosen is None
    assert [crew for _, _, crew in services.looks.of("node-2")] == [1]
    assert start(services, run_id, 1).chosen == CHOSEN
    assert say(services, run_id, 1, exec_ns=T0 + 9 * S).chosen is None
    assert stored(database, run_id).state is State.RUNNING and wrong(database) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_crews_meet_in_whatever_order(services: Services, database: Database, order: tuple[int, ...]) -> None:
    run_id = add_run(database)
    place_gang(database, run_id, 2, 1, 1)
    for number in order:
        start(services, run_id, number, offer=offer(number))
    assert start(services, run_id, order[0]).offers == (offer(0), offer(1), offer(2))
    for number in order:
        assert attempt_of(database, run_id).chosen is None
        start(services, run_id, number, reach=reach(number, of=3))
    chosen = attempt_of(database, run_id).chosen
    assert chosen is not None and chosen.addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert [start(services, run_id, number).chosen for number in range(3)] == [chosen, None, None]
    say(services, run_id, 0, exec_ns=T0 + 9 * S)
    assert [start(services, run_id, number).chosen for number in (1, 2)] == [chosen, chosen]


@pytest.mark.parametrize("killed_at", range(6))
def test_a_server_that_is_killed_at_any_step_is_told_again(
    services: Services, database: Database, run_id: str, killed_at: int
) -> None:
    said: list[dict[str, Any]] = [{"offer": offer(0)}, {"offer": offer(1)}, {"reach": reach(0)}, {"reach": reach(1)}]
    said += [{}, {}]
    known: list[dict[str, Any]] = [{}, {}]
    for step, news in enumerate(said):
        if step == killed_at:
            again(services)
        known[step % 2].update(news)
        start(services, run_id, step % 2, **known[step % 2])
    for number in (0, 1):
        start(services, run_id, number, **known[number])
    assert start(services, run_id, 0, **known[0]).chosen == CHOSEN
    say(services, run_id, 0, exec_ns=T0 + 9 * S)
    assert start(services, run_id, 1, **known[1]).chosen == CHOSEN


def test_the_first_offer_stays(services: Services, run_id: str) -> None:
    start(services, run_id, 0, offer=offer(0))
    start(services, run_id, 0, offer=offer(0, port=5000))
    assert start(services, run_id, 1, offer=offer(1)).offers == (offer(0), offer(1))


def test_nodes_that_do_not_reach_each_other_are_apart(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 0, offer=offer(0))
    start(services, run_id, 1, offer=offer(1))
    start(services, run_id, 0, reach=reach(0))
    answer = start(services, run_id, 1, reach=reach(1, took=None))
    sentence = "n2 does not reach n1: tried 10.0.0.1 (no route to host)"
    assert (answer.peer_failed, answer.chosen, answer.offers) == (sentence, None, ())
    assert start(services, run_id, 0).peer_failed == sentence
    attempt = attempt_of(database, run_id)
    assert (attempt.called_off, attempt.chosen_json) == (True, None)
    assert attempt.cause == Cause(crew=None, reason=Reason.NODES_APART, detail=sentence, apart=(1, 0))
    for number in (0, 1):
        ended(services, run_id, number)
    run = stored(database, run_id)
    assert (run.state, run.infra_retries_used) == (State.QUEUED, 1)
    assert attempt_of(database, run_id).reason is Reason.NODES_APART and wrong(database) == []
    # Nothing failed on a node of them, and the next attempt is not to meet on both.
    assert database.read(lambda connection: attempts.failed_nodes(connection, [run_id])) == {}
    text = msgspec.json.encode(hello("n1")).decode()
    database.write(lambda connection: connection.execute(tables.nodes.update().values(hello_json=text)))
    reading = database.read(
        lambda connection: services.make(QueueSnapshot).read(connection, now_ns=T0 + 20 * S, afresh=False)
    )
    (one,) = reading.waiting.values()
    assert (one.apart, one.avoid) == (frozenset({("node-2", "node-1")}), frozenset())


def ended(services: Services, run_id: str, number: int) -> None:
    """Have a crew end that was told to, before user code of it began."""
    ending = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=False, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, number, State.STOPPING, ending=ending)


def test_a_gang_whose_node_never_comes_is_placed_again_soon(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 0, offer=offer(0))
    look(services, clock)
    look(services, clock, after_s=rendezvous.COME_S - 1)
    assert not attempt_of(database, run_id).called_off
    look(services, clock, after_s=2)
    attempt = attempt_of(database, run_id)
    assert (
        attempt.called_off
        and attempt.cause is not None
        and attempt.cause.detail == golden("server.meetings.n2-come-meeting")
    )
    assert (attempt.crews[1].reason, attempt.crews[1].began) == (Reason.REFUSED, False)
    assert attempt.crews[1].settled_ns is not None and attempt.crews[0].ended_ns is None
    assert waiting(database, "node-2") == []  # its order will not leave any more
    assert told_of(database, run_id)[-1] == (State.STOPPING, golden("server.meetings.n2-come-meeting"))
    assert start(services, run_id, 0).peer_failed == golden("server.meetings.n2-come-meeting")
    ended(services, run_id, 0)
    run = stored(database, run_id)
    assert (run.state, run.infra_retries_used) == (State.QUEUED, 1)
    # It goes elsewhere, and the node that comes after all is told that this is over.
    avoided = database.read(lambda connection: attempts.failed_nodes(connection, [run_id]))
    assert avoided == {run_id: frozenset({"node-2"})}
    answer = start(services, run_id, 1, offer=offer(1))
    assert answer.stale and answer.chosen is None and wrong(database) == []


@pytest.mark.parametrize("first", ["fails", "is asked to stop"])
def test_a_node_that_was_not_heard_of_yet_when_the_gang_ended_has_not_failed(
    services: Services, database: Database, run_id: str, clock: FakeClock, first: str
) -> None:
    start(services, run_id, 0)
    if first == "fails":
        ending = Ending(state=State.FAILED, reason=Reason.START_FAILED, began=False, stopped=msgspec.Raw(b"{}"))
    else:
        tell(database, run_id, StopAsked(StopReason.PREEMPT))
        ending = Ending(state=State.FAILED, reason=Reason.PREEMPTED, began=False, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=ending)
    look(services, clock)
    assert (stored(database, run_id).state, attempt_of(database, run_id).crews[1].reason) == (
        State.QUEUED,
        Reason.REFUSED,
    )
    avoided = database.read(lambda connection: attempts.failed_nodes(connection, [run_id]))
    assert avoided == ({run_id: frozenset({"node-1"})} if first == "fails" else {})


def test_no_node_comes(services: Services, database: Database, run_id: str, clock: FakeClock) -> None:
    look(services, clock)
    look(services, clock, after_s=rendezvous.COME_S + 1)
    run = stored(database, run_id)
    assert (run.state, run.infra_retries_used) == (State.QUEUED, 1)
    assert attempt_of(database, run_id).reason is Reason.NODES_APART and wrong(database) == []


def test_a_crew_that_an_earlier_server_heard_of_is_waited_for(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 1, sentence="fetches its environment")
    again(services)
    look(services, clock)
    start(services, run_id, 0, offer=offer(0))
    look(services, clock, after_s=rendezvous.COME_S + 1)
    assert not attempt_of(database, run_id).called_off
    look(services, clock, after_s=rendezvous.TOTAL_S)
    attempt = attempt_of(database, run_id)
    assert attempt.called_off and [crew.ended_ns for crew in attempt.crews] == [None, None]
    assert start(services, run_id, 1).peer_failed == golden("server.meetings.n2-come-meeting")


def test_servers_that_are_started_again_and_again_wait_no_longer(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    for number in (0, 1):
        start(services, run_id, number, sentence="fetches its environment")
    for _ in range(4):
        again(services)
        look(services, clock, after_s=rendezvous.TOTAL_S)
    assert not attempt_of(database, run_id).called_off
    look(services, clock, after_s=rendezvous.MEET_S + 1)
    assert attempt_of(database, run_id).called_off


def test_who_does_not_say_what_it_reached_is_named(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 0, offer=offer(0), reach=reach(0))
    start(services, run_id, 1, offer=offer(1))
    look(services, clock, after_s=rendezvous.MEET_S + 1)
    answer = start(services, run_id, 1, offer=offer(1), reach=reach(1))
    assert answer.peer_failed == golden("server.meetings.n2-said-nodes") and answer.chosen is None


def test_chosen_waits_for_a_crew_that_went_silent(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    meet_first = {"offer": offer(1), "reach": reach(1)}
    start(services, run_id, 1, **meet_first)
    clock.advance(services.settings.soft_expiry_s)
    meet(services, run_id, 0)
    look(services, clock)
    assert attempt_of(database, run_id).chosen is None
    start(services, run_id, 1, **meet_first)
    assert attempt_of(database, run_id).chosen == CHOSEN


def test_nothing_is_chosen_once_a_crew_has_failed(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    meet(services, run_id, 0)
    say(services, run_id, 0, State.STOPPING, halt=Halt(reason=Reason.ENV_CORRUPT, detail="no such package"))
    answer = start(services, run_id, 1, offer=offer(1), reach=reach(1, took=None))
    assert answer.peer_failed == golden("server.meetings.n1-such-package") and answer.chosen is None
    look(services, clock)
    attempt = attempt_of(database, run_id)
    assert attempt.called_off and attempt.chosen is None and attempt.cause is not None
    assert attempt.cause.reason is Reason.ENV_CORRUPT  # and not that the nodes are apart


@pytest.mark.parametrize("what", ["halt", "stop"])
def test_a_gang_that_ends_has_not_met_though_all_is_said(
    services: Services, database: Database, run_id: str, what: str
) -> None:
    meet(services, run_id, 0)
    if what == "halt":
        say(services, run_id, 0, State.STOPPING, halt=Halt(reason=Reason.ENV_CORRUPT))
    else:
        tell(database, run_id, StopAsked(StopReason.CANCEL))
    meet(services, run_id, 1)
    assert attempt_of(database, run_id).chosen_json is None


def test_cancel_of_a_gang_with_an_absent_node(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 0, offer=offer(0))
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    look(services, clock)
    attempt = attempt_of(database, run_id)
    assert attempt.called_off and attempt.crews[1].reason is Reason.REFUSED
    answer = start(services, run_id, 0, offer=offer(0))
    assert (answer.stop, answer.chosen, answer.offers) == (StopReason.CANCEL, None, ())
    ending = Ending(state=State.CANCELLED, reason=Reason.CANCELLED, began=False, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=ending)
    assert stored(database, run_id).reason is Reason.CANCELLED and wrong(database) == []


def test_a_stop_and_chosen_are_never_in_one_answer(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    meet(services, run_id, 0, 1)
    say(services, run_id, 0, exec_ns=T0 + 9 * S)
    tell(database, run_id, StopAsked(StopReason.PREEMPT))
    answer = start(services, run_id, 1)
    assert (answer.stop, answer.chosen) == (StopReason.PREEMPT, None)
    look(services, clock, after_s=rendezvous.TOTAL_S)
    assert not attempt_of(database, run_id).called_off


def test_a_restored_server_calls_nothing_off(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    database.write(lambda connection: runs.hold(connection, [run_id], at_ns=T0 + 8 * S))
    look(services, clock)
    look(services, clock, after_s=4 * rendezvous.TOTAL_S)
    assert not attempt_of(database, run_id).called_off
    say(services, run_id, 0, exec_ns=T0 + 9 * S)  # it was chosen after the backup
    assert rendezvous.has_met(attempt_of(database, run_id))


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"offer": offer(1)}, "reports for node 1"),
        ({"reach": reach(1)}, "reports for node 1"),
        ({"offer": offer(0, port=0)}, "port"),
        ({"offer": offer(0, rendezvous_port=0)}, "port"),
        ({"offer": offer(0, port=1 << 16)}, "port"),
        ({"offer": offer(0, addresses=(Address(interface="eth0,lo", address="10.0.0.1"),))}, "address"),
        ({"offer": offer(0, addresses=(Address(interface="eth0", address="a b"),))}, "address"),
        ({"offer": offer(0, addresses=offer(0).addresses * 17)}, "more than 16"),
        ({"reach": CrewReach(crew=0, tried=reach(0).tried * 17)}, "more addresses"),
        ({"reach": CrewReach(crew=0, tried=reach(1).tried)}, "has tried"),
        ({"reach": CrewReach(crew=0, tried=(Tried(crew=1, address="::1", microseconds=-1),))}, "time"),
        ({"reach": CrewReach(crew=0, tried=(Tried(crew=1, address="::1", problem="x" * 201),))}, "200"),
    ],
)
def test_what_no_crew_can_have_said_is_refused(
    services: Services, run_id: str, said: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidValue, match=match):
        start(services, run_id, 0, **said)


def test_a_crew_without_others_meets_nobody(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place_gang(database, run_id, 1)
    with pytest.raises(InvalidValue, match="on one node"):
        start(services, run_id, 0, offer=offer(0))
    assert attempt_of(database, run_id).nonce == ""


def test_crews_of_a_gang_share_a_nonce_of_their_own(services: Services, database: Database, run_id: str) -> None:
    other = add_run(database)
    place_gang(database, other, 1, 1)
    first, second = attempt_of(database, run_id).nonce, attempt_of(database, other).nonce
    assert len(first) == len(second) == 32 and first != second


def test_chosen_or_called_off_never_both(database: Database, services: Services, run_id: str, clock: FakeClock) -> None:
    """The last word arrives in the moment in which the limit passes; on PostgreSQL both may be written at once."""
    known = RendezvousStates().see((run_id, 1), now_ns=0)
    for _ in range(8):
        run_id = add_run(database)
        place_gang(database, run_id, 2, 1)
        meet(services, run_id, 0)
        start(services, run_id, 1, offer=offer(1))
        attempt = attempt_of(database, run_id)
        both = threading.Barrier(2)

        def choose(attempt: StoredAttempt = attempt, both: threading.Barrier = both) -> None:
            both.wait()
            services.rendezvous.choose(attempt, CHOSEN, but=None)

        def call_off(attempt: StoredAttempt = attempt, both: threading.Barrier = both) -> None:
            both.wait()
            services.rendezvous.call_off(attempt, known, why="it took too long")

        threads = [threading.Thread(target=work) for work in (choose, call_off)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        attempt = attempt_of(database, run_id)
        assert (attempt.chosen_json is None) is attempt.called_off
        assert (attempt.cause is None) is (not attempt.called_off)


def test_a_gang_that_has_met_and_was_called_off_is_found(database: Database, services: Services, run_id: str) -> None:
    meet(services, run_id, 0, 1)
    assert wrong(database) == []
    database.write(lambda connection: connection.execute(tables.attempts.update().values(called_off=True)))
    assert wrong(database) == [golden("server.meetings.attempt-called-off")]


def test_what_was_decided_is_not_decided_again(database: Database, services: Services, run_id: str) -> None:
    attempt = attempt_of(database, run_id)

    def twice(connection: sa.Connection) -> list[bool]:
        values: list[dict[str, Any]] = [{"chosen_json": "{}"}, {"called_off": True}]
        done: list[bool] = []
        for one in values:
            found = attempts.find(connection, run_id, 1)
            assert found is not None
            done.append(attempts.decide(connection, found, **one))
        return [*done, attempts.decide(connection, attempt, called_off=True)]

    assert database.write(twice) == [True, False, False]
