"""Sources of a run's messages and files for its handle.

    Run ──▶ RunSource ──┬─ LocalRun    the run's supervisor on this machine: a socket and the run directory
                        └─ RemoteRun   a server: its event stream, and copies of its files (`remote/remote_run.py`)

Every source returns messages of `node.protocol`, so that all handles behave alike. When the connection of a `LocalRun`
ends before a supervisor had accepted it (the agent died with the run in its queue), the launch goes to a new agent:
nothing has run. When it ends without the last message, the run directory has it, or the supervisor was killed.
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
_TIMELINE = "serverless_gpu.client.runs.timeline"  # loaded when it is asked for: a call has no use for it
_LOSS = "serverless_gpu.node.attempt.supervisor_loss"

Reconnect = Callable[[], Channel]


class ConnectionNote(NamedTuple):
    """Something to say about the way to the run, not about the run."""

    sentence: str


class RunSource(abc.ABC):
    """Source of a run's messages and files."""

    run_id: str
    directory: Path  # of the last attempt's files, or their copies
    world_size: int | None  # 0 for a session; None while unknown
    origin: Origin = Origin()  # machine of the files, and whether loading them is safe

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Return whether more messages may come."""

    @property
    @abc.abstractmethod
    def logs(self) -> Path | str:
        """Return where all output of the ranks is: a directory, or the command that shows it."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news, or -1."""

    @abc.abstractmethod
    def receive(self, timeout_s: float | None) -> protocol.AnyMessage | ConnectionNote | None:
        """Return the next message, or None after the last.

        Raises TimeoutError when none came in time, BlockingIOError when none is there and `timeout_s` is 0, and
        ServerlessGpuError when the run's state cannot be known.
        """

    @abc.abstractmethod
    def stop(self, why: StopReason, *, patiently: bool = True) -> None:
        """Request the run's stop, if it has not ended; `patiently` waits for a server that is away."""

    @abc.abstractmethod
    def close(self) -> None:
        """Listen no more; the run goes on."""

    @abc.abstractmethod
    def ending(self) -> protocol.Stopped:
        """Return the run's ending, after the last message."""

    @abc.abstractmethod
    def receipt(self) -> Receipt | None:
        """Return the run's receipt, after the last message."""

    def receipts(self) -> dict[str, Receipt]:
        """Return the receipt of each node by name, after the last message."""
        receipt = self.receipt()
        return {} if receipt is None else {self.origin.node or socket.gethostname(): receipt}

    @abc.abstractmethod
    def bring_result(self, rank: int) -> None:
        """Provide a rank's result in `directory`, where it is kept at all."""

    @abc.abstractmethod
    def read_log(self, rank: int, stream: str) -> bytes:
        """Return a rank's output so far, as far as it is kept."""

    @abc.abstractmethod
    def read_telemetry(self) -> list[bytes]:
        """Return the samples so far: a file for each node of each attempt."""

    @abc.abstractmethod
    def cost(self) -> Cost:
        """Return the run's use and cost so far, over all of its attempts."""

    @abc.abstractmethod
    def attempts(self) -> list[AttemptTimes]:
        """Return the attempts so far, in order."""


class LocalRun(RunSource):
    """A run of this machine; channel None when it has ended, `again` relaunches one that was not accepted."""

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
        self._lost_ns: int | None = None  # boottime at which the supervisor's end was noticed

    @property
    def is_open(self) -> bool:
        """Return whether more messages may come."""
        return self.channel is not None

    @property
    def logs(self) -> Path:
        """Return the directory of the ranks' output."""
        return self.directory / "logs"

    def fileno(self) -> int:
        """Return the socket's descriptor, or -1."""
        return -1 if self.channel is None else self.channel.fileno()

    def receive(self, timeout_s: float | None) -> protocol.AnyMessage | None:
        """Return the supervisor's next message, or None after its last; a lost launch is sent again meanwhile."""
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
        """Tell the supervisor; one that is gone has ended its ranks."""
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
        """Return the ending from the run directory; write it where the supervisor died."""
        stopped = read_ending(self.directory)
        if stopped is None and self._settle():
            stopped = read_ending(self.directory)
        return stopped or supervisor_lost()

    def receipt(self) -> Receipt | None:
        """Return the receipt that the run directory has; write it where the supervisor died."""
        receipt = read_receipt(self.directory)
        if receipt is None and self._settle():
            receipt = read_receipt(self.directory)
        return receipt

    def bring_result(self, rank: int) -> None:
        """Do nothing: it is there."""

    def read_log(self, rank: int, stream: str) -> bytes:
        """Return the contents of the rank's file."""
        try:
            return (self.directory / "logs" / f"{rank}.{stream}").read_bytes()
        except FileNotFoundError:
            return b""

    def read_telemetry(self) -> list[bytes]:
        """Return the files of samples below the run's directory."""
        directories = load(_TIMELINE).attempt_directories(self.directory.parent)
        paths = [path for directory in directories for path in sorted((directory / "logs").glob("*.telemetry"))]
        return [path.read_bytes() for path in paths]

    def cost(self) -> Cost:
        """Return the cost from the attempts' directories."""
        found: Cost = load("serverless_gpu.client.runs.local_costs").cost_here(self.directory.parent, SystemClock())
        return found

    def attempts(self) -> list[AttemptTimes]:
        """Return the attempts from their directories."""
        timeline = load(_TIMELINE)
        return [
            timeline.read_attempt_times(directory) for directory in timeline.attempt_directories(self.directory.parent)
        ]

    def _settle(self) -> bool:
        """Record the ending of a run whose supervisor died; return False if none had it, or one still has it."""
        settled: bool = load(_LOSS).settle_here(self.directory, SystemClock(), seen_ns=self._lost_ns)
        return settled

    def _note(self, message: protocol.AnyMessage) -> None:
        match message:
            case protocol.Accepted() | protocol.Stopped():
                self._accepted = True
            case protocol.Refused() if not self._accepted:  # nothing was started
                remove_at_once(self.directory.parent)
            case _:
                pass


def supervisor_lost() -> protocol.Stopped:
    """Return the ending of a run whose supervisor died silently and without evidence of the cause."""
    reason = Reason.SUPERVISOR_KILLED
    return protocol.Stopped(state=MEANINGS[reason].state, reason=reason, cause=None, consequences=())
