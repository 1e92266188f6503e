"""Records one attempt in the monitor: samples into its telemetry file, sums to its supervisor.

    Observe ─▶ known │ Ranks ─▶ sampled, once a second │ EndingNote ─▶ no more samples │ Settled, end of file ─▶ over
       │                    └─ with the latest metrics of its Ray cluster, if any (`RayFile`)
       └─▶ AttemptDelivery (`delivery.py`), where it is tracked; what that says goes to the supervisor, too

    sample, 1 s ─▶ TelemetryFile ─ mean of the interval ─▶ logs/<node rank>.telemetry ─▶ delivery, Run.metrics(), server

Rows become rarer the longer a run lasts.

Failure cases:
- the supervisor's connection ends without `Settled` (it was killed, or this process was): the recorder follows the
  attempt's files until they show its end;
- the disk is full: the row is lost and counted, the loss is reported once, and the next row is tried;
- the run's directory is deleted: nothing is written any more;
- a writer was killed in the middle of a line: the next writer ends the line, and readers leave it out;
- the wall clock was set back: a row is due at once.
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
    SECOND_NS,
    DeviceTotals,
    GpuSample,
    Header,
    HostSample,
    RankSample,
    RaySample,
    Sample,
    Sampled,
    add,
    encode,
    interval_ns,
    merged,
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
from serverless_gpu.tracking.metric_points import SampleReader

_SAID_MAX = 8
_LOST_NS = 10 * 10**9
_EARLY_NS = SECOND_NS // 2  # a sampler's seconds are not exact


class Recorder:
    """One attempt; `origin_ns` is the time of the call, nanoseconds since 1970."""

    def __init__(self, observe: messages.Observe, origin_ns: int, clock: Clock) -> None:
        self.observe = observe
        self.origin_ns = origin_ns
        self.peer: Peer | None = None  # its supervisor; None when that is gone
        self.delivery: AttemptDelivery | None = None  # None where it is not tracked
        self.state = State.QUEUED
        self.ranks: messages.Ranks | None = None  # its processes and devices; None before they run
        self._clock = clock
        self._began_ns = 0
        self._lost_ns = clock.boottime_ns()
        self._recording: TelemetryFile | None = None
        self._ray = None if observe.spec.ray is None else RayFile(Path(observe.directory), observe.node_rank)
        self._has_ended = self._has_settled = False
        self._said: set[str] = set()

    @property
    def key(self) -> str:
        """Return what tells the attempt from others of this home."""
        return key_of(self.observe)

    @property
    def directory(self) -> Path:
        """Return the attempt's directory."""
        return Path(self.observe.directory)

    @property
    def is_observed(self) -> bool:
        """Return whether more comes of its supervisor."""
        return self.peer is not None and not self._has_settled

    @property
    def is_sampled(self) -> bool:
        """Return whether its ranks run."""
        return self.ranks is not None and self.is_observed and not self._has_ended

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing left to do for it."""
        if self.is_observed:
            return False
        return self.delivery is None or (self.delivery.is_done and self.delivery.held is None)

    # --- what its supervisor says --------------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """Take a connection for its supervisor's; one that connects again says everything again."""
        self.peer = peer
        if self.delivery is None:
            self.send(messages.Untracked(sentence="", final=True))
        elif self.delivery.status is not None:
            self.send(self.delivery.status)

    def receive(self, message: messages.AnyMonitorMessage) -> None:
        """Take a message of its supervisor."""
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
        """Learn that its supervisor's connection has ended."""
        self.peer = None
        self._lost_ns = self._clock.boottime_ns()
        self._close()

    def send(self, message: messages.MonitorMessage, *, passing: bool = False) -> None:
        """Send a message to its supervisor, if there is one."""
        if self.peer is not None:
            with contextlib.suppress(OSError):  # its end of file comes next, and says the same
                self.peer.send(message, passing=passing)

    # --- what its delivery says, and its files -------------------------------------------------------------------

    def tend(self) -> None:
        """Pass on news of its tracking; follow its files where no supervisor is left."""
        if self.delivery is None:
            return
        for message in self.delivery.news():
            self.send(message)
        self.delivery.tend()
        if self.peer is None and not self._has_settled:
            self._follow()

    def _follow(self) -> None:
        """Learn from its files how it ended, once no process looks after it any more."""
        if is_live(self.directory):
            return  # its supervisor connects again
        stopped = read_ending(self.directory)
        if stopped is not None:
            self._end(stopped.state, stopped.reason, "")
        elif self._clock.boottime_ns() - self._lost_ns < _LOST_NS:
            return  # the agent is about to write it
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
        """Keep what is this attempt's of a sample of the node, and tell its supervisor what it adds up to."""
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
                f"what the devices do cannot be written to {self.directory}: the disk is full, or it is gone"
            )
        if any(device.kind is DeviceKind.GPU for device in self.devices):
            for problem in node.problems:
                self._send_once(f"what the GPUs do is not known: {problem}")

    def used_by(self) -> dict[str, tuple[str, int]]:
        """Return which rank, by attempt and number, has a device: one each, or one process all of a node's."""
        ranks = sorted(self.ranks.pids) if self.ranks is not None else []
        if len(ranks) == 1:
            ranks *= len(self.devices)
        return {device.uuid: (self.key, rank) for device, rank in zip(self.devices, ranks, strict=False)}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return its devices, in the order of its ranks."""
        return self.ranks.devices if self.ranks is not None else ()

    def watched(self) -> messages.WatchedAttempt:
        """Return it as a frame shows it."""
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
    """Return what a sample of the node shows of some devices and of the ranks of some attempts."""
    ranks: list[RankSample] = []
    for key in keys:
        ranks += node.ranks.get(key, ())
    gpus = tuple(node.gpus.get(device.uuid, GpuSample()) for device in devices)
    return Sample(at_ns=node.at_ns, host=node.host, gpus=gpus, ranks=tuple(ranks))


class RayFile:
    """Reads the metrics of a Ray cluster on this node, written by `inside/raycluster/metrics.py`.

    The file is opened again only when it was written again. No metrics: no file; an old file, because Ray hangs or is
    gone; a file that is none of ours (a pipe, a directory, a gigabyte).
    """

    def __init__(self, directory: Path, node_rank: int) -> None:
        self._path = Path(metrics_file(str(directory), node_rank))
        self._seen: tuple[int, int] | None = None
        self._data = b""

    def latest(self, now_ns: int) -> RaySample | None:
        """Return the latest metrics; None if they are missing or too old. `now_ns` is boottime."""
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                # A pipe has nothing and does not block. A byte above the limit shows that the file is too large.
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    self._data = os.read(fd, RAY_BYTES_MAX + 1)
                finally:
                    os.close(fd)
                self._seen = seen
        except OSError:
            return None
        return read_ray(self._data, now_ns)


class TelemetryFile:
    """Writes one telemetry file; it goes on with a file that an earlier monitor left."""

    def __init__(self, path: Path, header: Header) -> None:
        self.rows = 0  # in the file
        self.lost = 0  # rows that could not be written
        self.uses: dict[str, DeviceTotals] = {}  # sums per device
        self._path = path
        self._header = header
        self._headed = False
        self._torn = False
        self._pending: list[Sample] = []
        self._last: Sample | None = None
        self._network: tuple[int, int] | None = None
        self._take_up()

    @property
    def header(self) -> Header:
        """Return what its samples are of now."""
        return self._header

    def describe(self, header: Header) -> None:
        """Say what the samples are of from here on: the devices have become known."""
        if header != self._header:
            self.flush()
            self._header, self._headed = header, False

    def append(self, sample: Sample) -> bool:
        """Take a sample; return whether a row was written: later in a run, not every sample is one."""
        self._pending.append(self._counted(sample))
        self.uses = add(self.uses, self._header, sample)
        if self._last is not None:
            since_ns = sample.at_ns - self._last.at_ns
            if 0 <= since_ns < interval_ns(self.rows) - _EARLY_NS:
                return False
        return self.flush()

    def flush(self) -> bool:
        """Write what has been taken since the last row; return whether that was anything and worked."""
        if not self._pending:
            return False
        row = merged(self._pending)
        self._pending.clear()
        self._last = row
        head = b"" if self._headed else encode(self._header)
        if not self._write((b"\n" if self._torn else b"") + head + encode(row)):
            self.lost += 1
            return False
        self._headed = True
        self.rows += 1
        return True

    def _write(self, data: bytes) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        written = 0
        try:
            written = os.write(fd, data)
        except OSError:
            pass
        finally:
            os.close(fd)
        if written:
            self._torn = written < len(data)
        return written == len(data)

    def _take_up(self) -> None:
        """Go on where an earlier monitor stopped: its number of rows, its last sample, its half line."""
        samples = SampleReader(self._path)
        while True:
            before = samples.offset
            for header, sample in samples.read():
                self.rows += 1
                self._last = sample
                self._headed = header == self._header
                self.uses = add(self.uses, header, sample)
            if samples.offset == before:
                break
        self._torn = samples.backlog > 0

    def _counted(self, sample: Sample) -> Sample:
        """Return the sample with what went over the network since the first one of the file."""
        host = sample.host
        if host.network_receive_bytes is None or host.network_transmit_bytes is None:
            return sample
        if self._network is None:
            before = HostSample() if self._last is None else self._last.host
            self._network = (
                host.network_receive_bytes - (before.network_receive_bytes or 0),
                host.network_transmit_bytes - (before.network_transmit_bytes or 0),
            )
        counted = msgspec.structs.replace(
            host,
            network_receive_bytes=max(0, host.network_receive_bytes - self._network[0]),
            network_transmit_bytes=max(0, host.network_transmit_bytes - self._network[1]),
        )
        return msgspec.structs.replace(sample, host=counted)
