"""Uses inotify watches to prove that an environment's libraries are unchanged.

    place   a watch on every directory and on every file, then a full check: the baseline
    ask     mount table ─ tops of the libraries ─ queue of events ─ stat of files that the queue cannot cover
            └ no change ──▶ "": a full check would find no change either
            └ a change ───▶ the reason; the watches are then invalid: check everything, and place new watches

A directory watch reports names that appear, disappear or are renamed. A directory watch does not report writes through
another hard link, or new hard links to a file. A file watch (on the inode) reports writes and new hard links under any
name.

Every write starts with opening the file, which the file watch reports. After a file was opened, `ask` compares the
file's `stat` values with the baseline. The comparison detects writes without events, through a memory mapping or, on
old kernels, io_uring.

    change                                                                      detected by
    write, truncate, chmod, a new hard link, a write by another name            watch on the file
    rename over a file or directory, new, removed                               watch on the directory
    write through a memory mapping                                              open, then the file's stat; last close
    a file that is a link to another place, or outside of watched directories   the file's stat, at each `ask`
    the library's directory, or one above it, renamed or replaced               device and inode of each top
    a mount on, above or below a top; unmounted                                 mount table; an event
    more events than the queue can hold                                         overflow event: the watches are invalid
    network, FUSE and overlay file systems, no watches left, too many links     `Unwatchable`: always a full check

File watches do not detect writes through a memory mapping that is older than the watches. A full check detects a write
through an older mapping only if the kernel has flushed the page since the previous write.

Like every scan, the watcher ignores bytecode. The watcher does not cover project code, because the gate compares every
project file anyway.

The watcher requires inotify, which only Linux provides. The kernel queues an event before the system call that caused
the event returns. An empty event queue therefore proves that no system call has changed a library since the last read.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serverless_gpu.environment.scan.directory_listing import BYTECODE, is_inside
from serverless_gpu.environment.scan.index import GatePart, Stats
from serverless_gpu.environment.scan.recognition import differing

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
COMPARED_MAX = 2_000
"""Maximum number of files that one `ask` call compares. For more files, a full check is almost as fast."""
WATCHES_SHARE = 0.5
"""Maximum share of the user's inotify watches per environment, because editors need watches too."""
LOCAL_FILE_SYSTEMS = {0xEF53: "ext", 0x58465342: "XFS", 0x9123683E: "btrfs", 0x01021994: "tmpfs", 0xF2F52010: "F2FS"}
WATCHES_LIMIT = "/proc/sys/fs/inotify/max_user_watches"
_MOUNTS = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")
_STATFS_BYTES = 256
_SHORTAGES: dict[int | None, str] = {
    errno.ENOSPC: "the user's inotify watches are used up (fs.inotify.max_user_watches)",
    errno.EMFILE: "the user's inotify queues are used up (fs.inotify.max_user_instances)",
}


class Unwatchable(Exception):
    """Inotify watches are unavailable or insufficient for an environment, for the stated reason."""


class WatchPlan(NamedTuple):
    """A watch plan: top directories of libraries, and the directories and files to watch."""

    tops: tuple[str, ...]
    directories: tuple[str, ...]
    watched: tuple[int, ...]
    compared: tuple[int, ...]


