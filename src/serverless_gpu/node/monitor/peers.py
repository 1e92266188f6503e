"""A connection to the monitor; queues messages, up to a bound, while the other side does not read."""

from __future__ import annotations

from collections import deque

import msgspec

from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

_PENDING_MAX = 64


class Peer:
    """A supervisor, an agent, or `sgpu top`; makes its channel non-blocking."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.watch: messages.WatchNode | None = None  # what it asked to see, or None
        self._pending: deque[messages.MonitorMessage] = deque(maxlen=_PENDING_MAX)

    @property
    def behind(self) -> bool:
        """Return whether something waits to be said."""
        return bool(self._pending)

    def say(self, word: messages.MonitorMessage, *, passing: bool = False) -> None:
        """Send or queue a message, dropping a passing one while another waits; raises OSError if it is gone."""
        if passing and self._pending:
            return
        self._pending.append(word)
        self.flush(keep=not passing)

    def flush(self, *, keep: bool = True) -> None:
        """Send the queue as far as the other side reads, and `keep` the rest or not; raises OSError."""
        while self._pending:
            try:
                messages.say(self.channel, self._pending[0])
            except BlockingIOError:
                if not keep:
                    self._pending.popleft()
                return
            self._pending.popleft()

    def hear(self) -> messages.AnyWord | None:
        """Return the next message, or None when the other side is gone or makes no sense; BlockingIOError."""
        try:
            return messages.hear(self.channel)
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None
