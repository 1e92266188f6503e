"""Messages to and from the monitor, one JSON object per packet (`inside/channel.py`).

    supervisor ──Observe, Ranks, EndingNote, Settled──▶ monitor      its end of file: the attempt is over
    supervisor ◀──TrackedNote, Untracked, AttemptSample, UserSentence─── monitor
    agent ──────Prepare──▶ monitor                               have ready what such a run will need
    top ────────WatchNode──▶ monitor ──NodeFrame──▶ top              while it runs
    `sgpu stop` ──RetireMonitor──▶ monitor                        end; it does, or says why not yet

Every supervisor, agent and `sgpu top` has a connection of its own to the socket `monitor-<PROTOCOL>-<version>.sock`.
`Peer` queues messages, up to a bound, while the other side does not read. Only the start of programs waits for the
monitor, and, for 200 ms, the receipt of a very short run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import DeviceUse
from serverless_gpu.model.spec import RunSpec, Tracking
from serverless_gpu.model.telemetry import Sample
from serverless_gpu.node.base.protocol import PROTOCOL, decoded
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.version import __version__

_PENDING_MAX = 64
_REACHING = frozenset(
    {
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
        "ssl_cert_file",
        "ssl_cert_dir",
        "requests_ca_bundle",
        "curl_ca_bundle",
        "pythonpath",
        "pythonhome",
    }
)


class MonitorMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


class Prepare(MonitorMessage, frozen=True, kw_only=True, tag="prepare"):
    """A run with this tracking is likely to come: start the home's MLflow server if it is to be that."""

    tracker: Tracking
    python: str  # the caller's, whose MLflow serves the home's store
    environ: dict[str, str]  # as in `Observe`


class Observe(MonitorMessage, frozen=True, kw_only=True, tag="observe"):
    """An attempt begins on this node; a supervisor's first message, as soon as it has the launch."""

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    world_size: int
    node_rank: int = 0  # number of this node in the gang
    num_nodes: int = 1
    python: str
    environ: dict[str, str]  # the caller's ``MLFLOW_…``, and those of proxies and certificates
    environment: str = ""  # what ranks import, in words
    called_ns: int  # boottime; steps of system metrics count seconds from here


class Ranks(MonitorMessage, frozen=True, kw_only=True, tag="ranks"):
    """The ranks run: their devices, in order of local rank, and their processes by global rank."""

    devices: tuple[Device, ...]
    pids: dict[int, int]
    cgroup: str = ""  # directory of the attempt's cgroup, or ""


class EndingNote(MonitorMessage, frozen=True, kw_only=True, tag="ending"):
    """No rank runs any more; `stopped.json`, logs and failures lie in the attempt's directory."""

    state: State
    reason: Reason
    sentence: str = ""


class Settled(MonitorMessage, frozen=True, kw_only=True, tag="settled"):
    """`receipt.json` lies there, too; nothing more comes."""


class TrackedNote(MonitorMessage, frozen=True, kw_only=True, tag="tracked"):
    """The run is tracked."""

    run_id: str  # MLflow's
    url: str
    environ: dict[str, str]  # variables with which any MLflow in a rank finds it


class Untracked(MonitorMessage, frozen=True, kw_only=True, tag="untracked"):
    """The run is not tracked, and why; `TrackedNote` may follow where `final` is not set."""

    sentence: str
    final: bool = False
    is_starting: bool = False  # the home's own server starts, which takes seconds


class AttemptSample(MonitorMessage, frozen=True, kw_only=True, tag="seen"):
    """Telemetry of the attempt up to now; sent after every sample."""

    uses: tuple[DeviceUse, ...]  # its devices, from its first to its last sample
    busy: bool  # whether a device, or on CPU slots a rank, worked noticeably since the last one


class UserSentence(MonitorMessage, frozen=True, kw_only=True, tag="said"):
    """A sentence for watchers of the run, and for its receipt where it is to be kept there."""

    sentence: str
    note: bool = False


class WatchNode(MonitorMessage, frozen=True, kw_only=True, tag="watch"):
    """Request for the node's frames, once a second, until the sender is gone."""

    fakes: str = ""  # the sender's `SERVERLESS_GPU_FAKE`: shown instead of the node's GPUs


class RetireMonitor(MonitorMessage, frozen=True, kw_only=True, tag="retire"):
    """End after the last attempt; while one goes on, the answer is a `UserSentence`."""


class WatchedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in a frame; `devices` by uuid, `pids` by global rank."""

    run_id: str
    fence: int
    name: str
    state: State
    devices: tuple[str, ...]
    pids: dict[int, int]
    began_ns: int  # when its ranks began, nanoseconds since 1970; 0 before
    tracked: str = ""  # link for people, or ""


class NodeFrame(MonitorMessage, frozen=True, kw_only=True, tag="frame"):
    """The node now; `sample` has all devices, and the ranks of all attempts in the order of `attempts`."""

    devices: tuple[Device, ...]
    sample: Sample
    attempts: tuple[WatchedAttempt, ...]


AnyMonitorMessage = (
    Prepare
    | Observe
    | Ranks
    | EndingNote
    | Settled
    | TrackedNote
    | Untracked
    | AttemptSample
    | UserSentence
    | WatchNode
    | RetireMonitor
    | NodeFrame
)
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyMonitorMessage] = msgspec.json.Decoder(AnyMonitorMessage)


def tracking_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables by which MLflow is found, reached and started."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith("MLFLOW_") or name.lower() in _REACHING) and not value.startswith("\0")
    }


def monitor_socket(sockets: Path) -> Path:
    """Return where the monitor listens."""
    return sockets / f"monitor-{PROTOCOL}-{__version__}.sock"


def send(channel: Channel, message: MonitorMessage) -> None:
    """Send a message; raises OSError if the peer is gone, BlockingIOError if it does not read."""
    channel.send(_encoder.encode(message), ())


def receive(channel: Channel) -> AnyMonitorMessage | None:
    """Return the next message, or None when the peer is gone.

    Raises MsgspecError for another protocol, OSError for a broken connection, BlockingIOError when nothing is there.
    """
    received = channel.receive()
    if received is None:
        return None
    message = decoded(_decoder, received)
    close_all(received[1])  # a monitor takes no descriptors
    return message


class Peer:
    """A supervisor, an agent, or `sgpu top`; makes its channel non-blocking."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.watch: WatchNode | None = None  # what it asked to see, or None
        self._pending: deque[MonitorMessage] = deque(maxlen=_PENDING_MAX)

    @property
    def behind(self) -> bool:
        """Return whether something waits to be said."""
        return bool(self._pending)

    def send(self, message: MonitorMessage, *, passing: bool = False) -> None:
        """Send or queue a message, dropping a passing one while another waits; raises OSError if it is gone."""
        if passing and self._pending:
            return
        self._pending.append(message)
        self.flush(keep=not passing)

    def flush(self, *, keep: bool = True) -> None:
        """Send the queue as far as the other side reads, and `keep` the rest or not; raises OSError."""
        while self._pending:
            try:
                send(self.channel, self._pending[0])
            except BlockingIOError:
                if not keep:
                    self._pending.popleft()
                return
            self._pending.popleft()

    def receive(self) -> AnyMonitorMessage | None:
        """Return the next message, or None when the other side is gone or makes no sense; BlockingIOError."""
        try:
            return receive(self.channel)
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None
