"""Submits a function and its arguments to a server as a run.

    profile ─ environment: live or snapshot ─ id and call on disk ─ parts of a large call first ─ POST /runs
                                                                              its answer is the stream ┘

`launch.py` launches local runs. The client writes the run's identifier to disk before sending the request. If the
server's answer is lost, the client repeats the request with the same identifier. The repeated request starts no second
run. If the server refuses the run, the client deletes the run's files. The client stores and prints the run's
identifier, because a request without an answer may have started a run. Ctrl-C during the request cancels any run that
the request has started. If the environment changes during the environment check, the client repeats the check.

The client uploads a large payload in parts, so that an interrupted upload can resume. The client names each part by its
digest:

    call.pkl ──▶ parts of 16 MiB, BLAKE3 each ──▶ ask for missing parts ──▶ send these ──▶ BlobReference

The client retries each part's upload for up to `SERVERLESS_GPU_PATIENCE` seconds. If the server reports a damaged part,
the client sends the part once more.

The pool and the usage policy come from the code, or from environment variables at the time of the call:

    pool=  >  policy= (the server knows its pool)  >  SGPU_POOL  >  DATABRICKS_REMOTE_GPU_POOL_ID
                                                                 >  DATABRICKS_USE_RESERVED_GPU_POOL=true: the only one
    policy=  >  SGPU_POLICY  >  the attached policy (the server knows it)

`DATABRICKS_USE_RESERVED_GPU_POOL=false` requests on-demand devices and overrides `DATABRICKS_REMOTE_GPU_POOL_ID`. The
run spec records the chosen pool and policy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import blake3
import msgspec

from serverless_gpu.ambient import SystemClock, machine, new_run_id
from serverless_gpu.client.caller_context import caller_context, interruptible, variables_elsewhere, variables_here
from serverless_gpu.client.display.run_display import TerminalDisplay
from serverless_gpu.client.launch import snapshot_environment
from serverless_gpu.client.launch.preflight import pack, refusing_reducer
from serverless_gpu.client.launch.remedies import explain
from serverless_gpu.client.mlflow_context import RemoteTracking, shown_arguments, with_tracking
from serverless_gpu.client.remote.event_stream import EventStream, ServerAway
from serverless_gpu.client.remote.profile import remote_home
from serverless_gpu.client.remote.remote_run import RemoteRun, clean_now_and_then, write_whole
from serverless_gpu.client.remote.server import RemoteServer, server_of
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import (
    AlreadyFinished,
    HashMismatch,
    InvalidValue,
    NoSuitableNode,
    NotFound,
    ServerlessGpuError,
    ServerProblem,
    ServerUnavailable,
)
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference, Environment, Function, RunSpec
from serverless_gpu.node.attempt.submission import Submission
from serverless_gpu.node.base.home import Home
from serverless_gpu.operating_system import require_linux
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import INLINE_BYTES_MAX
from serverless_gpu.wire.nodes import PoolView
from serverless_gpu.wire.runs import AcceptedMessage, RunRequest, RunView, Target

R = TypeVar("R")
_ON_ITS_WAY_S = 2.0
"""Maximum seconds until an interrupted request arrives at the server."""
_STOP_PAUSE_S = 0.1
_UNKNOWN = "it is unknown whether run {} was started"
_PART_TRIES = 2
POOL = "SGPU_POOL"
POLICY = "SGPU_POLICY"
POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
USE_RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
_RESERVED = "reserved"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SubmittedCall(NamedTuple):
    """The pickled call that every rank executes."""

    function: Callable[..., object]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    named: Mapping[str, object] = {}  # Arguments by name, for display only.


def launch(call: SubmittedCall | None, spec: RunSpec, *, watch: bool) -> Run[object]:
    """Start a run on a server. If `call` is None, the run executes the program `spec.payload`.

    If `watch` is True, the server responds with the run's event stream. Raises ServerUnavailable if the server may have
    accepted the run. After any other error, no run exists.
    """
    require_linux("calls through a server", "their ranks import the packages that the client captures on this machine")
    home = remote_home(os.environ)
    server = server_of(home.root, os.environ)
    choice = choose_pool(spec, os.environ, server.pools)
    spec = msgspec.structs.replace(choice.applied(spec), environment=environment_of(spec, server))
    far = RemoteTracking(spec.environment != "live", _is_beside(server), lambda: server.version().mlflow)
    spec = with_tracking(spec, call.named if call is not None else None, far)
    run_id = new_run_id()
    root = home.remote / run_id
    try:
        ranks = spec.resources.gpus or 0
        submission = Submission(run_id=run_id, fence=1, world_size=ranks, spec=spec, version=__version__)
        write_whole(root / "1" / "spec.json", msgspec.json.encode(submission))
        if call is not None:
            packed = pack(str(root / "call.pkl"), call.function, call.args, call.kwargs, refusing_reducer(spec))
            if packed.warning and not spec.quiet:
                print(f"serverless-gpu: {packed.warning}", file=sys.stderr)
        snapshot = _snapshot(home, server, spec, root) if spec.environment == "snapshot" else ""
        request = _request(server, root, run_id, spec, snapshot)
        if call is not None:
            request = msgspec.structs.replace(request, arguments=shown_arguments(call.named))
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    try:
        source = _submit(server, request, root, watch=watch)
    except InvalidValue as error:
        raise choice.told(error) from error.__cause__
    except NoSuitableNode as error:
        explain(error, "python")
        raise
    with contextlib.suppress(OSError):
        (root / "call.pkl").unlink()
    clean_now_and_then(home)
    # The server or the run's policy may have changed the limits in the run spec.
    names = ("policy", "team", "timeout_s", "max_run_s", "idle_timeout_s")
    return Run(source, msgspec.structs.replace(spec, **{name: getattr(source.spec, name) for name in names}))


def is_of_this_machine(home: Home, spec: RunSpec) -> bool:
    """Return True if this home directory's agent starts the ranks, so that prewarming saves time.

    If the server is unreachable, raise an error without waiting.
    """
    server = server_of(home.root, os.environ)
    server.version(patiently=False)
    return server.profile.embedded and environment_of(spec, server) == "live"


def environment_of(spec: RunSpec, server: RemoteServer) -> Environment:
    """Return "live" if `sgpu up` started the server and no other machine can join it, else "snapshot".

    If other machines can join the server, a live environment would exclude the run from most nodes. A sandbox does not
    show the caller's files.
    """
    if spec.environment != "auto":
        return spec.environment
    if not _is_beside(server):
        return "snapshot"
    version = server.version()
    return "snapshot" if version.joinable or version.sandboxes else "live"


def _is_beside(server: RemoteServer) -> bool:
    return server.profile.embedded and server.version().machine == machine()


def _snapshot(home: Home, server: RemoteServer, spec: RunSpec, root: Path) -> str:
    """Capture the environment into the server's store if necessary, and return the snapshot's address."""
    recognition = snapshot_environment.recognise(home, server.store())
    display = snapshot_environment.capture_display(quiet=spec.quiet, logs=root)
    try:
        while True:  # The loop runs at most twice, because a newly captured environment needs no second check.
            wanted = recognition.wanted(display)
            if not recognition.changes():
                return wanted.snapshot if wanted is not None else ""
    finally:
        display.finish()
        recognition.close()


def _request(server: RemoteServer, root: Path, run_id: str, spec: RunSpec, snapshot: str) -> RunRequest:
    context = caller_context()
    travelling = variables_elsewhere(context.environ) if snapshot else variables_here(context.environ)
    context = msgspec.structs.replace(context, environ=travelling)
    path, call = root / "call.pkl", None
    if not isinstance(spec.payload, Function):
        pass  # The run spec of a program contains the program's arguments.
    elif path.stat().st_size <= INLINE_BYTES_MAX:
        call = path.read_bytes()
    else:
        spec = msgspec.structs.replace(spec, payload=Function(call=upload_payload(server, path)))
    return RunRequest(
        id=run_id,
        spec=spec,
        target=target(travels=bool(snapshot)),
        context=msgspec.Raw(msgspec.json.encode(context)),
        call=call,
        snapshot=snapshot,
        version=__version__,
    )


def target(*, travels: bool) -> Target:
    """Return the requirements for a node.

    `travels` is True for a captured environment, which runs on any machine.
    """
    return Target(
        machine="" if travels else machine(),
        caller=machine(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{sys.platform}-{platform.machine()}",
    )


def _submit(server: RemoteServer, request: RunRequest, root: Path, *, watch: bool) -> RemoteRun:
    """Submit a run. If the server refuses the run, delete the run's files. After Ctrl-C, stop the run."""
    try:
        with interruptible():
            return _send(server, request, root, watch=watch)
    except KeyboardInterrupt:
        if _stop_submitted(server, request.id):
            shutil.rmtree(root, ignore_errors=True)
        else:
            TerminalDisplay(quiet=False).say(
                f"{_UNKNOWN.format(request.id)}; stop the run with `sgpu cancel {request.id}`"
            )
        raise
    except ServerlessGpuError as error:
        if not isinstance(error, ServerUnavailable) and type(error) is not ServerProblem:
            shutil.rmtree(root, ignore_errors=True)
            raise
        raise ServerUnavailable(
            f"{error.message}; {_UNKNOWN.format(request.id)}",
            hint=f"check the run with `sgpu show {request.id}` before the next call, which would start another run",
        ) from error
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _send(server: RemoteServer, request: RunRequest, root: Path, *, watch: bool) -> RemoteRun:
    if not watch:
        return RemoteRun(server, server.submit(request), root)
    stream = EventStream(server, request.id, request)
    try:
        return RemoteRun(server, _await_acceptance(stream, quiet=request.spec.quiet), root, stream=stream)
    except BaseException:
        stream.close()
        raise


