"""The kernel's inotify queue: watches on files and directories, and what happened to them. Linux only.

The kernel appends an event before the system call that caused it returns. So a reader that finds the queue empty knows
that no such call has returned since the queue was read last. Two kinds of writes raise no event: writes through a
memory mapping, and writes of other machines to a network file system. `watcher.py` handles both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

MODIFY = 0x2
ATTRIB = 0x4
CLOSE_WRITE = 0x8
OPEN = 0x20
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
UNMOUNT = 0x2000
OVERFLOW = 0x4000
_ONLY_DIRECTORY = 0x0100_0000
_DIRECTORY = ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | _ONLY_DIRECTORY
_FILE = MODIFY | ATTRIB | CLOSE_WRITE | OPEN | DELETE_SELF | MOVE_SELF
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class Event(NamedTuple):
    """One event: the number of its watch, what happened, and the name in a directory (b"" for the thing itself)."""

    watch: int
    mask: int
    name: bytes


class Inotify:
    """One queue with its watches.

    Raises:
        OSError: this system has no inotify, or the user has no queue left.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self._add = libc.inotify_add_watch
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify_init1")

    def fileno(self) -> int:
        """Return the descriptor, which is readable when events are queued."""
        return self._fd

    def watch_directory(self, path: str) -> int:
        """Watch the names in a directory and return the number of the watch.

        Raises:
            OSError: it cannot be watched; ENOSPC where the user has no watch left.
        """
        return self._watch(path, _DIRECTORY)

    def watch_file(self, path: str) -> int:
        """Watch a file itself, by whatever name it is written, and return the number of the watch."""
        return self._watch(path, _FILE)

    def read(self) -> list[Event]:
        """Return all events that are queued, without waiting."""
        events: list[Event] = []
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return events
            start = 0
            while start < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, start)
                start += _EVENT.size + length
                events.append(Event(watch, mask, data[start - length : start].rstrip(b"\0")))

    def close(self) -> None:
        """Remove all watches."""
        os.close(self._fd)

    def _watch(self, path: str, mask: int) -> int:
        number: int = self._add(self._fd, os.fsencode(path), mask)
        if number < 0:
            raise _error(path)
        return number


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)
