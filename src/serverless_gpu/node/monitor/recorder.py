"""One attempt as the monitor sees it: its samples go into its file of telemetry, what they add up to to its supervisor.

    Observe ─▶ known │ Ranks ─▶ sampled, once a second │ Ending ─▶ no more samples │ Settled, end of file ─▶ over

Failure cases: the supervisor's connection ends without `Settled` (it was killed, or this process was: the attempt is
followed by its files until those say that it is over); the home is full (samples are lost, and that is said once); the
run's directory is deleted (nothing is written any more).
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.model.attempt import State
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.telemetry import GpuSample, Header, RankSample, Sample, Sampled, works
from serverless_gpu.node.monitor import words
from serverless_gpu.node.monitor.peers import Peer
from serverless_gpu.node.monitor.records import Recording
from serverless_gpu.node.monitor.sampling import Look

_SAID_MAX = 8


class Recorder:
    """One attempt.

    Args:
        observe: its supervisor's first word.
        origin_ns: of the call, nanoseconds since 1970.
        clock: where time comes from.

    Attributes:
        peer: its supervisor; None when that is gone.
        state: where it is, as far as is known here.
        ranks: its processes and devices; None before they run.
        tracked: where it is tracked, once that is known.
    """

    def __init__(self, observe: words.Observe, origin_ns: int, clock: Clock) -> None:
        self.observe = observe
        self.origin_ns = origin_ns
        self.peer: Peer | None = None
        self.state = State.QUEUED
        self.ranks: words.Ranks | None = None
        self.tracked: words.Tracked | None = None
        self._clock = clock
        self._began_ns = 0
        self._recording: Recording | None = None
        self._settled = False
        self._said: set[str] = set()

    @property
    def key(self) -> str:
        """Return what tells the attempt from others of this home."""
        return f"{self.observe.run_id}.{self.observe.fence}.{self.observe.node_rank}"

    @property
    def directory(self) -> Path:
        """Return the attempt's directory."""
        return Path(self.observe.directory)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes of its supervisor."""
        return self._settled or self.peer is None

    @property
    def is_sampled(self) -> bool:
        """Return whether its ranks run."""
        return self.ranks is not None and not self.is_over and self.state is State.RUNNING

    # --- what its supervisor says --------------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """Take a connection for its supervisor's; one that connects again says everything again."""
        self.peer = peer

    def hear(self, word: words.AnyWord) -> None:
        """Take a word of its supervisor's."""
        match word:
            case words.Ranks():
                self._begin(word)
            case words.Ending(state=state):
                self.state = state
                self._close()
            case words.Settled():
                self._settled = True
            case _:
                pass

    def lose(self) -> None:
        """Learn that its supervisor's connection has ended."""
        self.peer = None
        self._close()

    def say(self, word: words.Word, *, passing: bool = False) -> None:
        """Say something to its supervisor, if there is one."""
        if self.peer is not None:
            with contextlib.suppress(OSError):  # its end of file comes next, and says the same
                self.peer.say(word, passing=passing)

    # --- samples -------------------------------------------------------------------------------------------------

    def _begin(self, ranks: words.Ranks) -> None:
        again = self.ranks is not None
        self.ranks, self.state = ranks, State.RUNNING
        self._began_ns = self._began_ns or self._clock.wall_ns()
        if again:
            return
        header = Header(
            run_id=self.observe.run_id,
            fence=self.observe.fence,
            node=socket.gethostname(),
            node_rank=self.observe.node_rank,
            origin_ns=self.origin_ns,
            devices=tuple(Sampled(device.uuid, device.type, device.kind) for device in ranks.devices),
        )
        path = self.directory / "logs" / f"{self.observe.node_rank}.telemetry"
        self._recording = Recording(path, header)

    def see(self, look: Look) -> None:
        """Take a look at the node: keep what is this attempt's, and tell its supervisor what it adds up to."""
        if self._recording is None or not self.is_sampled:
            return
        sample = sample_of(look, self.devices, self.key)
        self._recording.append(sample)
        uses = tuple(use.result() for use in self._recording.uses.values())
        self.say(words.Seen(uses=uses, busy=works(sample)), passing=True)
        if self._recording.lost:
            self._say_once(
                f"what the devices do cannot be written to {self.directory}: the disk is full, or it is gone"
            )
        if any(device.kind is DeviceKind.GPU for device in self.devices):
            for problem in look.problems:
                self._say_once(f"what the GPUs do is not known: {problem}")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(sentence)
            self.say(words.Said(sentence=sentence))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return its devices, in the order of its ranks."""
        return self.ranks.devices if self.ranks is not None else ()

    def used_by(self) -> dict[str, tuple[str, int]]:
        """Return which rank, by attempt and number, has a device: one each, or one process of a node all of them."""
        ranks = sorted(self.ranks.pids) if self.ranks is not None else []
        if len(ranks) == 1:
            ranks *= len(self.devices)
        return {device.uuid: (self.key, rank) for device, rank in zip(self.devices, ranks, strict=False)}

    def watched(self) -> words.Watched:
        """Return it as a frame shows it."""
        return words.Watched(
            run_id=self.observe.run_id,
            fence=self.observe.fence,
            name=self.observe.spec.name,
            state=self.state,
            devices=tuple(device.uuid for device in self.devices),
            pids=self.ranks.pids if self.ranks is not None else {},
            began_ns=self._began_ns,
            tracked=self.tracked.url if self.tracked is not None else "",
        )

    def _close(self) -> None:
        if self._recording is not None:
            self._recording.flush()
            self._recording = None


def sample_of(look: Look, devices: tuple[Device, ...], *keys: str) -> Sample:
    """Return what a look shows of some devices and of the ranks of some attempts."""
    ranks: list[RankSample] = []
    for key in keys:
        ranks += look.ranks.get(key, ())
    gpus = tuple(look.gpus.get(device.uuid, GpuSample()) for device in devices)
    return Sample(at_ns=look.at_ns, host=look.host, gpus=gpus, ranks=tuple(ranks))


def origin_of(observe: words.Observe, clock: Clock) -> int:
    """Return when the run was called, nanoseconds since 1970: the same on every node and for every attempt."""
    now_ns = clock.wall_ns()
    created_ns = created_wall_ns(observe.run_id)
    called_ns = now_ns - max(0, clock.boottime_ns() - observe.called_ns)
    return min(now_ns, called_ns if created_ns is None else created_ns)
