"""Files, port and store of an MLflow server.

    $SERVERLESS_GPU_HOME/mlflow/<key>/     key: "default", or of a caller's own store
    ├── server.json     what its keeper says of it; 0600
    ├── store           whose server it is: the address of the store, which may hold a password; 0600
    ├── lock            held by the keeper as long as it lives, with its pid in it
    ├── used            touched by users of the server
    ├── server.log      what MLflow wrote
    └── mlflow.db  artifacts/               only where the store is the home's own

A server keeps its port over restarts, so that links stay good. The first one follows from the directory's name: it is
the same even where `server.json` was lost, and lies below the kernel's ephemeral ports.

Explains the last output of an MLflow server in one sentence with a remedy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.home import Home

DEFAULT = "default"
HOST = "127.0.0.1"
_PORTS = range(20_000, 30_000)
_PORT_TRIES = 20
_NOTE_BYTES_MAX = 1 << 16

Stage = Literal["none", "starting", "ready", "failed", "stopped"]


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """A keeper's record of its server, in `server.json`."""

    stage: Stage = "none"
    port: int = 0
    keeper: int = 0  # pid
    server: int = 0  # pid, and the first one of its session
    boot_id: str = ""  # of the boot in which these pids mean something
    machine: str = ""  # `ambient.machine()` of both; `host` is its name for people
    host: str = ""
    python: str = ""  # the interpreter whose MLflow it is
    served_by: str = ""  # the interpreter whose MLflow answered last
    version: str = ""  # of that MLflow, as the server says
    problem: str = ""  # why it does not answer
    failures: int = 0  # failed starts in a row
    retry_wall_ns: int = 0  # it is not started again before


class Backing(NamedTuple):
    """A server's store, as its options describe it."""

    uri: str  # as MLflow takes it
    artifacts: str  # directory of files that come through the server, and of those that clients write themselves
    is_files: bool  # a directory of files, which newer MLflow wants to be asked for
    is_own: bool  # the home's own, so that every file goes through the server


class ServerFiles:
    """The files of one server, in a directory made with the first file; `store` is "" for one in there."""

    def __init__(self, directory: Path, store: str = "") -> None:
        self.directory, self.store = directory, store

    @property
    def lock(self) -> Path:
        """Return the file whose lock the keeper holds."""
        return self.directory / "lock"

    @property
    def log(self) -> Path:
        """Return the file that holds what MLflow wrote."""
        return self.directory / "server.log"

    @property
    def used(self) -> Path:
        """Return the file that users of the server touch."""
        return self.directory / "used"

    def make(self) -> None:
        """Make the directory, and write down whose server it is; raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _read(self.directory / "store") != self.store.encode():
            self._write("store", self.store.encode())

    def touch(self) -> None:
        """Mark the server as used now; raises OSError."""
        os.close(os.open(self.used, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(self.used)

    def note(self, noted: Noted) -> None:
        """Write the server's record; raises OSError."""
        self._write("server.json", msgspec.json.encode(noted))

    def noted(self) -> Noted:
        """Return what was written down; nothing much where there is nothing."""
        with contextlib.suppress(msgspec.MsgspecError):
            return from_json(_read(self.directory / "server.json"), Noted)
        return Noted()

    def uri(self, noted: Noted) -> str:
        """Return the address of the server: the one it has, or will have if nothing is in the way."""
        return f"http://{HOST}:{noted.port or next(self.ports(noted))}"

    def ports(self, noted: Noted) -> Iterator[int]:
        """Yield the ports to try in turn; 0, any, is the last."""
        if noted.port:
            yield noted.port
        start = int.from_bytes(hashlib.sha256(os.fsencode(self.directory.resolve())).digest()[:4])
        for number in range(_PORT_TRIES):
            yield _PORTS[(start + 101 * number) % len(_PORTS)]
        yield 0

    def backing(self) -> Backing:
        """Return the description of its store for the server."""
        if not self.store:
            return Backing(f"sqlite:///{self.directory / 'mlflow.db'}", str(self.directory / "artifacts"), False, True)
        path = local_path(self.store)
        if path is None:
            return Backing(self.store, str(self.directory / "artifacts"), False, True)
        if self.store.startswith("sqlite:"):
            return Backing(self.store, str(path.parent / "mlruns"), False, False)
        return Backing(str(path), str(path), True, False)

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
    """Return the place of the server of a store.

    A caller's store is ``sqlite:////…``, ``file:///…`` or a directory; "" is the home's own.
    """
    if not store:
        return ServerFiles(home.root / "mlflow" / DEFAULT)
    path = local_path(store)
    known = store if path is None else os.path.realpath(path)
    return ServerFiles(home.root / "mlflow" / hashlib.sha256(os.fsencode(known)).hexdigest()[:12], store)


