"""Gangs on several nodes that stand still or idle: what crews say, what they are answered, and who is to report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hangs import hang_detection
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, Silence
from serverless_gpu.model.hangs.hang_detection import PLACES_MAX, RankSeen, Sign
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, StopAsked
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Report, ReportAnswer
from tests.support.golden import golden
from tests.support.model.hangs import look
from tests.support.server.ganged import began, happened, place_met, say, services_of_nodes, wrong
from tests.support.server.stored import T0, S, add_run, stored, tell

pytestmark = pytest.mark.any_database


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=T0 + 9 * S)


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    return services_of_nodes(database, tmp_path, clock, nodes=2)


@pytest.fixture
def run_id(services: Services, database: Database) -> str:
    """Return a run of three ranks, two on n1 and one on n2, whose user code runs."""
    run_id = add_run(database, hang_timeout_s=600.0, hang_warning_s=0.0, idle_timeout_s=100.0)
    place_met(database, run_id, 2, 1)
    began(services, run_id)
    return run_id


def looks(services: Services) -> list[int]:
    return [number for node_id in ("node-1", "node-2") for _, _, number in services.looks.of(node_id)]


def rank(number: int, where: str = "train.py:30 train") -> RankSeen:
    return RankSeen(rank=number, state="S", where=where, place=1, places=(1,), signs=(Sign.SOCKET,))


def silent(services: Services, run_id: str, crew: int, ms: int, **said: Any) -> ReportAnswer:
    return say(services, run_id, crew, silence=Silence(number=1, ms=ms), **said)


def hung(services: Services, run_id: str, clock: FakeClock) -> None:
    """Have both crews stand still until that is judged."""
    silent(services, run_id, 0, 300_000)
    ask = silent(services, run_id, 1, 300_000).ask
    assert ask is not None
    clock.advance(300)
    silent(services, run_id, 0, 600_000, seen=CrewObservation(number=ask.number, ranks=(rank(0), rank(1))))
    silent(
        services, run_id, 1, 600_000, seen=CrewObservation(number=ask.number, ranks=(rank(2, "a.py:1\x1b[2J\nhere"),))
    )


def test_crews_are_asked_once_all_are_silent_and_told_what_came_of_it(
    services: Services, run_id: str, clock: FakeClock
) -> None:
    assert silent(services, run_id, 0, 500_000).ask is None
    assert say(services, run_id, 1).ask is None
    assert looks(services) == []
    hung(services, run_id, clock)
    assert looks(services) == [0]
    told = [silent(services, run_id, crew, 601_000).judgement for crew in (0, 1)]
    assert told[0] == told[1] and told[0] is not None and told[0].ends
    assert told[0].sentence == golden("server.stillness.output-10-min")


def test_a_hang_that_a_crew_ends_by_is_the_sentence_of_all(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    hung(services, run_id, clock)
    say(services, run_id, 1, State.STOPPING, halt=Halt(reason=Reason.COLLECTIVE_HANG, detail="all wait"))
    answer = silent(services, run_id, 0, 602_000)
    assert answer.peer_failed == "all wait" and answer.judgement is not None and answer.judgement.ends
    assert wrong(database) == []


def test_nothing_is_judged_of_a_run_that_is_to_stop(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    silent(services, run_id, 0, 900_000)
    assert silent(services, run_id, 1, 900_000).ask is None


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (CrewObservation(number=1, ranks=(rank(0),)), "has no rank 0 on this node"),
        (CrewObservation(number=1, ranks=(rank(2), rank(2))), "reports the same rank twice"),
        (CrewObservation(number=1, ranks=(RankSeen(rank=2, where="x" * 301),)), "over the size limits"),
        (
            CrewObservation(number=1, ranks=(RankSeen(rank=2, places=tuple(range(PLACES_MAX + 1))),)),
            "over the size limits",
        ),
        (CrewObservation(number=1, ranks=(), stacks={1: "another's"}), "has no rank 1 on this node"),
        (CrewObservation(number=1, ranks=(), stacks={2: "x" * 4_001}), "over the size limits"),
    ],
)
def test_what_nobody_can_have_seen_is_refused(services: Services, run_id: str, seen: CrewObservation, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        say(services, run_id, 1, seen=seen)


def test_what_a_node_saw_of_code_with_long_names_is_taken(services: Services, run_id: str) -> None:
    """A report that is refused is no sign of life: the crew would be given up for the names in its user's code."""
    watch = hang_detection.noted(
        hang_detection.begin(0), [look(2, (("/x/train.py", 1, "resume_in_" * 50),))], 1, spins=False
    )
    say(services, run_id, 1, seen=CrewObservation(number=1, ranks=hang_detection.seen(watch)))


