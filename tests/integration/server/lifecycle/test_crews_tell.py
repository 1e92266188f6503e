"""What the crews of a gang tell each other through the server: why one ends, and that all of them may."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp, Silent, StopAsked
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import node_key
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle.transitions import ReportRequests
from serverless_gpu.server.records import orders
from serverless_gpu.server.records.crews import CrewId
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File, ReportNow
from tests.support.golden import golden
from tests.support.server.agents import hello
from tests.support.server.ganged import (
    FINISHED,
    RAISED,
    began,
    happened,
    place_met,
    result,
    say,
    services_of_nodes,
    told_of,
    waiting,
    wrong,
)
from tests.support.server.made import recomposed
from tests.support.server.stored import T0, S, add_run, place_gang, stored, tell


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=2)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of three ranks, two on n1 and one on n2."""
    run_id = add_run(database)
    place_met(database, run_id, 2, 1)
    return run_id


def looks(services: Services, database: Database) -> list[tuple[str, int]]:
    """Return which crews are to report now: node and number."""
    return [(node_id, number) for node_id in ("node-1", "node-2") for _, _, number in services.looks.of(node_id)]


def test_all_may_exit_once_all_have_returned(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    assert not say(services, run_id, 1, returned=True).release
    assert not say(services, run_id, 1).release  # it says so no more, and nothing is taken back
    assert looks(services, database) == []
    assert say(services, run_id, 0, returned=True).release
    assert looks(services, database) == [("node-2", 1)]
    assert say(services, run_id, 1).release
    assert looks(services, database) == []
    run = stored(database, run_id)
    assert run.state is State.RUNNING and run.attempt is not None and run.attempt.released
    say(services, run_id, 1, State.STOPPING, files=(result(2),), ending=FINISHED)
    assert say(services, run_id, 0, State.STOPPING).release
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    assert say(services, run_id, 0, State.STOPPING).release
    say(services, run_id, 0, State.STOPPING, files=(result(0), result(1)), ending=FINISHED)
    assert stored(database, run_id).reason is Reason.COMPLETED
    assert wrong(database) == []


def test_22C8_a_crew_that_has_returned_does_not_wait_for_a_silent_one(
    services: Services, database: Database, run_id: str
) -> None:
    """Its devices are free then. The silent crew still says how the attempt ends, and may be heard of again."""
    began(services, run_id)
    assert not say(services, run_id, 0, returned=True).release
    happened(database, run_id, 1, Silent())
    assert say(services, run_id, 0, returned=True).release
    say(services, run_id, 0, State.STOPPING, files=(result(0), result(1)), ending=FINISHED)
    say(services, run_id, 0, State.STOPPING, freed=True, receipt=msgspec.Raw(b"{}"))
    run = stored(database, run_id)
    assert run.state is State.UNREACHABLE and run.attempt is not None and not run.attempt.released
    assert [crew.number for crew in run.attempt.open_crews] == [1] and wrong(database) == []
    assert not say(services, run_id, 1).release
    assert stored(database, run_id).state is State.RUNNING
    assert say(services, run_id, 1, returned=True).release
    say(services, run_id, 1, State.STOPPING, files=(result(2),), ending=FINISHED)
    assert stored(database, run_id).reason is Reason.COMPLETED and wrong(database) == []


def test_22C8_a_crew_that_has_returned_is_held_while_another_one_works_or_a_stop_was_asked_for(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    happened(database, run_id, 1, Silent())
    assert not say(services, run_id, 0).release  # user code runs there
    say(services, run_id, 0, returned=True)
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    answer = say(services, run_id, 0, returned=True)
    assert (answer.release, answer.stop) == (False, StopReason.CANCEL)


def test_22C8_a_crew_that_is_given_up_fails_the_run_whose_other_crew_has_left(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    happened(database, run_id, 1, Silent())
    say(services, run_id, 0, returned=True)
    say(services, run_id, 0, State.STOPPING, files=(result(0), result(1)), ending=FINISHED)
    happened(database, run_id, 1, GivenUp(reason=Reason.NODE_GONE))
    run = stored(database, run_id)
    assert (run.state, run.reason) == (State.LOST, Reason.NODE_GONE) and wrong(database) == []


def test_a_halt_is_told_to_the_others_before_it_has_ended(services: Services, database: Database, run_id: str) -> None:
    began(services, run_id)
    halt = Halt(reason=Reason.RANK_RAISED, rank=2, detail="ValueError: lr\x1b[2J\nand more")
    answer = say(services, run_id, 1, State.STOPPING, halt=halt)
    assert (answer.peer_failed, answer.release, looks(services, database)) == ("", False, [("node-1", 0)])
    assert say(services, run_id, 0).peer_failed == golden("server.crews_tell.rank-n2-valueerror")
    assert looks(services, database) == []
    assert say(services, run_id, 0).peer_failed  # until it says that it ends
    assert not say(services, run_id, 0, State.STOPPING, halt=Halt(reason=Reason.PEER_FAILED)).peer_failed
    assert told_of(database, run_id)[-1] == (State.STOPPING, golden("server.crews_tell.rank-n2-valueerror"))
    followed = Ending(state=State.FAILED, reason=Reason.PEER_FAILED, began=True, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 0, State.STOPPING, ending=followed)
    say(services, run_id, 1, State.STOPPING, ending=RAISED)
    run = stored(database, run_id)
    assert (run.state, run.reason, run.detail) == (
        State.FAILED,
        Reason.RANK_RAISED,
        golden("server.crews_tell.rank-n2-valueerror"),
    )
    assert wrong(database) == []


def test_who_only_says_that_a_peer_left_is_believed_until_somebody_has_more_to_say(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    lost = b'{"cause": {"rank": 0, "peer_lost": true, "detail": "Connection closed by peer"}}'
    ending = Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=msgspec.Raw(lost))
    say(services, run_id, 0, State.STOPPING, ending=ending)
    attempt = stored(database, run_id).attempt
    assert attempt is not None and attempt.cause is not None
    assert (attempt.cause.crew, attempt.cause.rank, attempt.cause.final) == (0, 0, False)
    stopped = b'{"cause": {"rank": 2, "detail": "killed for memory"}}'
    ending = Ending(state=State.FAILED, reason=Reason.HOST_OOM, began=True, stopped=msgspec.Raw(stopped))
    say(services, run_id, 1, State.STOPPING, ending=ending)
    run = stored(database, run_id)
    assert (run.reason, run.detail) == (Reason.HOST_OOM, golden("server.crews_tell.rank-n2-killed"))


def test_what_a_crew_is_asked_to_report_for_is_in_its_answer_though_it_was_read_before(
    services: Services, run_id: str
) -> None:
    """A sign of life is under way when another crew fails: it takes the look, so it has to take the news."""
    began(services, run_id)

    class Slow(ReportRequests):
        def done(self, node_id: str, crew: CrewId) -> bool:
            if node_id == "node-1":
                say(services, run_id, 1, State.STOPPING, halt=Halt(reason=Reason.RANK_RAISED, rank=2, detail="no"))
            return super().done(node_id, crew)

    services = recomposed(services, looks=Slow())
    assert say(services, run_id, 0).peer_failed == golden("server.crews_tell.rank-n2")
    assert services.looks.of("node-1") == ()


def test_a_cancelled_gang_is_cancelled_whoever_hears_of_it_first(
    services: Services, database: Database, run_id: str
) -> None:
    began(services, run_id)
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    assert say(services, run_id, 0, State.STOPPING, ending=RAISED).stop is None  # a consequence: it is over
    answer = say(services, run_id, 1, State.STOPPING)
    assert (answer.stop, answer.peer_failed) == (StopReason.CANCEL, "")
    ending = Ending(state=State.CANCELLED, reason=Reason.CANCELLED, began=True, stopped=msgspec.Raw(b"{}"))
    say(services, run_id, 1, State.STOPPING, ending=ending)
    assert stored(database, run_id).reason is Reason.CANCELLED


def test_a_crew_without_others_has_nobody_to_tell(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place_gang(database, run_id, 1)
    say(services, run_id, 0, exec_ns=T0 + 2 * S)
    answer = say(services, run_id, 0, returned=True, halt=Halt(reason=Reason.RANK_RAISED, rank=0))
    assert (answer.release, answer.peer_failed) == (False, "")
    run = stored(database, run_id)
    assert run.state is State.RUNNING and run.attempt is not None
    assert (run.attempt.cause, run.attempt.released, run.attempt.crews[0].halt_json) == (None, False, None)


def test_a_halt_is_of_a_rank_of_its_crew(services: Services, run_id: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.crews_tell.rank-node-n2"))):
        say(services, run_id, 1, halt=Halt(reason=Reason.RANK_RAISED, rank=0))


@pytest.mark.parametrize("name", ["results/0.pkl", "failures/1.json", "failures/9.stack", "hang-0-1.txt"])
def test_a_crew_writes_no_file_of_another(services: Services, run_id: str, name: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.crews.node-n2"))):
        say(services, run_id, 1, files=(File(name=name, size=2, inline=b"no"),))
    own = [File(name=name, size=2, inline=b"ok") for name in ("results/2.pkl", "failures/2.stack", "hang-1-1.txt")]
    say(services, run_id, 1, files=tuple(own))


def test_a_node_is_told_to_look_until_its_crew_has_reported(
    services: Services, database: Database, run_id: str
) -> None:
    text = msgspec.json.encode(hello("n2", takes=("crews",))).decode()
    database.write(lambda connection: connection.execute(tables.nodes.update().values(hello_json=text)))
    (start,) = waiting(database, "node-2")
    database.write(lambda connection: orders.take(connection, "node-2", [start.seq], at_ns=T0))
    services.looks.ask("node-2", (run_id, 1, 1))
    look = ReportNow(run_id=run_id, fence=1)

    async def listen() -> None:
        told = services.agents.stream(Caller(name="alice"), "node-2")
        assert [await anext(told), await anext(told)] == [look, look]  # it comes again, soon
        await asyncio.to_thread(say, services, run_id, 1)
        services.hub.touch(node_key("node-2"))
        services.looks.ask("node-1", (run_id, 1, 0))
        services.hub.close()
        assert [one async for one in told] in ([], [None])

    asyncio.run(asyncio.wait_for(listen(), 30))
    assert services.looks.of("node-2") == ()


def test_22C8_an_order_to_look_brings_what_the_crew_would_be_answered(
    services: Services, database: Database, run_id: str
) -> None:
    """So ranks exit, or end, without another request; the crew is asked to report until it has."""
    text = msgspec.json.encode(hello("n1", takes=("crews",))).decode()
    database.write(lambda connection: connection.execute(tables.nodes.update().values(hello_json=text)))
    began(services, run_id)
    say(services, run_id, 0, returned=True)
    assert say(services, run_id, 1, returned=True).release
    asked = ReportNow(run_id=run_id, fence=1, release=True)
    assert services.agents.looks(Caller(name="alice"), "node-1") == [asked]
    say(services, run_id, 0, returned=True)
    assert services.agents.looks(Caller(name="alice"), "node-1") == []


def test_a_node_that_knows_of_no_crews_is_not_told_to_look(services: Services, database: Database, run_id: str) -> None:
    text = msgspec.json.encode(hello("n2")).decode()
    database.write(lambda connection: connection.execute(tables.nodes.update().values(hello_json=text)))
    services.looks.ask("node-2", (run_id, 1, 1))
    assert services.agents.looks(Caller(name="alice"), "node-2") == []
