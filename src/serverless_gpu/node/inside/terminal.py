"""Runs a program and connects it to the terminals of its users.

    user's terminal ◀── frames (`terminal_frames.py`) ──▶ TerminalHost ◀── pty, or pipes ──▶ program

A shell of a run (`Command` with `tty`) listens on the socket `terminal` in the attempt's working directory. Users
connect, disconnect and connect again. While no user is connected, the program continues, and the host keeps the last
output for the next user. The last connected user determines the size of the terminal.

A program that `sgpu exec` starts in a run has one user. The program gets SIGHUP when the user disconnects.

Failure cases: If a user does not read, the host stops reading the program's output, as a pipe does. Without a user,
the host discards the oldest output. If the program ignores SIGHUP, the host kills it after two seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import termios
from collections.abc import Sequence

from . import terminal_frames as frames

SOCKET = "terminal"
"""Name of the socket in the attempt's working directory."""
KEPT_BYTES = 256 << 10
_QUEUED_BYTES_MAX = 1 << 20
_PIECE_BYTES = 64 << 10
_USERS_MAX = 8
_HANGUP_S = 2.0


def open_host(argv: Sequence[str], work: str) -> TerminalHost:
    """Start a program on a pseudo-terminal, and listen for users in the directory `work`. Raises OSError."""
    os.makedirs(work, exist_ok=True)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.chdir(work)  # The path of a Unix socket has at most 107 bytes.
        listener.bind(SOCKET)
        os.chmod(SOCKET, 0o600)
        listener.listen(_USERS_MAX)
    finally:
        os.fchdir(here)
        os.close(here)
    return TerminalHost(argv, tty=True, listener=listener)


