"""What is told of a run that leaves its devices idle, when that is taken back, and what stops it."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.hangs.idleness import IdleVerdict, of_gang
from serverless_gpu.model.lifecycle.attempt import Attempt, Limits, State, StopReason, StopRequested
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.supervisor.hang_watchdog import IdleWatchdog
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

RUNNING = Attempt(run_id="r", fence=1, world_size=2, limits=Limits(), state=State.RUNNING)
WARNING = (
    "no device has been busy for 48 min 00 s: the run will stop in 12 min 00 s (idle_timeout). "
    "Device use, output or `sgpu attach` prevents the stop"
)


class Scene:
    """A run whose telemetry says something every five seconds."""

    def __init__(self, limit_s: float | None = 3600.0) -> None:
        self.clock = FakeClock()
        self.told: list[str] = []
        self.notes: list[str] = []
        self.watch = IdleWatchdog(RunSpec(idle_timeout_s=limit_s), self.clock, self.told.append, self.notes)
        assert self.watch.look(RUNNING) is None  # user code has started

    def live(self, seconds: float, *, busy: bool | None = False) -> list[StopRequested]:
        found = []
        for _ in range(round(seconds / 5)):
            self.clock.advance(5)
            if busy is not None:
                self.watch.seen(busy)
            found.append(self.watch.look(RUNNING))
        return [event for event in found if event is not None]


def test_idle_devices_are_warned_of_and_then_the_run_is_stopped() -> None:
    scene = Scene()
    assert scene.live(2875) == [] and scene.told == []
    assert scene.live(5) == []
    assert scene.told == [WARNING] == [scene.watch.said]
    assert scene.live(715) == []
    assert scene.live(5) == [StopRequested(StopReason.IDLE)]
    assert scene.notes == [golden("node.idleness.stopped-because-device")]
    scene.watch.heard()  # its ranks end
    assert scene.told == [WARNING]


@pytest.mark.parametrize(
    ("work", "told"), [(True, ["the devices work again", ""]), (False, ["the run makes progress again", ""])]
)
def test_work_output_and_visits_take_a_warning_back(work: bool, told: list[str]) -> None:
    scene = Scene()
    scene.live(2900)
    if work:
        scene.watch.seen(True)
    else:
        scene.watch.heard()
    assert scene.told[1:] == told and scene.watch.said == ""
    assert scene.live(2800) == [] and scene.told[3:] == []
    scene.live(100)
    assert scene.told[3:] == [WARNING]


def test_F44_what_nobody_sees_is_not_idle() -> None:
    scene = Scene()
    assert scene.live(9000, busy=None) == [] and scene.told == []


def test_nothing_is_stopped_that_was_not_asked_for() -> None:
    assert Scene(None).live(9000) == []


def test_time_before_user_code_and_after_the_stop_does_not_count() -> None:
    clock = FakeClock()
    watch = IdleWatchdog(RunSpec(idle_timeout_s=10.0), clock, lambda _: None, [])
    for state in (State.STARTING, State.STOPPING):
        for _ in range(20):
            clock.advance(1)
            watch.seen(False)
            assert watch.look(msgspec.structs.replace(RUNNING, state=state)) is None


def test_a_crew_of_several_says_how_far_it_is_and_warns_and_stops_nothing_by_itself() -> None:
    scene, levels = Scene(), list[IdleVerdict]()
    scene.watch.tell_server = lambda *, idle: levels.append(idle)
    assert scene.live(4000) == [] and scene.told == []
    assert levels == [IdleVerdict.WARN, IdleVerdict.STOP]
    scene.watch.judged(IdleVerdict.WARN)
    assert scene.told[0].startswith("no device of any node has been busy for 1 h 0")
    scene.watch.judged(IdleVerdict.GO_ON)
    assert scene.told[1:] == [golden("node.idleness.devices-run-work"), ""]
    scene.live(5, busy=True)
    assert levels[2:] == [IdleVerdict.GO_ON]


@pytest.mark.parametrize(
    ("levels", "told", "expected"),
    [
        ([], None, IdleVerdict.GO_ON),
        ([IdleVerdict.STOP, IdleVerdict.GO_ON], IdleVerdict.WARN, IdleVerdict.GO_ON),
        ([IdleVerdict.STOP, IdleVerdict.WARN], None, IdleVerdict.WARN),
        ([IdleVerdict.STOP, IdleVerdict.STOP], IdleVerdict.GO_ON, IdleVerdict.WARN),
        ([IdleVerdict.STOP, IdleVerdict.STOP], IdleVerdict.WARN, IdleVerdict.STOP),
    ],
)
def test_a_gang_is_as_idle_as_the_least_of_its_crews(
    levels: list[IdleVerdict], told: IdleVerdict | None, expected: IdleVerdict
) -> None:
    assert of_gang(levels, told) is expected
