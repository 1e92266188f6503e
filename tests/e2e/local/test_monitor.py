"""The monitor: what a supervisor is told, that it comes back, and that it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from serverless_gpu import distributed
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.agent import connection
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages, start_stop
from serverless_gpu.testing import stop_agent
from tests.support.local.monitor import monitor
from tests.support.local.observe import Process, wait_for

W = TypeVar("W", bound=messages.MonitorMessage)

_DEVICES = tuple(
    Device(uuid=f"FAKE-H100-{index}", index=index, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE)
    for index in range(2)
)


class Line:
    """A connection to a monitor, as a supervisor has one."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        channel.sock.settimeout(60)

    def say(self, word: messages.MonitorMessage) -> None:
        """Say a word."""
        messages.send(self.channel, word)

    def wait_for(self, kind: type[W]) -> W:
        """Return the next word of a kind."""
        while True:
            word = messages.receive(self.channel)
            assert word is not None, "the monitor is gone"
            if isinstance(word, kind):
                return word


@pytest.fixture
def monitored(own: Path) -> Iterator[Home]:
    """Yield a home with a monitor and without an agent."""
    home = Home(own)
    start_stop.ensure(home, os.environ).close()
    yield home
    start_stop.stop(home)


def line_to(home: Home) -> Line:
    """Return a new connection to the monitor of a home."""
    channel = wait_for(lambda: start_stop.connect(home.sockets()), "the monitor listens")
    assert channel is not None
    return Line(channel)


@pytest.fixture
def line(monitored: Home) -> Iterator[Line]:
    """Yield a connection."""
    line = line_to(monitored)
    yield line
    line.channel.close()


@pytest.fixture
def other(monitored: Home) -> Iterator[Line]:
    """Yield another one."""
    line = line_to(monitored)
    yield line
    line.channel.close()


def next_monitor(home: Home, before: Process) -> Process:
    """Return the monitor that came after another one."""

    def look() -> Process | None:
        found = monitor(home)
        return found if found.pid != before.pid else None

    found = wait_for(look, "another monitor runs")
    assert found is not None
    return found


