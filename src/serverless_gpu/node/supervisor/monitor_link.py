"""The supervisor's connection to the node's monitor.

    supervisor ──Observe, Ranks, EndingNote, Settled──▶ monitor      sent again, in this order, to a restarted monitor
               ◀──TrackedNote, Untracked, AttemptSample, UserSentence──

The connection to the monitor never blocks. If the monitor is missing, hangs or dies, an attempt loses only its
telemetry and tracking. A function's ranks start without waiting for the monitor, because `mlflow` in a rank finds its
run later (`inside/`). A program runs no code of this package. The environment of a running program cannot change. The
start of a program therefore waits briefly for the tracking variables. A program's start waits longer while the home's
own MLflow server starts. The start of a Ray cluster also waits, because Ray workers need the tracking variables. The
receipt of a very short run waits up to `LINK_NS` for the tracking link. During the wait for the link, the client
already has the outcome. The devices are already free during the wait for the link.

Failure cases: Without a monitor, the supervisor tries to connect at most every two seconds. If an attempt ends before
the monitor runs, the supervisor writes the attempt to the monitor's backlog. If the monitor dies, its successor
receives all messages again and continues the same files. If the monitor does not read from its socket, the supervisor
queues the messages. After an invalid message, the supervisor reconnects after at most two seconds.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.placement import world_size
from serverless_gpu.model.receipt import DeviceUse
from serverless_gpu.model.spec import Command
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.protocol import Launch, original
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.inside.mlflow import job
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import Backlog, origin_of

_FIRST_NS = 100_000_000
_AGAIN_NS = 2_000_000_000
LINK_NS = 200_000_000
"""Longest wait of a receipt for its tracking link, from the start of the attempt, in nanoseconds."""
COMMAND_NS = 2_000_000_000
"""Longest wait of a program or a Ray cluster for tracking variables, unless the tracker is unreachable."""
SERVER_NS = 10_000_000_000
"""Longest wait of a program while the home's own MLflow server starts."""
_STARTING = "{} waits up to 10 s for the start of the home's MLflow server"
_STARTED_LATE = "the home's MLflow server was still starting, so the run will appear there later (see `sgpu mlflow`)"
_FOR_GOOD = ", so MLflow does not track this run"
_KEPT = "the node stores the recorded data and sends it once MLflow answers (within 24 h)"
_SILENT = "MLflow had not answered yet: the run will appear in MLflow after its first answer, see `sgpu show`"


