"""Transfers the bytes of local sockets through a tunnel. User and node run the same code.

    sockets ◀── thread `serve` ──▶ TunnelEnd ◀── thread `read`  ◀── stream of messages ── server
                                             └── thread `write` ──▶ POST of a message ──▶ server

Each stream of the tunnel belongs to one connected local socket. `TunnelEnd` (`model/tunnel_end.py`) decides which
frames are sent, and repeats frames after a break.

Failure cases: If the server does not answer, both threads try again with increasing pauses, and the sockets stay open.
If the tunnel ends, because the run has ended or the other end is away for too long, the pump closes all sockets.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerlessGpuError, ServerUnavailable
from serverless_gpu.model.endpoint import EndpointTarget
from serverless_gpu.model.tunnel_end import PIECE_BYTES, Close, Data, End, Frame, Open, TunnelEnd, TunnelMessage

_PAUSE_S = 0.05
_PAUSE_S_MAX = 2.0
_CONFIRM_S = 0.5
"""Seconds after which received frames are confirmed without a message in the other direction."""
_UNCONFIRMED_MAX = 32


class TunnelTransport(Protocol):
    """The way to the server."""

    def messages(self, received: int) -> Iterator[TunnelMessage]:
        """Yield messages of the other end. After ServerUnavailable, the caller calls again."""
        ...

    def send(self, message: TunnelMessage) -> bool:
        """Send a message. Return False if the other end does not read. Raises as `messages`."""
        ...

    def close(self) -> None:
        """Close the connections. Other threads may use them."""
        ...


class _Local:
    """A local socket with the bytes that it has not taken yet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.queue = bytearray()
        self.ended_here = False  # The local socket sends no more bytes.
        self.ended_there = False  # The other end sends no more bytes.


