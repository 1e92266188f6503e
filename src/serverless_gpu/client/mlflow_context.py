"""Determines a call's MLflow tracking from the caller's environment variables and MLflow module.

    MLFLOW_TRACKING_URI, …_EXPERIMENT_NAME, …_EXPERIMENT_ID, …_RUN_ID ─┐
    an imported mlflow: its URI, set_experiment, the active run ───────┼──▶ resolve ──▶ Tracking, part of the RunSpec
    the program, its user, its commit, the arguments ──────────────────┘

`resolve` neither imports MLflow nor uses the network, because every call waits for `resolve`. The tracking data
contains no credentials, because the client stores the data in the run directory and sends it to servers. If MLflow is
not installed in the caller's environment, only the server's MLflow tracks the run. If only the MLflow library can use a
tracking URI, the client passes the URI to the ranks unchanged and prints a warning. The client determines the program
name, the user name and the Git commit without starting another program. Unknown values are "".
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast
from urllib.parse import quote, unquote, urlsplit

import msgspec

from serverless_gpu.client.display.run_display import TerminalDisplay
from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.arguments import argument_texts
from serverless_gpu.model.spec import Command, RunSpec, Tracking

SWITCH = "SERVERLESS_GPU_TRACKING"
URI = "MLFLOW_TRACKING_URI"
EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
RUN_ID = "MLFLOW_RUN_ID"
ARGUMENT = "call."
"""Prefix of logged argument names, to avoid conflicts with parameters that user code logs."""
_IN_A_RANK = "SGPU_RUN_ID"
_FLUENT = "mlflow.tracking.fluent"
_SERVICE = "mlflow.tracking._tracking_service.utils"
_RUN = re.compile(r"[a-zA-Z0-9][\w-]{0,255}")
_EXPERIMENT = re.compile(r"[a-zA-Z0-9][\w-]{0,63}")
_EXPERIMENT_CHARACTERS_MAX = 250
_URI_CHARACTERS_MAX = 2_000
_MLFLOW_SCHEMES = frozenset({"databricks", "databricks-uc", "uc"})  # Schemes of MLflow URIs that need no path.
_MEMORY = ("", ":memory:")
_LOCAL_HOSTS = frozenset({"", "localhost"})
_NOWHERE = (
    f"this server does not track runs, because it runs no MLflow server and {URI} names none. "
    "Start MLflow with `sgpu up --mlflow`"
)
_shown_notices: set[str] = set()
INTERACTIVE = "interactive"
_SESSION = "JPY_SESSION_NAME"  # Environment variable in which Jupyter stores the notebook's path.
_EDITOR = "__vsc_ipynb_file__"  # Variable of `__main__` in which VS Code stores the notebook's path.
_NOTEBOOK = ".ipynb"
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_ABOVE_MAX = 64
_SMALL_BYTES = 4_096
_PACKED_BYTES_MAX = 4_000_000
# Packed Git reference file → modification time, size and text of the file.
_packed: dict[Path, tuple[tuple[int, int], str]] = {}


class TrackingStore(NamedTuple):
    """A run's MLflow store: a URI, or a message that explains why the URI is unusable."""

    uri: str = ""
    store: str = ""
    problem: str = ""


class RemoteTracking(NamedTuple):
    """Facts about a remote call's server that affect MLflow tracking."""

    is_elsewhere: bool  # True if ranks may run on another machine, which cannot use a local MLflow store.
    is_beside: bool  # True if the server runs on this machine, even if its nodes are other machines.
    mlflow: Callable[[], str]  # Function that returns the server's MLflow URI, or "".


class TrackingResolution(NamedTuple):
    """A call's MLflow tracking, if any, and a notice for the caller."""

    tracking: Tracking | None
    sentence: str = ""


class _Driver(NamedTuple):
    """State of the caller's MLflow module."""

    uri: str = ""  # MLflow's tracking URI.
    is_set: bool = False  # False if MLflow uses its default tracking URI.
    experiment_id: str = ""  # Experiment that the caller set with `set_experiment`, or "".
    run_id: str = ""  # ID of the active MLflow run, or "".
    run_experiment_id: str = ""  # Experiment ID of the active MLflow run.


