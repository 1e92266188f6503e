"""Sends messages with descriptors over Unix seqpacket sockets between the processes of a node.

A reader never receives part of a message, because each message is one packet. Several writers, such as the ranks of an
attempt, can share a socket without interleaving their messages. A message that is too large for a packet is sent in a
memfd. `receive` returns None if the peer has closed its socket. The module imports only the standard library, because
stems and ranks run it in the user's environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

# The kernel refuses a packet that exceeds the socket's send buffer, by default 212,992 bytes minus overhead.
PACKET_BYTES_MAX = 60_000
BODY_BYTES_MAX = 64 << 20
_FDS_MAX = 250  # The kernel accepts at most 253 descriptors (SCM_MAX_FD).
INLINE, MEMFD = b"I", b"M"


class Channel:
    """An end of a seqpacket connection, which owns its ``AF_UNIX``/``SOCK_SEQPACKET`` socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def adopt(cls, fd: int) -> Channel:
        """Return a channel that owns an inherited or received descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the socket's descriptor, so that selectors accept a channel."""
        return self.sock.fileno()

    def send(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send one message. Raises OSError if the peer has closed its socket or the message is too large.

        Raises BlockingIOError, without sending the message, if the buffer of a non-blocking socket is full.
        """
        if len(body) > BODY_BYTES_MAX:
            raise OSError(f"a message of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}")
        if len(body) <= PACKET_BYTES_MAX:
            socket.send_fds(self.sock, [INLINE, body], list(fds))
            return
        memory = os.memfd_create("sgpu-message", os.MFD_CLOEXEC)
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(memory, view) :]
            socket.send_fds(self.sock, [MEMFD], [*fds, memory])
        finally:
            os.close(memory)

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Return the next message and its close-on-exec descriptors, or None at end of file.

        Raises BlockingIOError if a non-blocking socket has no message.
        """
        try:
            packet, fds, flags, _ = self._take()
        except ConnectionResetError:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)  # Python's `recv_fds` does not pass MSG_CMSG_CLOEXEC to the kernel.
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(fds)
            raise OSError("the kernel truncated a message")
        if not packet:
            close_all(fds)
            return None
        if packet[:1] == INLINE:
            return packet[1:], tuple(fds)
        if packet != MEMFD or not fds:
            close_all(fds)
            raise OSError("received a packet that is not a valid message")
        memory = fds.pop()
        try:
            return _read_all(memory), tuple(fds)
        except OSError:
            close_all(fds)
            raise
        finally:
            os.close(memory)

    def _take(self) -> tuple[bytes, list[int], int, object]:
        try:
            return socket.recv_fds(self.sock, PACKET_BYTES_MAX + 1, _FDS_MAX)
        except ConnectionResetError:
            # If the peer closed its socket with unread input, the kernel first reports a single reset. The peer's last
            # messages are still in the buffer.
            return socket.recv_fds(self.sock, PACKET_BYTES_MAX + 1, _FDS_MAX)

    def close(self) -> None:
        """Close this end's socket."""
        self.sock.close()


def pair() -> tuple[Channel, Channel]:
    """Return the connected channels of a new socket pair."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > BODY_BYTES_MAX:
        raise OSError(f"a message of {size} bytes is over the limit of {BODY_BYTES_MAX}")
    body = bytearray()
    while len(body) < size:
        piece = os.pread(fd, size - len(body), len(body))
        if not piece:
            raise OSError("a message ended early")
        body += piece
    return bytes(body)


def close_all(fds: Iterable[int]) -> None:
    """Close unused descriptors of a received message."""
    for fd in fds:
        os.close(fd)
