"""Provides a run handle with messages and files from a local supervisor or a server.

    Run ──▶ RunSource ──┬─ LocalRun    the run's supervisor on this machine: a socket and the run directory
                        └─ RemoteRun   a server: its event stream, and copies of its files (`remote/remote_run.py`)

Every source returns messages of `node.protocol`, so that local and remote run handles behave the same. If the agent
dies while a run is queued, `LocalRun` loses its connection before a supervisor accepts the run. `LocalRun` sends a lost
launch to a new agent, because no user code has run. If the connection closes before the final message, `LocalRun` reads
the final state from the run directory. If the run directory contains no final state, the supervisor was killed.
"""

from __future__ import annotations

import abc
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.runs.outcome import Origin
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.node.attempt.history import read_ending, read_receipt
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import remove_at_once
from serverless_gpu.node.inside.channel import Channel

if TYPE_CHECKING:
    from serverless_gpu.client.runs.timeline import AttemptTimes
    from serverless_gpu.model.cost import Cost

_LAUNCH_TRIES = 3
# The client imports `timeline` and `supervisor_loss` at first use, because most calls need neither module.
_TIMELINE = "serverless_gpu.client.runs.timeline"
_LOSS = "serverless_gpu.node.attempt.supervisor_loss"

Reconnect = Callable[[], Channel]


class ConnectionNote(NamedTuple):
    """A message about the connection to the server or supervisor, not about the run."""

    sentence: str


class RunSource(abc.ABC):
    """Interface for reading a run's messages and files."""

    run_id: str
    directory: Path  # Local directory that contains the last attempt's files or copies of them.
    world_size: int | None  # Number of ranks, which is 0 for a session and None while unknown.
    origin: Origin = Origin()  # Node that stores the run's files, and the run's owner if the results are untrusted.

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Return True if more messages may arrive."""

    @property
    @abc.abstractmethod
    def logs(self) -> Path | str:
        """Return the directory that contains the ranks' output, or the command that shows the output."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when messages arrive, or -1."""

    @abc.abstractmethod
    def receive(self, timeout_s: float | None) -> protocol.AnyMessage | ConnectionNote | None:
        """Return the next message, or None after the last message.

        Raises TimeoutError if no message arrives in time. Raises BlockingIOError if `timeout_s` is 0 and no message is
        waiting. Raises ServerlessGpuError if the state of the run is unknown.
        """

    @abc.abstractmethod
    def stop(self, why: StopReason, *, patiently: bool = True) -> None:
        """Request that a running or queued run stops. If `patiently` is True, wait for an unreachable server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop reading messages. The run continues."""

    @abc.abstractmethod
    def ending(self) -> protocol.Stopped:
        """Return the run's final state after the last message."""

    @abc.abstractmethod
    def receipt(self) -> Receipt | None:
        """Return the run's receipt after the last message."""

    def receipts(self) -> dict[str, Receipt]:
        """Return each node's receipt by node name after the last message."""
        receipt = self.receipt()
        return {} if receipt is None else {self.origin.node or socket.gethostname(): receipt}

    @abc.abstractmethod
    def bring_result(self, rank: int) -> None:
        """Copy a rank's result into `directory`, if the result still exists."""

    @abc.abstractmethod
    def read_log(self, rank: int, stream: str) -> bytes:
        """Return a rank's output so far. Old output may have been deleted according to `[retention]`."""

    @abc.abstractmethod
    def read_telemetry(self) -> list[bytes]:
        """Return the run's telemetry samples so far: one file per node and attempt."""

    @abc.abstractmethod
    def cost(self) -> Cost:
        """Return the usage and cost of all attempts so far."""

    @abc.abstractmethod
    def attempts(self) -> list[AttemptTimes]:
        """Return all attempts so far, in order."""