def resolve(
    spec: RunSpec, arguments: Mapping[str, object], environ: Mapping[str, str], far: RemoteTracking | None = None
) -> TrackingResolution:
    """Return a call's MLflow tracking. An error reduces the tracking but never makes the call fail."""
    if not spec.tracking or environ.get(SWITCH) == "0" or _IN_A_RANK in environ:
        return TrackingResolution(None)
    is_installed = _is_installed()
    driver = _driver() if is_installed else _Driver()
    place = _place(driver, environ) if is_installed else TrackingStore()
    sentence = place.problem
    if place.problem:
        return TrackingResolution(None, place.problem)
    elsewhere = far is not None and far.is_elsewhere
    if place.store and elsewhere:
        sentence = (
            f"the MLflow store {place.store} on this machine cannot track runs on other machines; set {URI} to an "
            "MLflow server that both machines can reach"
        )
        place, driver = TrackingStore(), _Driver()
        environ = {name: value for name, value in environ.items() if name not in (RUN_ID, EXPERIMENT_ID)}
    if not place.uri and not place.store and far is not None:
        offered = far.mlflow()
        place = TrackingStore(uri=place_of(offered, "/").uri if offered else "")
    if not is_installed and not place.uri:
        return TrackingResolution(None)
    if far is not None and elsewhere and not far.is_beside and not place.uri:
        return TrackingResolution(None, sentence or _NOWHERE)
    host = urlsplit(place.uri).hostname or ""
    if elsewhere and (host in ("localhost", "::1") or host.startswith("127.")):
        sentence = f"{place.uri} is a loopback address of this machine, which nodes on other machines cannot reach"
    return TrackingResolution(_tracking(spec, arguments, environ, place, driver), sentence)


def with_tracking(
    spec: RunSpec, arguments: Mapping[str, object] | None = None, far: RemoteTracking | None = None
) -> RunSpec:
    """Return a run spec with MLflow tracking. Print each tracking notice once."""
    found = resolve(spec, arguments or {}, os.environ, far)
    if found.sentence and found.sentence not in _shown_notices and not spec.quiet:
        _shown_notices.add(found.sentence)
        TerminalDisplay(quiet=False).say(found.sentence)
    return msgspec.structs.replace(spec, tracker=found.tracking)


def place_of(uri: str, directory: str) -> TrackingStore:
    """Return the MLflow store of a tracking URI. Relative paths refer to `directory`."""
    text = uri.strip()
    if not text or len(text) > _URI_CHARACTERS_MAX or not text.isprintable():
        return TrackingStore(problem=f"run tracking is disabled, because {URI} is not a valid MLflow address")
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    if scheme not in _MLFLOW_SCHEMES and (not colon or "/" in scheme):
        return TrackingStore(store=_path(directory, text))
    if scheme in ("http", "https"):
        return _server(text)
    if scheme == "file":
        return _directory(rest, directory)
    if scheme.partition("+")[0] == "sqlite":
        return _database(scheme, rest, directory)
    return TrackingStore(
        problem=f"run tracking is disabled for {scheme}:… addresses, which only MLflow's own client can use. "
        "Ranks use the address unchanged"
    )


def _server(text: str) -> TrackingStore:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not text.isascii():
        return TrackingStore(problem=f"run tracking is disabled, because {URI} is not a valid MLflow address")
    # The stored tracking URI omits the user, the password and the query, because a query may contain a password.
    return TrackingStore(uri=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}")


def _directory(rest: str, directory: str) -> TrackingStore:
    path = rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in _LOCAL_HOSTS:
            return TrackingStore(problem=f"run tracking is disabled, because MLflow's directory file:{rest} is remote")
        path = slash + path
    return TrackingStore(store=_path(directory, unquote(path)))


def _database(scheme: str, rest: str, directory: str) -> TrackingStore:
    path, question, query = rest.removeprefix("//").removeprefix("/").partition("?")
    if path in _MEMORY or not rest.startswith("//"):
        return TrackingStore(problem="run tracking is disabled, because MLflow's SQLite database is in memory")
    if not path.startswith("/"):
        path = quote(os.path.join(directory, "")) + path
    return TrackingStore(store=f"{scheme}:///{os.path.normpath(path)}{question}{query}")


def _path(directory: str, path: str) -> str:
    """Return the canonical path of a local store.

    Stores with the same canonical path share an MLflow server.
    """
    return os.path.normpath(os.path.join(directory, path))


def _is_installed() -> bool:
    """Return True if ranks can import MLflow. Ignore a directory named `mlflow` that is not a module."""
    loaded = sys.modules.get("mlflow")
    if loaded is not None:
        return True
    try:
        found = importlib.util.find_spec("mlflow")
    except (ImportError, ValueError, AttributeError):  # A user's import finder may raise any exception.
        return False
    return found is not None and found.origin is not None


