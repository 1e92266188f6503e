"""Launches a run from a function and its arguments, and refuses invalid requests before the start.

    check function ─ bind arguments ─ agent (inventory) ─ choose candidates ─ run directory ─ payload ─ Launch
                     └ with env="snapshot": find it ────────────────────────────────────────────┘  └ Confirm

The client launches a session like a run, but without a function.

If the launch fails, the client removes the run directory. If the environment has changed, the client withdraws the
launch before user code starts. The client launches the withdrawn run again with the current files. If the stored
environment is damaged, the client captures the environment again and launches a new run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import msgspec

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch import snapshot_environment
from serverless_gpu.client.launch.local_secrets import with_secrets
from serverless_gpu.client.launch.preflight import bind_arguments, check_function, check_ray, pack, refusing_reducer
from serverless_gpu.client.mlflow_context import resolve, with_tracking
from serverless_gpu.client.runs.run import Run
from serverless_gpu.client.runs.run_source import LocalRun
from serverless_gpu.errors import AgentUnavailable, HardwareError, InvalidValue, UsageError
from serverless_gpu.model.billing.pricing import UNPRICED
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.placement import Candidates, candidates, restrict
from serverless_gpu.model.spec import HANG_WARNING, Command, Function, RunSpec, check_command, hang_warning_s, no_nccl
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.submission import ranks_of, write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.devices.inventory import offered
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.operating_system import start_thread

R = TypeVar("R")
Handle = TypeVar("Handle", bound=Run)  # type: ignore[type-arg]  # the result type is unknown

_REMOTE = "serverless_gpu.client.remote.submission"
_OWN = ("serverless_gpu.", "_sgpu_inside")
_FENCE = 1
_WITHDRAWN_S = 10.0
_notes_said: set[str] = set()


class LendingSession(NamedTuple):
    """The session of a run, and the session's devices that the run uses."""

    session: str
    devices: tuple[Device, ...]


class LaunchOrder(NamedTuple):
    """A request to launch a run or a session. Only a session has an idle limit."""

    spec: RunSpec
    called_ns: int
    lender: LendingSession | None = None
    idle_timeout_s: float | None = None


def launch(
    function: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    spec: RunSpec,
    lender: LendingSession | None = None,
    *,
    watch: bool = False,
) -> Run[R]:
    """Start a run on this machine or through a server. If the function raises an error, no run exists.

    `watch` is True if the caller immediately waits for the run.
    """
    called_ns = SystemClock().boottime_ns()
    arguments = check_call(function, args, kwargs, spec)
    if spec.hang_warning_s:  # Actors need no hang warning, because their ranks wait for calls.
        spec = msgspec.structs.replace(spec, hang_warning_s=hang_warning_s(os.environ.get(HANG_WARNING)))
    if spec.remote:
        if lender is not None:
            raise UsageError(
                f"{spec.name} has remote=True, and session {lender.session} holds devices of this machine",
                hint="call the function outside the session, or remove remote=True",
            )
        # The client imports the HTTP library only for remote calls, because the import is slow.
        remote = importlib.import_module(_REMOTE)
        return cast("Run[R]", remote.launch(remote.SubmittedCall(function, args, kwargs, arguments), spec, watch=watch))
    order = LaunchOrder(with_tracking(spec, arguments), called_ns, lender)

    def write_call(directory: Path) -> None:
        packed = pack(str(directory / "call.pkl"), function, args, kwargs, refusing_reducer(spec))
        if packed.warning and not spec.quiet:
            print(f"serverless-gpu: {packed.warning}", file=sys.stderr)

    return _place(Run, order, write_call)


def check_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], spec: RunSpec
) -> dict[str, object]:
    """Return the arguments by name. Raise UsageError for a call that cannot run on ranks."""
    check_function(function)
    arguments = bind_arguments(function, args, kwargs)
    if spec.ray is not None:
        check_ray(spec.ray)
    # The client does not display the arguments of a cell function, which are code objects.
    is_cell = str(getattr(function, "__module__", "")).startswith(_OWN)
    return {} if is_cell else arguments


def launch_command(spec: RunSpec, *, watch: bool = False) -> Run[None]:
    """Start the program `spec.payload` on this machine or through a server.

    The function raises the same errors as `launch`.
    """
    called_ns = SystemClock().boottime_ns()
    if isinstance(spec.payload, Command):
        check_command(spec.payload)
    spec = msgspec.structs.replace(spec, hang_warning_s=hang_warning_s(os.environ.get(HANG_WARNING)))
    if spec.remote:
        remote = importlib.import_module("serverless_gpu.client.remote.submission")
        return cast("Run[None]", remote.launch(None, spec, watch=watch))
    return _place(Run, LaunchOrder(with_tracking(spec), called_ns), lambda directory: None)


def launch_session(handle: Callable[..., Handle], spec: RunSpec, idle_timeout_s: float) -> Handle:
    """Request the devices of a session and return its handle. The session may still wait for devices."""
    order = LaunchOrder(spec, SystemClock().boottime_ns(), idle_timeout_s=idle_timeout_s)
    return _place(handle, order, lambda directory: None)


