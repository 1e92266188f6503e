"""Messages to and from the monitor, one JSON object per packet (`inside/channel.py`).

    supervisor ──Observe, Ranks, EndingNote, Settled──▶ monitor      end of file: the attempt has ended
    supervisor ◀──TrackedNote, Untracked, AttemptSample, UserSentence─── monitor
    agent ──────Prepare──▶ monitor                               prepares for a likely run
    top ────────WatchNode──▶ monitor ──NodeFrame──▶ top              while it runs
    `sgpu stop` ──RetireMonitor──▶ monitor                        exits, or answers why it continues

Every supervisor, agent and `sgpu top` has its own connection to the socket `monitor-<PROTOCOL>-<version>.sock`. `Peer`
queues a limited number of messages while the peer process does not read. Only the start of programs and, for 200 ms,
the receipt of a very short run wait for the monitor.
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
    """Base class of all monitor messages."""


class Prepare(MonitorMessage, frozen=True, kw_only=True, tag="prepare"):
    """Request to prepare for a run that is likely to start.

    The monitor starts the installation's MLflow server if the run will use that server.
    """

    tracker: Tracking
    python: str  # The caller's interpreter, whose MLflow serves the installation's store.
    environ: dict[str, str]  # The caller's MLflow variables, as in `Observe`.


class Observe(MonitorMessage, frozen=True, kw_only=True, tag="observe"):
    """Report that an attempt begins on this node.

    `Observe` is a supervisor's first message after the launch.
    """

    run_id: str
    fence: int
    directory: str
    spec: RunSpec
    world_size: int
    node_rank: int = 0  # Number of this node among the attempt's nodes.
    num_nodes: int = 1
    python: str
    environ: dict[str, str]  # The caller's ``MLFLOW_…`` variables and its proxy and certificate variables.
    environment: str = ""  # Description of the ranks' environment.
    called_ns: int  # Boottime of step 0 of the system metrics, which count steps in seconds.


class Ranks(MonitorMessage, frozen=True, kw_only=True, tag="ranks"):
    """Report that ranks run, with devices by local rank and processes by global rank."""

    devices: tuple[Device, ...]
    pids: dict[int, int]
    cgroup: str = ""  # Directory of the attempt's cgroup, or "".


class EndingNote(MonitorMessage, frozen=True, kw_only=True, tag="ending"):
    """Report that all ranks have ended.

    After the end of all ranks, the attempt's directory contains `stopped.json`, logs and failures.
    """

    state: State
    reason: Reason
    sentence: str = ""


class Settled(MonitorMessage, frozen=True, kw_only=True, tag="settled"):
    """Report that the supervisor has written `receipt.json`. `Settled` is the supervisor's last message."""


class TrackedNote(MonitorMessage, frozen=True, kw_only=True, tag="tracked"):
    """Report that the attempt has a run in MLflow."""

    run_id: str  # MLflow's
    url: str
    environ: dict[str, str]  # Variables with which MLflow finds the run in a rank.


class Untracked(MonitorMessage, frozen=True, kw_only=True, tag="untracked"):
    """Report the reason for which the run is not tracked. `TrackedNote` may follow unless `final` is set."""

    sentence: str
    final: bool = False
    is_starting: bool = False  # True while the installation's own MLflow server starts, which takes seconds.


class AttemptSample(MonitorMessage, frozen=True, kw_only=True, tag="seen"):
    """Telemetry of the attempt up to the latest sample.

    The monitor sends an `AttemptSample` after every sample.
    """

    uses: tuple[DeviceUse, ...]  # Usage of the attempt's devices, from the first to the latest sample.
    busy: bool  # True if a device or a rank on CPU slots was busy since the previous sample.


class UserSentence(MonitorMessage, frozen=True, kw_only=True, tag="said"):
    """Message for attached clients. If `note` is set, the receipt also contains the message."""

    sentence: str
    note: bool = False


class WatchNode(MonitorMessage, frozen=True, kw_only=True, tag="watch"):
    """Request for node frames until the sender disconnects."""

    interval_s: float = 1.0  # Maximum seconds between two frames.
    fakes: str = ""  # The sender's `SERVERLESS_GPU_FAKE`. The declared fake devices replace the node's GPUs.


class RetireMonitor(MonitorMessage, frozen=True, kw_only=True, tag="retire"):
    """Request to exit after the last attempt.

    If an attempt runs, the monitor answers with a `UserSentence`.
    """


class WatchedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in a node frame, with `devices` by uuid and `pids` by global rank."""

    run_id: str
    fence: int
    name: str
    state: State
    devices: tuple[str, ...]
    pids: dict[int, int]
    began_ns: int  # Start time of the attempt's ranks in nanoseconds since 1970; 0 before the start.
    tracked: str = ""  # Printable link to the MLflow run, or "".


class NodeFrame(MonitorMessage, frozen=True, kw_only=True, tag="frame"):
    """State of the node in one frame.

    `sample` contains all devices, and the ranks of all `attempts` in the same order.
    """

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
    """Return the caller's variables that MLflow needs to start and to reach a tracker."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith("MLFLOW_") or name.lower() in _REACHING) and not value.startswith("\0")
    }


def monitor_socket(sockets: Path) -> Path:
    """Return the path of the monitor's socket."""
    return sockets / f"monitor-{PROTOCOL}-{__version__}.sock"


def send(channel: Channel, message: MonitorMessage) -> None:
    """Send a message.

    Raises OSError if the peer has closed its socket. Raises BlockingIOError if the send buffer is full.
    """
    channel.send(_encoder.encode(message), ())


def receive(channel: Channel) -> AnyMonitorMessage | None:
    """Return the next message, or None at end of file.

    Raises MsgspecError for another protocol version. Raises OSError for a broken connection. Raises BlockingIOError if
    no message is pending.
    """
    received = channel.receive()
    if received is None:
        return None
    message = decoded(_decoder, received)
    close_all(received[1])  # The monitor accepts no descriptors from its peers.
    return message


class Peer:
    """The monitor's non-blocking connection to a supervisor, an agent or `sgpu top`."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.watch: WatchNode | None = None  # The peer's request for node frames, or None.
        self._pending: deque[MonitorMessage] = deque(maxlen=_PENDING_MAX)

    @property
    def behind(self) -> bool:
        """Return True while unsent messages are queued."""
        return bool(self._pending)

    def send(self, message: MonitorMessage, *, passing: bool = False) -> None:
        """Send or queue a message. Raises OSError if the peer has closed its socket.

        `send` drops a `passing` message while another message is queued.
        """
        if passing and self._pending:
            return
        self._pending.append(message)
        self.flush(keep=not passing)

    def flush(self, *, keep: bool = True) -> None:
        """Send queued messages until the send buffer is full. Raises OSError.

        If `keep` is False, the method drops the unsent messages.
        """
        while self._pending:
            try:
                send(self.channel, self._pending[0])
            except BlockingIOError:
                if not keep:
                    self._pending.popleft()
                return
            self._pending.popleft()

    def receive(self) -> AnyMonitorMessage | None:
        """Return the next message, or None at end of file or for an invalid message.

        Raises BlockingIOError if no message is pending.
        """
        try:
            return receive(self.channel)
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None
