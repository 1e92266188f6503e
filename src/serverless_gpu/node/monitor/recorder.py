"""Records one attempt: writes samples to a telemetry file and sends totals to the supervisor.

    Observe ─▶ known │ Ranks ─▶ sampled, once a second │ EndingNote ─▶ no more samples │ Settled, end of file ─▶ end
       │                    └─ with the latest metrics of its Ray cluster, if any (`RayFile`)
       └─▶ AttemptDelivery (`delivery.py`), if it is tracked; its messages go to the supervisor too

    sample, 1 s ─▶ TelemetryFile ─ mean of the interval ─▶ logs/<node rank>.telemetry ─▶ delivery, Run.metrics(), server

The interval between telemetry rows grows with the run's duration.

Failure cases:

If the supervisor disconnects without `Settled`, the recorder reads the attempt's files until the attempt has ended.

If the disk is full, the recorder drops and counts the telemetry row. The recorder reports the loss once and tries to
write the next row.

If the run's directory is deleted, the recorder writes no more rows.

If a writer was killed within a line, the next writer ends the line, and readers skip the incomplete line.

If the wall clock moves back, the recorder writes a row immediately.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.model.telemetry import (
    RAY_BYTES_MAX,
    GpuSample,
    Header,
    RankSample,
    RaySample,
    Sample,
    Sampled,
    read_ray,
    works,
)
from serverless_gpu.node.attempt.history import is_live, read_ending
from serverless_gpu.node.inside.raycluster.share import metrics_file
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import key_of
from serverless_gpu.node.monitor.delivery import AttemptDelivery
from serverless_gpu.node.monitor.messages import Peer
from serverless_gpu.node.monitor.sampler import NodeSample
from serverless_gpu.node.monitor.telemetry_file import TelemetryFile

_SAID_MAX = 8
_LOST_NS = 10 * 10**9


class Recorder:
    """The recorder of one attempt.

    `origin_ns` is the time of the call in nanoseconds since 1970.
    """

    def __init__(self, observe: messages.Observe, origin_ns: int, clock: Clock) -> None:
        self.observe = observe
        self.origin_ns = origin_ns
        self.peer: Peer | None = None  # Connection to the attempt's supervisor; None while disconnected.
        self.delivery: AttemptDelivery | None = None  # Delivery of the attempt; None if the attempt is not tracked.
        self.state = State.QUEUED
        self.ranks: messages.Ranks | None = None  # Processes and devices of the attempt; None before the ranks run.
        self._clock = clock
        self._began_ns = 0
        self._lost_ns = clock.boottime_ns()
        self._recording: TelemetryFile | None = None
        self._ray = None if observe.spec.ray is None else RayFile(Path(observe.directory), observe.node_rank)
        self._has_ended = self._has_settled = False
        self._said: set[str] = set()

    @property
    def key(self) -> str:
        """Return the attempt's key, which is unique in this installation."""
        return key_of(self.observe)

    @property
    def directory(self) -> Path:
        """Return the attempt's directory."""
        return Path(self.observe.directory)

    @property
    def is_observed(self) -> bool:
        """Return True while the attempt's supervisor may send more messages."""
        return self.peer is not None and not self._has_settled

    @property
    def is_sampled(self) -> bool:
        """Return True while the attempt's ranks run."""
        return self.ranks is not None and self.is_observed and not self._has_ended

    @property
    def is_over(self) -> bool:
        """Return True if the recorder has nothing left to record or deliver."""
        if self.is_observed:
            return False
        return self.delivery is None or (self.delivery.is_done and self.delivery.held is None)

    # --- supervisor messages -------------------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """Set the connection to the attempt's supervisor.

        After a reconnect, the supervisor sends all messages again.
        """
        self.peer = peer
        if self.delivery is None:
            self.send(messages.Untracked(sentence="", final=True))
        elif self.delivery.status is not None:
            self.send(self.delivery.status)

    def receive(self, message: messages.AnyMonitorMessage) -> None:
        """Process a message from the attempt's supervisor."""
        match message:
            case messages.Ranks():
                self._begin(message)
            case messages.EndingNote(state=state, reason=reason, sentence=sentence):
                self._end(state, reason, sentence)
            case messages.Settled():
                self._settle()
            case _:
                pass

    def lose(self) -> None:
        """Handle the end of the supervisor's connection."""
        self.peer = None
        self._lost_ns = self._clock.boottime_ns()
        self._close()

    def send(self, message: messages.MonitorMessage, *, passing: bool = False) -> None:
        """Send a message to the attempt's supervisor if it is connected."""
        if self.peer is not None:
            with contextlib.suppress(OSError):  # The event loop detects the lost connection later.
                self.peer.send(message, passing=passing)

    # --- delivery messages and files -----------------------------------------------------------------------------

    def tend(self) -> None:
        """Forward the delivery's messages to the supervisor.

        If the supervisor is not connected, the method reads the attempt's files.
        """
        if self.delivery is None:
            return
        for message in self.delivery.news():
            self.send(message)
        self.delivery.tend()
        if self.peer is None and not self._has_settled:
            self._follow()

    def _follow(self) -> None:
        """Read the attempt's final state from its files after the supervisor has ended."""
        if is_live(self.directory):
            return  # The attempt's supervisor will connect again.
        stopped = read_ending(self.directory)
        if stopped is not None:
            self._end(stopped.state, stopped.reason, "")
        elif self._clock.boottime_ns() - self._lost_ns < _LOST_NS:
            return  # The agent will soon write the attempt's final state.
        else:
            reason = Reason.SUPERVISOR_KILLED
            self._end(MEANINGS[reason].state, reason, MEANINGS[reason].sentence)
        self._settle()

    def _end(self, state: State, reason: Reason, sentence: str) -> None:
        self.state, self._has_ended = state, True
        self._close()
        if self.delivery is not None:
            self.delivery.ending(state, reason, sentence)

    def _settle(self) -> None:
        self._has_settled = True
        if self.delivery is not None:
            self.delivery.settled()

    # --- samples -------------------------------------------------------------------------------------------------

    def _begin(self, ranks: messages.Ranks) -> None:
        self.ranks, self.state = ranks, State.RUNNING
        self._began_ns = self._began_ns or self._clock.wall_ns()
        header = Header(
            run_id=self.observe.run_id,
            fence=self.observe.fence,
            node=socket.gethostname(),
            node_rank=self.observe.node_rank,
            origin_ns=self.origin_ns,
            devices=tuple(Sampled(device.uuid, device.type, device.kind) for device in ranks.devices),
        )
        if self._recording is None:
            path = self.directory / "logs" / f"{self.observe.node_rank}.telemetry"
            self._recording = TelemetryFile(path, header)
        self._recording.describe(header)

    def record(self, node: NodeSample) -> None:
        """Record the attempt's part of a node sample, and send the totals to the attempt's supervisor."""
        recording = self._recording
        if recording is None or not self.is_sampled:
            return
        sample = sample_of(node, self.devices, self.key)
        if self._ray is not None:
            sample = msgspec.structs.replace(sample, ray=self._ray.latest(self._clock.boottime_ns()))
        recording.append(sample)
        uses = tuple(use.result() for use in recording.uses.values())
        self.send(messages.AttemptSample(uses=uses, busy=works(sample)), passing=True)
        if recording.lost:
            self._send_once(
                f"cannot write samples of the devices to {self.directory}: the disk is full, or the directory was "
                "deleted"
            )
        if any(device.kind is DeviceKind.GPU for device in self.devices):
            for problem in node.problems:
                self._send_once(f"the state of the GPUs is unknown: {problem}")

    def used_by(self) -> dict[str, tuple[str, int]]:
        """Return the attempt key and rank of each device. A single process uses all devices."""
        ranks = sorted(self.ranks.pids) if self.ranks is not None else []
        if len(ranks) == 1:
            ranks *= len(self.devices)
        return {device.uuid: (self.key, rank) for device, rank in zip(self.devices, ranks, strict=False)}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the attempt's devices in rank order."""
        return self.ranks.devices if self.ranks is not None else ()

    def watched(self) -> messages.WatchedAttempt:
        """Return the attempt as an entry of a node frame."""
        status = self.delivery.status if self.delivery is not None else None
        return messages.WatchedAttempt(
            run_id=self.observe.run_id,
            fence=self.observe.fence,
            name=self.observe.spec.name,
            state=self.state,
            devices=tuple(device.uuid for device in self.devices),
            pids=self.ranks.pids if self.ranks is not None else {},
            began_ns=self._began_ns,
            tracked=status.url if isinstance(status, messages.TrackedNote) else "",
        )

    def _send_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(sentence)
            self.send(messages.UserSentence(sentence=sentence))

    def _close(self) -> None:
        if self._recording is not None:
            self._recording.flush()
            self._recording = None


