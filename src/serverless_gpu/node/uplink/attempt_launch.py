"""Turns an order into a launch: directory, call, interpreter and devices of this node.

    Start ─▶ opened with the node's key ─▶ directory + remote.json (then acknowledge the order) ─▶ call.pkl
          ─▶ spec.json … ─▶ Launch

User code waits until the server has answered a report about the attempt. An order may be an hour old. The server may
have started another attempt after it sent the order.

A node starts the interpreter before the run's ranks exist. A client must therefore name an existing interpreter that
other users cannot replace (`check_python`). Interpreter options may change the interpreter's behaviour. The node
refuses options that name code or a file, such as `-c` and `-m` (`check_flags`).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import HashMismatch, InvalidValue, SecretMissing, ServerProblem
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.pricing import UNPRICED
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.node_keys import order_text
from serverless_gpu.model.placement import candidates, restrict
from serverless_gpu.model.secrets import DeliveredSecrets, check_name, check_variable
from serverless_gpu.model.spec import BlobReference, Function
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt, has_remote, write_remote
from serverless_gpu.node.attempt.submission import write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.node.devices.inventory import offered
from serverless_gpu.node.uplink.node_session import NodeSession
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import PrivatePart, Start
from serverless_gpu.wire.connection import Connection

_FAKE = "SERVERLESS_GPU_FAKE"
_OF_THE_NODE = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")
"""Variables that ranks in a captured environment take from the node, unless the caller sent values."""


def opened(order: Start, session: NodeSession) -> Start:
    """Return an order with its secrets and context, which the server has sealed to this node's key.

    Raises InvalidValue if this node cannot open the sealed part. The opened part is in memory only.
    """
    if not order.sealed:
        return order
    data = session.open(order.sealed, about=order_text(order.run_id, order.fence, order.crew))
    if data is None:
        raise InvalidValue("the secrets and variables of the run are sealed to another key than the key of this node")
    private = from_json(data, PrivatePart)
    return msgspec.structs.replace(order, context=private.context, secrets=private.secrets, sealed=b"")


def take_order(home: Home, order: Start, profile: Path) -> tuple[Path, ServerAttempt] | None:
    """Create the attempt's directory, or return None if an earlier call created the directory.

    After `take_order` returns, the server need not send the order again. The uplink repeats an interrupted call of
    `take_order`, because an interrupted call cannot have launched the attempt. The server's run id names a directory on
    this node. `take_order` accepts only a valid run identifier, and never the identifier of a run of this node's own
    user.

    Raises InvalidValue for an invalid identifier or gang, and StorageError. Raises OSError if it is unknown whether the
    directory existed before.
    """
    if created_wall_ns(order.run_id) is None or order.fence < 1:
        raise InvalidValue(f"{order.run_id[:64]!r} (fence {order.fence}) is not a valid attempt")
    if has_remote(home.attempt(order.run_id, order.fence)):
        return None
    _check_crews(order)
    if (home.attempt(order.run_id, order.fence) / "spec.json").exists():
        raise InvalidValue(f"run {order.run_id} belongs to a user of this node")
    remote = ServerAttempt(
        run_id=order.run_id,
        fence=order.fence,
        profile=str(profile),
        token=order.token,
        gpu_type=order.gpu_type,
        world_size=order.gpus,
        partition_grace_s=order.partition_grace_s,
        owner=order.owner,
        tariff=order.tariff or UNPRICED,
    )
    shutil.rmtree(home.attempt(order.run_id, order.fence), ignore_errors=True)
    directory = home.make_attempt(order.run_id, order.fence)
    try:
        write_remote(directory, remote)
    except OSError as error:
        raise storage_error(error, directory) from None
    return directory, remote


def make_launch(
    order: Start, directory: Path, greeting: protocol.Greeting, *, clock: Clock, waited_ns: int, store: StoreLocation
) -> protocol.Launch:
    """Return the launch for an order. Raises HardwareError or InvalidValue for an order that cannot run.

    `waited_ns` is the time since the client submitted the run, by the server's clock. `store` is the environment store.
    """
    devices = offered(greeting, os.environ)
    there = restrict(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    visible = [device for device in there if device.uuid not in order.without]
    chosen = candidates(gpus=order.gpus, gpu_type=order.gpu_type, devices=visible, own=greeting.own_types)
    context = _context(order)
    environment = None
    if order.spec.environment == "snapshot":
        if not order.snapshot:
            raise ServerProblem("the run needs a captured environment, but the order names no snapshot")
        environment = protocol.EnvironmentRequest(
            snapshot=order.snapshot, store=store.url, token=store.token, ca=store.ca
        )
    spec = order.spec
    if order.isolation != NONE:
        # The node's processes would read tracking variables and stores that the caller chose, with the node's rights.
        spec = msgspec.structs.replace(spec, tracker=None)
    now_ns = clock.boottime_ns()
    return protocol.Launch(
        run_id=order.run_id,
        fence=order.fence,
        directory=str(directory),
        spec=spec,
        candidates=chosen.devices,
        world_size=order.gpus,
        of_type=sum(device.type == chosen.devices[0].type for device in devices),
        context=context,
        called_ns=max(0, now_ns - max(0, waited_ns)),
        tariff=order.tariff or greeting.prices.get(chosen.devices[0].type, UNPRICED),
        environment=environment,
        confirmed=False,
        lease_ns=now_ns + round(order.partition_grace_s * 1e9),
        crews=order.crews,
        crew=order.crew,
        nonce=order.nonce,
        owner=f"{order.owner} of {store.url}" if order.owner else protocol.UNKNOWN_OWNER,
        isolation=order.isolation,
    )


def write_call(order: Start, directory: Path, connection: Connection) -> None:
    """Write `call.pkl` from the order or from the server, unless the run is a command.

    Raises StorageError for a full disk. Raises ServerProblem if the server does not have the call or does not answer.
    """
    reference = order.spec.payload.call if isinstance(order.spec.payload, Function) else None
    try:
        if reference is not None:
            _fetch(reference, directory / "call.pkl", f"/attempts/{order.run_id}/{order.fence}/blobs", connection)
        elif order.call is not None:
            (directory / "call.pkl").write_bytes(order.call)
    except OSError as error:
        raise storage_error(error, directory) from None


def with_secrets(order: Start, launch: protocol.Launch) -> protocol.Launch:
    """Write the run's secrets for its ranks and return the launch with the secrets' directory.

    Raises SecretMissing if a secret was deleted after placement, InvalidValue for an invalid variable, or StorageError.
    After an exception, the attempt must not start.
    """
    if not order.secrets:
        return launch
    values: dict[str, bytes] = {}
    for one in order.secrets:
        check_name(one.name)  # The secret's name becomes a file name.
        if one.value is None:
            raise SecretMissing(f"the secret {one.text} was deleted after the attempt was placed")
        values[one.name] = check_variable(one.text, one.value) if one.variable else one.value
    place = secret_files.write(Path(launch.directory), values)
    secrets = DeliveredSecrets(
        directory=str(place),
        texts=tuple(one.text for one in order.secrets),
        variables={one.name: one.variable for one in order.secrets if one.variable},
        note=secret_files.note(place),
    )
    return msgspec.structs.replace(launch, secrets=secrets)


def write_run(launch: protocol.Launch) -> None:
    """Write the files that describe the run to users, as in `write_submission`."""
    write_submission(launch, __version__)


def _check_crews(order: Start) -> None:
    """Raise InvalidValue unless the order's gang is valid, includes this node, and has a nonce."""
    if not order.crews:
        return
    numbers = [crew.number for crew in order.crews]
    first = 0
    for crew in order.crews:
        if crew.first_rank != first or crew.gpus < 1:
            raise InvalidValue(f"node {crew.number} of the gang must not begin with rank {crew.first_rank}")
        first += crew.gpus
    if numbers != list(range(len(numbers))) or not 0 <= order.crew < len(numbers) or first != order.world_size:
        raise InvalidValue(
            f"node {order.crew} of {numbers[:8]} with {first} of {order.world_size} devices is not a valid gang"
        )
    if len(numbers) > 1 and not order.nonce:
        raise InvalidValue("the order has a gang on several nodes but no nonce for it")


