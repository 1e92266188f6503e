"""The process that keeps Ray where the server is: started by it, nobody's child, and there when the server is not.

    server ── ensure, every few seconds ─▶ lock held, same plan? ─▶ nothing
                                           lock held, another one ─▶ ended in order, and started
                                           free                   ─▶ started, detached

So restarting or upgrading a server disturbs no cluster. Without a server for ten minutes it ends Ray and itself; runs
do not need either.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.engines.ray.ray_keeper import KeeperPlan, RayKeeper
from serverless_gpu.errors import AgentUnavailable, InvalidValue, ServerlessGpuError
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.lock_files import held_note, hold
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.inside import linux
from serverless_gpu.node.processes.spawn import clean_process, open_log
from serverless_gpu.version import __version__

IDLE_S = 600.0
"""How long Ray is kept for a server that is not there."""
LOCK = "keeper.lock"
_PLAN, _LOG = "keeper.json", "keeper.log"
_TELLING = ("RAY_", "CUDA_", "SERVERLESS_GPU_")
_START_S = 30.0
_END_S = 30.0


class RunningKeeper(NamedTuple):
    """A keeper that runs."""

    pid: int
    digest: str


def ensure(directory: Path, plan: KeeperPlan, owner: Path, environ: Mapping[str, str]) -> bool:
    """Have a keeper of a plan running; return whether one was started.

    Args:
        directory: of its files.
        plan: what it keeps.
        owner: a lock's file: whoever holds that needs Ray.
        environ: variables; the few that every process needs are passed on.

    Raises:
        AgentUnavailable: it could not be started, or another one not ended.
    """
    found = running(directory)
    digest = digest_of(plan)
    if found is not None and found.digest == digest:
        return False
    if found is not None:
        stop(directory)
    log = -1
    try:
        write_private(directory / _PLAN, msgspec.json.encode(plan))
        log = open_log(directory / _LOG)
        process = clean_process(__name__, (str(directory), str(owner)), fds=(), log=log, environ=environ)
    except OSError as error:
        raise AgentUnavailable(f"what keeps Ray could not be started: {error}") from error
    finally:
        if log >= 0:
            os.close(log)
    try:
        process.wait(_START_S)  # it detaches at once
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return True


def running(directory: Path) -> RunningKeeper | None:
    """Return the keeper of a directory, or None if missing."""
    words = (held_note(directory / LOCK) or b"").decode("ascii", "replace").split()
    return RunningKeeper(int(words[0]), words[1]) if len(words) == 2 and words[0].isdigit() else None


def stop(directory: Path) -> bool:
    """End the keeper of a directory, and Ray with it; return whether there was one.

    Raises:
        AgentUnavailable: it does not end.
    """
    found = running(directory)
    if found is None:
        return False
    try:
        process = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return False
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _END_S)[0]:
            raise AgentUnavailable(f"what keeps Ray (pid {found.pid}) does not end", hint=f"kill -9 {found.pid}")
    finally:
        os.close(process)
    return True


def stop_ray(home: Path) -> bool:
    """End the Ray of a home's server; return whether there was one; as `stop`."""
    return stop(home / "server" / "ray")


def digest_of(plan: KeeperPlan) -> str:
    """Return what tells a plan, kept by this version, from others; another shell's PATH makes none of it."""
    ours = {name: value for name, value in plan.environ.items() if name.startswith(_TELLING)}
    told = msgspec.json.encode(msgspec.structs.replace(plan, environ=ours), order="sorted")
    return hashlib.sha256(__version__.encode() + told).hexdigest()[:16]


def main(directory: str, owner: str) -> NoReturn:
    """Keep Ray until told to stop, or until there was no server for long.

    Args:
        directory: of its files.
        owner: the server's lock.
    """
    if os.fork():
        os._exit(0)  # nobody's child: the server may end first
    os.setsid()
    linux.set_name("sgpu-ray-keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGTERM, lambda *_: None)
    place = Path(directory)
    code = 0
    try:
        plan = _read(place / _PLAN)
        if hold(place / LOCK, f"{os.getpid()} {digest_of(plan)}") is not None:
            RayKeeper(plan, say=say, started=lambda: say("Ray has started"), needed=Needed(Path(owner))).keep(reading)
    except ServerlessGpuError as error:
        say(f"it ends: {error}")
        code = 1
    sys.stdout.flush()
    os._exit(code)


class Needed:
    """Checks whether Ray is still needed.

    Args:
        owner: a lock's file.
        idle_s: how long nobody may hold it.
    """

    def __init__(self, owner: Path, idle_s: float = IDLE_S) -> None:
        self._owner, self._idle_s = owner, idle_s
        self._clock = SystemClock()
        self._seen_ns = self._clock.boottime_ns()

    def __call__(self) -> str:
        """Return "", or why it is no longer needed."""
        now_ns = self._clock.boottime_ns()
        if held_note(self._owner) is not None:
            self._seen_ns = now_ns
        return "" if now_ns - self._seen_ns < self._idle_s * 1e9 else "there was no server for ten minutes"


def say(sentence: str) -> None:
    """Write a line into the log."""
    sys.stdout.write(f"{format_moment(SystemClock().wall_ns())} {sentence}\n")
    sys.stdout.flush()


def _read(path: Path) -> KeeperPlan:
    try:
        return from_json(path.read_bytes(), KeeperPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} does not say what is to be kept: {error}") from None
