"""Keeps Ray running on one machine: starts Ray, restarts Ray after an exit, and stops Ray cleanly.

    sgpu up   ─▶ server ── ensure, every few seconds ─▶ lock held, same plan? ─▶ nothing
                                                        lock held, other plan  ─▶ end Ray cleanly, then start it
                                                        lock free              ─▶ `main`, detached: outlives the server
    sgpu join ─▶ in the foreground

    head there? ─▶ end leftover processes ─▶ a fresh directory ─▶ ray start --block ─▶ started
        ▲                                                             │
        └──────────── pause with backoff ◀── Ray exited ──────────────┘
    stop request ─▶ SIGTERM, 5 s, SIGKILL to all its processes ─▶ remove the directory

A restart or upgrade of the server does not affect the Ray cluster. After ten minutes without a server, the detached
keeper stops Ray and exits. Running attempts need neither Ray nor the keeper. Ray starts the machine's agent as a
detached process without Ray's environment variables. The agent therefore survives the exit of Ray.

Failure cases: If the Ray head does not answer, the keeper reports the failure once and keeps trying. If Ray exits or
does not start, the keeper reads the cause from Ray's log and restarts Ray. If the keeper is killed, Ray continues until
the next keeper restarts Ray. A restart of Ray interrupts the machine's membership in the cluster. Attempts on the
machine continue. The keeper refuses a directory that belongs to another user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.errors import AgentUnavailable, InvalidValue, ServerlessGpuError, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.lock_files import held_note, hold
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.inside import linux
from serverless_gpu.node.processes import daemon
from serverless_gpu.node.processes.spawn import open_log
from serverless_gpu.units import format_duration_ms
from serverless_gpu.version import __version__

MARK = "SERVERLESS_GPU_RAY"
"""Environment variable that names Ray's directory in every Ray process of a keeper."""
STARTED = b"Ray runtime started"
CONNECT_S = 3.0
END_S = 5.0
_LOOK_S = 0.5
WATCH_S = 5.0
_STEADY_S = 60.0
PAUSE_S, _PAUSE_S_MAX = 1.0, 30.0
_KILL_TRIES = 40
_KILL_PAUSE_S = 0.05
_TAIL_BYTES = 200_000


class KeeperPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command and settings of the Ray process that a keeper runs."""

    command: tuple[str, ...]
    environ: dict[str, str]
    directory: str  # Ray's directory, inside a private directory of the current user.
    log: str
    head: str = ""  # Address of the head, or "" on the head's machine.
    token: str = ""

    @property
    def parent(self) -> str:
        """Return the private directory that contains Ray's directory."""
        return os.path.dirname(self.directory)


class RayKeeper:
    """Runs Ray on this machine, and restarts Ray after an exit.

    The keeper calls `say` with a message after each change, and `started` after each start of Ray. Every few seconds,
    the keeper calls `needed`, which returns "" or the reason why Ray is no longer needed.
    """

    def __init__(
        self,
        plan: KeeperPlan,
        *,
        say: Callable[[str], None],
        started: Callable[[], None] = lambda: None,
        needed: Callable[[], str] = lambda: "",
    ) -> None:
        self._plan, self._say, self._started, self._needed = plan, say, started, needed
        self._clock = SystemClock()
        self._pause_s = PAUSE_S
        self._away = ""

    def keep(self, stop: int) -> None:
        """Keep Ray running until a stop request, or until Ray is no longer needed.

        `stop` is a file descriptor that becomes readable on a stop request. Raises StorageError for an unusable
        directory.
        """
        end_processes(self._plan.directory)
        try:
            while not _waited(stop, 0):
                why = unreachable(self._plan.head)
                if why:
                    if why != self._away:
                        head = self._plan.head
                        self._say(f"the head of the pool at {head} does not answer ({why}); retrying")
                    self._away = why
                    if self._over() or _waited(stop, self._next_pause_s()):
                        return
                    continue
                self._away = ""
                if self._run(stop) or self._over():
                    return
                if _waited(stop, self._next_pause_s()):
                    return
        finally:
            end_processes(self._plan.directory)
            shutil.rmtree(self._plan.parent, ignore_errors=True)

    def _run(self, stop: int) -> bool:
        """Start Ray, and wait until Ray exits or must stop. Return True if the keeper must exit."""
        make_directory(self._plan.parent)
        log = open_log(Path(self._plan.log))
        begin = os.fstat(log).st_size
        environ = {**self._plan.environ, MARK: self._plan.directory}
        try:
            process = subprocess.Popen(
                self._plan.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"Ray cannot be started: {error}")
            return False
        finally:
            os.close(log)
        since_ns = self._clock.boottime_ns()
        told = self._watch(process, stop, begin)
        lived_s = (self._clock.boottime_ns() - since_ns) / 1e9
        if told:
            end(process, self._plan.directory)
            return True
        process.wait()
        end_processes(self._plan.directory)
        if lived_s > _STEADY_S:
            self._pause_s = PAUSE_S
        why = why_ended(_written(self._plan.log, begin))
        self._say(f"Ray exited after {format_duration_ms(round(lived_s * 1000))}: {why}; the keeper restarts Ray")
        return False

    def _watch(self, process: subprocess.Popen[bytes], stop: int, begin: int) -> bool:
        """Wait until Ray exits (False) or the keeper must stop Ray (True)."""
        is_started = False
        pidfd = os.pidfd_open(process.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(stop, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll((WATCH_S if is_started else _LOOK_S) * 1000)}
                if stop in ready:
                    return True
                if pidfd in ready:
                    return False
                if not is_started and STARTED in _written(self._plan.log, begin):
                    is_started = True
                    self._started()
                if self._over():
                    return True
        finally:
            os.close(pidfd)

    def _over(self) -> bool:
        why = self._needed()
        if why:
            self._say(f"Ray ends: {why}")
        return bool(why)

    def _next_pause_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _PAUSE_S_MAX)
        return pause_s