def _fetch(reference: BlobReference, path: Path, route: str, connection: Connection) -> None:
    size = 0
    with path.open("wb") as file:
        for digest in reference.parts:
            data = connection.get(f"{route}/{digest}")
            size += file.write(data)
    if size != reference.size:
        raise HashMismatch(f"the call has {reference.size} bytes, but {size} bytes arrived")


def _context(order: Start) -> protocol.Context:
    """Return the context of the ranks. The node itself supplies declared devices and home variables."""
    try:
        context = from_json(order.context, protocol.Context)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"the caller's context is not valid: {error}") from None
    check_flags(context.flags)
    if not order.snapshot:
        check_python(context.python)
        if order.isolation != NONE:
            check_reachable(context.python)
    environ = {name: value for name, value in context.environ.items() if name != _FAKE}
    own = (_FAKE, *(_OF_THE_NODE if order.snapshot else ()))
    environ = {**{name: os.environ[name] for name in own if name in os.environ}, **environ}
    return msgspec.structs.replace(context, environ=environ)


FLAGS_MAX = 64
FLAG_CHARACTERS_MAX = 1_000
_INTERPRETER_NAME = re.compile(r"(python|pypy)[0-9.]*(t|d|-dbg|-debug|-intel64)?")
_FLAG_LETTERS = re.compile(r"-[bBdEIOPqRsSuv]+")
_WARNING_FLAG = re.compile(r"-W[^\0]+")
_X_OPTIONS = frozenset(
    {
        "context_aware_warnings",
        "cpu_count",
        "dev",
        "disable_remote_debug",
        "faulthandler",
        "frozen_modules",
        "gil",
        "importtime",
        "int_max_str_digits",
        "no_debug_ranges",
        "perf",
        "perf_jit",
        "pycache_prefix",
        "showrefcount",
        "thread_inherit_context",
        "tracemalloc",
        "utf8",
        "warn_default_encoding",
    }
)
_INTERPRETER_HINT = (
    "start the client with the absolute path of a Python interpreter that other users cannot "
    "replace, or use env='snapshot'"
)