def test_a_gang_is_idle_only_when_all_its_devices_are_and_is_warned_before_it_is_stopped(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    assert say(services, run_id, 0, idle=IdleVerdict.STOP).idle is IdleVerdict.GO_ON
    assert say(services, run_id, 1).idle is IdleVerdict.GO_ON
    assert say(services, run_id, 1, idle=IdleVerdict.WARN).idle is IdleVerdict.WARN
    assert looks(services) == [0]
    assert say(services, run_id, 0).idle is IdleVerdict.GO_ON  # its devices work again
    assert say(services, run_id, 0, idle=IdleVerdict.STOP).idle is IdleVerdict.WARN
    assert stored(database, run_id).stop is None
    say(services, run_id, 1, idle=IdleVerdict.STOP)
    assert stored(database, run_id).stop is StopReason.IDLE
    assert [say(services, run_id, crew).stop for crew in (0, 1)] == [StopReason.IDLE] * 2


def test_a_crew_that_is_not_heard_of_is_not_idle(services: Services, run_id: str, clock: FakeClock) -> None:
    say(services, run_id, 0, idle=IdleVerdict.STOP)
    say(services, run_id, 1, idle=IdleVerdict.WARN)
    clock.advance(services.settings.soft_expiry_s)
    assert say(services, run_id, 1, idle=IdleVerdict.STOP).idle is None


def test_an_attempt_that_idled_stops_no_later_one(services: Services, database: Database) -> None:
    """A report is still judged by what was read of its attempt when the run waits for the next one."""
    run_id = add_run(database, idle_timeout_s=100.0, resume=True)
    place_met(database, run_id, 2, 1)
    began(services, run_id)
    say(services, run_id, 0, idle=IdleVerdict.STOP)
    say(services, run_id, 1, idle=IdleVerdict.WARN)
    before = stored(database, run_id)
    assert before.attempt is not None
    for crew in (0, 1):
        happened(database, run_id, crew, AttemptEnded(Reason.DRAINED, began=False))
    said = Report(state=State.RUNNING, idle=IdleVerdict.STOP)
    services.gang_hangs.hear(before, before.attempt, before.attempt.crews[1], said)
    after = stored(database, run_id)
    assert (after.state, after.stop) == (State.QUEUED, None)


def test_a_gang_whose_ranks_return_one_after_the_other_is_not_told_that_it_idles(
    services: Services, database: Database, run_id: str
) -> None:
    assert say(services, run_id, 0, returned=True).idle is IdleVerdict.GO_ON
    assert say(services, run_id, 1, idle=IdleVerdict.WARN).idle is IdleVerdict.WARN  # of those that still work
    assert say(services, run_id, 1).idle is IdleVerdict.GO_ON
    answer = say(services, run_id, 1, returned=True)
    assert (answer.release, answer.idle) == (True, None)
    assert (say(services, run_id, 0, returned=True).idle, stored(database, run_id).stop) == (None, None)


def test_the_first_crew_that_reaches_its_time_limit_stops_all_with_their_grace(
    services: Services, database: Database, run_id: str
) -> None:
    say(services, run_id, 1, State.STOPPING, halt=Halt(reason=Reason.TIMEOUT))
    answer = say(services, run_id, 0)
    assert (answer.stop, answer.peer_failed) == (StopReason.TIMEOUT, "")
    assert stored(database, run_id).stop is None
    assert wrong(database) == []
