"""Reads a run's event stream, and resumes a broken stream without gaps or repetitions.

    thread: POST /runs, or GET /runs/{run}/events?after&offsets ──▶ cursor ──▶ queue ──▶ reader: the run's handle
            ▲── again: after a pause, from the cursor ──┘                     pipe: wakes the reader

A reader thread transfers messages from the server to a queue. The run handle reads the message queue, writes files and
updates displays. The message queue is bounded. If the queue is full, the reader thread stops reading the event stream.
While the message queue is full, the server stores the messages. Each event stream has a separate connection, so that
closing one stream affects no other stream.

The reader thread prints one notice about a broken connection and reconnects for up to `SERVERLESS_GPU_PATIENCE`
seconds. If the server refuses the request, the reader thread passes the server's error to the run handle. If the token
expires after the server has accepted the run, the reader thread waits for a new token (`RemoteServer.wait_for_token`).
Each new connection makes progress, even if a proxy interrupts the event stream repeatedly. After Python has deleted a
run handle, its reader thread exits at the server's next stream comment. The server sends a stream comment every 10 s.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.remote.server import RemoteServer
from serverless_gpu.errors import NotAllowed, NotAuthenticated, ServerProblem, ServerUnavailable
from serverless_gpu.operating_system import start_thread
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import (
    AcceptedMessage,
    EndedMessage,
    GapMessage,
    LogMessage,
    RunRequest,
    SettledMessage,
    StateMessage,
    StreamMessage,
)

_PAUSE_S = 0.05
_PAUSE_S_MAX = 2.0
_TOLD_AFTER_S = 1.0
_MESSAGES_MAX = 1_000
_BYTES_MAX = 8 << 20


class ServerAway(NamedTuple):
    """A notice for the user that the server is unreachable or no longer accepts the token."""

    sentence: str


Heard = StreamMessage | ServerAway
E = TypeVar("E", bound=ServerProblem)


class StreamCursor:
    """The client's position in an event stream, for resuming the stream and skipping repeated messages."""

    def __init__(self) -> None:
        self.after = 0
        self.offsets: dict[tuple[int, int, str], int] = {}

    def query(self) -> dict[str, str]:
        """Return the query parameters for requesting the next messages."""
        places = (f"{fence}.{rank}.{stream}:{at}" for (fence, rank, stream), at in self.offsets.items())
        return {"after": str(self.after), "offsets": ",".join(places)}

    def take(self, message: StreamMessage) -> StreamMessage | None:
        """Return the part of a message that follows the cursor, or None for a repeated message."""
        match message:
            case StateMessage(seq=seq, fence=fence) | EndedMessage(seq=seq, fence=fence):
                if 0 < seq <= self.after:
                    return None
                self.after = max(self.after, seq)
                self.offsets = {key: at for key, at in self.offsets.items() if key[0] >= fence}
                return message
            case LogMessage():
                return self._log(message)
            case GapMessage():
                key = (message.fence, message.rank, message.stream)
                end = message.offset + message.size
                start = max(message.offset, self.offsets.get(key, 0))
                if start >= end:
                    return None
                self.offsets[key] = end
                return msgspec.structs.replace(message, offset=start, size=end - start)
            case _:
                return message

    def _log(self, message: LogMessage) -> LogMessage | None:
        key = (message.fence, message.rank, message.stream)
        known = max(0, self.offsets.get(key, 0) - message.offset)
        if known >= len(message.data):
            return None
        self.offsets[key] = message.offset + len(message.data)
        if not known:
            return message
        return msgspec.structs.replace(message, offset=message.offset + known, data=message.data[known:])