def places(home: Home) -> list[ServerFiles]:
    """Return the places of all servers that this home has or had."""
    found = sorted(path for path in (home.root / "mlflow").glob("*") if path.is_dir())
    return [opened(path) for path in found]


def opened(directory: Path) -> ServerFiles:
    """Return a place that was made before, by its directory."""
    return ServerFiles(directory, _read(directory / "store").decode("utf-8", "replace"))


def local_path(store: str) -> Path | None:
    """Return the file or directory that a store is, or None for one that is somewhere else."""
    scheme = store.partition(":")[0] if "://" in store or store.startswith("file:") else ""
    if not scheme:
        return Path(store)
    if scheme.startswith("sqlite"):
        return Path(unquote(store.partition("///")[2].partition("?")[0]))
    if scheme == "file":
        return Path(unquote(urlsplit(store).path))
    return None


def held_port(place: ServerFiles, noted: Noted) -> socket.socket:
    """Return a socket bound to the server's port that does not listen; OSError: none is free.

    The kernel gives such a port only to a process that asks for it with SO_REUSEADDR; MLflow's server does, and is let
    in beside us. During a restart no other process gets the port.
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


class Attempted(NamedTuple):
    """A server that was to start: its interpreter, its store (as may be shown), the place of its log."""

    python: str
    store: str
    log: str


NO_DATABASE = "is not a database"
OTHER_VERSION = "was written by another version of MLflow"
_LACKS = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE)
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_LINE_MAX = 300
_PAUSE_S, _PAUSE_S_MAX = 5.0, 600.0


_KNOWN: tuple[tuple[str, Callable[[Attempted], str]], ...] = (
    (
        "Detected out-of-date database schema",  # which it also says of a newer one
        lambda tried: (
            f"{tried.store} {OTHER_VERSION}; serve it with that one, or upgrade it, after a "
            f"backup: {shlex.quote(tried.python)} -m mlflow db upgrade {shlex.quote(tried.store)}"
        ),
    ),
    (
        "Can't locate revision",
        lambda tried: f"{tried.store} was written by a newer MLflow than that of {tried.python}; upgrade it there",
    ),
    ("ddress already in use", lambda tried: "its port was taken by another process while it started"),
    (
        "unable to open database file",
        lambda tried: f"{tried.store} cannot be opened: it is not there, or not yours to write",
    ),
    ("attempt to write a readonly database", lambda tried: f"{tried.store} cannot be written to"),
    ("database is locked", lambda tried: f"{tried.store} is locked by another process"),
    (
        "file is not a database",
        lambda tried: f"{tried.store} {NO_DATABASE}; once that file is moved away a new one is made",
    ),
    ("No space left on device", lambda tried: f"no space left for {tried.store}"),
    ("database or disk is full", lambda tried: f"no space left for {tried.store}"),
)


def sentence(written: str, ending: str, tried: Attempted) -> str:
    """Return why a server did not come up, or ended.

    `written` is the end of its output; `ending` the fallback, such as "exit code 1".
    """
    for words, say in _KNOWN:
        if words in written:
            return say(tried)
    lacking = _LACKS.findall(written)
    if lacking and lacking[-1].partition(".")[0] == "mlflow":
        return f"{tried.python} has no MLflow; pip install mlflow"
    if lacking:
        what = f"no {lacking[-1]}; mlflow-skinny is not enough"
        return f"{tried.python} has not all of MLflow ({what}); pip install mlflow"
    errors = _ERROR.findall(written)
    last = errors[-1].strip()[:_LINE_MAX] if errors else ""
    return f"MLflow's server ended ({ending}){': ' + last if last else ''}; all it wrote: {tried.log}"


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return float(min(_PAUSE_S * 2 ** min(max(failures, 1) - 1, 20), _PAUSE_S_MAX))


def without_password(store: str) -> str:
    """Return the address of a store as it may be shown."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", store)
