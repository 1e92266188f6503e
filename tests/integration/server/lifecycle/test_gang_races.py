"""What comes in the very moment in which a gang meets, ends or is released: each of the two orders has one outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp, StopAsked
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import rendezvous
from serverless_gpu.server.records import attempts, orders, runs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, Stop
from tests.support.golden import golden
from tests.support.server.agents import hello
from tests.support.server.ganged import FINISHED, happened, result, say, services_of_nodes, wrong
from tests.support.server.meetings import CHOSEN, attempt_of, look, meet, offer, reach, start
from tests.support.server.stored import T0, S, add_run, place_gang, stored, tell

CANCEL, PREEMPT, TIMEOUT = StopReason.CANCEL, StopReason.PREEMPT, StopReason.TIMEOUT
STOPS = pytest.mark.parametrize("why", [CANCEL, PREEMPT, TIMEOUT])
ENDS = {CANCEL: State.CANCELLED, TIMEOUT: State.TIMED_OUT, PREEMPT: State.QUEUED}
OWN = {CANCEL: Reason.CANCELLED, TIMEOUT: Reason.TIMEOUT, PREEMPT: Reason.PREEMPTED}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=3)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of two crews with a device each, which may go on as another attempt."""
    run_id = add_run(database, resume=True)
    place_gang(database, run_id, 1, 1)
    return run_id


def ended(why: StopReason, *, began: bool = True) -> Ending:
    state = State.CANCELLED if why is CANCEL else State.FAILED
    return Ending(state=state, reason=OWN[why], began=began, stopped=msgspec.Raw(b"{}"))


def runs_on(services: Services, run_id: str, *numbers: int) -> None:
    for number in numbers:
        say(services, run_id, number, exec_ns=T0 + 9 * S)


def returned(services: Services, run_id: str, *numbers: int) -> None:
    for number in numbers:
        say(services, run_id, number, returned=True)


def end(services: Services, run_id: str, number: int, ending: Ending) -> None:
    files = (result(number),) if ending.reason is Reason.COMPLETED else ()
    say(services, run_id, number, State.STOPPING, ending=ending, files=files)


def told_to_end(reason: Reason = Reason.PEER_FAILED) -> Ending:
    return Ending(state=State.FAILED, reason=reason, began=False, stopped=msgspec.Raw(b"{}"))


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{}, {"sentence": "fetches its environment"}, {"offer": offer(1), "reach": reach(1)}])
def test_F17_a_node_that_dies_before_the_meeting_holds_up_nobody_and_counts_for_nothing(
    services: Services, database: Database, run_id: str, clock: FakeClock, said: dict[str, Any]
) -> None:
    """Whatever it had said: it is proven that none of it ever ran, so the run is placed again without its word."""
    look(services, clock)
    start(services, run_id, 0, offer=offer(0))
    if said:
        start(services, run_id, 1, **said)
    soft_s = services.settings.soft_expiry_s
    look(services, clock, after_s=soft_s - 1, away=["node-2"])
    start(services, run_id, 0, offer=offer(0))
    assert not attempt_of(database, run_id).called_off
    look(services, clock, after_s=2, away=["node-2"])
    attempt = attempt_of(database, run_id)
    assert attempt.called_off and attempt.cause is not None
    assert attempt.cause.detail == golden("server.gang_races.n2-gone-silent")
    assert (attempt.crews[1].reason, attempt.crews[1].settled_ns is not None) == (Reason.REFUSED, True)
    assert start(services, run_id, 0).peer_failed == attempt.cause.detail
    say(services, run_id, 0, State.STOPPING, ending=told_to_end())
    run = stored(database, run_id)
    assert (run.state, run.infra_retries_used) == (State.QUEUED, 0)
    avoided = database.read(lambda connection: attempts.failed_nodes(connection, [run_id]))
    assert avoided == {run_id: frozenset({"node-2"})}
    # It comes back, and is told that this is over; what it then says of its end changes nothing.
    assert start(services, run_id, 1, **said).stale and start(services, run_id, 1, **said).chosen is None
    say(services, run_id, 1, State.STOPPING, ending=told_to_end(Reason.CANCELLED))
    assert attempt_of(database, run_id).crews[1].reason is Reason.REFUSED and wrong(database) == []


def test_a_silent_crew_whose_node_is_there_is_waited_for(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 1, offer=offer(1))
    look(services, clock, after_s=2 * services.settings.soft_expiry_s)
    assert not attempt_of(database, run_id).called_off