def _stop_submitted(server: RemoteServer, run_id: str) -> bool:
    """Stop a run that the server may have accepted. Return True if the run has ended or never existed."""
    clock = SystemClock()
    until_ns = clock.boottime_ns() + round(_ON_ITS_WAY_S * 1e9)
    pause = threading.Event()
    while True:
        try:
            server.stop(run_id, StopReason.CANCEL, patiently=False)
        except AlreadyFinished:
            return True
        except NotFound:  # The interrupted request may still arrive at the server.
            if clock.boottime_ns() > until_ns:
                return True
            pause.wait(_STOP_PAUSE_S)
        except ServerlessGpuError:
            return False
        else:
            return True


def _await_acceptance(stream: EventStream, *, quiet: bool) -> RunView:
    while True:
        heard = stream.read(None)
        if isinstance(heard, AcceptedMessage):
            return heard.run
        if not isinstance(heard, ServerAway):
            raise ServerProblem(
                f"the server started the stream of a new run with an unexpected message: {type(heard).__name__}"
            )
        TerminalDisplay(quiet=quiet).say(heard.sentence)


def upload_payload(server: RemoteServer, path: Path) -> BlobReference:
    """Upload a non-empty file. Return a reference to the uploaded file."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parts = tuple(blake3.blake3(part).hexdigest() for part in _parts(content, size))
        missing = set(server.missing_parts(tuple(dict.fromkeys(parts))))
        for digest, part in zip(parts, _parts(content, size), strict=True):
            if digest in missing:
                missing.discard(digest)
                _put_part(server, digest, part)
    return BlobReference(size=size, parts=parts)


def _parts(content: mmap.mmap, size: int) -> Iterator[bytes]:
    for start in range(0, size, BLOB_PART_BYTES):
        yield content[start : start + BLOB_PART_BYTES]


def _put_part(server: RemoteServer, digest: str, part: bytes) -> None:
    for attempt in range(_PART_TRIES):
        try:
            return server.put_part(digest, part)
        except HashMismatch:
            if attempt + 1 == _PART_TRIES:
                raise


class PoolChoice(NamedTuple):
    """A run's pool and usage policy. If `pool` is None, the run may use any on-demand pool."""

    pool: str | None
    variable: str = ""  # Environment variable that names the pool, or "".
    policy: str | None = None  # Policy name from `SGPU_POLICY` if the code sets no policy, or None.

    def applied(self, spec: RunSpec) -> RunSpec:
        """Return the run spec with the chosen pool and policy."""
        return msgspec.structs.replace(spec, pool=self.pool, policy=spec.policy or self.policy)

    def told(self, error: InvalidValue) -> InvalidValue:
        """Return a server's error, and name the environment variable that set the refused pool or policy."""
        for variable, name in ((self.variable, self.pool), (POLICY, self.policy)):
            if variable and name is not None and repr(name) in error.message:
                return type(error)(f"{error.message}, which {variable} names", hint=error.hint)
        return error


