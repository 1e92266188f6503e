"""The supervisor's line to the monitor: what is said and heard, how long ranks wait, and what becomes of it when the
monitor is not there, dies, hangs or talks nonsense."""

from __future__ import annotations

import select
import selectors
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import DeviceUse
from serverless_gpu.model.spec import Command, RayCluster, RunSpec, Tracking
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.protocol import Context, EnvironmentRequest, Launch
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import Backlog
from serverless_gpu.node.supervisor.monitor_link import COMMAND_NS, LINK_NS, SERVER_NS, MonitorLink
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.fake_monitor import FakeMonitor

DEVICES = (Device(uuid="FAKE-0", index=0, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE),)
TRACKED = messages.TrackedNote(run_id="m1", url="http://127.0.0.1:5000/#/runs/m1", environ={"MLFLOW_RUN_ID": "m1"})
KEPT = "the node stores the recorded data and sends it once MLflow answers (within 24 h)"
USE = DeviceUse(uuid="FAKE-0", samples=3, busy_percent=50.0)
THERE = Tracking(uri="http://there:5000")
HOMES = Tracking()
ENVIRON = {
    "MLFLOW_TRACKING_URI": "http://there:5000",
    "HTTPS_PROXY": "http://proxy",
    "no_proxy": "localhost",
    "AWS_SECRET_ACCESS_KEY": "x",
    "HOME": "/home/me",
    "MLFLOW_ODD": "\0ff",
}


def launch(**changes: object) -> Launch:
    context = Context(python="/usr/bin/python", flags=(), environ=ENVIRON, cwd="/", umask=0, argv=("",), sys_path=())
    made = Launch(
        run_id="r",
        fence=2,
        directory="/home/runs/r/2",
        spec=RunSpec(tracker=THERE),
        candidates=DEVICES,
        world_size=1,
        context=context,
        called_ns=7,
    )
    return msgspec.structs.replace(made, **changes)


class Line:
    """One observation, with what its supervisor has."""

    def __init__(self, sockets: Path, made: Launch) -> None:
        self.clock = FakeClock()
        self.told: list[protocol.Message] = []
        self.selector = selectors.DefaultSelector()
        self.observation = MonitorLink(made, sockets, self.clock, self.selector, self.told.append)
        self.seen: list[bool] = []
        self.observation.on_seen = self.seen.append

    def turn(self) -> None:
        """Do one turn of the supervisor's loop."""
        for key, _ in self.selector.select(5):
            key.data()
        self.observation.tend()

    def sentences(self) -> list[str]:
        """Return what was told in words."""
        return [message.sentence for message in self.told if isinstance(message, protocol.WaitingNote)]


Begin = Callable[[Launch], Line]


@pytest.fixture
def begin(sockets: Path) -> Iterator[Begin]:
    """Yield what begins an observation."""
    lines: list[Line] = []

    def begun(made: Launch) -> Line:
        lines.append(Line(sockets, made))
        lines[-1].observation.begin()
        return lines[-1]

    yield begun
    for line in lines:
        line.observation.close()


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sg-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def monitor(sockets: Path) -> Iterator[FakeMonitor]:
    made = FakeMonitor(sockets)
    yield made
    made.close()


def test_the_monitor_is_told_of_an_attempt_from_its_launch_to_its_receipt(
    begin: Begin, monitor: FakeMonitor, sockets: Path
) -> None:
    line = begin(launch(environment=EnvironmentRequest(snapshot="abc", store="file:///s")))
    line.observation.ranks(DEVICES, {0: 41}, Path("/sys/fs/cgroup/x"))
    line.observation.ending(State.FAILED, Reason.RANK_RAISED, "a rank raised an exception: E: no")
    line.observation.settled(sockets)
    peer = monitor.accept()
    while monitor.hear(peer) is not None:
        pass
    assert monitor.heard == [
        messages.Observe(
            run_id="r",
            fence=2,
            directory="/home/runs/r/2",
            spec=RunSpec(tracker=THERE),
            world_size=1,
            python="/usr/bin/python",
            environ={
                "MLFLOW_TRACKING_URI": "http://there:5000",
                "HTTPS_PROXY": "http://proxy",
                "no_proxy": "localhost",
            },
            environment="snapshot abc",
            called_ns=7,
        ),
        messages.Ranks(devices=DEVICES, pids={0: 41}, cgroup="/sys/fs/cgroup/x"),
        messages.EndingNote(
            state=State.FAILED, reason=Reason.RANK_RAISED, sentence="a rank raised an exception: E: no"
        ),
        messages.Settled(),
    ]
    assert not line.selector.get_map()


