"""What a crew of a gang on several nodes says of its ranks, and does of what the server says; on a clock of the test.

The ranks have no process, so nothing is ever seen of them: they stand still.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, InspectionRequest, Judgement
from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Hang,
    HangConfirmed,
    Limits,
    PeerFailed,
    Phase,
    RankReturned,
    State,
)
from serverless_gpu.model.placement import CrewPlace, laid_out
from serverless_gpu.node.attempt.usage_account import AttemptAccount
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import GangNews
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.hang_watchdog import GangHangReporter, HangWatchdog, Watchdogs
from serverless_gpu.node.supervisor.rendezvous import Peers
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.account import launch

S = 1_000_000_000
ATTEMPT = Attempt(
    run_id="r",
    fence=1,
    world_size=2,
    first=2,
    has_peers=True,
    limits=Limits(hang_warning_ns=600 * S),
    state=State.RUNNING,
)
TOLD = "no output for 10 min 00 s, and rank 0 on n1 waits: rank 3 on n2 is elsewhere"
JUDGEMENT = Judgement(number=1, sentence=TOLD, hang=Hang(waiting=(0, 1, 2), elsewhere=(3,)))


class Scene:
    """A crew that stands still, looked after every five seconds."""

    def __init__(self, directory: Path, channel: Channel) -> None:
        self.clock = FakeClock()
        self.told: list[str] = []
        self.notes: list[str] = []
        self.said: dict[str, Any] = {}
        self.attempt = ATTEMPT
        place = CrewPlace(number=1, node="n2", first_rank=2, gpus=2)
        self.reporter = GangHangReporter(directory, place, self.clock, self.told.append, self.notes)
        self.reporter.tell_server = self.said.update
        self._gang = LocalGang(launch(directory), channel, AttemptAccount(launch(directory), self.clock))

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            self.clock.advance(5)
            for _ in range(3):  # a look is begun in one turn and there in the next
                self.reporter.look(self.attempt, self._gang)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    ours, theirs = pair()
    with closing(theirs), closing(ours) as channel:
        yield Scene(tmp_path, channel)


def test_a_silence_is_told_when_looks_are_due_and_each_has_its_number(scene: Scene) -> None:
    scene.live(295)
    assert scene.said == {}
    scene.live(10)
    assert (scene.said["silent"], scene.said["silent_since_ns"]) == (1, scene.clock.boottime_ns() - 300 * S)
    scene.reporter.heard()
    scene.live(5)
    assert (scene.said["silent"], scene.said["seen"]) == (0, None)
    scene.live(305)
    assert scene.said["silent"] == 2


def test_what_was_seen_is_told_once_the_window_is_over(scene: Scene) -> None:
    scene.live(310)
    scene.reporter.asked(InspectionRequest(number=77, window_ms=60_000))
    scene.live(55)
    assert "seen" not in scene.said
    scene.live(10)
    seen = scene.said["seen"]
    assert isinstance(seen, CrewObservation) and seen.number == 77
    assert [rank.rank for rank in seen.ranks] == [2, 3] and not any(rank.moving for rank in seen.ranks)


def test_progress_makes_a_look_void(scene: Scene) -> None:
    scene.live(310)
    scene.reporter.asked(InspectionRequest(number=77, window_ms=60_000))
    scene.live(30)
    scene.reporter.heard()
    scene.live(60)
    assert scene.said["silent"] == 0 and scene.said["seen"] is None


def test_a_warning_is_told_written_and_taken_back(scene: Scene, tmp_path: Path) -> None:
    scene.live(310)
    for _ in range(2):  # each answer has it
        assert scene.reporter.judged(JUDGEMENT) is None
    assert scene.told == [golden("node.witness.stacks-all-ranks", TOLD=TOLD, tmp_path=tmp_path)]
    assert scene.notes == [golden("node.witness.hang-txt-stacks", TOLD=TOLD)]
    text = (tmp_path / "hang-1-1.txt").read_text()
    assert "node n2, at" in text and TOLD in text
    assert scene.reporter.judged(Judgement(number=1, sentence="")) is None
    assert scene.told[1:] == [golden("node.witness.ranks-get-again"), ""] and scene.reporter.said == ""


def test_the_end_has_the_sentence_of_all_nodes_and_another_file(scene: Scene, tmp_path: Path) -> None:
    scene.live(310)
    scene.reporter.judged(JUDGEMENT)
    ends = Judgement(number=1, sentence=TOLD, ends=True, hang=JUDGEMENT.hang)  # of a server that forgot the first
    assert scene.reporter.judged(ends) == HangConfirmed(detail=TOLD)
    assert scene.reporter.hang == Hang(waiting=(0, 1, 2), elsewhere=(3,), file="hang-*-2.txt")
    assert (tmp_path / "hang-1-2.txt").exists()


@pytest.mark.parametrize(("seconds", "is_kept"), [(0, True), (5, True), (60, False)])
def test_F04_what_was_seen_is_kept_where_the_other_node_was_told_first_and_ended_these_ranks(
    scene: Scene, tmp_path: Path, seconds: int, is_kept: bool
) -> None:
    """They write why they fail, and then they do; who got on in between has stood still no more."""
    scene.live(310)
    scene.reporter.asked(InspectionRequest(number=77, window_ms=60_000))
    scene.reporter.ended()
    assert not list(tmp_path.iterdir()), "nothing was seen yet"
    scene.live(65)
    if seconds:
        scene.reporter.heard()
    scene.live(seconds)
    scene.reporter.heard(PeerFailed(detail="rank 3 on n2"))
    scene.attempt = msgspec.structs.replace(ATTEMPT, state=State.STOPPING)
    scene.live(5)
    scene.reporter.ended()
    assert [path.name for path in tmp_path.iterdir()] == (["hang-1-1.txt"] if is_kept else [])
    if not is_kept:
        return
    text = (tmp_path / "hang-1-1.txt").read_text()  # the number that the other node's has
    assert golden("remote.gangs.run-ended-before") in text and "---- rank 3 (" in text
    assert scene.reporter.hang is None and scene.notes == []


def test_ranks_that_returned_after_all_have_not_stood_still(scene: Scene, tmp_path: Path) -> None:
    scene.live(310)
    scene.reporter.asked(InspectionRequest(number=77, window_ms=60_000))
    scene.live(65)
    scene.attempt = msgspec.structs.replace(ATTEMPT, phase=Phase.RETURNED, returned=frozenset({2, 3}))
    scene.live(5)
    scene.reporter.ended()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sentence", ["", TOLD])
def test_what_was_judged_is_not_written_again(scene: Scene, tmp_path: Path, sentence: str) -> None:
    scene.live(310)
    scene.reporter.asked(InspectionRequest(number=77, window_ms=60_000))
    scene.live(65)
    scene.reporter.judged(Judgement(number=1, sentence=sentence))
    scene.reporter.ended()
    assert [path.name for path in tmp_path.iterdir()] == (["hang-1-1.txt"] if sentence else [])


def test_F05_ranks_that_wait_for_those_on_other_nodes_are_told_after_a_minute(scene: Scene) -> None:
    scene.reporter.heard(RankReturned(rank=2))
    scene.attempt = msgspec.structs.replace(
        ATTEMPT, world_size=1, phase=Phase.RETURNED, returned=frozenset({2}), limits=Limits()
    )
    scene.live(55)
    assert scene.told == []
    scene.live(10)
    assert scene.told == [golden("node.witness.rank-returned-minute")]
    assert scene.notes == scene.told


def test_of_several_crews_none_ends_the_gang_for_standing_still_or_idling(tmp_path: Path) -> None:
    own = launch(tmp_path)
    clock, said = FakeClock(), list[str]()
    alone = Watchdogs(own, Home(tmp_path), clock, said.append, [])
    assert isinstance(alone.hangs, HangWatchdog) and alone.idleness.tell_server is None
    several = msgspec.structs.replace(own, crews=laid_out([("n1", 2), ("n2", 2)]), crew=1, nonce="n")
    watchdogs = Watchdogs(several, Home(tmp_path), clock, said.append, [])
    with selectors.DefaultSelector() as selector:
        peers = Peers(several, "", clock, selector, lambda message: None)
        watchdogs.judged_by(peers)
        assert isinstance(watchdogs.hangs, GangHangReporter) and watchdogs.idleness.tell_server == peers.tell
        [event] = peers.hear(GangNews(judgement=msgspec.structs.replace(JUDGEMENT, ends=True)))
        assert event == HangConfirmed(detail=TOLD)
        both = peers.hear(GangNews(judgement=msgspec.structs.replace(JUDGEMENT, number=2, ends=True), peer_failed="it"))
        assert [type(event) for event in both] == [HangConfirmed, PeerFailed], "it has stacks to write first"
        peers.close()
