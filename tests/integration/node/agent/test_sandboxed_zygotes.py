"""Zygotes in sandboxes that the pool replaces: after an abnormal end, a change of mounts, or a process of no run."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.isolation import SANDBOX
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, Stopped
from serverless_gpu.node.agent.zygote_pool import ZygotePool
from serverless_gpu.node.agent.zygotes import Zygote, ZygoteRequest
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Context, Stem
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.node.processes.process_tree import find_cgroup_root, look_at
from serverless_gpu.node.spawner.verbs import RootSpawner
from tests.support.golden import golden

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sandboxes")

START_UP_CODE = """\
import ctypes, os, signal
forks = 0
libc = ctypes.CDLL(None)

def change_mounts():
    assert libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0

def leave_a_process(*_):
    if os.fork() == 0:
        libc.prctl(15, b"left-behind", 0, 0, 0)
        os.closerange(3, 64)
        libc.pause()

def hook():
    global forks
    forks += 1
    if forks == 2:  # The first fork is the trial fork of the zygote. The second makes a stem.
        {action}

os.register_at_fork(after_in_parent=hook)
"""
MOUNT = "change_mounts()"
# The zygote is back in its own pid namespace when the signal arrives.
LEAVE_A_PROCESS = "signal.signal(14, leave_a_process), signal.setitimer(signal.ITIMER_REAL, 0.05)"


class Handed(NamedTuple):
    """A stem that the pool gave to a run."""

    stem: Stem
    fd: int


class Recorded(ZygotePool):
    """A pool that knows the processes of all zygotes it ever had."""

    def _spawn(self, *arguments: Any) -> Zygote:
        zygote = super()._spawn(*arguments)
        self.keepers = [*getattr(self, "keepers", []), zygote.process]
        return zygote


class Node:
    """A pool of zygotes, and the loop of its agent."""

    def __init__(self, place: Path, spawner: RootSpawner) -> None:
        self.selector = selectors.DefaultSelector()
        self.cgroups = find_cgroup_root(f"serverless_gpu-test-{os.getpid()}", {})
        self.log = os.open(place / "log", os.O_RDWR | os.O_CREAT, 0o600)
        self.pool = Recorded(Home(place), self.log, self.cgroups, self.selector, SystemClock(), spawner)
        self.principal = spawner.principal("alice", place)
        self.problems: list[str] = []

    def turn_until(self, condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until and not self.problems, (what, self.problems)
            for key, _ in self.selector.select(0.01):
                key.data()
            self.pool.tend(())

    def run(self, python: str) -> Handed:
        """Have the pool give a stem to a run."""
        context = Context(
            python=python, flags=(), environ={}, cwd="/", umask=0o022, argv=(), sys_path=(), descriptors_max=64
        )
        request = ZygoteRequest(context, None, self.principal.owner, self.principal, SANDBOX)
        found: list[Handed] = []
        self.pool.give_stem(request, 1, lambda stem, fd: found.append(Handed(stem, fd)), self.problems.append)
        self.turn_until(lambda: found, "the pool gave a stem")
        return found[0]

    def end(self, handed: Handed, reason: Reason = Reason.COMPLETED) -> None:
        """Have the attempt of a stem end."""
        stopped = Stopped(state=MEANINGS[reason].state, reason=reason, cause=None, consequences=())
        self.pool.attempt_ended(handed.stem.pid, stopped)
        os.close(handed.fd)
        self.turn_until(lambda: look_at(handed.stem.pid) is None, "the agent ended the stem")

    def cold_reason(self, python: str) -> str:
        """Return the reason why the next run starts cold, or "" if it starts warm."""
        self.turn_until(lambda: all(each.state == "ready" for each in self.pool.statuses()), "zygotes are ready")
        handed = self.run(python)
        self.end(handed)
        assert handed.stem.warm == (not handed.stem.warm_reason)
        return handed.stem.warm_reason


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("SERVERLESS_GPU_PRELOAD", "numpy")
    with tempfile.TemporaryDirectory(prefix="sg-zygotes-", dir="/var/tmp") as place:
        os.chmod(place, 0o711)
        made = Node(Path(place), RootSpawner({PLACE: place}))
        yield made
        made.pool.close()
        for keeper in made.pool.keepers:
            keeper.wait(10)
        made.cgroups.close()
        made.selector.close()
        os.close(made.log)


@pytest.fixture
def hooked(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that makes an interpreter whose start-up code acts when the zygote forks a stem."""

    def make(action: str) -> str:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
        (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        (site / "hook.py").write_text(START_UP_CODE.format(action=action))
        (site / "hook.pth").write_text("import hook\n")
        return str(tmp_path / "venv" / "bin" / "python")

    return make


def test_27_an_attempt_that_a_signal_ended_is_the_last_of_its_zygote(node: Node) -> None:
    first = node.run(sys.executable)
    assert not first.stem.warm
    node.end(first)
    assert node.cold_reason(sys.executable) == ""
    node.end(node.run(sys.executable), Reason.RANK_SIGNAL)
    assert node.cold_reason(sys.executable) == golden("node.zygote_policy.signal")
    assert node.cold_reason(sys.executable) == ""


def test_27_a_zygote_whose_mounts_changed_gives_no_further_stem(node: Node, hooked: Callable[[str], str]) -> None:
    python = hooked(MOUNT)
    node.end(node.run(python))
    assert node.cold_reason(python) == golden("node.zygote_policy.mounts")


def test_27_a_process_that_start_up_code_left_behind_ends_with_its_zygote(
    node: Node, hooked: Callable[[str], str]
) -> None:
    python = hooked(LEAVE_A_PROCESS)

    def left() -> list[int]:
        return [pid for pid in _pids() if (seen := look_at(pid)) is not None and seen.name == "left-behind"]

    findings: list[str] = []
    node.pool.on_stranger = findings.append
    handed = node.run(python)
    node.turn_until(left, "start-up code left a process behind")
    node.end(handed)
    node.turn_until(lambda: not left(), "the agent ended the process")
    assert node.cold_reason(python) == golden("node.zygote_policy.stranger")
    assert findings == [golden("node.zygote_policy.finding")]


def test_the_memory_of_a_zygote_is_shown_with_its_owner(node: Node) -> None:
    node.end(node.run(sys.executable))
    node.turn_until(lambda: all(each.memory_bytes for each in node.pool.statuses()), "the pool measured the zygote")
    (status,) = node.pool.statuses()
    assert status.owner == "alice" and 5_000_000 < status.memory_bytes < 500_000_000


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