class TunnelPump:
    """One end of a tunnel with its threads.

    Args:
        transport: the way to the server.
        accept: connects a new stream to its target and returns the local socket; None for the user's end.
        away_s: seconds without the server after which the tunnel ends.
    """

    def __init__(
        self,
        transport: TunnelTransport,
        accept: Callable[[EndpointTarget], socket.socket] | None,
        *,
        away_s: float,
    ) -> None:
        self._transport = transport
        self._accept = accept
        self._away_s = away_s
        self._end = TunnelEnd(opens=accept is None)
        self._clock = SystemClock()
        self._heard_ns = self._clock.boottime_ns()
        self._lock = threading.Condition()
        self._locals: dict[int, _Local] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._retry = threading.Event()
        self.over = threading.Event()
        self.error: ServerlessGpuError | None = None
        self._threads = [
            threading.Thread(target=work, name=f"tunnel {work.__name__}", daemon=True)
            for work in (self._serve, self._read, self._write)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def open(self, target: EndpointTarget) -> socket.socket:
        """Return a socket that is connected to a target. Its first line is the target's answer."""
        ours, theirs = socket.socketpair()
        with self._lock:
            if self.over.is_set():
                theirs.close()
                ours.close()
                raise self.error or ServerUnavailable("the connection to the run has ended")
            self._locals[self._end.open(target)] = _Local(theirs)
            self._lock.notify_all()
        self._wake()
        return ours

    def resume(self) -> None:
        """Connect to the server at once instead of after a pause."""
        self._retry.set()

    def close(self, error: ServerlessGpuError | None = None) -> None:
        """End the tunnel and close all sockets."""
        with self._lock:
            if self.over.is_set():
                return
            self.error = error
            self.over.set()
            self._lock.notify_all()
        self._retry.set()
        self._wake()
        self._transport.close()

    # --- server -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        pause_s = _PAUSE_S
        while not self.over.is_set():
            try:
                for message in self._transport.messages(self._end.received):
                    pause_s = _PAUSE_S
                    self._heard_ns = self._clock.boottime_ns()
                    with self._lock:
                        for frame in self._end.receive(message):
                            self._take(frame)
                        if self._end.has_news or self._end.unconfirmed >= _UNCONFIRMED_MAX:
                            self._lock.notify_all()
                    self._wake()
            except ServerUnavailable:
                pass
            except (ServerlessGpuError, ValueError) as error:
                self.close(error if isinstance(error, ServerlessGpuError) else ServerUnavailable(str(error)))
                return
            if self._clock.boottime_ns() - self._heard_ns > self._away_s * 1e9:
                self.close(ServerUnavailable("the other end of the connection did not answer for too long"))
                return
            self._retry.wait(pause_s)
            self._retry.clear()
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _write(self) -> None:
        pause_s = _PAUSE_S
        while True:
            with self._lock:
                while not (self._end.has_news or self._end.unconfirmed >= _UNCONFIRMED_MAX or self.over.is_set()):
                    if not self._lock.wait(_CONFIRM_S) and self._end.unconfirmed:
                        break
                if self.over.is_set():
                    return
                message = self._end.next_message()
            try:
                taken = self._transport.send(message)
            except ServerUnavailable:
                taken = False
            except ServerlessGpuError as error:
                self.close(error)
                return
            if taken:
                pause_s = _PAUSE_S
                continue
            with self._lock:
                self._end.rewind()
                self._lock.wait_for(self.over.is_set, pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _take(self, frame: Frame) -> None:
        """Process a frame of the other end. The caller holds the lock."""
        if isinstance(frame, Open):
            assert self._accept is not None
            try:
                self._locals[frame.stream] = _Local(self._accept(frame.target))
            except (OSError, ServerlessGpuError) as error:
                text = error.message if isinstance(error, ServerlessGpuError) else error.strerror
                self._end.send(frame.stream, f"-{text}\n".encode())
                self._end.close(frame.stream)
            return
        local = self._locals.get(frame.stream)
        if local is None:
            if isinstance(frame, Data):
                self._end.use(frame.stream, len(frame.data))
            return
        match frame:
            case Data(data=data):
                local.queue += data
            case End():
                local.ended_there = True
                if not local.queue:
                    with contextlib.suppress(OSError):
                        local.sock.shutdown(socket.SHUT_WR)
            case Close(error=reason):
                local.queue += f"-{reason}\n".encode() if reason else b""
                local.ended_here = local.ended_there = True

    # --- local sockets ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self.over.is_set():
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            with self._lock:
                for stream, local in list(self._locals.items()):
                    if local.ended_here and local.ended_there and not local.queue:
                        self._forget(stream)
                        continue
                    reads = not local.ended_here and self._end.room(stream) > 0
                    events = (select.POLLIN if reads else 0) | (select.POLLOUT if local.queue else 0)
                    if events:
                        poll.register(local.sock, events)
            ready = dict(poll.poll())
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            with self._lock:
                for stream, local in list(self._locals.items()):
                    if local.sock.fileno() in ready:
                        self._transfer(stream, local, ready[local.sock.fileno()])
                if self._end.has_news:
                    self._lock.notify_all()
        with self._lock:
            for stream in list(self._locals):
                self._forget(stream)
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _transfer(self, stream: int, local: _Local, events: int) -> None:
        try:
            if local.queue:
                sent = local.sock.send(local.queue)
                del local.queue[:sent]
                self._end.use(stream, sent)
                if local.ended_there and not local.queue:
                    local.sock.shutdown(socket.SHUT_WR)
            room = self._end.room(stream)
            if events & (select.POLLIN | select.POLLHUP) and not local.ended_here and room:
                data = local.sock.recv(min(PIECE_BYTES, room))
                if data:
                    self._end.send(stream, data)
                else:
                    local.ended_here = True
                    self._end.end(stream)
        except BlockingIOError:
            return
        except OSError:
            self._end.close(stream)
            self._forget(stream)

    def _forget(self, stream: int) -> None:
        self._locals.pop(stream).sock.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError), self._lock:
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")
