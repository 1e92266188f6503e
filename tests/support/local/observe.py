"""Looking at what happens outside: waiting for a state, processes, locks, what a run left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from serverless_gpu import attach
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.lifecycle.attempt import FactKind, StopReason
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import is_held
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.testing import agent_status

T = TypeVar("T")

LIMIT_S = 60.0


def wait_for(look: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """Return what `look` returns as soon as that is true; fail after the limit."""
    limit = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < limit, f"after {limit_s:g} s still not: {what}"
        time.sleep(0.01)


class Process:
    """A process that a test follows and may end: by its pidfd, so never another one of the same number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def alive(self) -> bool:
        """Return whether it still runs (a zombie does not)."""
        return self._fd >= 0 and not select.select([self._fd], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self._fd >= 0:
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """End it and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self, limit_s: float = LIMIT_S) -> None:
        """Wait until it is gone."""
        if self._fd >= 0:
            assert select.select([self._fd], [], [], limit_s)[0], f"pid {self.pid} is still there after {limit_s:g} s"


def announced(where: Path, name: str) -> tuple[Process, int]:
    """Wait for a process to announce itself (`ranks.announce`); return it and its parent's pid."""
    text = wait_for(lambda: (where / name).exists() and (where / name).read_text(), f"{name} announced itself")
    pid, parent = str(text).split()
    return Process(int(pid)), int(parent)


def agent(home: Path) -> Process:
    """Return the agent of a home."""
    status = agent_status(home)
    assert status is not None, "no agent"
    return Process(status.pid)


def zygote(home: Path) -> Process:
    """Return the one zygote of a home."""
    status = agent_status(home)
    assert status is not None and len(status.zygotes) == 1
    assert status.zygotes[0].pid is not None, status.zygotes
    return Process(status.zygotes[0].pid)


def supervisor(home: Path, run_id: str) -> Process:
    """Return the supervisor of a run."""

    def look() -> int:
        status = agent_status(home)
        attempts = () if status is None else status.attempts
        return next((attempt.pid for attempt in attempts if attempt.run_id == run_id), 0)

    return Process(wait_for(look, "the run has a supervisor"))


def kill_own_supervisor(home: str) -> None:
    """Kill the supervisor of the run that this is a rank of, as code of its user can, and wait to be ended, too."""
    supervisor(Path(home), os.environ["SGPU_RUN_ID"]).kill()
    time.sleep(LIMIT_S)


def used_ms(home: Path, run_id: str) -> int:
    """Return for how long the devices of a run's first attempt were in use until its user code wrote ``used``."""
    (began,) = (fact for fact in first_facts(home / "runs" / run_id / "1") if fact.kind is FactKind.EXEC)
    return (int((home / "used").read_text()) - began.boottime_ns) // 10**6


def run_directories(home: Path) -> list[str]:
    """Return the runs that have a directory."""
    return sorted(os.listdir(home / "runs")) if (home / "runs").exists() else []


def held_locks(home: Path) -> list[str]:
    """Return the devices of a home that somebody holds, and the tickets of those who wait."""
    names = []
    for path in (home / "locks").glob("*"):
        if path.suffix not in (".lock", ".ticket"):
            continue
        if is_held(path):
            names.append(path.name)
    return sorted(names)


def run_sockets(home: Path) -> list[str]:
    """Return the sockets of runs."""
    return sorted(
        path.name for path in Home(home).sockets().glob("*.sock") if not path.name.startswith(("agent-", "monitor-"))
    )


def processes_of(home: Path) -> list[str]:
    """Return the agents and supervisors of a home, as command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if f"'{home}'" in line and "serverless_gpu.node" in line:
                    found.append(f"{entry.name}: {line}")
    return found


def nothing_of_a_run(home: Path) -> bool:
    """Return whether no run of this home is being looked after, holds a lock, or has a socket."""
    status = agent_status(home)
    busy = status is not None and (status.attempts or status.queued)
    return not (busy or held_locks(home) or run_sockets(home))


def cancel_all(home: Path) -> None:
    """End what a failed test left running, so that the next one does not suffer from it."""
    for name in run_sockets(home) if home.exists() else []:
        with contextlib.suppress(ServerlessGpuError):
            attach(name.removesuffix(".sock")).cancel()


def run_script(
    path: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
    limit_s: float = 90,
) -> subprocess.CompletedProcess[str]:
    """Run a script as a person would, and return what it printed and its exit code."""
    command = [*before, sys.executable, str(path), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environ or {})}, check=False, timeout=limit_s
    )


def start_script(path: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a script and return its process, output in pipes."""
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Wait for a script; return its exit code, stdout, stderr. One that does not end is killed."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the script did not end in {limit_s:g} s\n{out}\n{err}") from None
    return process.returncode, out, err


def ask_to_stop(home: Path, run_id: str, reason: StopReason) -> None:
    """Ask a run's supervisor to stop it, as whoever acts for a server does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(Home(home).sockets() / f"{run_id}.sock"))
        channel = Channel(sock)
        protocol.receive(channel)
        protocol.send(channel, protocol.Cancel(reason=reason))
