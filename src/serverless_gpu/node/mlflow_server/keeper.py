"""The keeper of an MLflow server: a detached process that starts and watches one server.

    lock ─▶ reserve port ─▶ end leftovers of an earlier server ─▶ server ─▶ /health? ─▶ ready
      ▲                                                                        │
      └── pause ◀── server ended, or silent for two minutes ◀──────────────────┘ checked every 30 s
    SIGTERM, owner's end, 8 h without use ─▶ SIGTERM to the server, 5 s, SIGKILL to it and all descendants

An MLflow server is in use while clients touch its `used` file. An open connection, such as a browser that shows a page,
also counts as use.

Failure cases:

If MLflow is missing or incomplete, or its database has another version, the keeper records one message and exits. After
a pause, the next request starts another keeper. A keeper retries without a request if it has an owner, or if its server
has answered before.

If the server dies or hangs, the keeper restarts the server on the same port, with exponential backoff.

If the keeper is killed, the kernel ends the MLflow server. The next keeper ends the MLflow server's remaining child
processes.

If another process uses the server's previous port, the keeper chooses another port and logs the change. Links that
contain the previous port no longer work.

If the disk is full, the keeper's record is outdated. Readers of an outdated record behave as if the keeper had not
reported yet.

The server is the program `mlflow server` in the caller's interpreter. MLflow's command imports all of MLflow and starts
a second process, which repeats the imports. Each of the two MLflow processes needs 260 MB. To save a process, the
keeper's program replaces itself with the second process if the MLflow version allows it. The kernel ends the MLflow
server when the keeper exits.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, machine
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.node.inside import linux
from serverless_gpu.node.mlflow_server.server import (
    HOST,
    ServerFiles,
    ServerRecord,
    ServerStore,
    StartAttempt,
    failure_sentence,
    held_port,
    open_place,
    pause_s,
    without_password,
)
from serverless_gpu.node.processes import daemon
from serverless_gpu.node.processes.spawn import bound_log, clean_variables, open_log, startup_variables

_STEADY_S = 60.0
_STOP_S = 5.0
_LOOK_S = 0.2
_SILENT_MAX = 4
_OWNED_PAUSE_S_MAX = 60.0
_RESTARTS_MAX = 5
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.01
_LAST_WORDS_BYTES = 16_000


class KeeperLimits(NamedTuple):
    """Time limits of a keeper, in seconds."""

    # Time limit in seconds for the server's first answer. A busy machine may need a minute to start the server, an idle
    # machine five seconds.
    start_s: float = 180.0
    watch_s: float = 30.0  # Interval in seconds between two checks of a running server.
    answer_s: float = 5.0  # Timeout in seconds of one request to the server.
    idle_s: float = 8 * 3600.0  # Idle time in seconds after which the keeper ends the server.


LIMITS = KeeperLimits()


class ServerStart(NamedTuple):
    """Start parameters of an MLflow server: interpreter, caller's variables and additional host names."""

    python: str
    environ: Mapping[str, str]
    hosts: tuple[str, ...] = ()


class End(StrEnum):
    """Reason for which a keeper stops watching its server."""

    ASKED = "asked"
    UNUSED = "unused"
    DIED = "died"
    SILENT = "silent"


class MlflowChild(NamedTuple):
    """A started server with a descriptor that becomes readable when the server ends."""

    process: subprocess.Popen[bytes]
    pidfd: int
    log_from: int


def main(directory: str, python: str, environ: dict[str, str], owner: int, hosts: str) -> NoReturn:
    """Run an MLflow server until no client needs it. `start_keeper` passes the arguments."""
    named = tuple(name for name in hosts.split(",") if name)
    starting = ServerStart(python, {**os.environ, **environ}, named)
    keep(open_place(Path(directory)), starting, owner=owner)
    sys.stdout.flush()
    os._exit(0)


def keep(place: ServerFiles, starting: ServerStart, *, owner: int = -1, limits: KeeperLimits = LIMITS) -> None:
    """Run an MLflow server in this process until no client needs it, unless another keeper runs."""
    linux.set_name("sgpu-mlflow")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = hold(place.lock, str(os.getpid()))
    if lock is None:
        return
    with contextlib.suppress(OSError):
        linux.become_subreaper()
    MlflowKeeper(place, starting, owner=owner, limits=limits).serve()
    os.close(lock)