# --- the caller's own MLflow ------------------------------------------------------------------------------------------


class _Info(Protocol):
    run_id: object
    experiment_id: object


class _ActiveRun(Protocol):
    info: _Info


class _Fluent(Protocol):
    """The attributes of MLflow's fluent interface that serverless-gpu uses.

    `_active_experiment_id` is a private attribute of MLflow and may be absent.
    """

    def active_run(self) -> _ActiveRun | None: ...


class _Service(Protocol):
    def get_tracking_uri(self) -> object: ...
    def is_tracking_uri_set(self) -> object: ...


def _driver() -> _Driver:
    """Return the state of an imported MLflow module without using the network."""
    fluent, service = sys.modules.get(_FLUENT), sys.modules.get(_SERVICE)
    if fluent is None or service is None:
        return _Driver()
    try:
        run = cast("_Fluent", fluent).active_run()
        return _Driver(
            uri=str(cast("_Service", service).get_tracking_uri()),
            is_set=bool(cast("_Service", service).is_tracking_uri_set()),
            experiment_id=_valid(_EXPERIMENT, getattr(fluent, "_active_experiment_id", None)),
            run_id=_valid(_RUN, run.info.run_id) if run is not None else "",
            run_experiment_id=_valid(_EXPERIMENT, run.info.experiment_id) if run is not None else "",
        )
    except Exception:  # noqa: BLE001 - MLflow may have an unknown version, or another thread may be importing MLflow
        return _Driver()


def _place(driver: _Driver, environ: Mapping[str, str]) -> TrackingStore:
    uri = environ.get(URI, "")
    # MLflow IDs of runs and experiments are valid only in the store that the caller's MLflow module uses.
    is_numbered = bool(driver.experiment_id or environ.get(RUN_ID) or environ.get(EXPERIMENT_ID))
    if driver.run_id or (not uri and (driver.is_set or is_numbered)):
        uri = driver.uri
    if not uri:
        return TrackingStore()
    try:
        return place_of(uri, os.getcwd())
    except FileNotFoundError:  # If the working directory does not exist, the launch fails with an error.
        return TrackingStore()


def _valid(pattern: re.Pattern[str], value: object) -> str:
    text = value if isinstance(value, str) else str(value) if isinstance(value, int) else ""
    return text if pattern.fullmatch(text) else ""


# --- tracked facts ----------------------------------------------------------------------------------------------------


def _tracking(
    spec: RunSpec, arguments: Mapping[str, object], environ: Mapping[str, str], place: TrackingStore, driver: _Driver
) -> Tracking:
    """Return a call's tracking data as valid UTF-8."""
    program = submitted_program(spec.payload) if isinstance(spec.payload, Command) else calling_program(environ)
    user = user_name()
    continued = _valid(_RUN, environ.get(RUN_ID))
    parent = "" if continued else driver.run_id
    experiment_id = (driver.run_experiment_id if parent else "") or driver.experiment_id
    experiment = "" if experiment_id else environ.get(EXPERIMENT_NAME, "").strip()
    if not experiment and not experiment_id:
        experiment_id = _valid(_EXPERIMENT, environ.get(EXPERIMENT_ID))
        experiment = "" if experiment_id else f"/Users/{_path_part(user)}/{_path_part(program.name)}"
    tags = {"mlflow.user": user, "mlflow.source.name": program.path or program.name, "mlflow.source.type": program.kind}
    commit = commit_of(Path(program.path).parent) if os.path.isabs(program.path) else None
    if commit is not None and commit.commit:
        tags["mlflow.source.git.commit"] = commit.commit
    if commit is not None and commit.branch:
        tags["mlflow.source.git.branch"] = commit.branch
    made = Tracking(
        uri=place.uri,
        store=place.store,
        experiment=experiment[:_EXPERIMENT_CHARACTERS_MAX],
        experiment_id=experiment_id,
        run_id=continued,
        parent_id=parent,
        tags=tags,
        params={f"{ARGUMENT}{name}": text for name, text in shown_arguments(arguments).items()},
    )
    return from_builtins(_sendable(msgspec.to_builtins(made)), Tracking)


