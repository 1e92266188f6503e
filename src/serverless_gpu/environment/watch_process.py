"""The watching process: it keeps watches (`scan/watcher.py`) for the service, and answers whether anything happened.

    service ── fork ─▶ place, look at everything ── "=" and the generation of the index ──▶ service
            ── "?" ──▶ queue of events, stats ─────── "=": unchanged · "!" and a reason ───▶
                       └ a change in between: "!" and a reason; the process ends

It is a process of its own because placing takes as long as a full look, and removing 50,000 watches takes the kernel
tens of milliseconds: the service waits for neither. Whatever goes wrong here costs speed only: without an answer the
service has every file looked at.

Failure cases: watches cannot be had ("!" with the reason); the process is killed (end of file); it does not answer
(killed after a second); the service is gone (end of file: the process ends); the service is killed while it forks.
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
"""After so long without an answer every file is looked at; that takes a tenth of it."""
LOOKS_MAX = 15
"""So many full looks at most between two tries to place watches."""
_PACKET_BYTES_MAX = 4096
_REASON_CHARACTERS_MAX = 500
_NAME = "sgpu-watch"


class WatchProcess:
    """The service's end of one watching process.

    `leave` closes, in the process, what it inherits and must not keep open. Raises OSError: no process can be started.
    """

    def __init__(self, recogniser: Recogniser, description: Description, leave: Callable[[], None]) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.generation = b""
        """Of the index that the watches go with; b"" until they are placed."""
        self.saved = 0
        """How many full looks its answers have saved."""
        self.reason = ""
        """Why it ended."""
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
        """Take what the process says without being asked; return whether it goes on."""
        answer = self._receive()
        if answer[:1] == b"=":
            self.generation = answer[1:]
            return True
        return self._end(answer)

    def ask(self) -> bytes:
        """Return the generation of the index whose libraries are proven to be unchanged, or b"" for no proof."""
        if not self.generation:
            return b""
        with contextlib.suppress(OSError):  # it has ended; why is still to be read
            self.sock.send(b"?")
        answer = self._receive()
        if answer == b"=":
            return self.generation
        self._end(answer)
        return b""

    def close(self) -> None:
        """Have the process end."""
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
    """How many full looks to let pass before watches are placed again: twice as many after each that were of no use."""

    def __init__(self) -> None:
        self.reason = ""
        """Why the environment was not watched, as it was logged last."""
        self._pause = 0
        self._left = 0

    def is_due(self) -> bool:
        """Return whether to place watches after this look."""
        self._left -= 1
        return self._left < 0

    def count(self, saved: int) -> None:
        """Take into account how many full looks the last watches have saved."""
        self._pause = 0 if saved else min(2 * self._pause + 1, LOOKS_MAX)
        self._left = self._pause


def _be_watcher(
    sock: socket.socket, recogniser: Recogniser, description: Description, leave: Callable[[], None]
) -> NoReturn:
    """Place watches, answer, and end; what goes wrong is the last answer."""
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
        with contextlib.suppress(OSError):  # the service is gone
            sock.send(b"!" + reason[:_REASON_CHARACTERS_MAX].encode(errors="replace"))
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def _answer(sock: socket.socket, watcher: LibraryWatcher) -> str:
    """Answer questions until something happens; return what."""
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
