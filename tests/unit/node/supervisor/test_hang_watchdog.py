"""What is told of a run that stands still, and when it is taken back, on a clock that the test moves.

The ranks have no process, so nothing is ever seen of them: they stand still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Attempt, Limits, State
from serverless_gpu.node.attempt.usage_account import AttemptAccount
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.hang_watchdog import HangWatchdog
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.account import launch

ATTEMPT = Attempt(
    run_id="r", fence=1, world_size=2, limits=Limits(hang_warning_ns=600_000_000_000), state=State.RUNNING
)
NOTHING_SEEN = "no output for 10 min 00 s, and every rank waits (ranks 0, 1 in an unknown place)"


class Scene:
    """A run that stands still, looked after every five seconds."""

    def __init__(self, directory: Path, channel: Channel) -> None:
        self.clock = FakeClock()
        self.told: list[str] = []
        self.notes: list[str] = []
        self.watch = HangWatchdog(directory, self.clock, self.told.append, self.notes)
        self._gang = LocalGang(launch(directory), channel, AttemptAccount(launch(directory), self.clock))

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            self.clock.advance(5)
            for _ in range(3):  # a look is begun in one turn and there in the next
                self.watch.look(ATTEMPT, self._gang)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    ours, theirs = pair()
    with closing(theirs), closing(ours) as channel:
        yield Scene(tmp_path, channel)


def test_a_warning_is_taken_back_by_progress_and_leaves_no_sentence(scene: Scene) -> None:
    scene.live(630)
    [warning] = scene.told
    assert warning.startswith("no output for 10 min 0") and scene.watch.said == warning
    scene.watch.heard()
    scene.live(30)
    assert scene.told[1:] == [golden("node.hang_watch.ranks-get-again"), ""]
    assert scene.watch.said == ""
    scene.watch.heard()
    scene.live(30)
    assert len(scene.told) == 3


def test_an_observer_that_slept_has_seen_no_progress(scene: Scene) -> None:
    scene.live(630)
    scene.clock.advance(3600)
    scene.live(60)
    [warning] = scene.told
    assert scene.watch.said == warning
    scene.live(630)
    assert len(scene.told) == 2 and scene.told[1].startswith("no output for 10 min 0")
    scene.watch.heard()
    scene.live(5)
    assert scene.told[2:] == [golden("node.hang_watch.ranks-get-again-after"), ""]


def test_the_note_begins_with_the_file_for_a_receipt_cuts_the_end(scene: Scene, tmp_path: Path) -> None:
    scene.live(630)
    assert scene.told == [golden("node.hang_watch.stacks-all-ranks", NOTHING_SEEN=NOTHING_SEEN, tmp_path=tmp_path)]
    assert scene.notes == [golden("node.hang_watch.hang-txt-stacks", NOTHING_SEEN=NOTHING_SEEN)]
    assert (tmp_path / "hang-1.txt").exists()


def test_a_file_that_cannot_be_written_loses_no_sentence(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "hang-1.txt").mkdir()
    scene.live(630)
    problem = "could not be written (Is a directory)"
    assert scene.told == [
        golden("node.hang_watch.stacks-all-ranks-hang", NOTHING_SEEN=NOTHING_SEEN, tmp_path=tmp_path, problem=problem)
    ]
    assert scene.notes == [f"hang-1.txt {problem}: {NOTHING_SEEN}"]