class LibraryWatcher:
    """Inotify watches on the libraries of one environment.

    Raises Unwatchable: inotify watches are unavailable.
    """

    def __init__(self, gate: GatePart, files: Stats) -> None:
        names = files.names()
        self._plan = make_plan(gate, names, files.kinds)
        self._number_of: dict[int, int] = {}
        self._compared: dict[int, None] = dict.fromkeys(self._plan.compared)
        self._baseline = files
        self._stats = Stats()
        self._inotify: Inotify | None = None
        self._mounts_fd = -1
        try:
            self._place(names)
        except OSError as error:
            self.close()
            raise Unwatchable(_SHORTAGES.get(error.errno, str(error))) from None
        except Unwatchable:
            self.close()
            raise

    def _place(self, names: Sequence[str]) -> None:
        plan = self._plan
        _check_limit(len(plan.directories) + len(plan.watched))
        # The open descriptor reports all later mount changes.
        self._mounts_fd = os.open(_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
        self._mounts = self._read_mounts()
        _check_file_systems(plan.tops, self._mounts)
        self._tops = _identities(plan.tops)
        self._inotify = Inotify()
        for directory in plan.directories:
            self._inotify.watch_directory(directory)
        for number in plan.watched:
            self._number_of[self._inotify.watch_file(names[number])] = number

    def close(self) -> None:
        """Remove all inotify watches and close their descriptors."""
        if self._inotify is not None:
            self._inotify.close()
        if self._mounts_fd >= 0:
            os.close(self._mounts_fd)

    def fileno(self) -> int:
        """Return the inotify descriptor, which becomes readable when an event is queued."""
        return self._queue.fileno()

    @property
    def _queue(self) -> Inotify:
        assert self._inotify is not None
        return self._inotify

    def begin(self, files: Stats) -> None:
        """Set the baseline to the files of a full check that ran after the watches were placed."""
        self._baseline = files
        self._stats = files.pick(self._compared)

    def take_events(self) -> str:
        """Read the event queue, and return why the libraries may have changed, or "" if unchanged."""
        opened = []
        for event in self._queue.read():
            if event.mask == OPEN:
                opened.append(event.watch)
            elif reason := _disturbance(event):
                return reason
        return self._compare_from_now_on(opened)

    def ask(self) -> str:
        """Return why the libraries may differ from the baseline, or "" if they are proven unchanged."""
        try:
            if _is_changed(self._mounts_fd) and self._read_mounts() != self._mounts:
                return "a file system was mounted or unmounted"
            if _identities(self._plan.tops) != self._tops:
                return "a library directory was replaced"
        except OSError as error:
            return str(error)
        if reason := self.take_events():
            return reason
        if differing(self._stats):
            return "the size, time or mode of a library file has changed"
        return ""

    def _compare_from_now_on(self, opened: Iterable[int]) -> str:
        before = len(self._compared)
        self._compared.update((self._number_of[watch], None) for watch in opened if watch in self._number_of)
        if len(self._compared) > COMPARED_MAX:
            return f"more than {COMPARED_MAX:,} library files were opened"
        if len(self._compared) != before:
            self._stats = self._baseline.pick(self._compared)
        return ""

    def _read_mounts(self) -> frozenset[str]:
        with open(_MOUNTS, "rb") as file:
            return mounts_about(self._plan.tops, os.fsdecode(file.read()))


def make_plan(gate: GatePart, names: Sequence[str], kinds: str) -> WatchPlan:
    """Return the watch plan for an environment's libraries.

    Raises Unwatchable: too many files are links to other places, or lie outside of the watched directories.
    """
    tops = tuple(area.top for area in gate.areas if area.place is None)
    areas_of = memoryview(gate.areas_of).cast("H").tolist()
    libraries = [area.place is None for area in gate.areas]
    directories = tuple(name for name, area in zip(gate.directory_names(), areas_of, strict=True) if libraries[area])
    known = frozenset(directories)
    watched: list[int] = []
    compared: list[int] = []
    for number, name in enumerate(names):
        if name.rpartition("/")[0] not in known:
            compared.append(number)
        # A directory watch reports a replaced link. No write can change a link.
        elif kinds[number] == "l":
            continue
        elif os.path.islink(name):  # If the file is missing, placing its watch fails later.
            compared.append(number)
        else:
            watched.append(number)
    if len(compared) > COMPARED_MAX:
        raise Unwatchable(f"{len(compared):,} library files are links to other places, or lie outside of the libraries")
    return WatchPlan(tops, directories, tuple(watched), tuple(compared))


def mounts_about(tops: Iterable[str], table: str) -> frozenset[str]:
    """Return the mount table lines for mounts above, on or below the given directories."""
    tops = tuple(dict.fromkeys(path for top in tops for path in (top, os.path.realpath(top))))
    found = []
    for line in table.splitlines():
        fields = line.split(" ")
        point = _unescape(fields[4]) if len(fields) > 4 else "/"
        if any(is_inside(top, point) or is_inside(point, top) for top in tops):
            found.append(line)
    return frozenset(found)


def _disturbance(event: Event) -> str:
    """Return the change that an event reports, or "" if the event is irrelevant."""
    if event.mask & OVERFLOW:
        return "the kernel's inotify event queue overflowed"
    if event.mask & UNMOUNT:
        return "a watched file system was unmounted"
    name = os.fsdecode(event.name)
    if name == "__pycache__" or name.endswith(BYTECODE):
        return ""
    return f"{name or 'a file or directory'} was changed"


def _check_file_systems(tops: Iterable[str], mounts: Iterable[str]) -> None:
    """Refuse libraries on several file systems, or on a file system that may miss inotify events."""
    points = {_unescape(line.split(" ")[4]) for line in mounts}
    for top in tops:
        real = os.path.realpath(top)
        kind = file_system(real)
        if kind not in LOCAL_FILE_SYSTEMS:
            names = ", ".join(LOCAL_FILE_SYSTEMS.values())
            raise Unwatchable(f"{top} lies on a file system of type {kind:#x}; watches support only {names}")
        if inner := sorted(point for point in points if point != real and is_inside(point, real)):
            raise Unwatchable(f"another file system is mounted at {inner[0]}")


def file_system(path: str) -> int:
    """Return the kernel's type number for the file system of a path."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.statfs(os.fsencode(path), found) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return ctypes.c_long.from_buffer(found).value & 0xFFFF_FFFF


def _check_limit(wanted: int) -> None:
    with open(WATCHES_LIMIT, encoding="ascii") as file:
        limit = int(file.read())
    if wanted > WATCHES_SHARE * limit:
        raise Unwatchable(f"{wanted:,} watches exceed {WATCHES_SHARE:.0%} of fs.inotify.max_user_watches ({limit:,})")


def _is_changed(mounts_fd: int) -> bool:
    """Return True if the mount table has changed since the previous call."""
    poller = select.poll()
    poller.register(mounts_fd, select.POLLPRI)
    return bool(poller.poll(0))


def _identities(tops: Iterable[str]) -> tuple[tuple[int, int], ...]:
    return tuple((found.st_dev, found.st_ino) for found in map(os.stat, tops))


def _unescape(point: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), point)


class Event(NamedTuple):
    """An inotify event: the watch number, the event mask, and a name in the directory or b""."""

    watch: int
    mask: int
    name: bytes


class Inotify:
    """An inotify event queue with its watches.

    Raises OSError: the system has no inotify, or the user's limit on queues is reached.
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
        """Return the inotify descriptor, which is readable when events are queued."""
        return self._fd

    def watch_directory(self, path: str) -> int:
        """Watch the entries of a directory, and return the number of the watch.

        Raises OSError: the directory cannot be watched. The errno is ENOSPC if the user's limit on watches is reached.
        """
        return self._watch(path, _DIRECTORY)

    def watch_file(self, path: str) -> int:
        """Watch a file under all of its names, and return the number of the watch."""
        return self._watch(path, _FILE)

    def read(self) -> list[Event]:
        """Return all queued events without waiting for new events."""
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
        """Close the inotify queue, which removes all watches."""
        os.close(self._fd)

    def _watch(self, path: str, mask: int) -> int:
        number: int = self._add(self._fd, os.fsencode(path), mask)
        if number < 0:
            raise _error(path)
        return number


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)