class EventStream:
    """Reads a run's events from the server in a thread.

    If `request` is given, the thread first submits the run. The server's response to the submission is the event
    stream.
    """

    def __init__(self, server: RemoteServer, run_id: str, request: RunRequest | None = None) -> None:
        self._server = server
        self._run_id = run_id
        self._request = request
        self._cursor = StreamCursor()
        self._clock = SystemClock()
        self._queue: deque[Heard] = deque()
        self._queued_bytes = 0
        self._error: Exception | None = None
        self._over = False  # True after the reader thread has queued the last message.
        self._closed = threading.Event()
        self._turn = threading.Condition()
        self._connection: Connection | None = None
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        start_thread(self._listen, f"serverless-gpu-run-{run_id}")

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a message arrives, or -1."""
        return self._readable

    def read(self, timeout_s: float | None) -> Heard | None:
        """Return the next message, or None after the last message.

        Raise TimeoutError if no message arrives in time.
        """
        deadline_ns = None if timeout_s is None else self._clock.boottime_ns() + round(timeout_s * 1e9)
        poll = select.poll()
        poll.register(self._readable, select.POLLIN)
        while True:
            with self._turn:
                if self._queue:
                    return self._pop()
                if self._error is not None:
                    raise self._error.with_traceback(None)  # A new traceback omits the reader thread's frames.
                if self._over or self._closed.is_set():
                    return None
            left_s = None if deadline_ns is None else (deadline_ns - self._clock.boottime_ns()) / 1e9
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            poll.poll(None if left_s is None else left_s * 1000)

    def close(self) -> None:
        """Stop reading the event stream. Callers may call this method at any time, even in a finalizer."""
        with self._turn:
            if self._closed.is_set():
                return
            self._closed.set()
            readable, writable, connection = self._readable, self._writable, self._connection
            self._readable = self._writable = -1
            self._queue.clear()
            self._turn.notify_all()
        os.close(readable)
        os.close(writable)
        if connection is not None:
            connection.close()

    # --- the queue -----------------------------------------------------------------------------------------------

    def _pop(self) -> Heard:
        message = self._queue.popleft()
        self._queued_bytes -= _size(message)
        if not self._queue and not self._over and self._error is None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._readable, 1 << 12)
        self._turn.notify_all()
        return message

    def _put(self, message: Heard) -> None:
        with self._turn:
            while (len(self._queue) >= _MESSAGES_MAX or self._queued_bytes >= _BYTES_MAX) and not self._closed.is_set():
                self._turn.wait()
            self._queue.append(message)
            self._queued_bytes += _size(message)
            self._wake()

    def _wake(self) -> None:
        if not self._closed.is_set():
            # The run handle wakes up anyway, because a full wakeup pipe is already readable.
            with contextlib.suppress(BlockingIOError):
                os.write(self._writable, b"\0")

    # --- the thread ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        error: Exception | None = None
        try:
            self._keep_up()
        except Exception as problem:  # noqa: BLE001 - the run handle would wait forever for a dead reader thread
            error = problem
        with self._turn:
            self._error, self._over = error, True
            self._wake()

    def _keep_up(self) -> None:
        """Read the event stream until the last message, and reconnect after each connection failure."""
        pause_s, away_ns, told = _PAUSE_S, 0, False
        while not self._closed.is_set():
            problem, token = "the server ended the stream", self._server.profile.token
            try:
                for message in self._messages():
                    if told:
                        away_ms = (self._clock.boottime_ns() - away_ns) // 1_000_000
                        self._put(ServerAway(f"the server answers again after {format_duration_ms(away_ms)}"))
                    away_ns, told = 0, False
                    if self._queue_new(message):
                        pause_s = _PAUSE_S
                    if isinstance(message, SettledMessage):
                        return
            except ServerProblem as error:
                url = self._server.profile.url
                if isinstance(error, NotAuthenticated) and self._server.look_again() != url:
                    continue  # The old address now belongs to another server.
                if isinstance(error, NotAuthenticated) and self._request is None:
                    if not self._server.wait_for_token(
                        self._with_run_state(error),
                        token,
                        say=lambda sentence: self._put(ServerAway(sentence)),
                        closed=self._closed,
                    ):
                        return
                    continue
                if not error.retryable:
                    raise self._with_run_state(error) from None
                problem = error.message
                self._server.look_again()
            now_ns = self._clock.boottime_ns()
            away_ns = away_ns or now_ns
            if (now_ns - away_ns) / 1e9 + pause_s > self._server.patience_s:
                raise ServerUnavailable(
                    f"the server has not answered for {self._server.patience_s:.0f} s: {problem}",
                    hint=f"the run continues: attach with serverless_gpu.attach({self._run_id!r}) when the server "
                    "answers again",
                )
            if not told and now_ns - away_ns >= _TOLD_AFTER_S * 1e9:
                told = True
                self._put(ServerAway(f"the server at {self._server.profile.url} does not answer; waiting for it"))
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _with_run_state(self, error: E) -> E:
        """Return the server's error. If the server has accepted the run, add the run's state."""
        if self._request is None and isinstance(error, NotAuthenticated | NotAllowed):
            still = (
                f"run {self._run_id} continues; to stop the run, use `sgpu cancel {self._run_id}` with a token that "
                "has "
                "the permission"
            )
            return type(error)(error.message, hint="; ".join(filter(None, (error.hint, still))))
        return error

    def _messages(self) -> Iterator[StreamMessage]:
        connection = self._server.connect()
        with self._turn:
            self._connection = connection
        try:
            if self._request is not None:
                yield from connection.stream("POST", "/runs", self._request, answer=StreamMessage)
            else:
                path = f"/runs/{self._run_id}/events"
                yield from connection.stream("GET", path, answer=StreamMessage, query=self._cursor.query())
        finally:
            connection.close()

    def _queue_new(self, message: StreamMessage) -> bool:
        """Queue the part of a message that follows the cursor. Return True if the cursor has advanced."""
        if isinstance(message, AcceptedMessage):
            self._request = None
        new = self._cursor.take(message)
        if new is not None:
            self._put(new)
        return new is not None and not isinstance(message, AcceptedMessage)


def _size(message: Heard) -> int:
    return len(message.data) if isinstance(message, LogMessage) else 0