def observe(home: Home, run_id: str = "01aaaaaaaaaaaaaaaaaaaaaaaa", **changes: object) -> messages.Observe:
    """Return what a supervisor says of an attempt, whose directory is made."""
    directory = home.attempt(run_id, 1)
    if not directory.exists():
        home.make_attempt(run_id, 1)
    fields: dict[str, object] = {
        "run_id": run_id,
        "fence": 1,
        "directory": str(directory),
        "spec": RunSpec(),
        "world_size": 2,
        "python": "/usr/bin/python3",
        "environ": {},
        "called_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    }
    return messages.Observe(**{**fields, **changes})  # type: ignore[arg-type]  # for short


def ranks() -> messages.Ranks:
    """Return two ranks on two fakes, which are this process."""
    return messages.Ranks(devices=_DEVICES, pids={0: os.getpid(), 1: os.getpid()})


def test_a_supervisor_is_told_what_was_seen_and_the_samples_lie_in_the_attempt(monitored: Home, line: Line) -> None:
    word = observe(monitored)
    line.say(word)
    assert line.wait_for(messages.Untracked).final
    line.say(ranks())
    wait_for(lambda: line.wait_for(messages.AttemptSample).uses[0].samples >= 2, "two samples")
    seen = line.wait_for(messages.AttemptSample)
    assert [use.uuid for use in seen.uses] == [device.uuid for device in _DEVICES]
    rows = Path(word.directory, "logs", "0.telemetry").read_text().splitlines()
    assert rows[0].startswith("{") and rows[2].startswith("[")


def test_nothing_is_sampled_before_ranks_run_nor_after_they_have_ended(
    monitored: Home, line: Line, other: Line
) -> None:
    word = observe(monitored)
    path = Path(word.directory, "logs", "0.telemetry")
    line.say(word)
    line.wait_for(messages.Untracked)
    assert not path.exists()
    line.say(ranks())
    line.wait_for(messages.AttemptSample)
    line.say(messages.EndingNote(state=State.SUCCEEDED, reason=Reason.COMPLETED))
    other.say(messages.WatchNode())
    wait_for(
        lambda: all(w.state is State.SUCCEEDED for w in other.wait_for(messages.NodeFrame).attempts), "it is known"
    )
    rows = path.read_bytes()
    other.wait_for(messages.NodeFrame)
    other.wait_for(messages.NodeFrame)
    assert path.read_bytes() == rows


def test_whoever_looks_gets_frames_with_the_attempts(monitored: Home, line: Line, other: Line) -> None:
    other.say(messages.WatchNode(fakes="H100:8"))
    assert other.wait_for(messages.NodeFrame).attempts == ()
    line.say(observe(monitored))
    line.say(ranks())

    def look() -> messages.NodeFrame | None:
        frame = other.wait_for(messages.NodeFrame)
        return frame if frame.attempts and frame.attempts[0].devices and frame.sample.ranks else None

    frame = wait_for(look, "the attempt is in a frame")
    assert frame is not None
    assert frame.attempts[0].pids == {0: os.getpid(), 1: os.getpid()}
    assert {device.uuid for device in frame.devices} >= {device.uuid for device in _DEVICES}
    assert len(frame.sample.gpus) == len(frame.devices) and [rank.rank for rank in frame.sample.ranks] == [0, 1]


def test_a_second_monitor_leaves_the_place_to_the_first(monitored: Home, line: Line) -> None:
    first = monitor(monitored)
    process, ready_fd = start_stop.start(monitored, monitored.sockets(), os.environ)
    assert process.wait(50) == 0
    os.close(ready_fd)
    line.say(messages.WatchNode())
    assert line.wait_for(messages.NodeFrame).attempts == () and first.alive()


def test_it_stays_as_long_as_an_attempt_does_and_ends_with_it(monitored: Home, line: Line) -> None:
    process = monitor(monitored)
    line.say(observe(monitored))
    line.wait_for(messages.Untracked)
    assert start_stop.stop(monitored) == 0 and process.alive()
    line.channel.close()
    process.wait_gone()
    assert not messages.monitor_socket(monitored.sockets()).exists()


def test_one_that_is_stopped_by_a_signal_is_ended_all_the_same(
    monitored: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_stop, "END_S", 0.5)
    process = monitor(monitored)
    process.send(signal.SIGSTOP)
    assert start_stop.stop(monitored) == 1 and not process.alive()


def test_it_ends_when_its_home_is_gone(monitored: Home) -> None:
    process = monitor(monitored)
    messages.monitor_socket(monitored.sockets()).unlink()
    process.wait_gone()


def test_words_that_make_no_sense_cost_their_speaker_the_connection(monitored: Home, line: Line, other: Line) -> None:
    line.channel.send(b'{"type": "poem"}')
    assert messages.receive(line.channel) is None
    other.say(messages.WatchNode())
    assert other.wait_for(messages.NodeFrame).attempts == ()


def test_a_watcher_that_does_not_read_holds_nobody_up(monitored: Home, line: Line, other: Line) -> None:
    other.channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    other.say(messages.WatchNode())
    line.say(observe(monitored))
    line.say(ranks())
    wait_for(lambda: line.wait_for(messages.AttemptSample).uses[0].samples >= 3, "three samples")


def test_the_agent_starts_it_and_starts_it_again_when_it_was_killed(own: Path, tmp_path: Path) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    first = monitor(Home(own))
    first.kill()
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    second = next_monitor(Home(own), first)
    assert second.alive()
    stop_agent(own)
    second.wait_gone()


def test_F44_one_that_is_killed_with_work_left_is_followed_by_another_although_nothing_runs(own: Path) -> None:
    home = Home(own)
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    first = monitor(home)
    home.tracking.mkdir(exist_ok=True)
    (home.tracking / "another-version.1.0.json").write_text("{}")  # stays: nobody here can read it
    first.kill()
    second = next_monitor(home, first)
    stop_agent(own)
    second.wait_gone()
    connection.connect(home)[0].sock.close()
    assert monitor(home).alive(), "an agent that was started anew starts one, too"
