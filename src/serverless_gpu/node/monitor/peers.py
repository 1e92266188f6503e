"""A connection to the monitor: what is said on it, kept for a while where the other side does not read."""

from __future__ import annotations

from collections import deque

import msgspec

from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

_PENDING_MAX = 64


class Peer:
    """A supervisor, an agent, or somebody who looks.

    Args:
        channel: the connection; made non-blocking.

    Attributes:
        watch: what it asked to see, or None.
    """

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.watch: messages.WatchNode | None = None
        self._pending: deque[messages.MonitorMessage] = deque(maxlen=_PENDING_MAX)

    @property
    def behind(self) -> bool:
        """Return whether something waits to be said."""
        return bool(self._pending)

    def say(self, word: messages.MonitorMessage, *, passing: bool = False) -> None:
        """Say something; what is passing is left out where something else still waits.

        Raises:
            OSError: it is gone.
        """
        if passing and self._pending:
            return
        self._pending.append(word)
        self.flush(keep=not passing)

    def flush(self, *, keep: bool = True) -> None:
        """Say what waits, as far as the other side reads.

        Args:
            keep: whether what cannot be said now is kept.

        Raises:
            OSError: it is gone.
        """
        while self._pending:
            try:
                messages.say(self.channel, self._pending[0])
            except BlockingIOError:
                if not keep:
                    self._pending.popleft()
                return
            self._pending.popleft()

    def hear(self) -> messages.AnyWord | None:
        """Return the next word, or None when the other side is gone or makes no sense.

        Raises:
            BlockingIOError: there is none.
        """
        try:
            return messages.hear(self.channel)
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None