def check_python(python: str) -> None:
    """Raise InvalidValue unless the path is the absolute path of a Python that other users cannot replace."""
    shown = python[:FLAG_CHARACTERS_MAX]
    if not python.startswith("/") or python.startswith("//") or "\0" in python or os.path.normpath(python) != python:
        raise InvalidValue(f"the interpreter {shown!r} is not an absolute path without `..`", hint=_INTERPRETER_HINT)
    try:
        real = os.path.realpath(python, strict=True)
        mode = os.stat(real).st_mode
    except OSError as error:
        raise InvalidValue(f"cannot use the interpreter {shown!r}: {error.strerror}", hint=_INTERPRETER_HINT) from None
    if not _INTERPRETER_NAME.fullmatch(os.path.basename(python)) and not _INTERPRETER_NAME.fullmatch(
        os.path.basename(real)
    ):
        raise InvalidValue(
            f"{shown!r} is not the name of a Python interpreter", hint="python, python3, python3.12, pypy3"
        )
    if not stat.S_ISREG(mode) or not os.access(real, os.X_OK):
        raise InvalidValue(
            f"the interpreter {shown!r} is not a program that this node may start", hint=_INTERPRETER_HINT
        )
    for path in dict.fromkeys((*_with_parents(python), *_with_parents(real))):
        if _anybody_may_change(path):
            raise InvalidValue(
                f"the interpreter {shown!r} could be replaced by any user: {path} is writable by others",
                hint=f"chmod o-w {path}",
            )


def check_reachable(python: str) -> None:
    """Raise InvalidValue unless each user of the node may execute an interpreter, or it is the node's own.

    The launcher of a sandbox is root. Without this check, a caller could name an interpreter in another user's private
    directory, and the sandbox would show the files beside the interpreter.
    """
    real = os.path.realpath(python)
    own = f"{os.path.realpath(sys.base_prefix)}/"
    named = [
        path for path in dict.fromkeys((python, real)) if not os.path.realpath(os.path.dirname(path)).startswith(own)
    ]
    for path in dict.fromkeys(part for each in named for part in _with_parents(each)):
        if path.startswith("/proc") or not os.stat(path).st_mode & stat.S_IXOTH:
            shown = python[:FLAG_CHARACTERS_MAX]
            problem = f"the interpreter {shown!r} is not executable for every user of the node: {path}"
            raise InvalidValue(problem, hint=_INTERPRETER_HINT)


def check_flags(flags: Sequence[str]) -> None:
    """Raise InvalidValue for unknown options, and for options that name code to run."""
    if len(flags) > FLAGS_MAX or any(len(flag) > FLAG_CHARACTERS_MAX for flag in flags):
        raise InvalidValue(f"an interpreter takes at most {FLAGS_MAX} options of {FLAG_CHARACTERS_MAX} characters")
    rest = iter(flags)
    for flag in rest:
        if _FLAG_LETTERS.fullmatch(flag) or _WARNING_FLAG.fullmatch(flag):
            continue
        value = next(rest, "") if flag == "-X" else flag[2:] if flag.startswith("-X") else ""
        if value.partition("=")[0] not in _X_OPTIONS or "\0" in value:
            raise InvalidValue(
                "the node does not start an interpreter with the option "
                f"{flag!r}{f' {value!r}' if flag == '-X' else ''}",
                hint="use only options that change the interpreter's behaviour (-O, -u, -W, -X utf8), not options "
                "that name code",
            )


def _with_parents(path: str) -> list[str]:
    """Return a path and all directories above it."""
    found = [path]
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


def _anybody_may_change(path: str) -> bool:
    """Return True if other users may replace a path.

    The caller checks link targets separately.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & stat.S_IWOTH:
        return False
    # Only the mode of a sticky directory itself matters, because the directory protects its entries.
    return not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
