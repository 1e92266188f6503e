"""Whoever watches an attempt: the client that launched it, others that attached.

A watcher that does not read costs nothing but its own output: messages queue up to a bound, output is dropped first and
counted, everything else is kept (there are few of those). A watcher that goes away is forgotten; the run goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from serverless_gpu.node import protocol
from serverless_gpu.node.inside.channel import Channel

_QUEUED_OUTPUT_MAX = 512


class Watcher:
    """One connection and what still has to be sent on it."""

    def __init__(self, channel: Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self.dropped = 0
        self.gone = False
        self._deaf = False
        self._queue: deque[protocol.Message] = deque()

    @property
    def waiting(self) -> bool:
        """Return whether something is queued for when the peer reads again."""
        return bool(self._queue)

    def say(self, message: protocol.Message) -> None:
        """Send a message, or queue it."""
        if self._deaf:
            return
        if isinstance(message, protocol.Output | protocol.Waiting) and len(self._queue) >= _QUEUED_OUTPUT_MAX:
            self.dropped += 1
            return
        self._queue.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what the peer will take."""
        while self._queue and not self.gone:
            try:
                protocol.send(self.channel, self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                # It does not listen any more; its last word, a cancel perhaps, may still be there to read.
                self._deaf = True
                self._queue.clear()
                return
            self._queue.popleft()

    def drain(self, timeout_s: float) -> None:
        """Send what is queued, waiting for the peer up to a limit for each message."""
        self.channel.sock.settimeout(timeout_s)
        self.flush()

    def hear(self, obey: Callable[[protocol.AnyMessage], None]) -> bool:
        """Take one message and pass it on; return False when the peer is gone or talks nonsense."""
        try:
            received = protocol.receive(self.channel)
        except BlockingIOError:
            return True
        except (OSError, msgspec.MsgspecError):
            return False
        if received is None:
            return False
        obey(received[0])
        return True