class MonitorLink:
    """One attempt's connection to the monitor."""

    def __init__(
        self,
        launch: Launch,
        sockets: Path,
        clock: Clock,
        selector: selectors.BaseSelector,
        tell: Callable[[protocol.Message], None],
    ) -> None:
        # The attempt's MLflow run and the link to that run, once known.
        self.tracked: messages.TrackedNote | None = None
        self.uses: tuple[DeviceUse, ...] = ()  # Observed use of the devices so far.
        self.notes: list[str] = []  # Notes for the receipt.
        # Callback after each telemetry sample, with True if any device was busy.
        self.on_seen: Callable[[bool], None] = lambda busy: None
        self._launch = launch
        self._path = messages.monitor_socket(sockets)
        self._clock = clock
        self._selector = selector
        self._tell = tell
        self._said: list[messages.MonitorMessage] = []
        self._pending: deque[messages.MonitorMessage] = deque()
        self._channel: Channel | None = None
        self._untracked: messages.Untracked | None = None
        self._began_ns = clock.boottime_ns()
        self._pause_ns = _FIRST_NS
        self._again_ns = 0
        self._told_waiting = False

    # --- monitor messages ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask the monitor to observe the attempt."""
        launch = self._launch
        self._began_ns = self._clock.boottime_ns()
        self._say(
            messages.Observe(
                run_id=launch.run_id,
                fence=launch.fence,
                directory=launch.directory,
                spec=launch.spec,
                world_size=world_size(launch.all_crews),
                node_rank=launch.crew,
                num_nodes=len(launch.all_crews),
                python=original(launch.context.python),
                environ=messages.tracking_variables(launch.context.environ),
                environment="live" if launch.environment is None else f"snapshot {launch.environment.snapshot}",
                called_ns=launch.called_ns,
            )
        )

    def ranks(self, devices: tuple[Device, ...], pids: Mapping[int, int], cgroup: Path | None) -> None:
        """Report to the monitor which processes use which devices."""
        self._say(messages.Ranks(devices=devices, pids=dict(pids), cgroup="" if cgroup is None else str(cgroup)))

    def linger(self) -> None:
        """Read the monitor's last messages. Wait up to `LINK_NS` for the tracking link of a short attempt."""
        self.hear()
        until_ns = self._began_ns + LINK_NS
        while self._is_undecided and (left_ns := until_ns - self._clock.boottime_ns()) > 0:
            assert self._channel is not None
            if not select.select([self._channel.sock], [], [], left_ns / 1e9)[0]:
                return
            self.hear()

    def ending(self, state: State, reason: Reason, sentence: str) -> None:
        """Report the attempt's outcome to the monitor once the attempt's files are complete."""
        self._say(messages.EndingNote(state=state, reason=reason, sentence=sentence))

    def settled(self, backlog: Path) -> None:
        """Report the written receipt and disconnect. Put an unobserved attempt into the `backlog`."""
        self._say(messages.Settled())
        self.close()
        observe = self._said[0]
        is_heard_of = Path(self._launch.directory, job.FILE).exists()
        if self._launch.spec.tracker is None or is_heard_of or not isinstance(observe, messages.Observe):
            return
        with contextlib.suppress(OSError):
            Backlog(backlog, self._clock).leave(observe, origin_of(observe, self._clock))

    def close(self) -> None:
        """Disconnect from the monitor."""
        if self._channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._channel.sock)
            self._channel.close()
            self._channel = None

    # --- tracking state ------------------------------------------------------------------------------------------

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables with which MLflow in a rank finds its run."""
        return {} if self.tracked is None else self.tracked.environ

    @property
    def url(self) -> str:
        """Return the URL of the run in MLflow, or ""."""
        return "" if self.tracked is None else self.tracked.url

    @property
    def told(self) -> protocol.Tracked | None:
        """Return the tracking message for newly attached clients, or None."""
        tracked = self.tracked
        return None if tracked is None else protocol.Tracked(run_id=tracked.run_id, url=tracked.url)

    @property
    def hold_ns(self) -> int | None:
        """Return the deadline for tracking variables, or None if the ranks need not wait."""
        until_ns = self._began_ns + self._patience_ns()
        return until_ns if self._clock.boottime_ns() < until_ns else None

    @property
    def wake_ns(self) -> int | None:
        """Return the time of the next `tend` call, or None while the supervisor is connected."""
        return self._again_ns if self._channel is None and self._said else None

    def receipt_notes(self) -> list[str]:
        """Return the receipt's notes about tracking, except the link."""
        missing = self._missing()
        return [*self.notes, missing] if missing else self.notes

    def _missing(self) -> str:
        """Return why the run has no tracking link and when the data will arrive, or ""."""
        untracked = self._untracked
        if self.tracked is not None or self._launch.spec.tracker is None:
            return ""
        if untracked is None:
            return _SILENT
        if untracked.is_starting:
            return _STARTED_LATE
        if untracked.final:
            return f"{untracked.sentence}{_FOR_GOOD}" if untracked.sentence else ""
        return f"{untracked.sentence}; {_KEPT}"

    @property
    def _is_undecided(self) -> bool:
        is_told = self.tracked is not None or self._untracked is not None
        return self._launch.spec.tracker is not None and self._channel is not None and not is_told

    def _patience_ns(self) -> int:
        tracker, untracked = self._launch.spec.tracker, self._untracked
        if tracker is None or self.tracked is not None or (untracked is not None and untracked.final):
            return 0
        # A program or Ray worker cannot receive tracking variables after its start.
        is_told_once = isinstance(self._launch.spec.payload, Command) or self._launch.spec.ray is not None
        if untracked is not None:
            return SERVER_NS if is_told_once and untracked.is_starting else 0
        return COMMAND_NS if is_told_once else 0

    # --- connection ----------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Connect to the monitor if necessary, and send pending messages."""
        if self._channel is None and self._said and self._clock.boottime_ns() >= self._again_ns:
            self._connect()
        elif self._pending:
            self._flush()

    def hear(self) -> None:
        """Read all messages that the monitor has sent."""
        while self._channel is not None:
            try:
                word = messages.receive(self._channel)
            except BlockingIOError:
                return
            except (OSError, msgspec.MsgspecError):
                word = None
            if word is None:
                self._lose()
                return
            self._pause_ns = _AGAIN_NS
            self._understand(word)

    def _understand(self, word: messages.AnyMonitorMessage) -> None:
        match word:
            case messages.TrackedNote() if self.tracked is None:
                self.tracked, self._untracked = word, None
                self._tell(protocol.Tracked(run_id=word.run_id, url=word.url))
            case messages.Untracked(sentence=sentence, final=final) if self.tracked is None:
                if final and sentence and (self._untracked is None or not self._untracked.final):
                    self._tell(protocol.WaitingNote(sentence=f"{sentence}{_FOR_GOOD}"))
                self._untracked = word
                if self._patience_ns() == SERVER_NS and not self._told_waiting:
                    self._told_waiting = True
                    who = "the program" if isinstance(self._launch.spec.payload, Command) else "the Ray cluster"
                    self._tell(protocol.WaitingNote(sentence=_STARTING.format(who)))
            case messages.AttemptSample(uses=uses, busy=busy):
                self.uses = uses
                self.on_seen(busy)
            case messages.UserSentence(sentence=sentence, note=note):
                self._tell(protocol.WaitingNote(sentence=sentence))
                if note:
                    self.notes.append(sentence)
            case _:
                pass

    def _say(self, word: messages.MonitorMessage) -> None:
        self._said.append(word)
        if self._channel is None:
            self.tend()
            return
        self._pending.append(word)
        self._flush()

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            self._wait()
            return
        self._channel = Channel(sock)
        self._selector.register(sock, selectors.EVENT_READ, self.hear)
        self._pending = deque(self._said)
        self._flush()

    def _flush(self) -> None:
        while self._channel is not None and self._pending:
            try:
                messages.send(self._channel, self._pending[0])
            except BlockingIOError:
                return
            except OSError:
                self.hear()  # The monitor's last messages may still be in the socket buffer.
                self._lose()
                return
            self._pending.popleft()

    def _lose(self) -> None:
        if self._channel is not None:
            self.close()
            self._wait()

    def _wait(self) -> None:
        self._again_ns = self._clock.boottime_ns() + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _AGAIN_NS)