def test_what_the_monitor_says_reaches_watchers_ranks_and_the_receipt(begin: Begin, monitor: FakeMonitor) -> None:
    line = begin(launch())
    peer = monitor.accept()
    said = (
        messages.Untracked(sentence="it does not answer"),
        TRACKED,
        messages.TrackedNote(run_id="m2", url="http://other", environ={}),
        messages.AttemptSample(uses=(USE,), busy=False),
        messages.UserSentence(sentence="1,204 points dropped", note=True),
        messages.UserSentence(sentence="MLflow answers again"),
    )
    for word in said:
        messages.send(peer, word)
    line.turn()
    observation = line.observation
    assert (observation.environ, observation.url, observation.uses) == ({"MLFLOW_RUN_ID": "m1"}, TRACKED.url, (USE,))
    assert observation.told == protocol.Tracked(run_id="m1", url=TRACKED.url)
    assert observation.hold_ns is None
    assert line.told == [
        protocol.Tracked(run_id="m1", url=TRACKED.url),
        protocol.WaitingNote(sentence="1,204 points dropped"),
        protocol.WaitingNote(sentence="MLflow answers again"),
    ]
    assert observation.receipt_notes() == ["1,204 points dropped"]
    assert line.seen == [False]
    messages.send(peer, messages.AttemptSample(uses=(USE,), busy=True))
    line.turn()
    assert line.seen == [False, True]


def test_the_ranks_of_a_function_wait_for_nothing(begin: Begin, monitor: FakeMonitor) -> None:
    for tracker in (THERE, HOMES):
        line = begin(launch(spec=RunSpec(tracker=tracker)))
        peer = monitor.accept()
        assert line.observation.hold_ns is None
        messages.send(peer, messages.Untracked(sentence="it did not answer last time"))
        line.turn()
        assert line.observation.hold_ns is None
        assert line.told == []  # it may answer yet
        assert line.observation.receipt_notes() == [golden("node.observation.did-answer-last", KEPT=KEPT)]


def test_the_receipt_of_what_was_over_at_once_names_where_it_is_tracked(
    begin: Begin, monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serverless_gpu.node.supervisor.monitor_link.LINK_NS", 60 * 10**9
    )  # it waits no longer than it has to
    line = begin(launch())
    peer = monitor.accept()
    late = threading.Timer(0.02, lambda: messages.send(peer, TRACKED))
    late.start()
    line.observation.linger()
    late.join()
    assert line.observation.url == TRACKED.url