class LocalRun(RunSource):
    """A run on this machine.

    `channel` is None after the run's end. `again` is a function that repeats the launch if the agent dies before a
    supervisor accepts the run.
    """

    def __init__(
        self, run_id: str, directory: Path, world_size: int, channel: Channel | None, again: Reconnect | None = None
    ) -> None:
        self.run_id = run_id
        self.directory = directory
        self.world_size = world_size
        self.channel = channel
        self._again = again
        self._tries = 1
        self._accepted = again is None
        # Boot time in nanoseconds at which this process detected the supervisor's exit.
        self._lost_ns: int | None = None

    @property
    def is_open(self) -> bool:
        """Return True if more messages may arrive."""
        return self.channel is not None

    @property
    def logs(self) -> Path:
        """Return the directory of the ranks' output."""
        return self.directory / "logs"

    def fileno(self) -> int:
        """Return the socket's descriptor, or -1."""
        return -1 if self.channel is None else self.channel.fileno()

    def receive(self, timeout_s: float | None) -> protocol.AnyMessage | None:
        """Return the supervisor's next message, or None after the last message.

        Repeat a launch that a dead agent lost.
        """
        while self.channel is not None:
            self.channel.sock.settimeout(timeout_s)
            try:
                received = protocol.receive(self.channel)
            except (TimeoutError, BlockingIOError):
                raise
            except (OSError, msgspec.MsgspecError):
                received = None
            if received is not None:
                self._note(received[0])
                return received[0]
            self._lost_ns = SystemClock().boottime_ns()
            self.close()
            if not self._accepted and self._again is not None and self._tries < _LAUNCH_TRIES:
                self._tries += 1
                self.channel = self._again()
        return None

    def stop(self, why: StopReason, *, patiently: bool = True) -> None:
        """Send the stop request to the supervisor, unless the supervisor has exited."""
        channel = self.channel
        if channel is not None:
            with contextlib.suppress(OSError):
                protocol.send(channel, protocol.Cancel(reason=why))

    def close(self) -> None:
        """Close the socket."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def ending(self) -> protocol.Stopped:
        """Return the run's final state from the run directory.

        If the supervisor died, record the final state first.
        """
        stopped = read_ending(self.directory)
        if stopped is None and self._settle():
            stopped = read_ending(self.directory)
        return stopped or supervisor_lost()

    def receipt(self) -> Receipt | None:
        """Return the run's receipt from the run directory. If the supervisor died, record the receipt first."""
        receipt = read_receipt(self.directory)
        if receipt is None and self._settle():
            receipt = read_receipt(self.directory)
        return receipt

    def bring_result(self, rank: int) -> None:
        """Do nothing, because the run directory already contains the result."""

    def read_log(self, rank: int, stream: str) -> bytes:
        """Return the contents of the rank's output file."""
        try:
            return (self.directory / "logs" / f"{rank}.{stream}").read_bytes()
        except FileNotFoundError:
            return b""

    def read_telemetry(self) -> list[bytes]:
        """Return the run directory's telemetry sample files."""
        directories = load(_TIMELINE).attempt_directories(self.directory.parent)
        paths = [path for directory in directories for path in sorted((directory / "logs").glob("*.telemetry"))]
        return [path.read_bytes() for path in paths]

    def cost(self) -> Cost:
        """Return the run's cost, computed from the attempt directories."""
        found: Cost = load("serverless_gpu.client.runs.local_costs").cost_here(self.directory.parent, SystemClock())
        return found

    def attempts(self) -> list[AttemptTimes]:
        """Return the run's attempts, read from the attempt directories."""
        timeline = load(_TIMELINE)
        return [
            timeline.read_attempt_times(directory) for directory in timeline.attempt_directories(self.directory.parent)
        ]

    def _settle(self) -> bool:
        """Record the final state of a run whose supervisor died. Return False if the supervisor did not die."""
        settled: bool = load(_LOSS).settle_here(self.directory, SystemClock(), seen_ns=self._lost_ns)
        return settled

    def _note(self, message: protocol.AnyMessage) -> None:
        match message:
            case protocol.Accepted() | protocol.Stopped():
                self._accepted = True
            # The client removes the run directory, because the run has started no process.
            case protocol.Refused() if not self._accepted:
                remove_at_once(self.directory.parent)
            case _:
                pass


def supervisor_lost() -> protocol.Stopped:
    """Return the final state for a run whose supervisor died for an unknown reason."""
    reason = Reason.SUPERVISOR_KILLED
    return protocol.Stopped(state=MEANINGS[reason].state, reason=reason, cause=None, consequences=())
