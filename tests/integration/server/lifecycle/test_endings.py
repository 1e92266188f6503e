"""How a run on several nodes ended, told as one, and told as soon as it is certain."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Failure, Hang, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Crew, Halt, Over, early_reasons, fold
from serverless_gpu.model.lifecycle.run_lifecycle import Run, surely_ends
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle.endings import CrewEnding, ending_of_gang
from serverless_gpu.server.records.crews import StoredCrew
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_stream import Position, RunSnapshot, RunStream
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File
from serverless_gpu.wire.runs import EndedMessage
from tests.support.golden import golden
from tests.support.server.ganged import began, place_met, say, services_of_nodes, wrong
from tests.support.server.stored import T0, S, add_run, outcome, place_gang, stored

RAISED = Cause(crew=1, reason=Reason.RANK_RAISED, rank=2, detail="ValueError: no")


def failed(rank: int, reason: Reason = Reason.RANK_RAISED, **other: object) -> Failure:
    return msgspec.structs.replace(Failure(rank=rank, reason=reason, at_ns=7, detail="ValueError: no"), **other)


def stopped(reason: Reason = Reason.RANK_RAISED, cause: Failure | None = None, *others: Failure) -> Stopped:
    state = State.SUCCEEDED if reason is Reason.COMPLETED else State.FAILED
    return Stopped(state=state, reason=reason, cause=cause, consequences=others)


def word(number: int, said: Stopped | None = None, **other: object) -> CrewEnding:
    return msgspec.structs.replace(CrewEnding(node=f"n{number + 1}", stopped=said), **other)


def test_the_story_is_that_of_the_cause_and_the_rest_are_consequences() -> None:
    told_to = Failure(rank=None, reason=Reason.PEER_FAILED, at_ns=3)
    peer = failed(0, peer_lost=True)
    first = msgspec.structs.replace(stopped(Reason.PEER_FAILED, told_to, peer), tails={0: "bye"})
    hang = Hang(waiting=(2,), elsewhere=(), file="hang-*-1.txt")
    own = msgspec.structs.replace(stopped(Reason.RANK_RAISED, failed(2)), tails={2: "x"}, hang=hang, log_tail="x")
    told = ending_of_gang([word(0, first), word(1, own)], RAISED, state=State.FAILED, reason=Reason.RANK_RAISED)
    assert told is not None and told.cause == failed(2, node="n2")
    assert told.consequences == (failed(0, peer_lost=True, node="n1"),)
    assert told.tails == {2: "x", 0: "bye"} and told.hang == hang
    assert told.proven


def test_a_hang_that_all_nodes_say_has_no_consequences() -> None:
    hung = Failure(rank=None, reason=Reason.COLLECTIVE_HANG, at_ns=3, detail="rank 3 on n2 is elsewhere")
    words = [word(number, stopped(Reason.COLLECTIVE_HANG, hung)) for number in (0, 1)]
    told = ending_of_gang(words, None, state=State.FAILED, reason=Reason.COLLECTIVE_HANG)
    assert told is not None and told.consequences == ()


def test_a_crew_that_says_nothing_is_spoken_for() -> None:
    halted = word(0, halt=Halt(reason=Reason.RANK_RAISED, rank=0, peer_lost=True, detail="reset"))
    gone = word(1, reason=Reason.NODE_GONE, given_up=True)
    cause = Cause(crew=0, reason=Reason.RANK_RAISED, rank=0, detail="reset", final=False)
    told = ending_of_gang([halted, gone], cause, state=State.FAILED, reason=Reason.RANK_RAISED, hint="n2 is silent")
    assert told is not None and told.cause is not None and told.hint == "n2 is silent"
    assert (told.cause.rank, told.cause.node, told.cause.detail) == (0, "n1", "reset")
    assert [(one.reason, one.node) for one in told.consequences] == [(Reason.NODE_GONE, "n2")]
    lost = Cause(crew=1, reason=Reason.NODE_GONE)
    told = ending_of_gang([halted, gone], lost, state=State.LOST, reason=Reason.NODE_GONE)
    assert told is not None and told.cause is not None and told.cause.node == "n2"
    assert [(one.rank, one.node) for one in told.consequences] == [(0, "n1")]


def test_what_only_the_server_knows_is_left_to_it() -> None:
    words = [word(0, stopped(Reason.REFUSED)), word(1)]
    apart = Cause(crew=None, reason=Reason.NODES_APART)
    assert ending_of_gang(words, apart, state=State.FAILED, reason=Reason.NODES_APART) is None
    done = [word(0, stopped(Reason.COMPLETED)), word(1, stopped(Reason.COMPLETED))]
    told = ending_of_gang(done, None, state=State.SUCCEEDED, reason=Reason.COMPLETED)
    assert told == stopped(Reason.COMPLETED)


def test_a_gpu_that_failed_tells_the_story_whoever_was_first() -> None:
    lost = stopped(Reason.GPU_LOST, failed(3, Reason.GPU_LOST))
    words = [word(0, lost), word(1, stopped(Reason.RANK_RAISED, failed(2)))]
    told = ending_of_gang(words, RAISED, state=State.FAILED, reason=Reason.GPU_LOST)
    assert told is not None and told.cause is not None and (told.cause.rank, told.cause.node) == (3, "n1")
    assert [one.node for one in told.consequences] == ["n2"]


# --- as soon as it is certain -----------------------------------------------------------------------------------------


def lives() -> list[Crew]:
    """Return crews in all the ways in which one may be when its gang ends."""
    reasons = (
        Reason.RANK_RAISED,
        Reason.PEER_FAILED,
        Reason.GPU_LOST,
        Reason.NODE_GONE,
        Reason.RANK_SIGNAL,
        Reason.TIMEOUT,
        Reason.SUPERVISOR_KILLED,
    )
    halts = [None, *(Halt(reason=reason, peer_lost=lost) for reason in reasons[:2] for lost in (False, True))]
    overs = [None, *(Over(reason=reason, began=True, given_up=reason is Reason.NODE_GONE) for reason in reasons)]
    silent = Crew(number=0, state=State.UNREACHABLE, before=State.RUNNING, began=True)
    made = [Crew(number=0, state=State.RUNNING, began=True, halt=halt, over=over) for halt in halts for over in overs]
    return [silent, *made]


@pytest.mark.parametrize("quiet", [(), (0,), (1,)])
def test_what_is_told_early_holds_whatever_comes_after_it(quiet: tuple[int, ...]) -> None:
    told = 0
    kinds = itertools.product((False, True), (0, 1), (0, 1), (False, True))
    wishes = [
        Run(
            run_id="r",
            fence=1,
            state=State.STOPPING,
            began=True,
            may_resume=may_resume,
            retries_left=retries,
            faults_left=of_faults,
            goes_on_at_limit=may_resume and at_limit,
        )
        for may_resume, retries, of_faults, at_limit in kinds
    ]
    ends = [one for one in lives() if one.over is not None]
    for one, other in itertools.product(lives(), repeat=2):
        crews = [one, msgspec.structs.replace(other, number=1)]
        now = fold(crews)
        reasons = early_reasons(crews, now.cause, quiet)
        final = [run for run in wishes if surely_ends(run, reasons, began=True)]
        if not reasons or not final or now.over is not None:
            continue
        told += 1
        for ending in ends:
            after = [
                crew if crew.over is not None else msgspec.structs.replace(ending, number=crew.number, halt=crew.halt)
                for crew in crews
            ]
            over = fold(after, now.cause).over
            assert over is not None
            for run in final:
                assert surely_ends(run, [over.reason], began=True), (crews, after)
    assert told


def test_nothing_is_told_early_that_may_be_tried_again() -> None:
    run = Run(run_id="r", fence=1, state=State.RUNNING, began=True)
    assert surely_ends(run, (Reason.RANK_RAISED, Reason.GPU_LOST), began=True)
    assert not surely_ends(msgspec.structs.replace(run, retries_left=1), (Reason.RANK_RAISED,), began=True)
    with_faults = msgspec.structs.replace(run, faults_left=1)
    assert surely_ends(with_faults, (Reason.RANK_RAISED,), began=True)
    assert not surely_ends(with_faults, (Reason.RANK_RAISED, Reason.GPU_LOST), began=True)
    assert not surely_ends(msgspec.structs.replace(run, began=False), (Reason.START_FAILED,), began=False)


# --- by reports -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=2)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of three ranks, two on n1 and one on n2, whose user code has begun."""
    run_id = add_run(database)
    place_met(database, run_id, 2, 1)
    began(services, run_id)
    return run_id