def _place(handle: Callable[..., Handle], order: LaunchOrder, fill: Callable[[Path], None]) -> Handle:
    """Choose devices, write the run directory and send the launch to the agent."""
    home = home_with_notice()
    recognition = snapshot_environment.recognise(home) if order.spec.environment == "snapshot" else None
    try:
        while True:  # The loop runs at most twice, because a newly captured environment needs no second check.
            placed = _try_place(handle, order, fill, home, recognition)
            if placed is not None:
                return placed
    finally:
        if recognition is not None:
            recognition.close()


def _try_place(
    handle: Callable[..., Handle],
    order: LaunchOrder,
    fill: Callable[[Path], None],
    home: Home,
    recognition: snapshot_environment.Recognition | None,
) -> Handle | None:
    """Launch the run. Return None if the environment has changed and the client has withdrawn the launch."""
    channel, greeting = connect(home)
    try:
        message = make_message(order, home, greeting)
        directory = Path(message.directory)
        try:
            home.make_attempt(message.run_id, message.fence)
            write_submission(message, greeting.version)
            fill(directory)
            message = with_secrets(home, message)
            if recognition is not None:
                message = _in_environment(message, recognition)
            channel = _send(home, channel, message)
            if not message.confirmed and recognition is not None:
                if recognition.changes():  # The next capture reports the environment changes to the user.
                    withdraw(channel)
                    secret_files.remove(directory)
                    home.remove_run(message.run_id)
                    return None
                # If the supervisor has exited, the run handle detects the exit and reports the error.
                with contextlib.suppress(OSError):
                    protocol.send(channel, protocol.Confirm())
        except BaseException:
            # Ctrl-C may arrive just after the client has sent the launch, when a supervisor may already exist. A
            # supervisor that already exists reads the withdrawal message.
            with contextlib.suppress(OSError):
                protocol.send(channel, protocol.Cancel())
            secret_files.remove(directory)
            home.remove_run(message.run_id)
            raise
    except BaseException:
        channel.close()
        raise
    again = msgspec.structs.replace(message, confirmed=True)

    def launch_again() -> Channel:  # The dead agent's cleanup has deleted the first copy of the secrets.
        return _send(home, None, with_secrets(home, again))

    source = LocalRun(message.run_id, directory, ranks_of(message), channel, launch_again)
    made = handle(source, order.spec)
    if recognition is not None and order.idle_timeout_s is None:
        made._relaunch_with(lambda: _relaunch(order, home, again))
    return made


def _relaunch(order: LaunchOrder, home: Home, message: protocol.Launch) -> LocalRun | None:
    """Capture a damaged environment again and relaunch its run. Return None if a new capture cannot help."""
    recognition = snapshot_environment.Recognition(home)
    try:
        wanted = recognition.wanted()
        if not recognition.verified or wanted is None or wanted != message.environment:
            return None
    finally:
        recognition.close()
    channel, greeting = connect(home)
    try:
        fresh = msgspec.structs.replace(make_message(order, home, greeting), environment=wanted, confirmed=True)
        directory = Path(fresh.directory)
        try:
            home.make_attempt(fresh.run_id, fresh.fence)
            write_submission(fresh, greeting.version)
            if isinstance(order.spec.payload, Function):
                shutil.copyfile(Path(message.directory) / "call.pkl", directory / "call.pkl")
            fresh = with_secrets(home, fresh)
            channel = _send(home, channel, fresh)
        except BaseException:
            secret_files.remove(directory)
            home.remove_run(fresh.run_id)
            raise
    except BaseException:
        channel.close()
        raise
    again = fresh
    return LocalRun(
        fresh.run_id,
        directory,
        ranks_of(fresh),
        channel,
        lambda: _send(home, None, with_secrets(home, again)),
    )


def _in_environment(message: protocol.Launch, recognition: snapshot_environment.Recognition) -> protocol.Launch:
    """Return the launch message with the environment. Capture a new environment first."""
    display = snapshot_environment.capture_display(quiet=message.spec.quiet, logs=Path(message.directory) / "logs")
    try:
        wanted = recognition.wanted(display)
    finally:
        display.finish()
    # A session's environment needs no check, because a session runs no user code.
    confirmed = recognition.verified or message.idle_timeout_s is not None
    return msgspec.structs.replace(message, environment=wanted, confirmed=confirmed)


def withdraw(channel: Channel) -> None:
    """Withdraw a launch before user code starts, and wait until its devices are free."""
    channel.sock.settimeout(_WITHDRAWN_S)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        protocol.send(channel, protocol.Cancel())
        while (received := protocol.receive(channel)) is not None:
            if isinstance(received[0], protocol.Finished | protocol.Refused):
                break
    channel.close()