def shown_arguments(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return a call's arguments as text for other users, or nothing if a value's class fails."""
    try:
        return argument_texts(arguments)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a user's class may raise any exception, which must not fail the run
        return {}


def _path_part(name: str) -> str:
    return "".join(char if char.isprintable() and char not in "/\\" else "_" for char in name) or "_"


def _sendable(value: object) -> object:
    """Return a value as valid UTF-8. Paths and environment variables may contain invalid bytes."""
    if isinstance(value, dict):
        return {_sendable(key): _sendable(inner) for key, inner in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class Program(NamedTuple):
    """The script, notebook or command that called serverless-gpu."""

    name: str  # File name of the program without directory and suffix. Without a file, `INTERACTIVE`.
    path: str = ""
    kind: Literal["LOCAL", "NOTEBOOK"] = "LOCAL"  # MLflow's name for the type of the program.


class Commit(NamedTuple):
    """Checked-out commit and branch of a Git repository. Unknown values are ""."""

    commit: str = ""
    branch: str = ""


def calling_program(environ: Mapping[str, str]) -> Program:
    """Return the script or notebook that the current process runs."""
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules:
        path = str(getattr(main, _EDITOR, "") or environ.get(_SESSION, ""))
        # In VS Code, the notebook's path has a suffix after the file extension.
        name, ending, _ = os.path.basename(path).partition(_NOTEBOOK)
        if name and ending:
            return Program(name, os.path.join(os.path.dirname(path), name + ending), "NOTEBOOK")
        return Program(INTERACTIVE, kind="NOTEBOOK")
    path = str(getattr(main, "__file__", None) or "")
    if not path:
        return Program(INTERACTIVE)
    path = os.path.abspath(path)
    name = Path(path).stem
    if name == "__main__":  # The caller started Python with `python -m package`.
        name = os.path.basename(os.path.dirname(path))
    return Program(name, path)


def submitted_program(command: Command) -> Program:
    """Return the script or module that a Python command runs, or the executable of any other command."""
    if command.argv[1:2] == ("-m",) and len(command.argv) > 2:
        return Program(command.argv[2])
    script = next((argument for argument in command.argv if argument.endswith(".py")), command.argv[0])
    path = os.path.abspath(script) if os.path.exists(script) else script
    return Program(Path(script).stem or INTERACTIVE, path)


def user_name() -> str:
    """Return the name of the operating system user, or the user ID if the account has no name."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # The exception's type depends on the Python version.
        return f"uid {os.getuid()}"


def commit_of(directory: Path) -> Commit:
    """Return the checked-out commit of the Git repository that contains a directory."""
    try:
        for above in (directory, *directory.parents)[:_ABOVE_MAX]:
            git = above / ".git"
            if os.path.lexists(git):
                # In a worktree or a submodule, `.git` is a file that contains the path of the Git directory.
                return _head(git if git.is_dir() else above / _read(git).removeprefix("gitdir:").strip())
    except (OSError, ValueError):
        pass
    return Commit()


def _head(git: Path) -> Commit:
    text = _read(git / "HEAD").strip()
    if not text.startswith("ref:"):
        return Commit(text) if _COMMIT.fullmatch(text) else Commit()
    reference = text.removeprefix("ref:").strip()
    if not reference.startswith("refs/") or ".." in reference:
        return Commit()
    common = git
    with contextlib.suppress(OSError):  # A worktree shares the branches of its main repository.
        common = git / _read(git / "commondir").strip()
    branch = reference.removeprefix("refs/heads/")
    with contextlib.suppress(OSError):
        commit = _read(common / reference).strip()
        if _COMMIT.fullmatch(commit):
            return Commit(commit, branch)
    return Commit(_in_packed(common / "packed-refs", reference), branch)


def _in_packed(file: Path, reference: str) -> str:
    try:
        found = file.stat()
    except OSError:
        return ""
    if found.st_size > _PACKED_BYTES_MAX:
        return ""
    state = (found.st_mtime_ns, found.st_size)
    known = _packed.get(file)
    if known is None or known[0] != state:
        _packed.clear()
        known = _packed[file] = (state, _read(file, _PACKED_BYTES_MAX))
    for line in known[1].splitlines():
        commit, _, name = line.partition(" ")
        if name == reference and _COMMIT.fullmatch(commit):
            return commit
    return ""


def _read(file: Path, most: int = _SMALL_BYTES) -> str:
    # Opening a pipe or a device in blocking mode could hang.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8", errors="replace") as opened:
        return opened.read(most)