def unreachable(address: str, limit_s: float = CONNECT_S) -> str:
    """Return the reason why ``host:port`` does not answer, or "". Return "" for an empty address."""
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def make_directory(path: str) -> None:
    """Create an empty private directory. Raise StorageError if mkdir fails or another user owns the path."""
    try:
        if os.path.lexists(path):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise StorageError(
                    (f"{path} is not a directory of this user"),
                    hint=f"inspect the directory with `ls -ld {path}` and remove it",
                )
            shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be created: {error.strerror}") from error


def end(process: subprocess.Popen[bytes], directory: str, limit_s: float = END_S) -> None:
    """Stop Ray with SIGTERM, so that the head removes the machine immediately. Kill Ray on a timeout."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_processes(directory)


def end_processes(directory: str) -> int:
    """Kill every Ray process of a directory, and return the number of killed processes."""
    count = 0
    for _ in range(_KILL_TRIES):
        found = 0
        for pidfd in marked(directory):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                found += 1
        if not found:
            return count
        count = max(count, found)
        select.select([], [], [], _KILL_PAUSE_S)
    return count


def marked_pids(directory: str) -> list[int]:
    """Return the pids of processes whose `MARK` environment variable names a directory."""
    names = (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    return [int(name) for name in names if _has_mark(int(name), directory)]


def marked(directory: str) -> Iterator[int]:
    """Yield a pidfd of each process whose `MARK` environment variable names a directory.

    The generator closes each pidfd before it yields the next pidfd.
    """
    for pid in marked_pids(directory):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if _has_mark(pid, directory):  # A second check of the process detects a reused process id.
                yield pidfd
        finally:
            os.close(pidfd)


def log_path(directory: Path) -> Path:
    """Return the path of Ray's log."""
    return directory / "ray.log"


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables without Ray's variables."""
    return {name: value for name, value in environ.items() if not name.startswith(("RAY_", MARK))}


def _has_mark(pid: int, directory: str) -> bool:
    try:
        if f"{MARK}={directory}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _waited(stop: int, pause_s: float) -> bool:
    """Wait for a stop request, and return False on a timeout."""
    return bool(select.select([stop], [], [], pause_s)[0])


def _written(path: str, begin: int) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begin if size >= begin else 0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""


_EXIT_CHARACTERS_MAX = 300
_KNOWN_EXITS: tuple[tuple[str, str], ...] = (
    (
        r"GCS returned an authentication error",
        ("the restarted head rejected the old connection, so this machine joins the head again"),
    ),
    (
        r"failed to connect to GCS|Failed to connect to GCS|GCS.{0,40}(is dead|timed? ?out)",
        "the connection to the pool's head was lost",
    ),
    (r"Version mismatch", "this machine and the head have different versions of Ray or Python"),
    (
        r"(?i)token.{0,60}(invalid|mismatch|unauthenticated)|UNAUTHENTICATED",
        "the head does not accept this machine's token",
    ),
    (r"(?i)bind: address already in use|address already in use", "another process uses one of Ray's ports"),
    (r"(?i)no space left on device", "a disk or /dev/shm has no free space"),
    (
        r"marked.{0,40}as dead|has been marked dead",
        "the head removed this machine because the machine missed several health checks",
    ),
)
_EXITED = re.compile(r"(\w+) \[exit code=(-?\d+)\]")
_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception): .+)$", re.MULTILINE)
_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t(INFO|WARNING|ERR|ERROR|SUCC)\s+\S+:\d+ -- ")