def prewarm(spec: RunSpec) -> None:
    """Prepare a warm interpreter in the background. Ignore errors, because a later call reports them."""
    # `sysconfig` caches its variables here, in the main thread. Up to Python 3.12, a first call in another thread may
    # return incomplete variables.
    sysconfig.get_config_vars()

    def ask() -> None:
        try:
            home, environment = find_home(os.environ), None
            if spec.remote and not importlib.import_module(_REMOTE).is_of_this_machine(home, spec):
                return
            if spec.environment == "snapshot":
                recognition = snapshot_environment.Recognition(home, capture=False)
                environment = recognition.wanted()
                recognition.close()
                if environment is None:
                    # The home directory contains no capture of this environment yet. The first call captures the
                    # environment and shows the progress.
                    return
            channel, _ = connect(home)
            ranks = spec.processes(spec.resources.gpus or 1)
            tracker = resolve(spec, {}, os.environ).tracking if not spec.remote else None
            asked = protocol.Prewarm(context=caller_context(), ranks=ranks, environment=environment, tracker=tracker)
            protocol.send(channel, asked)
            channel.close()
        except Exception:  # noqa: BLE001 - prewarming is optional
            pass

    # If the process cannot start a thread, the run starts without a warm interpreter.
    with contextlib.suppress(HardwareError):
        start_thread(ask, "serverless-gpu-prewarm")


def should_prewarm(module: str) -> bool:
    """Return True if decorators in `module` prewarm an interpreter.

    Only scripts and notebooks prewarm, not ranks and tests.
    """
    setting = os.environ.get("SERVERLESS_GPU_PREWARM")
    if setting is not None:
        return setting not in ("0", "")
    return module == "__main__" and "SGPU_RUN_ID" not in os.environ and "pytest" not in sys.modules


def home_with_notice() -> Home:
    """Return the home directory of this process. Print any notice about the home directory once."""
    home = find_home(os.environ)
    if home.note and home.note not in _notes_said:
        _notes_said.add(home.note)
        warnings.warn(home.note, stacklevel=5)
    return home


def make_message(order: LaunchOrder, home: Home, greeting: protocol.Greeting) -> protocol.Launch:
    """Return the launch message for an order. The attempt directory does not exist yet."""
    context = caller_context()
    devices = offered(greeting, context.environ)
    chosen = _choose(greeting, order, devices, context.environ)
    if order.idle_timeout_s is not None and chosen.count > protocol.SESSION_DEVICES_MAX:
        raise InvalidValue(
            f"a session holds at most {protocol.SESSION_DEVICES_MAX} devices, not {chosen.count}",
            hint="set the number of devices with gpus=, or open several sessions",
        )
    check_shown(order.spec, chosen.count)
    check_nccl(order.spec, chosen.devices)
    run_id = new_run_id()
    return protocol.Launch(
        run_id=run_id,
        fence=_FENCE,
        directory=str(home.attempt(run_id, _FENCE)),
        spec=order.spec,
        candidates=chosen.devices,
        world_size=chosen.count,
        of_type=sum(device.type == chosen.devices[0].type for device in devices),
        context=context,
        called_ns=order.called_ns,
        tariff=greeting.prices.get(chosen.devices[0].type, UNPRICED),
        session=order.lender.session if order.lender else "",
        idle_timeout_s=order.idle_timeout_s,
    )


def check_shown(spec: RunSpec, devices: int) -> None:
    """Raise InvalidValue if the run has none of the ranks in `ranks_log`."""
    shown, ranks = spec.ranks_log, spec.processes(devices)
    if shown and min(shown) >= ranks:
        raise InvalidValue(
            f"ranks_log names rank {', '.join(map(str, shown))}, but this run has "
            + (f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"),
            hint='name existing ranks, or set ranks_log="all"',
        )


def check_nccl(spec: RunSpec, devices: Sequence[Device]) -> None:
    """Raise InvalidValue for `init="nccl"` with fake GPUs or CPU slots."""
    if spec.init != "nccl" or any(device.kind is DeviceKind.GPU for device in devices):
        return
    declared = devices[0].kind is DeviceKind.FAKE
    raise no_nccl("GPUs that SERVERLESS_GPU_FAKE declares" if declared else "CPU slots")


def _choose(
    greeting: protocol.Greeting, order: LaunchOrder, offered: Sequence[Device], environ: Mapping[str, str]
) -> Candidates:
    wanted = order.spec.resources
    if order.lender is None:
        devices = restrict(offered, environ.get("CUDA_VISIBLE_DEVICES"))
        return candidates(gpus=wanted.gpus, gpu_type=wanted.gpu_type, devices=devices, own=greeting.own_types)
    held = order.lender.devices
    kind = wanted.gpu_type or held[0].type
    try:
        return candidates(gpus=wanted.gpus, gpu_type=kind, devices=held, own=greeting.own_types)
    except HardwareError:
        raise InvalidValue(
            f"{order.spec.name} requests {wanted.gpus or 'all'} {kind}; session {order.lender.session} holds "
            f"{len(held)} {held[0].type}",
            hint="open a session with these devices, or call the function outside the session",
        ) from None


def _send(home: Home, channel: Channel | None, message: protocol.Launch) -> Channel:
    """Send a launch to the connected agent, or to a new agent if the connected agent has just exited."""
    for channel_or_none in (channel, None):
        live = channel_or_none or connect(home)[0]
        try:
            protocol.send(live, message)
        except OSError:
            live.close()
            continue
        return live
    raise AgentUnavailable("this node's agent ended twice before accepting the run", hint=f"see {home.agent_log}")
