"""From a function and its arguments to a launched run: everything that can be refused is refused here, before
anything starts.

    check function ─ bind arguments ─ agent (inventory) ─ choose candidates ─ run directory ─ payload ─ Launch

Failure cases: whatever goes wrong, the run directory is removed again; nothing else exists yet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.client.connection import caller_context, connect
from serverless_gpu.client.preflight import bind_arguments, check_function, pack
from serverless_gpu.client.run import Run
from serverless_gpu.errors import AgentUnavailable, InvalidValue, ServerNotConfigured
from serverless_gpu.model.hardware import Device, DeviceKind, parse_fake
from serverless_gpu.model.placement import Candidates, candidates, restrict
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node import protocol
from serverless_gpu.node.entrypoint import air_program
from serverless_gpu.node.home import Home, find_home, storage_error
from serverless_gpu.node.inside.channel import Channel

R = TypeVar("R")

_FENCE = 1
_notes_said: set[str] = set()


def launch(function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object], spec: RunSpec) -> Run[R]:
    """Start a run on this machine and return its handle.

    Args:
        function: what every rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        spec: what was asked for.

    Raises:
        ServerlessGpuError: nothing was started; the message says why and what to do.
    """
    called_ns = SystemClock().boottime_ns()
    check_function(function)
    bind_arguments(function, args, kwargs)
    if spec.remote:
        raise ServerNotConfigured(
            "remote=True needs a server, and none is configured",
            hint="leave remote out to run on this machine; the server, `sgpu up`, is not in this version",
        )
    home = _home()
    context = caller_context()
    channel, greeting = connect(home)
    try:
        chosen = _choose(greeting, spec, context.environ)
        run_id = new_run_id()
        directory = home.make_attempt(run_id, _FENCE)
        try:
            _write(directory, run_id, chosen.count, spec, context, greeting.version)
            packed = pack(str(directory / "call.pkl"), function, args, kwargs)
            if packed.warning and not spec.quiet:
                print(f"serverless-gpu: {packed.warning}", file=sys.stderr)
            message = protocol.Launch(
                run_id=run_id,
                fence=_FENCE,
                directory=str(directory),
                spec=spec,
                candidates=chosen.devices,
                world_size=chosen.count,
                context=context,
                called_ns=called_ns,
                price=greeting.prices.get(chosen.devices[0].type),
            )
            channel = _send(home, channel, message)
        except BaseException:
            # Ctrl-C may have come just after the launch was sent: then a supervisor reads this.
            with contextlib.suppress(OSError):
                protocol.send(channel, protocol.Cancel())
            home.remove_run(run_id)
            raise
    except BaseException:
        channel.close()
        raise
    return Run(run_id, directory, spec, chosen.count, channel, lambda: _send(home, None, message))


def prewarm(spec: RunSpec) -> None:
    """Have a warm interpreter ready for such runs, in the background; the first run says what goes wrong."""

    def ask() -> None:
        try:
            channel, _ = connect(find_home(os.environ))
            protocol.send(channel, protocol.Prewarm(context=caller_context(), ranks=spec.resources.gpus or 1))
            channel.close()
        except Exception:  # noqa: BLE001 - a help for later, in a thread nobody watches
            pass

    threading.Thread(target=ask, name="serverless-gpu-prewarm", daemon=True).start()


def should_prewarm(module: str) -> bool:
    """Return whether decorating a function of this module prewarms: scripts and notebooks yes; ranks and tests no."""
    setting = os.environ.get("SERVERLESS_GPU_PREWARM")
    if setting is not None:
        return setting not in ("0", "")
    return module == "__main__" and "SGPU_RUN_ID" not in os.environ and "pytest" not in sys.modules


def _home() -> Home:
    home = find_home(os.environ)
    if home.note and home.note not in _notes_said:
        _notes_said.add(home.note)
        warnings.warn(home.note, stacklevel=5)
    return home


def _choose(greeting: protocol.Greeting, spec: RunSpec, environ: Mapping[str, str]) -> Candidates:
    if greeting.problem:
        raise InvalidValue(greeting.problem)
    devices: Sequence[Device] = greeting.devices
    fakes = environ.get("SERVERLESS_GPU_FAKE")
    if fakes:
        cpus = [device for device in devices if device.kind is DeviceKind.CPU]
        devices = (*parse_fake(fakes, greeting.own_types), *cpus)
    return candidates(
        gpus=spec.resources.gpus,
        gpu_type=spec.resources.gpu_type,
        devices=restrict(devices, environ.get("CUDA_VISIBLE_DEVICES")),
        own=greeting.own_types,
    )


def _write(
    directory: Path, run_id: str, world_size: int, spec: RunSpec, context: protocol.Context, version: str
) -> None:
    """Write what makes a run readable and repeatable by hand; values of variables stay out of it."""
    submission = protocol.Submission(run_id=run_id, fence=_FENCE, world_size=world_size, spec=spec, version=version)
    environment = {"python": context.python, "flags": context.flags, "variables": sorted(context.environ)}
    air = air_program(directory=directory, run_id=run_id, fence=_FENCE, world_size=world_size, context=context)
    try:
        (directory / "spec.json").write_bytes(msgspec.json.encode(submission))
        (directory / "environment.json").write_bytes(msgspec.json.encode(environment))
        (directory / "_air.py").write_text(air, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise storage_error(error, directory) from None


def _send(home: Home, channel: Channel | None, message: protocol.Launch) -> Channel:
    """Send a launch, to a new agent if the one we know has just ended."""
    for channel_or_none in (channel, None):
        live = channel_or_none or connect(home)[0]
        try:
            protocol.send(live, message)
        except OSError:
            live.close()
            continue
        return live
    raise AgentUnavailable(
        "the agent of this node ended twice while a run was sent to it", hint=f"see {home.agent_log}"
    )