class MlflowKeeper:
    """Runs and watches one MLflow server.

    End of file on the descriptor `owner` ends the server. The value -1 means that the server has no owner.
    """

    def __init__(self, place: ServerFiles, starting: ServerStart, *, owner: int, limits: KeeperLimits) -> None:
        self._place, self._python, self._owner, self._limits = place, starting.python, owner, limits
        self._clock = SystemClock()
        self._backing = place.backing()
        self._variables = server_variables(self._backing, starting)
        self._is_asked = False
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._touched, self._used_ns = 0.0, self._clock.boottime_ns()
        before = place.noted()
        self._end_leftover(before)
        self._noted = ServerRecord(
            port=before.port,
            keeper=os.getpid(),
            boot_id=self._clock.boot_id(),
            machine=machine(),
            host=socket.gethostname(),
            python=self._python,
            served_by=before.served_by,
            version=before.version,
            failures=before.failures if before.python == self._python else 0,
        )

    def serve(self) -> None:
        """Run the server until a stop request, until the server is idle, or until it cannot start."""
        restarts = 0
        with contextlib.closing(self._port()):
            while True:
                end, was_ready_s = self._once()
                if end in (End.ASKED, End.UNUSED):
                    _say(f"ends: {end}")
                    self._note(stage="stopped", server=0, problem="", failures=0)
                    return
                if was_ready_s is None:
                    failures = self._noted.failures + 1
                    retry_wall_ns = self._clock.wall_ns() + int(pause_s(failures) * 1e9)
                    self._note(stage="failed", server=0, failures=failures, retry_wall_ns=retry_wall_ns)
                    _say(self._noted.problem)
                restarts = 0 if was_ready_s is not None and was_ready_s >= _STEADY_S else restarts + 1
                if self._owner < 0 and (was_ready_s is None or restarts > _RESTARTS_MAX):
                    return
                if self._wait(min(pause_s(restarts), _OWNED_PAUSE_S_MAX)) is End.ASKED:
                    return

    def _once(self) -> tuple[End, float | None]:
        """Run the server once.

        Return the end reason and the seconds during which the server answered (None: never).
        """
        self._note(stage="starting", server=0)
        child = self._start()
        if child is None:
            return End.DIED, None
        try:
            end = self._until_ready(child)
            if end is not None:
                return end, None
            ready_ns = self._clock.boottime_ns()
            text = (self._get("/version") or b"").decode("ascii", "replace").strip()
            version = text if len(text) < 40 and text.isprintable() else ""
            self._note(stage="ready", problem="", failures=0, retry_wall_ns=0, version=version, served_by=self._python)
            end = self._watch(child)
            answered_s = (self._clock.boottime_ns() - ready_ns) / 1e9
            if end in (End.DIED, End.SILENT):
                self._note(stage="starting", server=0, problem=f"MLflow's server {end}, so the keeper restarts it")
            return end, answered_s
        finally:
            self._finish(child)

    def _start(self) -> MlflowChild | None:
        if not (Path(self._python).is_file() and os.access(self._python, os.X_OK)):
            self._note(problem=f"the interpreter {self._python} no longer exists")
            return None
        try:
            log = open_log(self._place.log)
            try:
                log_from = os.fstat(log).st_size
                process = subprocess.Popen(
                    [self._python, "-c", server_program(os.getpid(), self._noted.port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._place.directory,
                    env=self._variables,
                    start_new_session=True,
                    umask=0o077 if self._backing.is_own else -1,
                )
            finally:
                os.close(log)
            self._note(server=process.pid)
            return MlflowChild(process, os.pidfd_open(process.pid), log_from)
        except OSError as error:
            self._note(problem=f"the keeper could not start MLflow's server: {error.strerror or error}")
            return None

    def _until_ready(self, child: MlflowChild) -> End | None:
        """Wait until the server answers. Return None, or the reason for which the wait ended early."""
        deadline_ns = self._clock.boottime_ns() + int(self._limits.start_s * 1e9)
        while self._clock.boottime_ns() < deadline_ns:
            if self._get("/health") is not None:
                return None
            end = self._wait(_LOOK_S, child)
            if end is not None:
                if end is End.DIED:
                    self._note(problem=self._why(child))
                return end
        self._note(
            problem=f"MLflow's server did not answer within {self._limits.start_s:.0f} s. See the log {self._place.log}"
        )
        return End.SILENT

    def _watch(self, child: MlflowChild) -> End:
        """Check the server periodically. Return the reason for which the keeper stops watching the server."""
        silent = 0
        while True:
            end = self._wait(self._limits.watch_s, child)
            if end is not None:
                return end
            silent = 0 if self._get("/health") is not None else silent + 1
            if silent >= _SILENT_MAX:
                return End.SILENT
            with contextlib.suppress(OSError), open(self._place.log, "r+b") as log:
                bound_log(log.fileno())
            if self._owner < 0 and self._unused_s() >= self._limits.idle_s:
                return End.UNUSED

    def _finish(self, child: MlflowChild) -> None:
        """End the server and all its descendants."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)
        select.select([child.pidfd], [], [], _STOP_S)
        for _ in range(_LOCK_TRIES):
            if not linux.kill_descendants(os.getpid()):
                break
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            select.select([], [], [], _LOCK_PAUSE_S)
        child.process.returncode = 0  # The loop above has already reaped the server and its orphans.
        os.close(child.pidfd)

    def _wait(self, seconds: float, child: MlflowChild | None = None) -> End | None:
        """Wait up to `seconds` for an event. Return the event that ended the wait, or None."""
        fds = [self._wake, *((child.pidfd,) if child else ()), *((self._owner,) if self._owner >= 0 else ())]
        deadline_ns = self._clock.boottime_ns() + int(seconds * 1e9)
        while True:
            left_s = max(0.0, (deadline_ns - self._clock.boottime_ns()) / 1e9)
            readable = select.select(fds, [], [], left_s)[0]
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 512)
            if self._is_asked or self._owner in readable:
                return End.ASKED
            if child is not None and child.pidfd in readable:
                return End.DIED
            if not readable:
                return None

    def _why(self, child: MlflowChild) -> str:
        written = ""
        with contextlib.suppress(OSError), self._place.log.open("rb") as file:
            file.seek(max(child.log_from, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            written = file.read(_LAST_WORDS_BYTES).decode("utf-8", "replace")
        code = child.process.wait()
        ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
        shown = without_password(self._backing.uri)
        return failure_sentence(written, ending, StartAttempt(self._python, shown, str(self._place.log)))

    def _port(self) -> socket.socket:
        before = self._noted.port
        held = held_port(self._place, self._noted)
        self._note(port=held.getsockname()[1])
        if before and before != self._noted.port:
            _say(
                f"port {before} is taken by another process. The server now uses port {self._noted.port}, so "
                "earlier links are broken"
            )
        return held

    def _get(self, path: str) -> bytes | None:
        """Return the first bytes of the server's response, or None if the request fails."""
        connection = http.client.HTTPConnection(HOST, self._noted.port, timeout=self._limits.answer_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read(1000) if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _unused_s(self) -> float:
        now_ns = self._clock.boottime_ns()
        touched = self._touched
        with contextlib.suppress(OSError):
            touched = self._place.used.stat().st_mtime
        if touched != self._touched or has_connection(self._noted.port):
            self._touched, self._used_ns = touched, now_ns
        return (now_ns - self._used_ns) / 1e9

    def _note(self, **changes: object) -> None:
        self._noted = msgspec.structs.replace(self._noted, **changes)
        try:
            self._place.note(self._noted)
        except OSError as error:
            _say(f"cannot write to {self._place.directory}: {error}")

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def _end_leftover(self, before: ServerRecord) -> None:
        """End the remaining processes of a killed keeper's server, identified by session and directory."""
        if not before.server or before.boot_id != self._clock.boot_id() or before.machine != machine():
            return
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                is_its = os.getsid(pid) == before.server
                if is_its and os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(self._place.directory):
                    daemon.end(pid, _STOP_S, signals=(signal.SIGKILL,))  # SIGKILL frees the server's port at once.


def has_connection(port: int) -> bool:
    """Return True if a client is connected to a loopback port."""
    wanted = f":{port:04X}"
    with contextlib.suppress(OSError), open("/proc/net/tcp", encoding="ascii") as file:
        for line in file:
            words = line.split()
            if len(words) > 3 and words[1].endswith(wanted) and words[3] == "01":
                return True
    return False


def _say(text: str) -> None:
    """Write a line to the keeper's log."""
    print(f"{format_moment(SystemClock().wall_ns())} {text}", flush=True)


_PROGRAM = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != {parent}:
    os._exit(1)
try:
    import mlflow.server
    apart = mlflow.server._exec_cmd

    def become(command, *args, **options):
        if isinstance(command, list) and command[:2] == [sys.executable, "-m"]:
            sys.stdout.flush()
            os.execve(command[0], command, {{**os.environ, **(options.get("extra_env") or {{}})}})
        return apart(command, *args, **options)

    mlflow.server._exec_cmd = become
except Exception as error:
    print(f"started as it comes: {{error!r}}", flush=True)
from mlflow.cli import cli
cli(["server", "--host", {host!r}, "--port", "{port}", "--workers", "1"], prog_name="mlflow")
"""
_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def server_program(parent: int, port: int) -> str:
    """Return the server program for `python -c`.

    `parent` is the keeper's pid.
    """
    return _PROGRAM.format(parent=parent, host=HOST, port=port)


def server_variables(backing: ServerStore, starting: ServerStart) -> dict[str, str]:
    """Return the server's environment variables, without the caller's MLflow client variables.

    The keeper passes variables instead of options, because older MLflow versions ignore unknown variables. Variables
    also keep passwords out of the process list.
    """
    environ = starting.environ
    names = [name for host in (*_HOSTS, *starting.hosts) for name in (host, f"{host}:*")]
    variables = {
        **clean_variables(environ),
        **startup_variables(environ),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "MLFLOW_BACKEND_STORE_URI": backing.uri,
        "MLFLOW_ARTIFACTS_DESTINATION": backing.artifacts,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names),
    }
    # The default artifact location lets later users of the store find the files without this server.
    if not backing.is_own:
        variables["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = backing.artifacts
    if backing.is_files:
        variables["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return variables
