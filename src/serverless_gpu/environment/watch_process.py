"""Keeps watches (`scan/watcher.py`) in a separate process, which reports changes of the libraries.

    service ── fork ─▶ place, check everything ──── "=" and the generation of the index ──▶ service
            ── "?" ──▶ queue of events, stats ─────── "=": unchanged · "!" and a reason ───▶
                       └ a change in between: "!" and a reason; the process ends

The process is separate because placing watches takes as long as a full check, and the kernel takes tens of milliseconds
to remove 50,000 watches. The service waits neither for placing nor for removing watches. A failure of the process only
costs speed: without an answer, the service checks every file.

Failure cases: If watches are not available, the process sends "!" with the reason. If the process is killed, the
service reads an end of file. If the process does not answer, the service kills the process after a second. If the
service has ended, the process reads an end of file and exits, even if the service is killed during the fork.
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
"""Seconds without an answer after which the service checks every file. A check takes a tenth of this time."""
LOOKS_MAX = 15
"""Maximum number of full checks between two attempts to place watches."""
_PACKET_BYTES_MAX = 4096
_REASON_CHARACTERS_MAX = 500
_NAME = "sgpu-watch"


class WatchProcess:
    """The service's handle of a watching process.

    In the new process, `leave` closes inherited descriptors that must not stay open. Raises OSError: the system cannot
    start a process.
    """

    def __init__(self, recogniser: Recogniser, description: Description, leave: Callable[[], None]) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.generation = b""
        """Generation of the index that the watches cover, or b"" before the watches are placed."""
        self.saved = 0
        """Number of full checks that the process's answers have saved."""
        self.reason = ""
        """Reason why the process has ended."""
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
        """Read an unsolicited message from the process, and return True if the process continues."""
        answer = self._receive()
        if answer[:1] == b"=":
            self.generation = answer[1:]
            return True
        return self._end(answer)

    def ask(self) -> bytes:
        """Return the index generation whose libraries are proven unchanged, or b"" without proof."""
        if not self.generation:
            return b""
        with contextlib.suppress(OSError):  # The process has ended, but its last message can still be read.
            self.sock.send(b"?")
        answer = self._receive()
        if answer == b"=":
            return self.generation
        self._end(answer)
        return b""

    def close(self) -> None:
        """Kill the watching process."""
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
    """Counts the full checks before new watches. The number doubles after watches that saved no check."""

    def __init__(self) -> None:
        self.reason = ""
        """Last logged reason why the environment was not watched."""
        self._pause = 0
        self._left = 0

    def is_due(self) -> bool:
        """Return True if the service should place watches after this check."""
        self._left -= 1
        return self._left < 0

    def count(self, saved: int) -> None:
        """Record the number of full checks that the last watches have saved."""
        self._pause = 0 if saved else min(2 * self._pause + 1, LOOKS_MAX)
        self._left = self._pause


def _be_watcher(
    sock: socket.socket, recogniser: Recogniser, description: Description, leave: Callable[[], None]
) -> NoReturn:
    """Place watches, answer questions, and exit. An error becomes the last message."""
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
        with contextlib.suppress(OSError):  # The service has ended.
            sock.send(b"!" + reason[:_REASON_CHARACTERS_MAX].encode(errors="replace"))
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def _answer(sock: socket.socket, watcher: LibraryWatcher) -> str:
    """Answer questions until an event invalidates the watches, and return the reason."""
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
