"""Runs of the canary's scratch principals, which the agent of this node starts like any other run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.isolation import Level
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.placement import candidates
from serverless_gpu.model.secrets import DeliveredSecrets
from serverless_gpu.model.spec import Command, Resources, RunSpec
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.attempt.submission import write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.canary.targets import MEMORY_BYTES
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.processes.spawn import load_inside

FENCE = 1
SECRET = "CANARY"
TOKEN = "canary-token"
"""File beside the facts of the victim's run, with the permissions of an attempt's token."""
_FLAGS = ("-I", "-S")
_SECONDS_MAX = 120.0
_ENDED_S = 30.0


class CanaryRun(NamedTuple):
    """A run that the agent has accepted, with its connection."""

    run_id: str
    directory: Path
    channel: Channel

    @property
    def log(self) -> Path:
        """Return the file with the standard output of the run."""
        return self.directory / "logs" / "0.stdout"

    def wait(self) -> None:
        """Wait for the end of the run. Raises AgentUnavailable if the run is refused or takes too long."""
        self.channel.sock.settimeout(_SECONDS_MAX)
        said = ""
        try:
            while (received := protocol.receive(self.channel)) is not None:
                match received[0]:
                    case protocol.Finished():
                        return
                    case protocol.Refused(message=message):
                        raise AgentUnavailable(f"the agent refused the canary's run: {message}")
                    case protocol.WaitingNote(sentence=sentence):
                        said = sentence
        except TimeoutError:
            raise AgentUnavailable(
                f"the canary's run did not end within {_SECONDS_MAX:.0f} s{f': {said}' if said else ''}",
                hint="stop other runs on this node, then start the canary again",
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise AgentUnavailable(f"the connection to the canary's run broke: {error}") from None

    def ended(self) -> bool:
        """Return True if the run has ended."""
        return (self.directory / "stopped.json").exists()

    def problem(self) -> str:
        """Return why the run ended, as text after a sentence, or ""."""
        stopped = read_ending(self.directory)
        if stopped is None:
            return ""
        return f": {stopped.reason}" + (f", {stopped.cause.detail}" if stopped.cause is not None else "")

    def stop(self) -> None:
        """Stop the run and wait for its end."""
        with contextlib.suppress(OSError):
            protocol.send(self.channel, protocol.Cancel(reason=StopReason.CANCEL))
        with contextlib.suppress(AgentUnavailable):
            self.wait()


def program_of(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of `node/inside/canary/` in this interpreter."""
    text = f"{load_inside()}import sys\nfrom _sgpu_inside.canary import {module}\n{module}.main(sys.argv[1])\n"
    return (sys.executable, *_FLAGS, "-c", text, *arguments)


class ScratchRun(NamedTuple):
    """A run to start: identifier, owner, program, level, network rules (`Launch`) and memory limit."""

    run_id: str
    owner: str
    argv: tuple[str, ...]
    level: Level
    egress_problem: str | None = None
    memory_bytes: int | None = MEMORY_BYTES


@contextlib.contextmanager
def started(home: Home, clock: Clock, wanted: ScratchRun) -> Iterator[CanaryRun]:
    """Start a run of a scratch principal on a CPU slot of this node. Stop the run at the end.

    Raises AgentUnavailable, StorageError or HardwareError.
    """
    channel, greeting = connect(home)
    try:
        slots = candidates(gpus=1, gpu_type=CPU, devices=greeting.devices, own=greeting.own_types)
        directory = home.make_attempt(wanted.run_id, FENCE)
        write_private(directory / TOKEN, b"a token")
        write_private(directory / "results" / TOKEN, b"a result")
        place = secret_files.write(directory, {SECRET: b"a secret"})
        launch = protocol.Launch(
            run_id=wanted.run_id,
            fence=FENCE,
            directory=str(directory),
            spec=_spec(wanted),
            candidates=slots.devices,
            world_size=1,
            of_type=len(slots.devices),
            context=_context(),
            called_ns=clock.boottime_ns(),
            secrets=DeliveredSecrets(directory=str(place), texts=(SECRET,)),
            owner=wanted.owner,
            isolation=wanted.level,
            egress_problem=wanted.egress_problem,
        )
        write_submission(launch, greeting.version)
        protocol.send(channel, launch)
        run = CanaryRun(wanted.run_id, directory, channel)
        try:
            yield run
        finally:
            run.stop()
    finally:
        channel.close()
        home.remove_run(wanted.run_id)


def outcomes(log: Path) -> list[Mapping[str, object]]:
    """Return the lines of JSON in the output of a run, or () if the run has not started yet."""
    try:
        return json_lines(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def json_lines(text: str) -> list[Mapping[str, object]]:
    """Return the JSON objects in the lines of a text. Ignore other lines, such as warnings of Python."""
    found: list[Mapping[str, object]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def _spec(wanted: ScratchRun) -> RunSpec:
    return RunSpec(
        name="canary",
        resources=Resources(gpus=1, gpu_type=CPU, memory_bytes=wanted.memory_bytes),
        timeout_s=_SECONDS_MAX,
        grace_s=_ENDED_S / 10,
        payload=Command(argv=wanted.argv),
        tracking=False,
        secrets=(SECRET,),
        hang_warning_s=0,
    )


def _context() -> protocol.Context:
    return protocol.Context(
        python=sys.executable,
        flags=_FLAGS,
        environ={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/"},
        cwd="/",
        umask=0o077,
        argv=("canary",),
        sys_path=(),
    )