def why_ended(written: bytes) -> str:
    """Return the cause of Ray's exit as one line, extracted from Ray's log.

    Ray's log ends with hundreds of lines of state dumps and stacks, which contain few useful messages.
    """
    text = written.decode("utf-8", errors="replace")
    for pattern, sentence in _KNOWN_EXITS:
        if re.search(pattern, text):
            return sentence
    exited = _EXITED.findall(text)
    if exited:
        return ", ".join(f"its {name} ended with {code}" for name, code in dict.fromkeys(exited))
    raised = _RAISED.findall(text)
    if raised:
        return _shown_line(raised[-1])
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line and line.strip("-")), "")
    return _shown_line(last) or "it wrote nothing"


def _shown_line(line: str) -> str:
    return "".join(letter for letter in line if letter.isprintable())[:_EXIT_CHARACTERS_MAX]


IDLE_S = 600.0
"""Seconds after which a keeper without a server stops Ray."""
LOCK = "keeper.lock"
_PLAN, _LOG = "keeper.json", "keeper.log"
_PLAN_VARIABLES = ("RAY_", "CUDA_", "SERVERLESS_GPU_")
_START_S = 30.0
_STOP_S = 30.0


class RunningKeeper(NamedTuple):
    """A running keeper process."""

    pid: int
    digest: str


def ensure(directory: Path, plan: KeeperPlan, owner: Path, environ: Mapping[str, str]) -> bool:
    """Start a keeper for a plan if no such keeper runs. Return True if the call started a keeper.

    `directory` contains the keeper's files. The keeper runs Ray while a server holds the lock `owner`. Raises
    AgentUnavailable if the keeper cannot start, or if a keeper with a different plan does not exit.
    """
    found = running(directory)
    digest = digest_of(plan)
    if found is not None and found.digest == digest:
        return False
    if found is not None:
        stop(directory)
    try:
        write_private(directory / _PLAN, msgspec.json.encode(plan))
        process = daemon.start(__name__, (str(directory), str(owner)), log=directory / _LOG, environ=environ)
    except OSError as error:
        raise AgentUnavailable(f"the Ray keeper did not start: {error}") from error
    daemon.reap(process, _START_S)
    return True


def running(directory: Path) -> RunningKeeper | None:
    """Return the running keeper of a directory, or None."""
    words = (held_note(directory / LOCK) or b"").decode("ascii", "replace").split()
    return RunningKeeper(int(words[0]), words[1]) if len(words) == 2 and words[0].isdigit() else None


def stop(directory: Path) -> bool:
    """Stop a directory's keeper and Ray. Return True if a keeper was running. Raises AgentUnavailable."""
    found = running(directory)
    if found is None:
        return False
    if not daemon.end(found.pid, _STOP_S, signals=(signal.SIGTERM,)):
        raise AgentUnavailable(f"the Ray keeper (pid {found.pid}) does not exit", hint=f"kill -9 {found.pid}")
    return True


def stop_ray(home: Path) -> bool:
    """Stop Ray and the keeper of a home directory's server, as `stop` does."""
    return stop(home / "server" / "ray")


def digest_of(plan: KeeperPlan) -> str:
    """Return a digest of a plan and the package version. The digest does not cover PATH."""
    ours = {name: value for name, value in plan.environ.items() if name.startswith(_PLAN_VARIABLES)}
    told = msgspec.json.encode(msgspec.structs.replace(plan, environ=ours), order="sorted")
    return hashlib.sha256(__version__.encode() + told).hexdigest()[:16]


def main(directory: str, owner: str) -> NoReturn:
    """Keep Ray running until a stop request, or until `IDLE_S` seconds have passed without a server."""
    if os.fork():
        os._exit(0)  # The detached process can outlive the server.
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
            RayKeeper(plan, say=say, started=lambda: say("Ray has started"), needed=ServerNeed(Path(owner))).keep(
                reading
            )
    except ServerlessGpuError as error:
        say(f"it ends: {error}")
        code = 1
    sys.stdout.flush()
    os._exit(code)


class ServerNeed:
    """Decides if a server still needs Ray.

    Ray is needed if a server has held the lock `owner` within the last `idle_s` seconds.
    """

    def __init__(self, owner: Path, idle_s: float = IDLE_S) -> None:
        self._owner, self._idle_s = owner, idle_s
        self._clock = SystemClock()
        self._seen_ns = self._clock.boottime_ns()

    def __call__(self) -> str:
        """Return "", or the reason why Ray is no longer needed."""
        now_ns = self._clock.boottime_ns()
        if held_note(self._owner) is not None:
            self._seen_ns = now_ns
        return (
            "" if now_ns - self._seen_ns < self._idle_s * 1e9 else ("no server has run on this machine for ten minutes")
        )


def say(sentence: str) -> None:
    """Write a line to the keeper's log."""
    sys.stdout.write(f"{format_moment(SystemClock().wall_ns())} {sentence}\n")
    sys.stdout.flush()


def _read(path: Path) -> KeeperPlan:
    try:
        return from_json(path.read_bytes(), KeeperPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"the file {path} does not contain a valid plan for the Ray keeper: {error}") from None
