"""Runs file watches (`scan/watcher.py`) in a separate process that reports library changes.

    service ── fork ─▶ place, check everything ──── "=" and the generation of the index ──▶ service
            ── "?" ──▶ queue of events, stats ─────── "=": unchanged · "!" and a reason ───▶
                       └ a change in between: "!" and a reason; the process ends

Placing watches takes as long as a full check. Removing 50,000 watches takes the kernel tens of milliseconds. In a
separate process, placing and removing watches does not delay the service. If the watch process does not answer, the
service checks every file.

Failure cases: If the kernel refuses the watches, the watch process sends "!" and the reason. If the watch process dies,
the service reads an end of file. If the watch process does not answer within a second, the service kills the watch
process. After the service ends, the watch process reads an end of file and exits, even if the service dies during the
fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.scan.watcher import LibraryWatcher, Unwatchable
from serverless_gpu.errors import ServerlessGpuError

ANSWER_S_MAX = 1.0
"""Seconds that the service waits for an answer before it checks every file.

A watch check takes a tenth of `ANSWER_S_MAX`.
"""
LOOKS_MAX = 15
"""Maximum number of full checks between two attempts to place watches."""
_PACKET_BYTES_MAX = 4096
_REASON_CHARACTERS_MAX = 500
_NAME = "sgpu-watch"


class WatchProcess:
    """The environment service's handle of its watch process.

    `leave` closes inherited file descriptors in the forked watch process. Raises OSError if the fork fails.
    """

    def __init__(self, recogniser: Recogniser, description: Description, leave: Callable[[], None]) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.generation = b""
        """Generation of the index that the watches cover, or b"" before the watches are placed."""
        self.saved = 0
        """Number of full checks that the watch process's answers have saved."""
        self.reason = ""
        """Reason why the watch process has ended."""
        sys.stderr.flush()
        try:
            self.pid = os.fork()
        except OSError:
            self.sock.close()
            theirs.close()
            raise
        if self.pid == 0:
            self.sock.close()
            _be_watcher(theirs, recogniser, description, leave)
        theirs.close()
        self.sock.settimeout(ANSWER_S_MAX)

    def hear(self) -> bool:
        """Read an unsolicited message from the watch process. Return True if the watch process continues."""
        answer = self._receive()
        if answer[:1] == b"=":
            self.generation = answer[1:]
            return True
        return self._end(answer)

    def ask(self) -> bytes:
        """Return the index generation with proven unchanged libraries, or b"" without a proof."""
        if not self.generation:
            return b""
        with contextlib.suppress(OSError):  # The socket still holds the last message of an ended watch process.
            self.sock.send(b"?")
        answer = self._receive()
        if answer == b"=":
            return self.generation
        self._end(answer)
        return b""

    def close(self) -> None:
        """Kill the watch process and close its socket."""
        self.sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> bytes:
        try:
            return self.sock.recv(_PACKET_BYTES_MAX)
        except TimeoutError:
            return f"!the watching process did not answer within {ANSWER_S_MAX:.0f} s".encode()
        except OSError:
            return b""

    def _end(self, answer: bytes) -> bool:
        self.generation = b""
        self.reason = answer[1:].decode(errors="replace") or "the watching process has ended"
        return False


class WatchBackoff:
    """Backoff for placing watches. The pause in full checks doubles after watches that saved no check."""

    def __init__(self) -> None:
        self.reason = ""
        """Last logged reason why the environment was not watched."""
        self._pause = 0
        self._left = 0

    def is_due(self) -> bool:
        """Return True if the service should place watches after the current full check."""
        self._left -= 1
        return self._left < 0

    def count(self, saved: int) -> None:
        """Record the number of full checks that the last watches have saved."""
        self._pause = 0 if saved else min(2 * self._pause + 1, LOOKS_MAX)
        self._left = self._pause


def _be_watcher(
    sock: socket.socket, recogniser: Recogniser, description: Description, leave: Callable[[], None]
) -> NoReturn:
    """Place file watches, answer the service's queries, and exit. Report an error in the last message."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave()
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(_NAME)
        try:
            watcher, generation = recogniser.watch(description)
            sock.send(b"=" + generation)
            reason = _answer(sock, watcher)
        except (Unwatchable, OSError, ServerlessGpuError) as error:
            reason = str(error)
        with contextlib.suppress(OSError):  # Ignore the error if the service has ended.
            sock.send(b"!" + reason[:_REASON_CHARACTERS_MAX].encode(errors="replace"))
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def _answer(sock: socket.socket, watcher: LibraryWatcher) -> str:
    """Answer the service's queries until a file event invalidates the watches, and return the reason."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(watcher, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if sock.fileno() in ready:
            if not sock.recv(_PACKET_BYTES_MAX):
                return "the service has ended"
            if reason := watcher.ask():
                return reason
            sock.send(b"=")
        elif reason := watcher.take_events():
            return reason