@pytest.mark.parametrize("spec", [RunSpec(tracker=THERE), RunSpec()])
def test_F44_a_receipt_waits_for_a_blink_and_only_where_something_is_tracked(
    begin: Begin, monitor: FakeMonitor, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    real = select.select

    def selected(rlist: list[Any], wlist: list[Any], xlist: list[Any], timeout: float) -> Any:
        waited.append(timeout)
        return real(rlist, wlist, xlist, 0)

    line = begin(launch(spec=spec))
    peer = monitor.accept()
    monkeypatch.setattr(select, "select", selected)
    line.observation.linger()
    assert waited == ([LINK_NS / 1e9] if spec.tracker else [])
    line.clock.advance(LINK_NS / 1e9)
    line.observation.linger()
    line.clock.advance(-LINK_NS / 1e9)
    messages.send(peer, messages.Untracked(sentence="it does not answer"))
    line.observation.linger()
    assert len(waited) <= 1  # it lasted longer than that, and it is known already


def test_nobody_waits_for_a_monitor_that_is_not_there_but_a_program_a_little(begin: Begin) -> None:
    program = begin(launch(spec=RunSpec(tracker=THERE, payload=Command(argv=("train",)))))
    assert program.observation.hold_ns == program.clock.boottime_ns() + COMMAND_NS
    program.clock.advance(COMMAND_NS / 1e9)
    assert program.observation.hold_ns is None


def test_a_ray_cluster_waits_as_a_program_does_for_its_workers_know_what_they_are_started_with(
    begin: Begin, monitor: FakeMonitor
) -> None:
    line = begin(launch(spec=RunSpec(tracker=HOMES, ray=RayCluster())))
    assert line.observation.hold_ns == line.clock.boottime_ns() + COMMAND_NS
    messages.send(monitor.accept(), messages.Untracked(sentence="the home's MLflow server starts", is_starting=True))
    line.turn()
    assert line.observation.hold_ns == line.clock.boottime_ns() + SERVER_NS
    assert line.sentences() == [golden("node.observation.home-mlflow-server")]


def test_a_receipt_without_a_link_says_what_becomes_of_the_run_in_mlflow(begin: Begin, monitor: FakeMonitor) -> None:
    line = begin(launch(spec=RunSpec(tracker=HOMES)))
    assert line.observation.receipt_notes() == [golden("node.observation.mlflow-answered-yet")]
    messages.send(monitor.accept(), messages.Untracked(sentence="the home's server starts", is_starting=True))
    line.turn()
    assert line.observation.receipt_notes() == [golden("node.observation.home-mlflow-server-still")]
    assert begin(launch(spec=RunSpec())).observation.receipt_notes() == []


def test_a_program_waits_for_the_homes_own_server_to_start_and_that_is_said(begin: Begin, monitor: FakeMonitor) -> None:
    line = begin(launch(spec=RunSpec(tracker=HOMES, payload=Command(argv=("train",)))))
    peer = monitor.accept()
    for _ in range(2):
        messages.send(peer, messages.Untracked(sentence="the home's MLflow server starts", is_starting=True))
    line.turn()
    assert line.observation.hold_ns == line.clock.boottime_ns() + SERVER_NS
    assert line.sentences() == [golden("node.observation.home-mlflow-server-starts")]
    messages.send(peer, messages.Untracked(sentence="no MLflow in /usr/bin/python yet"))
    line.turn()
    assert line.observation.hold_ns is None, "it does not start"
    messages.send(peer, messages.Untracked(sentence="no MLflow in /usr/bin/python", final=True))
    line.turn()
    assert line.observation.hold_ns is None
    assert line.sentences()[1:] == [golden("node.observation.mlflow-usr-bin")]
    assert line.observation.receipt_notes() == [golden("node.observation.mlflow-usr-bin")]


def test_a_monitor_that_comes_later_hears_everything_and_is_not_asked_for_too_often(
    sockets: Path, begin: Begin
) -> None:
    line = begin(launch())
    line.observation.ranks(DEVICES, {0: 41}, None)
    monitor = FakeMonitor(sockets)
    line.observation.tend()  # not yet
    assert line.observation.wake_ns is not None and line.observation.wake_ns > line.clock.boottime_ns()
    line.clock.advance(2)
    line.observation.tend()
    assert line.observation.wake_ns is None
    peer = monitor.accept()
    assert [type(monitor.hear(peer)) for _ in range(2)] == [messages.Observe, messages.Ranks]
    monitor.close()


def test_a_monitor_that_dies_is_followed_by_another_that_hears_everything_again(sockets: Path, begin: Begin) -> None:
    first = FakeMonitor(sockets)
    line = begin(launch())
    peer = first.accept()
    messages.send(peer, TRACKED)
    first.close()
    line.turn()
    assert line.observation.tracked == TRACKED  # its last words
    second = FakeMonitor(sockets)
    line.observation.ending(State.SUCCEEDED, Reason.COMPLETED, "")
    line.clock.advance(2)
    line.observation.tend()
    peer = second.accept()
    assert [type(second.hear(peer)) for _ in range(2)] == [messages.Observe, messages.EndingNote]
    messages.send(peer, TRACKED)  # a new monitor says it again, watchers have it
    line.turn()
    assert [type(message) for message in line.told] == [protocol.Tracked]
    second.close()


def test_a_monitor_that_does_not_read_holds_nothing_up(begin: Begin, monitor: FakeMonitor) -> None:
    big = launch(spec=RunSpec(tracker=THERE, tags={"x": "y" * 40_000}))
    line = begin(big)
    for _ in range(20):
        line.observation.ranks(DEVICES, dict.fromkeys(range(3_000), 1), None)
    peer = monitor.accept()
    assert isinstance(monitor.hear(peer), messages.Observe)
    heard = 0
    while heard < 20:
        assert isinstance(monitor.hear(peer), messages.Ranks)
        heard += 1
        line.observation.tend()


@pytest.mark.parametrize("nonsense", [b"{", b'{"type": "no"}', b'{"type": "seen"}'])
def test_a_monitor_that_talks_nonsense_is_left_alone_for_a_while(
    begin: Begin, monitor: FakeMonitor, nonsense: bytes
) -> None:
    line = begin(launch())
    monitor.accept().send(nonsense)
    line.turn()
    assert not line.selector.get_map()
    assert line.observation.wake_ns is not None and line.observation.wake_ns > line.clock.boottime_ns()
    assert line.observation.hold_ns is None


@pytest.mark.parametrize("knocks", [False, True])
def test_an_attempt_that_no_monitor_has_heard_of_is_left_for_the_next_one(
    begin: Begin, sockets: Path, tmp_path: Path, knocks: bool
) -> None:
    backlog = tmp_path / "tracking"
    directory = tmp_path / "attempt"
    directory.mkdir()
    monitor = FakeMonitor(sockets) if knocks else None  # it is killed before it reads
    line = begin(launch(directory=str(directory)))
    line.observation.ending(State.SUCCEEDED, Reason.COMPLETED, "")
    line.observation.settled(backlog)
    (kept, held) = next(Backlog(backlog, line.clock).take(frozenset(), 1))
    held.leave()
    assert (kept.observe.run_id, kept.observe.directory) == ("r", str(directory))
    assert kept.observe.spec.tracker == THERE
    assert line.observation.receipt_notes() == [golden("node.observation.mlflow-answered-yet")]
    if monitor is not None:
        monitor.close()


def test_an_attempt_that_a_monitor_knows_or_that_is_not_tracked_is_not_left_for_another(
    begin: Begin, tmp_path: Path
) -> None:
    backlog = tmp_path / "tracking"
    nowhere = begin(launch(directory=str(tmp_path), spec=RunSpec()))
    nowhere.observation.settled(backlog)
    (tmp_path / "tracking.json").write_text("{}")
    begin(launch(directory=str(tmp_path))).observation.settled(backlog)
    assert not backlog.exists()