class _User:
    """A connected terminal, with the bytes that it has not received yet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.reader = frames.FrameReader()
        self.queue = bytearray()


class TerminalHost:
    """A program with the terminals of its users.

    Args:
        argv: the program and its arguments.
        tty: True for a pseudo-terminal; False for pipes.
        size: initial rows and columns of the pseudo-terminal.
        listener: socket on which users connect, or None for a program that ends with its only user.

    Raises OSError if the program cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], *, tty: bool, size: tuple[int, int] = (24, 80), listener: socket.socket | None = None
    ) -> None:
        self._listener = listener
        self._users: list[_User] = []
        self._kept = bytearray()
        self._input = bytearray()
        self._ends = False  # True once the user has ended the program's input.
        self._sources: dict[int, bytes] = {}  # Output frames by descriptor.
        self._tty = tty
        if tty:
            master, slave = pty.openpty()
            _resize(master, size)
            try:
                self._child = subprocess.Popen(
                    argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=_take_terminal
                )
            except BaseException:
                os.close(master)
                raise
            finally:
                os.close(slave)
            self._writer, self._sources = master, {master: frames.OUTPUT}
        else:
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
            assert self._child.stdin and self._child.stdout and self._child.stderr
            # The host owns the descriptors, and closes each at its end.
            self._writer = os.dup(self._child.stdin.fileno())
            out, err = os.dup(self._child.stdout.fileno()), os.dup(self._child.stderr.fileno())
            self._sources = {out: frames.OUTPUT, err: frames.ERRORS}
            for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
                stream.close()
        for fd in {self._writer, *self._sources}:
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        """Return the pid of the program."""
        return self._child.pid

    def add(self, sock: socket.socket) -> None:
        """Connect a user, and send the kept output. Refuse the user if too many users are connected."""
        user = _User(sock)
        if len(self._users) >= _USERS_MAX:
            with contextlib.suppress(OSError):
                sock.sendall(frames.encode(frames.NOTE, f"{_USERS_MAX} terminals are already connected".encode()))
            sock.close()
            return
        for start in range(0, len(self._kept), frames.PAYLOAD_BYTES_MAX):
            user.queue += frames.encode(frames.OUTPUT, bytes(self._kept[start : start + frames.PAYLOAD_BYTES_MAX]))
        self._users.append(user)

    def serve(self) -> int:
        """Connect users and program until the program ends. Return the program's exit status."""
        pidfd = os.pidfd_open(self._child.pid)
        hangup_s: float | None = None
        while True:
            poll = self._poll(pidfd)
            ready = dict(poll.poll(None if hangup_s is None else hangup_s * 1e3))
            if hangup_s is not None and not ready:
                self._signal(signal.SIGKILL)
            if self._listener is not None and self._listener.fileno() in ready:
                with contextlib.suppress(OSError):
                    self.add(self._listener.accept()[0])
            for fd in [fd for fd in self._sources if fd in ready]:
                self._read(fd)
            if self._writer in ready and self._input:
                self._write()
            for user in [user for user in self._users if user.sock.fileno() in ready]:
                self._hear(user, ready[user.sock.fileno()])
            if hangup_s is None and self._listener is None and not self._users:
                self._signal(signal.SIGHUP)
                self._end_input()
                hangup_s = _HANGUP_S
            if pidfd in ready:
                break
        os.close(pidfd)
        status = self._child.wait()
        self._finish(status)
        return status

    def _poll(self, pidfd: int) -> select.poll:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        has_room = all(len(user.queue) < _QUEUED_BYTES_MAX for user in self._users)
        for fd in self._sources if has_room else ():
            poll.register(fd, select.POLLIN)
        if self._input:
            events = select.POLLOUT | (select.POLLIN if self._writer in self._sources and has_room else 0)
            poll.register(self._writer, events)
        for user in self._users:
            events = select.POLLIN if len(self._input) < _QUEUED_BYTES_MAX else 0
            poll.register(user.sock, events | (select.POLLOUT if user.queue else 0))
        return poll

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:  # The kernel reports the end of a pseudo-terminal as EIO.
                raise
            data = b""
        if not data:
            kind = self._sources.pop(fd)
            if not (kind == frames.OUTPUT and self._tty):
                os.close(fd)
            return False
        kind = self._sources[fd]
        if self._listener is not None:
            self._kept += data
            del self._kept[:-KEPT_BYTES]
        for user in self._users:
            user.queue += frames.encode(kind, data)
        return True

    def _write(self) -> None:
        try:
            del self._input[: os.write(self._writer, self._input)]
        except BlockingIOError:
            return
        except OSError:  # The program has closed its input.
            self._input.clear()
        if self._ends and not self._input:
            self._end_input()

    def _end_input(self) -> None:
        self._ends = True
        if self._input or self._writer < 0:
            return
        if not self._tty:
            os.close(self._writer)
            self._writer = -1

    def _hear(self, user: _User, events: int) -> None:
        try:
            if events & select.POLLOUT and user.queue:
                del user.queue[: user.sock.send(user.queue)]
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = user.sock.recv(_PIECE_BYTES)
                if not data:
                    raise ConnectionResetError
                for kind, payload in user.reader.feed(data):
                    self._obey(kind, payload)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            user.sock.close()
            self._users.remove(user)

    def _obey(self, kind: bytes, payload: bytes) -> None:
        if kind == frames.INPUT and not self._ends and self._writer >= 0:
            self._input += payload
        elif kind == frames.SIZE and self._tty:
            _resize(self._writer, frames.size_of(payload))
        elif kind == frames.END:
            if self._tty:
                self._input += b"\x04"  # End of input for a terminal in line mode.
            else:
                self._end_input()
        elif kind == frames.SIGNAL and len(payload) == 1 and payload[0] in _SIGNALS:
            self._signal(payload[0])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)

    def _finish(self, status: int) -> None:
        """Send the last output and the exit status to all users, for at most two seconds per user."""
        for fd in list(self._sources):
            while self._read(fd):
                if any(len(user.queue) > 2 * _QUEUED_BYTES_MAX for user in self._users):
                    break
        for user in self._users:
            with contextlib.suppress(OSError):
                user.sock.settimeout(_HANGUP_S)
                user.sock.sendall(bytes(user.queue) + frames.exit_frame(status))
            user.sock.close()
        self._users.clear()
        for fd in {self._writer, *self._sources} - {-1}:
            os.close(fd)


_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT})


def _resize(fd: int, size: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _take_terminal() -> None:
    """Make the pseudo-terminal on standard input the controlling terminal of the new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