def sample_of(node: NodeSample, devices: tuple[Device, ...], *keys: str) -> Sample:
    """Return the part of a node sample for the given devices and attempts."""
    ranks: list[RankSample] = []
    for key in keys:
        ranks += node.ranks.get(key, ())
    gpus = tuple(node.gpus.get(device.uuid, GpuSample()) for device in devices)
    return Sample(at_ns=node.at_ns, host=node.host, gpus=gpus, ranks=tuple(ranks))


class RayFile:
    """Reads a node's Ray metrics, written by `inside/raycluster/metrics.py`.

    The reader opens the metrics file only after a new write. The result is empty if the file is missing, or outdated
    because Ray hangs or has ended. The reader ignores unexpected file types and files above the size limit.
    """

    def __init__(self, directory: Path, node_rank: int) -> None:
        self._path = Path(metrics_file(str(directory), node_rank))
        self._seen: tuple[int, int] | None = None
        self._data = b""

    def latest(self, now_ns: int) -> RaySample | None:
        """Return the latest Ray metrics; None if they are missing or too old. `now_ns` is a boottime."""
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                # Use O_NONBLOCK, because opening or reading a pipe must not block. Reading one byte above the limit
                # shows that the file is too large.
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    self._data = os.read(fd, RAY_BYTES_MAX + 1)
                finally:
                    os.close(fd)
                self._seen = seen
        except OSError:
            return None
        return read_ray(self._data, now_ns)