def choose_pool(spec: RunSpec, environ: Mapping[str, str], pools: Callable[[], Iterable[PoolView]]) -> PoolChoice:
    """Return a run's pool and usage policy.

    The function calls `pools` only if an environment variable requests a reserved pool without naming it.
    """
    if spec.policy is not None:
        return PoolChoice(spec.pool)
    return _pool(spec, environ, pools)._replace(policy=environ.get(POLICY) or None)


def _pool(spec: RunSpec, environ: Mapping[str, str], pools: Callable[[], Iterable[PoolView]]) -> PoolChoice:
    if spec.pool is not None:
        return PoolChoice(spec.pool)
    if environ.get(POOL):
        return PoolChoice(environ[POOL], POOL)
    reserved = environ.get(USE_RESERVED, "").lower()
    if reserved and reserved not in (*_TRUE, *_FALSE):
        raise InvalidValue(f"{USE_RESERVED}={environ[USE_RESERVED]!r} is neither true nor false")
    if reserved in _FALSE:
        return PoolChoice(None, USE_RESERVED)
    if environ.get(POOL_ID):
        return PoolChoice(environ[POOL_ID], POOL_ID)
    return PoolChoice(_only_reserved(pools()), USE_RESERVED) if reserved else PoolChoice(None)


def _only_reserved(pools: Iterable[PoolView]) -> str:
    names = [pool.name for pool in pools if pool.kind == _RESERVED]
    if len(names) == 1:
        return names[0]
    if not names:
        raise InvalidValue(
            f"{USE_RESERVED} requests a reserved pool, but the server has no reserved pool",
            hint="unset the variable to use on-demand devices, or ask an operator to create a pool with "
            "`sgpu pool set NAME --reserved`",
        )
    raise InvalidValue(
        f"{USE_RESERVED} requests a reserved pool, but the server has {len(names)}: {', '.join(names[:20])}",
        hint=f"choose a pool with pool= or {POOL_ID}",
    )
