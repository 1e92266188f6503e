"""Starts, queries and ends the MLflow servers of an installation, and defines their files.

    ensure_server ──▶ lock held     ─▶ the record of its keeper
                      free          ─▶ start a keeper (a few milliseconds; the lock admits one keeper)
                      failed lately ─▶ the problem, until the pause ends: 5 s, 10 s, … 10 min
    stop_server ────▶ SIGTERM to the keeper, which ends the server; after a timeout SIGKILL

    $SERVERLESS_GPU_HOME/mlflow/<key>/     key: "default", or the key of a caller's own store
    ├── server.json     the keeper's record of its server; 0600
    ├── store           the address of the store, which may contain a password; 0600
    ├── lock            locked by the keeper for its lifetime; contains its pid
    ├── used            touched by users of the server
    ├── server.log      MLflow's output
    └── mlflow.db  artifacts/               only for the home's own store

The monitor, `sgpu mlflow` and the server call this module. No function waits for the start of MLflow, which takes
seconds. A server keeps its port across restarts, so that links remain valid. The first port derives from a hash of the
directory's path. The server therefore gets the same port if `server.json` is lost. All server ports are below the
kernel's ephemeral port range.

Failure cases: If the keeper cannot start or no file can be written, the returned result contains a problem message.
Start failures raise no exceptions. A keeper on another machine may hold the lock if the home directory is on a network
file system. The result names the machine of the lock's holder. No second server starts, because two MLflow servers
would write to one database.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import select
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from serverless_gpu.ambient import Clock, SystemClock, machine
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.processes import daemon

DEFAULT = "default"
HOST = "127.0.0.1"
PASSED_ON = ("PYTHONPATH", "PYTHONHOME")
Stage = Literal["none", "starting", "ready", "failed", "stopped"]
_END_S = 10.0
_ENDING_LOOKS = 20
_ENDING_PAUSE_S = 0.05
_PORTS = range(20_000, 30_000)
_PORT_TRIES = 20
_NOTE_BYTES_MAX = 1 << 16
_PAUSE_S, _PAUSE_S_MAX = 5.0, 600.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Keepers that this process has started and that may not hold their lock yet.
_started: list[tuple[Path, subprocess.Popen[bytes]]] = []


class Serving(NamedTuple):
    """Address and state of an MLflow server."""

    uri: str  # Current or future address of the MLflow server.
    ready: bool  # True if the MLflow server answers.
    # Reason for which the server does not answer; "" during the first start or while the server answers.
    problem: str = ""
    # True if `problem` is temporary, because the keeper is restarting a dead server.
    is_restarting: bool = False
    failures: int = 0  # Number of consecutive failed starts, excluding the current start.


class MlflowServer(NamedTuple):
    """Current state of an MLflow server of this installation."""

    place: ServerFiles
    uri: str
    store: str  # Address of the caller's store; "" for the installation's own store.
    stage: Stage  # State of the server; ``"none"`` before the first start.
    pid: int | None = None  # Pid of the MLflow server; None if the server does not run.
    version: str = ""
    python: str = ""
    served_by: str = ""
    problem: str = ""
    memory_bytes: int = 0  # Memory of the server and its descendants, in bytes.
    used_s: float = 0.0  # Seconds since the server was last used.


def ensure_server(
    home: Home, python: str, store: str = "", *, environ: Mapping[str, str] | None = None, now: bool = False
) -> Serving:
    """Start a store's server if needed, and mark the server as used. Returns at once.

    `python` is the interpreter that provides MLflow for a new server. `store` is "" for the installation's own store.
    `environ` contains the variables with which Python finds modules in the server. With `now`, the call retries after a
    recent failure and waits at most a second for the failed keeper to exit.
    """
    place, clock = place_of(home, store), SystemClock()
    try:
        place.make()
        place.touch()
    except OSError as error:
        return Serving("", False, f"cannot write to {place.directory}: {error.strerror or error}")
    holder = _ending(place) if now else _holder(place)
    # Read the record after checking the lock, so that the record includes the final report of an exiting keeper.
    noted = place.noted()
    if holder is not None:
        return _kept(place, noted, holder)
    _started[:] = [each for each in _started if each[1].poll() is None]
    # A keeper that this process started may not hold its lock yet.
    if any(path == place.lock and child.pid != noted.keeper for path, child in _started):
        return Serving(place.uri(noted), False, failures=noted.failures)
    if not now and _is_too_soon(noted, python, clock):
        return Serving(place.uri(noted), False, noted.problem)
    problem = ""
    try:
        start_keeper(place, python, environ or {})
    except OSError as error:
        problem = f"could not start the MLflow server: {error.strerror or error}"
    return Serving(place.uri(noted), False, problem, failures=noted.failures)


def kept(place: ServerFiles) -> Serving | None:
    """Return a server's state from its keeper; None without a keeper or before the keeper's first report."""
    holder, noted = _holder(place), place.noted()
    return _kept(place, noted, holder) if holder and noted.keeper == holder else None


def look(place: ServerFiles, clock: Clock) -> MlflowServer:
    """Return a server's state without starting the server."""
    holder, noted = _holder(place), place.noted()
    stage, problem = noted.stage, noted.problem
    if holder is None and stage in ("starting", "ready"):
        stage, problem = "stopped", ""  # After the loss of the keeper, no process restarts the MLflow server.
    serving = _kept(place, noted, holder) if holder is not None else Serving(place.uri(noted), False, problem)
    pid = noted.server if holder is not None and noted.machine == machine() and noted.server else None
    memory_bytes = 0
    for each in () if pid is None else (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            memory_bytes += int(Path(f"/proc/{each}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    used_s = 0.0
    with contextlib.suppress(OSError):
        used_s = max(0.0, clock.wall_ns() / 1e9 - place.used.stat().st_mtime)
    return MlflowServer(
        place=place,
        uri=serving.uri,
        store=place.store,
        stage=stage,
        pid=pid,
        version=noted.version,
        python=noted.python,
        served_by=noted.served_by,
        problem=serving.problem,
        memory_bytes=memory_bytes,
        used_s=used_s,
    )


def servers(home: Home) -> list[MlflowServer]:
    """Return the states of all MLflow servers in a home directory."""
    clock = SystemClock()
    return [look(place, clock) for place in places(home)]


def stop_server(place: ServerFiles) -> bool:
    """End an MLflow server and wait until it has ended. Return True if the server was running.

    Raises AgentUnavailable if the server does not end or runs on another machine.
    """
    holder = _holder(place)
    if holder is None:
        return False
    noted = place.noted()
    if noted.machine not in ("", machine()):
        raise AgentUnavailable(
            f"the MLflow server of this home runs on {noted.host}", hint="end the MLflow server on that machine"
        )
    if holder and not daemon.end(holder, _END_S):
        raise AgentUnavailable(f"the keeper of the MLflow server (pid {holder}) did not end after it was killed")
    return True


def stop_servers(home: Home) -> int:
    """End all MLflow servers in a home directory and return the number of servers that ran.

    Raises AgentUnavailable if a server cannot be ended.
    """
    return sum(stop_server(place) for place in places(home))


def start_keeper(
    place: ServerFiles, python: str, environ: Mapping[str, str], *, owner: int = -1, hosts: str = ""
) -> subprocess.Popen[bytes]:
    """Start and return a keeper for existing server files.

    The keeper exits if another keeper holds the lock. A keeper with an `owner` descriptor ends when all other copies of
    the descriptor are closed, but not when idle. `hosts` contains additional host names of the server, separated by
    commas. Raises OSError.
    """
    passed = {name: environ[name] for name in PASSED_ON if name in environ}
    child = daemon.start(
        "serverless_gpu.node.mlflow_server.keeper",
        (str(place.directory), python, passed, owner, hosts),
        log=place.directory / "keeper.log",
        environ=os.environ,
        fds=() if owner < 0 else (owner,),
    )
    _started.append((place.lock, child))
    return child


def _kept(place: ServerFiles, noted: ServerRecord, holder: int) -> Serving:
    if noted.machine not in ("", machine()):
        problem = (
            f"the MLflow server of {place.directory} runs on another machine, {noted.host}. Set "
            "MLFLOW_TRACKING_URI to a server that all machines reach"
        )
        return Serving("", False, problem)
    is_its = noted.keeper == holder  # If the pids differ, an earlier keeper wrote the record.
    if not is_its:
        return Serving(place.uri(noted), False, failures=noted.failures)
    is_restarting = noted.stage == "starting" and bool(noted.problem)
    return Serving(place.uri(noted), noted.stage == "ready", noted.problem, is_restarting, noted.failures)


def _is_too_soon(noted: ServerRecord, python: str, clock: Clock) -> bool:
    if noted.stage != "failed":
        return False
    whole_s = pause_s(noted.failures)
    left_s = (noted.retry_wall_ns - clock.wall_ns()) / 1e9
    # Only the shortest pause applies to another interpreter, which may have the missing module.
    if python != noted.python:
        left_s -= whole_s - pause_s(1)
    return 0 < left_s <= whole_s  # A remaining time outside the range means that the wall clock has changed.


def _holder(place: ServerFiles) -> int | None:
    """Return the pid of a server's keeper.

    The pid is 0 before the keeper has written its pid. Without a keeper, the result is None.
    """
    note = held_note(place.lock)
    if note is None:
        return None
    return int(note) if note.strip().isdigit() else 0


def _ending(place: ServerFiles) -> int | None:
    """Wait for a failed keeper to exit, then return the result of `_holder`."""
    for _ in range(_ENDING_LOOKS):
        holder = _holder(place)
        if holder is None or not place.noted().problem:
            break
        select.select([], [], [], _ENDING_PAUSE_S)
    return holder


def pause_s(failures: int) -> float:
    """Return the pause in seconds after a number of consecutive failures."""
    return float(min(_PAUSE_S * 2 ** min(max(failures, 1) - 1, 20), _PAUSE_S_MAX))


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A keeper's record of its server in `server.json`."""

    stage: Stage = "none"
    port: int = 0
    keeper: int = 0  # Pid of the keeper.
    server: int = 0  # Pid of the server, which is a session leader.
    boot_id: str = ""  # Boot identifier of the boot in which the recorded pids are valid.
    machine: str = ""  # Identifier of the keeper's machine (`ambient.machine`), with the printable name in `host`.
    host: str = ""
    python: str = ""  # Path of the interpreter that provides MLflow.
    served_by: str = ""  # Path of the interpreter whose MLflow server last answered.
    version: str = ""  # MLflow version that the server reports.
    problem: str = ""  # Reason for which the server does not answer.
    failures: int = 0  # Number of consecutive failed starts.
    retry_wall_ns: int = 0  # Earliest wall-clock time of the next start.


class ServerStore(NamedTuple):
    """The store of an MLflow server, in the form of the server's options."""

    uri: str  # Address of the store in MLflow's format.
    # Artifact directory for files that clients upload through the server or write directly.
    artifacts: str
    is_files: bool  # True for a file store, which newer MLflow versions accept only after configuration.
    is_own: bool  # True for the installation's own store, whose clients upload all files through the server.


class ServerFiles:
    """The files of one MLflow server. The first write creates the server's directory.

    `store` is "" for the installation's own store.
    """

    def __init__(self, directory: Path, store: str = "") -> None:
        self.directory, self.store = directory, store

    @property
    def lock(self) -> Path:
        """Return the path of the keeper's lock file."""
        return self.directory / "lock"

    @property
    def log(self) -> Path:
        """Return the path of the MLflow output file."""
        return self.directory / "server.log"

    @property
    def used(self) -> Path:
        """Return the path of the file that server users touch."""
        return self.directory / "used"

    def make(self) -> None:
        """Create the server's directory and record the store. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _read(self.directory / "store") != self.store.encode():
            self._write("store", self.store.encode())

    def touch(self) -> None:
        """Mark the server as used now. Raises OSError."""
        os.close(os.open(self.used, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(self.used)

    def note(self, noted: ServerRecord) -> None:
        """Write the server's record. Raises OSError."""
        self._write("server.json", msgspec.json.encode(noted))

    def noted(self) -> ServerRecord:
        """Return the server's record, or a default record if no valid record exists."""
        with contextlib.suppress(msgspec.MsgspecError):
            return from_json(_read(self.directory / "server.json"), ServerRecord)
        return ServerRecord()

    def uri(self, noted: ServerRecord) -> str:
        """Return the current or expected address of the server."""
        return f"http://{HOST}:{noted.port or next(self.ports(noted))}"

    def ports(self, noted: ServerRecord) -> Iterator[int]:
        """Yield the ports to try in order. The last port is 0, with which the kernel chooses a port."""
        if noted.port:
            yield noted.port
        start = int.from_bytes(hashlib.sha256(os.fsencode(self.directory.resolve())).digest()[:4])
        for number in range(_PORT_TRIES):
            yield _PORTS[(start + 101 * number) % len(_PORTS)]
        yield 0

    def backing(self) -> ServerStore:
        """Return the store's description for the server options."""
        if not self.store:
            return ServerStore(
                f"sqlite:///{self.directory / 'mlflow.db'}", str(self.directory / "artifacts"), False, True
            )
        path = local_path(self.store)
        if path is None:
            return ServerStore(self.store, str(self.directory / "artifacts"), False, True)
        if self.store.startswith("sqlite:"):
            return ServerStore(self.store, str(path.parent / "mlruns"), False, False)
        return ServerStore(str(path), str(path), True, False)

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.directory / f"{name}.{secrets.token_hex(4)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            temporary.replace(self.directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def place_of(home: Home, store: str = "") -> ServerFiles:
    """Return a store's server files.

    A caller's store is ``sqlite:////…``, ``file:///…`` or a directory. The value "" means the installation's own store.
    """
    if not store:
        return ServerFiles(home.root / "mlflow" / DEFAULT)
    path = local_path(store)
    known = store if path is None else os.path.realpath(path)
    return ServerFiles(home.root / "mlflow" / hashlib.sha256(os.fsencode(known)).hexdigest()[:12], store)


def places(home: Home) -> list[ServerFiles]:
    """Return the files of all current and previous servers in a home directory."""
    found = sorted(path for path in (home.root / "mlflow").glob("*") if path.is_dir())
    return [open_place(path) for path in found]


def open_place(directory: Path) -> ServerFiles:
    """Return an existing server's files from its directory."""
    return ServerFiles(directory, _read(directory / "store").decode("utf-8", "replace"))


def local_path(store: str) -> Path | None:
    """Return a store's file or directory, or None for a remote store."""
    scheme = store.partition(":")[0] if "://" in store or store.startswith("file:") else ""
    if not scheme:
        return Path(store)
    if scheme.startswith("sqlite"):
        return Path(unquote(store.partition("///")[2].partition("?")[0]))
    if scheme == "file":
        return Path(unquote(urlsplit(store).path))
    return None


def held_port(place: ServerFiles, noted: ServerRecord) -> socket.socket:
    """Return a bound, non-listening socket for the server's port.

    The kernel assigns a bound port only to a process that also sets SO_REUSEADDR. MLflow's server sets SO_REUSEADDR and
    can therefore bind the same port. The bound socket prevents other processes from taking the port during a restart.
    Raises OSError if no port is free.
    """
    for port in place.ports(noted):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
            return sock
        except OSError:
            sock.close()
            if port == 0:
                raise
    raise AssertionError("unreachable: 0 is the last port")


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_NOTE_BYTES_MAX)
    return b""


class StartAttempt(NamedTuple):
    """Details of a failed start for the error message: interpreter, store without password, log path."""

    python: str
    store: str
    log: str


NO_DATABASE = "is not a database"
OTHER_VERSION = "was written by another version of MLflow"
_LACKS = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE)
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_LINE_MAX = 300
_KNOWN: tuple[tuple[str, Callable[[StartAttempt], str]], ...] = (
    (
        "Detected out-of-date database schema",  # MLflow also prints this message for newer database schemas.
        lambda tried: (
            f"{tried.store} {OTHER_VERSION}; serve the store with that version, or back it up and upgrade it: "
            f"{shlex.quote(tried.python)} -m mlflow db upgrade {shlex.quote(tried.store)}"
        ),
    ),
    (
        "Can't locate revision",
        lambda tried: (
            f"{tried.store} was written by a newer MLflow than that of {tried.python}. Upgrade MLflow "
            "in that interpreter"
        ),
    ),
    ("ddress already in use", lambda tried: "another process took the port of the MLflow server during its start"),
    (
        "unable to open database file",
        lambda tried: f"cannot open {tried.store}: the file does not exist, or you may not write to it",
    ),
    ("attempt to write a readonly database", lambda tried: f"the database {tried.store} is read-only"),
    ("database is locked", lambda tried: f"{tried.store} is locked by another process"),
    (
        "file is not a database",
        lambda tried: (
            f"{tried.store} {NO_DATABASE}; move the file elsewhere, and the next start creates a new database"
        ),
    ),
    ("No space left on device", lambda tried: f"no space left for {tried.store}"),
    ("database or disk is full", lambda tried: f"no space left for {tried.store}"),
)


def failure_sentence(written: str, ending: str, tried: StartAttempt) -> str:
    """Return the reason for which a server did not start or ended.

    `written` is the last part of the server's output. `ending` is the fallback reason, such as "exit code 1".
    """
    for words, say in _KNOWN:
        if words in written:
            return say(tried)
    lacking = _LACKS.findall(written)
    if lacking and lacking[-1].partition(".")[0] == "mlflow":
        return f"{tried.python} has no MLflow. Run pip install mlflow"
    if lacking:
        what = f"no {lacking[-1]}; mlflow-skinny is not enough"
        return f"{tried.python} has only a part of MLflow ({what}); pip install mlflow"
    errors = _ERROR.findall(written)
    last = errors[-1].strip()[:_LINE_MAX] if errors else ""
    return f"MLflow's server ended ({ending}){': ' + last if last else ''}. See the log {tried.log}"


def without_password(store: str) -> str:
    """Return a store's address without its password."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", store)
