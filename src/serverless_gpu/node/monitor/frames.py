"""Reads the frames that the monitor sends about its node, for `sgpu top` and for the uplink.

The monitor can fail to start, end repeatedly, or stop sending frames. `FrameReader` reconnects every few seconds, and
`FrameReader.problem` describes the current failure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

FRAME_S = 1.0
_RESTART_NS = 3_000_000_000
_SILENT_NS = 5_000_000_000


class FrameReader:
    """Reads frames from the node monitor.

    Args:
        connect: starts the monitor if needed, and returns a connection.
        fakes: the reader's `SERVERLESS_GPU_FAKE`.
        clock: measures the silence of the monitor.
        interval_s: seconds between two frames. The monitor sends more frames while another reader requests more.
    """

    def __init__(
        self, connect: Callable[[], Channel], fakes: str, clock: Clock, *, interval_s: float = FRAME_S
    ) -> None:
        self._connect = connect
        self._fakes = fakes
        self._clock = clock
        self._interval_s = interval_s
        self._channel: Channel | None = None
        self._heard_ns = self._tried_ns = clock.boottime_ns()
        self._failure = ""
        self._is_same = False  # True if the last frame came from the current monitor.
        self.frame: messages.NodeFrame | None = None
        self.before: messages.NodeFrame | None = None

    @property
    def problem(self) -> str:
        """Return the reason for missing frames, or "" if frames arrive."""
        if self._channel is None:
            return self._failure
        silent_ns = self._clock.boottime_ns() - self._heard_ns
        return (
            f"the monitor has sent nothing for {silent_ns // 10**9} s"
            if silent_ns > _SILENT_NS + self._interval_s * 1e9
            else ""
        )

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when frames arrive."""
        return [] if self._channel is None else [self._channel.fileno()]

    def open(self) -> None:
        """Subscribe to the monitor's frames. Raise OSError if the monitor has just ended."""
        channel = self._connect()
        try:
            messages.send(channel, messages.WatchNode(fakes=self._fakes, interval_s=self._interval_s))
            channel.sock.setblocking(False)
        except OSError:
            channel.close()
            raise
        self._channel, self._is_same = channel, False
        self._heard_ns = self._clock.boottime_ns()

    def take(self) -> bool:
        """Read frames, and reconnect if the monitor has ended. Return True if a new frame arrived."""
        if self._channel is None:
            self._open_again()
        new = False
        while self._channel is not None:
            try:
                word = messages.receive(self._channel)
            except BlockingIOError:
                break
            except (OSError, msgspec.MsgspecError):
                word = None
            if word is None:
                self.close()
                self._failure = "the monitor has ended and sgpu restarts it"
            elif isinstance(word, messages.NodeFrame):
                self.before = self.frame if self._is_same else None
                self.frame, self._is_same, new = word, True, True
                self._heard_ns = self._clock.boottime_ns()
        return new

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open_again(self) -> None:
        now_ns = self._clock.boottime_ns()
        if now_ns - self._tried_ns < _RESTART_NS:
            return
        self._tried_ns = now_ns
        try:
            self.open()
        except ServerlessGpuError as error:
            self._failure = error.message
        except OSError as error:
            self._failure = f"sgpu cannot connect to the monitor: {error.strerror}"