def look(services: Services, database: Database, run_id: str) -> RunSnapshot:
    def quiet(crew: StoredCrew) -> float | None:
        return services.reports.quiet_s(crew)

    return database.read(lambda connection: run_views.look(connection, run_id, 0, quiet=quiet))


def ending(said: Stopped) -> Ending:
    return Ending(state=said.state, reason=said.reason, began=True, stopped=msgspec.Raw(msgspec.json.encode(said)))


def test_the_first_failure_is_told_before_the_other_node_has_cleaned_up(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    failure = File(name="failures/2.json", size=2, inline=b"{}")
    say(services, run_id, 1, halt=Halt(reason=Reason.RANK_RAISED, rank=2, detail="ValueError: no"), files=(failure,))
    there = look(services, database, run_id)
    assert there.early is None and there.may_be_early
    assert there.run.sentence == golden("server.gang_endings.rank-n2-valueerror")
    say(services, run_id, 1, State.STOPPING, ending=ending(stopped(Reason.RANK_RAISED, failed(2))))
    found = look(services, database, run_id)
    early = found.early
    assert early is not None and found.ended is None and not found.may_be_early
    assert (early.seq, early.state, early.reason) == (0, State.FAILED, Reason.RANK_RAISED)
    assert early.sentence == golden("server.gang_endings.rank-raised-exception")
    assert [file.name for file in early.files] == ["failures/2.json"]
    assert found.run.state is State.STOPPING and not found.run.finished
    assert [(crew.node, crew.state) for crew in found.run.crews] == [("n1", State.RUNNING), ("n2", State.FAILED)]
    watch = RunStream(
        run_id, Position(), look=lambda after: look(services, database, run_id), files=services.logs, clock=clock
    )
    assert [message for message in watch.next() if isinstance(message, EndedMessage)] == [early]
    assert not [message for message in watch.next() if isinstance(message, EndedMessage)]  # once
    peer = failed(0, peer_lost=True)
    told_to = Failure(rank=None, reason=Reason.PEER_FAILED, at_ns=1)
    say(services, run_id, 0, State.STOPPING, ending=ending(stopped(Reason.PEER_FAILED, told_to, peer)))
    [last] = [message for message in watch.next() if isinstance(message, EndedMessage)]
    assert last.seq > 0 and (last.state, last.reason) == (early.state, early.reason)
    text = outcome(database, run_id).stopped
    assert text is not None
    assert [one.node for one in msgspec.json.decode(text, type=Stopped).consequences] == ["n1"]
    assert wrong(database) == []


def test_who_fails_because_a_node_is_gone_does_not_wait_for_the_fence(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    peer = stopped(Reason.RANK_RAISED, failed(0, peer_lost=True))
    halt = Halt(reason=Reason.RANK_RAISED, rank=0, peer_lost=True, detail="Connection reset by peer")
    say(services, run_id, 1)
    say(services, run_id, 0, State.STOPPING, ending=ending(peer), halt=halt)
    there = look(services, database, run_id)
    assert there.early is None and there.may_be_early
    clock.advance(11.0)
    early = look(services, database, run_id).early
    assert early is not None and early.reason is Reason.RANK_RAISED and early.ending is not msgspec.UNSET
    told = msgspec.json.decode(early.ending, type=Stopped)
    assert told.hint == golden("server.gang_endings.n2-been-heard")
    assert told.cause is not None and told.cause.node == "n1"
    say(services, run_id, 1)  # it was only slow
    assert look(services, database, run_id).early is None
    services.presence.lose("node-2", "its raylet is dead")
    clock.advance(5.0)
    assert look(services, database, run_id).early is None  # that node's processes are heard of, whatever Ray says
    clock.advance(2.0)
    assert look(services, database, run_id).early is not None


def test_a_run_that_is_tried_again_is_told_when_all_have_ended(services: Services, database: Database) -> None:
    run_id = add_run(database, retries=1)
    place_met(database, run_id, 2, 1)
    began(services, run_id)
    say(services, run_id, 1, State.STOPPING, ending=ending(stopped(Reason.RANK_RAISED, failed(2))))
    there = look(services, database, run_id)
    assert (there.early, there.may_be_early) == (None, False)  # nobody looks each second until the other node is done
    told_to = stopped(Reason.PEER_FAILED, Failure(rank=None, reason=Reason.PEER_FAILED, at_ns=1))
    say(services, run_id, 0, State.STOPPING, ending=ending(told_to))
    assert stored(database, run_id).state is State.QUEUED


def test_nodes_that_say_the_same_say_it_once(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place_gang(database, run_id, 2, 1)
    assert run_views.sentence(stored(database, run_id)) == golden("server.gang_endings.n1-n2-get")
    say(services, run_id, 1, State.STARTING, sentence="environment: 37 %")
    assert run_views.sentence(stored(database, run_id)) == "n2: environment: 37 %"
    say(services, run_id, 0, State.STARTING, sentence="environment: 80 %")
    assert run_views.sentence(stored(database, run_id)) == golden("server.gang_endings.n1-environment-80")
    say(services, run_id, 0, State.STARTING, sentence="environment: 37 %")
    assert run_views.sentence(stored(database, run_id)) == "environment: 37 %"


@pytest.mark.parametrize("why", list(StopReason))
def test_a_stop_that_is_asked_for_later_does_not_undo_what_was_told(why: StopReason) -> None:
    run = Run(run_id="r", fence=1, state=State.STOPPING, began=True, may_resume=True, stop=why)
    assert surely_ends(run, (Reason.RANK_RAISED, Reason.GPU_LOST), began=True)
