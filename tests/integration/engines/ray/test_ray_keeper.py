"""Ray is kept running: with programs that stand for `ray start`, so that what it does is what the test says."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.engines.ray import ray_keeper
from serverless_gpu.engines.ray.ray_keeper import MARK, KeeperPlan, RayKeeper
from serverless_gpu.errors import StorageError
from tests.support.golden import golden
from tests.support.local.observe import wait_for

_STAY = "print('Ray runtime started', flush=True); import signal; signal.pause()"
_TWO = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    signal.pause()
open(os.environ["SERVERLESS_GPU_RAY"] + "/here", "w").close()
print("Ray runtime started", flush=True)
while True:
    signal.pause()
"""


class Kept:
    """A keeper in a thread, told to stop by a pipe.

    Attributes:
        said: what it has said.
        starts: how often Ray has started.
    """

    def __init__(self, plan: KeeperPlan, needed: Callable[[], str] = lambda: "") -> None:
        self.said: list[str] = []
        self.starts = 0
        self._reading, self._writing = os.pipe()
        keeper = RayKeeper(plan, say=self.said.append, started=self._started, needed=needed)
        self.thread = threading.Thread(target=keeper.keep, args=(self._reading,), daemon=True)
        self.thread.start()

    def _started(self) -> None:
        self.starts += 1

    def stop(self) -> None:
        os.write(self._writing, b"x")
        self.thread.join(30)
        assert not self.thread.is_alive()
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []
    for name in ("PAUSE_S", "WATCH_S"):
        monkeypatch.setattr(ray_keeper, name, 0.2)

    def make(program: str, head: str = "", **options: Callable[[], str]) -> Kept:
        made.append(Kept(plan(tmp_path, program, head), **options))
        return made[-1]

    yield make
    for each in made:
        if each.thread.is_alive():
            each.stop()


def plan(tmp_path: Path, program: str, head: str = "") -> KeeperPlan:
    (tmp_path / "pool" / "ray").mkdir(parents=True, exist_ok=True)
    return KeeperPlan(
        command=(sys.executable, "-c", f"import os; os.makedirs(os.environ['{MARK}'], exist_ok=True)\n{program}"),
        environ={"PATH": os.environ["PATH"]},
        directory=str(tmp_path / "pool" / "ray"),
        log=str(tmp_path / "ray.log"),
        head=head,
    )


def test_it_is_started_said_and_ended_in_order_with_nothing_left(tmp_path: Path, kept: Callable[..., Kept]) -> None:
    one = kept(_STAY)
    wait_for(lambda: one.starts == 1, "it has started")
    one.stop()
    assert one.said == []
    assert not (tmp_path / "pool").exists()
    assert list(ray_keeper.marked(str(tmp_path / "pool" / "ray"))) == []


def test_it_is_started_again_when_it_ends_and_why_is_said(kept: Callable[..., Kept]) -> None:
    one = kept("raise SystemExit('RuntimeError: Version mismatch: The cluster was started with:')")
    wait_for(lambda: len(one.said) >= 2, "it has been started twice")
    why = "this machine and the head have different versions of Ray or Python"
    assert one.said[0].startswith("Ray exited after ")
    assert one.said[0].endswith(f": {why}; the keeper restarts Ray")


def test_what_does_not_end_by_itself_is_killed_with_all_it_has_started(
    tmp_path: Path, kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_keeper, "END_S", 0.2)
    monkeypatch.setattr(ray_keeper.end, "__defaults__", (0.2,))
    one = kept(_TWO)
    wait_for(lambda: one.starts == 1, "it has started")
    directory = str(tmp_path / "pool" / "ray")
    assert sum(1 for _ in ray_keeper.marked(directory)) == 2
    one.stop()
    assert sum(1 for _ in ray_keeper.marked(directory)) == 0


def test_what_an_earlier_keeper_left_is_ended_first(tmp_path: Path, kept: Callable[..., Kept]) -> None:
    left = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", "import signal; signal.pause()"],
        {MARK: str(tmp_path / "pool" / "ray")},
    )
    other = os.posix_spawn(
        sys.executable, [sys.executable, "-c", "import signal; signal.pause()"], {MARK: str(tmp_path / "pool" / "rays")}
    )
    wait_for(lambda: sum(1 for _ in ray_keeper.marked(str(tmp_path / "pool" / "ray"))) == 1, "it is there")
    one = kept(_STAY)
    wait_for(lambda: one.starts == 1, "it has started")
    assert os.waitstatus_to_exitcode(os.waitpid(left, 0)[1]) == -signal.SIGKILL
    assert os.waitpid(other, os.WNOHANG) == (0, 0)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)


def test_a_head_that_is_away_is_asked_again_and_that_is_said_once(kept: Callable[..., Kept]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    one = kept(_STAY, head=f"127.0.0.1:{port}")
    wait_for(lambda: bool(one.said), "it is said")
    assert one.said == [golden("engines.ray_keeper.head-pool-127", port=port)]
    with socket.create_server(("127.0.0.1", port)):
        wait_for(lambda: one.starts == 1, "it has started")
    assert len(one.said) == 1


def test_it_ends_when_nobody_needs_it(tmp_path: Path, kept: Callable[..., Kept]) -> None:
    gone = threading.Event()
    one = kept(_STAY, needed=lambda: "no server has run on this machine for ten minutes" if gone.is_set() else "")
    wait_for(lambda: one.starts == 1, "it has started")
    gone.set()
    one.thread.join(30)
    assert one.said == [golden("engines.ray_keeper.ray-ends-server")]
    assert not (tmp_path / "pool").exists()


def test_a_directory_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as refused:
        ray_keeper.make_directory(str(tmp_path / "pool"))
    assert refused.value.message == golden("engines.ray_keeper.directory-ours", value=tmp_path / "pool")
    assert (tmp_path / "elsewhere").is_dir()