@pytest.mark.parametrize("why", ["cancel", "apart", "halt"])
def test_a_node_that_dies_once_its_gang_is_not_to_begin_is_not_waited_for(
    services: Services, database: Database, run_id: str, clock: FakeClock, why: str
) -> None:
    meet(services, run_id, 0)
    start(services, run_id, 1, offer=offer(1), reach=reach(1, took=None) if why == "apart" else None)
    if why == "cancel":
        tell(database, run_id, StopAsked(StopReason.CANCEL))
    elif why == "halt":
        say(services, run_id, 0, State.STOPPING, halt=Halt(reason=Reason.ENV_CORRUPT))
    look(services, clock)
    assert attempt_of(database, run_id).called_off and len(attempt_of(database, run_id).open_crews) == 2
    own = {"cancel": Reason.CANCELLED, "apart": Reason.PEER_FAILED, "halt": Reason.ENV_CORRUPT}[why]
    say(services, run_id, 0, State.STOPPING, ending=told_to_end(own))
    look(services, clock, after_s=services.settings.soft_expiry_s + 1, away=["node-2"])
    run = stored(database, run_id)
    if why == "cancel":
        assert (run.state, run.reason) == (State.CANCELLED, Reason.CANCELLED)
    else:
        assert (run.state, run.infra_retries_used) == (State.QUEUED, 1)
    assert attempt_of(database, run_id).open_crews == () and wrong(database) == []


# --- stops ------------------------------------------------------------------------------------------------------------


@STOPS
@pytest.mark.parametrize("offered", [0, 1, 2, 3])
def test_a_stop_before_it_is_chosen_lets_nobody_begin(
    services: Services, database: Database, run_id: str, clock: FakeClock, why: StopReason, offered: int
) -> None:
    """After so many of the words that a meeting takes; all of them come after the stop once more."""
    words: list[dict[str, Any]] = [{"offer": offer(0)}, {"offer": offer(1)}, {"reach": reach(0)}, {"reach": reach(1)}]
    for number, word in enumerate(words[:offered]):
        start(services, run_id, number % 2, **word)
    tell(database, run_id, StopAsked(why))
    for number, word in enumerate(words):
        answer = start(services, run_id, number % 2, **word)
        assert (answer.stop, answer.chosen, answer.offers) == (why, None, ())
    look(services, clock)
    attempt = attempt_of(database, run_id)
    assert attempt.called_off and attempt.chosen_json is None
    for number in (0, 1):
        end(services, run_id, number, ended(why, began=False))
    run = stored(database, run_id)
    assert (run.state, run.infra_retries_used) == (ENDS[why], 0) and wrong(database) == []


@STOPS
@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_stop_once_it_is_chosen_ends_what_has_begun_and_nothing_else_begins(
    services: Services, database: Database, run_id: str, clock: FakeClock, why: StopReason, begun: int
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, *range(begun))
    tell(database, run_id, StopAsked(why))
    for number in range(begun, 2):
        answer = start(services, run_id, number, offer=offer(number), reach=reach(number))
        assert (answer.stop, answer.chosen) == (why, None)
    look(services, clock, after_s=rendezvous.TOTAL_S)
    attempt = attempt_of(database, run_id)
    assert (attempt.chosen, attempt.called_off) == (CHOSEN, False)
    for number in (0, 1):
        end(services, run_id, number, ended(why, began=number < begun))
    assert stored(database, run_id).state is ENDS[why] and wrong(database) == []


@STOPS
def test_a_stop_just_before_the_last_has_returned_is_what_ends_it(
    services: Services, database: Database, run_id: str, why: StopReason
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0)
    tell(database, run_id, StopAsked(why))
    answer = say(services, run_id, 1, returned=True)
    assert (answer.stop, answer.release) == (why, False)
    assert not attempt_of(database, run_id).released
    for number in (0, 1):
        end(services, run_id, number, ended(why))
    assert stored(database, run_id).state is ENDS[why] and wrong(database) == []


@STOPS
def test_a_stop_just_after_the_last_has_returned_ends_nothing(
    services: Services, database: Database, run_id: str, why: StopReason
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0, 1)
    tell(database, run_id, StopAsked(why))
    answer = say(services, run_id, 0, returned=True)
    assert (answer.stop, answer.release) == (why, True)
    for number in (0, 1):
        end(services, run_id, number, FINISHED)
    run = stored(database, run_id)
    assert (run.state, run.reason) == (State.SUCCEEDED, Reason.COMPLETED) and wrong(database) == []


@pytest.mark.parametrize("released", [False, True])
def test_the_order_to_stop_says_whether_all_had_returned(
    services: Services, database: Database, run_id: str, released: bool
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0, *([1] if released else []))
    tell(database, run_id, StopAsked(CANCEL))
    said = msgspec.json.encode(hello()).decode()

    def take(connection: sa.Connection) -> None:
        connection.execute(tables.nodes.update().values(hello_json=said))
        for node_id in ("node-1", "node-2"):
            orders.take_starts(connection, node_id, [(run_id, 1)], at_ns=T0 + 9 * S)

    database.write(take)
    who, agents = Caller(name="alice"), services.agents
    stops = [order for number in (1, 2) for order in agents.waiting(who, f"node-{number}") if isinstance(order, Stop)]
    assert [(order.reason, order.released) for order in stops] == [(CANCEL, released)] * 2


# --- releases ---------------------------------------------------------------------------------------------------------


def test_a_node_that_is_lost_once_all_have_returned_is_the_reason_unless_its_results_are_here(
    services: Services, database: Database, run_id: str
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0, 1)
    end(services, run_id, 0, FINISHED)
    happened(database, run_id, 1, GivenUp(Reason.NODE_GONE))
    attempt = attempt_of(database, run_id)
    assert attempt.reason is Reason.NODE_GONE and attempt.released
    assert wrong(database) == []


def test_a_crew_that_fails_just_before_the_last_has_returned_is_the_cause(
    services: Services, database: Database, run_id: str
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0)
    say(services, run_id, 1, State.STOPPING, halt=Halt(reason=Reason.RANK_RAISED, rank=1, detail="no luck"))
    answer = say(services, run_id, 0, returned=True)
    assert (answer.release, answer.peer_failed) == (False, golden("server.unfolded_gangs.rank-n2-luck"))
    assert not attempt_of(database, run_id).released and wrong(database) == []


# --- a server that was restored ---------------------------------------------------------------------------------------


def restored(services: Services, database: Database, run_id: str, clock: FakeClock) -> None:
    """Go on from a backup that was made while the gang met."""
    database.write(lambda connection: runs.hold(connection, [run_id], at_ns=T0 + 8 * S))
    services.meetings.keep(())
    look(services, clock)


def test_a_restored_server_whose_gang_had_half_met_ends_it(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    """On n1 user code runs, as was chosen after the backup; n2 was not told, and nobody can tell it now."""
    restored(services, database, run_id, clock)
    runs_on(services, run_id, 0)
    for after_s in (0, rendezvous.MEET_S - 1, 2):
        assert start(services, run_id, 1, offer=offer(1), reach=reach(1)).chosen is None
        assert attempt_of(database, run_id).cause is None
        look(services, clock, after_s=after_s)
        runs_on(services, run_id, 0)
    why = "the restored server lost the rendezvous that these nodes wait for: n2"
    assert start(services, run_id, 1, offer=offer(1), reach=reach(1)).peer_failed == why
    assert say(services, run_id, 0, exec_ns=T0 + 9 * S).peer_failed == why
    end(services, run_id, 1, told_to_end())
    end(services, run_id, 0, msgspec.structs.replace(told_to_end(), began=True))
    run = stored(database, run_id)
    assert (run.state, run.reason) == (State.LOST, Reason.SERVER_RESTORED) and wrong(database) == []


def test_a_restored_server_ends_no_gang_of_which_a_crew_is_only_slow_to_say_that_it_runs(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    restored(services, database, run_id, clock)
    runs_on(services, run_id, 0)
    look(services, clock, after_s=rendezvous.MEET_S + 1)
    runs_on(services, run_id, 0, 1)
    look(services, clock, after_s=rendezvous.MEET_S + 1)
    run = stored(database, run_id)
    assert run.attempt is not None and (run.state, run.attempt.cause) == (State.RUNNING, None)
    assert wrong(database) == []


def test_a_restored_server_lets_a_gang_meet_of_which_nobody_has_begun(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    restored(services, database, run_id, clock)
    meet(services, run_id, 0, 1)
    assert attempt_of(database, run_id).chosen == CHOSEN  # as the first server did, of the same words


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [FINISHED, told_to_end()])
def test_a_crew_has_given_its_devices_back_and_the_other_one_has_not(
    services: Services, database: Database, run_id: str, later: Ending
) -> None:
    meet(services, run_id, 0, 1)
    runs_on(services, run_id, 0, 1)
    returned(services, run_id, 0, 1)
    end(services, run_id, 1, FINISHED)
    say(services, run_id, 1, State.STOPPING, freed=True, receipt=msgspec.Raw(b"{}"))
    attempt = attempt_of(database, run_id)
    assert [crew.settled_ns is None for crew in attempt.crews] == [True, False]
    assert attempt.settled_ns is None and [crew.number for crew in attempt.open_crews] == [0]
    # Others may have them from now on, and the run is not over before the other crew is.
    assert stored(database, run_id).state is State.STOPPING and wrong(database) == []
    end(services, run_id, 0, later)
    run = stored(database, run_id)
    assert run.attempt is not None and run.attempt.ended_ns is not None and not run.finished
    say(services, run_id, 0, State.STOPPING, receipt=msgspec.Raw(b"{}"))
    assert database.read(lambda c: attempts.find(c, run_id, 1)).settled_ns is not None  # type: ignore[union-attr]  # it is there


def test_what_was_decided_about_a_meeting_stays_though_the_rest_of_it_comes_late(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    start(services, run_id, 0, offer=offer(0))
    look(services, clock)
    look(services, clock, after_s=services.settings.soft_expiry_s + 1, away=["node-2"])
    answers = [start(services, run_id, 1, offer=offer(1)), start(services, run_id, 1, reach=reach(1))]
    assert all(answer.stale and answer.chosen is None for answer in answers)
    assert start(services, run_id, 0, offer=offer(0), reach=reach(0)).chosen is None
    assert rendezvous.has_met(attempt_of(database, run_id)) and wrong(database) == []
