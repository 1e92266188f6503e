"""Locks of devices: flock files, one per uuid, and a queue of tickets for waiters.

    <directory>/<uuid>.lock              flock held = device lent; the content only says by whom
    <directory>/<uuid>.quarantine        not empty = the device must not be lent; the content says why
    <directory>/<queue>.<number>.ticket  flock held = this waiter lives; the lower number goes first
    <directory>/*.mutex                  held for a few file operations, so that no two takers get half of a set each

A flock belongs to the open file: it goes when the last copy of the descriptor is closed, so also when its holder is
killed, and it stays while someone the descriptor was handed to (`LockedDevices.fds`) lives. No crash needs cleaning up.

It does not choose devices, wait, or talk to NVML.

Failure cases:
- real GPUs are locked machine-wide, by every user: the directory is world-writable like /tmp, files are 0666, and
  whatever is not a plain file of its own (a planted symbolic or hard link, a pipe) is refused with StorageError. The
  lock is cooperative: a user who wants to break it can, as they could use the GPU without asking;
- a cleaner of temporary directories that deletes a held file would let two holders in. Taking checks that the locked
  file still has that name, and a flock on the directory, held as long as the lock, makes systemd-tmpfiles skip it;
- the mutex is waited for at most a second and then done without: exclusion never rests on it, only fairness;
- contents are written by other users: bounded, checked, and never shown with control characters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.base.lock_files import (
    OPEN,
    PAUSE_S,
    create,
    is_named,
    is_taken,
    mutex,
    open_file,
    opened,
    opened_directory,
    read_note,
)
from serverless_gpu.node.processes.process_tree import ProcessIdentity

MACHINE_DIRECTORIES = (Path("/run/lock/serverless_gpu"), Path("/tmp/serverless_gpu-locks"))
"""Directories of real GPUs' locks, best first: /run/lock is not writable for everybody on every distribution."""

_TEXT_MAX = 1000
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOT_QUEUE = re.compile(r"[^A-Za-z0-9_-]")
_TICKET = re.compile(r"(.+)\.(\d{18})\.ticket")
_DEVICES = "devices.mutex"


class LockHolder(Struct, frozen=True):
    """Holder of a device, since when (nanoseconds since 1970); `run_id` is empty for an unreadable note.

    A session holds devices also while no run uses them.
    """

    uuid: str
    run_id: str
    user: str
    pid: int
    since_wall_ns: int
    session: bool = False


class Quarantine(Struct, frozen=True):
    """Why a device must not be lent, since when (nanoseconds since 1970)."""

    reason: str
    since_wall_ns: int
    left: tuple[ProcessIdentity, ...] = ()  # processes that could not be ended; it stays while one of them lives
    fault: str = ""  # a `model.xid.XidKind`, or ""
    boot_id: str = ""  # of the boot in which no look at it is proof enough, or ""


class Busy(Struct, frozen=True):
    """The answer when not enough devices were free: who holds the others, and which are in quarantine."""

    holders: tuple[LockHolder, ...]
    quarantined: tuple[str, ...] = ()


class LockedDevices:
    """Devices that are ours until `release`, or until this process and everyone given `fds` is gone."""

    def __init__(self, uuids: tuple[str, ...], fds: tuple[int, ...], held: contextlib.ExitStack) -> None:
        self.uuids = uuids  # in the order of the candidates
        self.fds = fds  # one open lock file per device; a copy in another process keeps the device locked
        self._held = held

    def release(self) -> None:
        """Close our descriptors; the devices are free when no copy is left elsewhere. Idempotent."""
        self.fds = ()
        self._held.close()

    def __enter__(self) -> LockedDevices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class DeviceLocks:
    """The locks and quarantine notes of one directory (`lock_directory`), made (0700) if missing.

    Methods raise StorageError when the directory or a file in it cannot be used.
    """

    def __init__(self, directory: Path, *, clock: Clock | None = None) -> None:
        self.directory = directory
        self._clock: Clock = clock or SystemClock()

    def try_lock(self, uuids: Sequence[str], count: int, holder: LockHolder) -> LockedDevices | Busy:
        """Take the first `count` free devices in the order given, or none; never wait for a device.

        The `uuid` of `holder` is replaced by each device's. Raises InvalidValue for an impossible `count`.
        """
        candidates = tuple(dict.fromkeys(uuids))
        if not 1 <= count <= len(candidates):
            raise InvalidValue(f"{count} devices cannot be taken from {len(candidates)} candidates.")
        taken: dict[str, int] = {}
        holders: list[LockHolder] = []
        quarantined: list[str] = []
        with opened_directory(self.directory) as directory, mutex(directory, _DEVICES), contextlib.ExitStack() as held:
            for uuid in candidates:
                if len(taken) == count:
                    break
                found = _take(directory, uuid)
                if isinstance(found, LockHolder):
                    holders.append(found)
                elif isinstance(found, Quarantine):
                    quarantined.append(uuid)
                else:
                    taken[uuid] = found
                    held.callback(os.close, found)
            if len(taken) < count:
                return Busy(tuple(holders), tuple(quarantined))
            for uuid, fd in taken.items():
                _write(fd, msgspec.structs.replace(holder, uuid=uuid))
            guard = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)  # keeps cleaners out
            held.callback(os.close, guard)
            with contextlib.suppress(BlockingIOError):  # a cleaner is at work this very moment; `is_named` covers that
                fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return LockedDevices(tuple(taken), tuple(taken.values()), held.pop_all())

    def holders(self, uuids: Sequence[str]) -> tuple[LockHolder, ...]:
        """Return the holders of these devices; free and quarantined ones are missing."""
        held: list[LockHolder] = []
        # With the mutex, so that no taker finds a device busy because of this test.
        with opened_directory(self.directory) as directory, mutex(directory, _DEVICES):
            for uuid in dict.fromkeys(uuids):
                found = _take(directory, uuid)
                if isinstance(found, int):
                    os.close(found)
                elif isinstance(found, LockHolder):
                    held.append(found)
        return tuple(held)

    def waiting(self, queue: str) -> int:
        """Return how many live processes wait in a queue."""
        return Ticket(self.directory, queue).ahead()

    def quarantine(self, uuid: str, reason: str, left: tuple[ProcessIdentity, ...] = (), *, fault: str = "") -> None:
        """Keep a device from being lent until `lift`; do it before releasing its lock.

        After a `fault`, only a restart of the machine, or a person, makes it good again.
        """
        boot_id = self._clock.boot_id() if fault else ""
        note = Quarantine(reason[:_TEXT_MAX], self._clock.wall_ns(), left, fault, boot_id)
        with opened_directory(self.directory) as directory, opened(directory, f"{_checked(uuid)}.quarantine") as fd:
            _write(fd, note)

    def quarantined(self) -> dict[str, Quarantine]:
        """Return the devices in quarantine; a note that cannot be read counts as one."""
        with opened_directory(self.directory) as directory:
            names = sorted(name for name in os.listdir(directory) if name.endswith(".quarantine"))
            notes = {uuid: _read_quarantine(directory, uuid) for uuid in (name.rpartition(".")[0] for name in names)}
        return {uuid: note for uuid, note in notes.items() if note is not None}

    def is_settled(self, note: Quarantine) -> bool:
        """Return whether no look at a device can make its note void: the driver said what it is about."""
        return bool(note.boot_id) and note.boot_id == self._clock.boot_id()

    def noted_ns(self, uuid: str) -> int:
        """Return when a device's note was last written or lifted, nanoseconds since 1970; 0 for never."""
        try:
            return os.stat(self.directory / f"{_checked(uuid)}.quarantine", follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    def lift(self, uuid: str) -> None:
        """Let a device be lent again; nothing happens if it is not in quarantine."""
        with opened_directory(self.directory) as directory, opened(directory, f"{_checked(uuid)}.quarantine") as fd:
            # Emptied, not deleted: in a sticky directory only the file's owner may delete it, but anyone may lift.
            os.ftruncate(fd, 0)


class Ticket:
    """A place in a queue, first come first served, kept while this object is open and its process lives.

    A context manager: entering takes the next number (or raises StorageError), leaving gives it up.
    """

    def __init__(self, directory: Path, queue: str) -> None:
        self.directory = directory
        self._queue = _NOT_QUEUE.sub("_", queue)  # two names that fall together only share a queue
        self._number = 0
        self._fd = -1

    def __enter__(self) -> Ticket:
        with opened_directory(self.directory) as directory, mutex(directory, f"{self._queue}.mutex") as counter:
            self._number = max(self._numbers(directory), default=0)
            with contextlib.suppress(msgspec.MsgspecError):
                self._number = max(from_json(read_note(counter), int), self._number, 0)
            while self._fd < 0:
                self._number += 1
                with contextlib.suppress(FileExistsError):  # only when the mutex had to be done without
                    self._fd = create(directory, self._name(self._number))
            with contextlib.ExitStack() as undo:
                undo.callback(self._give_up)
                # Locked before the mutex is free, so that no waiter takes this ticket for a dead one.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # No number is used twice: who clears away a dead ticket must not hit a new one of the same name.
                _write(counter, self._number)
                undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up()

    def ahead(self) -> int:
        """Return how many living waiters came before; all there are, for one that is not in the queue."""
        with opened_directory(self.directory) as directory:
            numbers = [number for number in self._numbers(directory) if number < self._number or not self._number]
            return sum(_waits(directory, self._name(number)) for number in numbers)

    def _give_up(self) -> None:
        if self._fd >= 0:
            # The ticket is dead once it is closed; deleting it only keeps the directory small.
            with contextlib.suppress(StorageError), opened_directory(self.directory) as directory:
                os.unlink(self._name(self._number), dir_fd=directory)
            os.close(self._fd)
            self._fd = -1

    def _name(self, number: int) -> str:
        return f"{self._queue}.{number:018d}.ticket"

    def _numbers(self, directory: int) -> list[int]:
        matches = map(_TICKET.fullmatch, os.listdir(directory))
        return [int(match[2]) for match in matches if match and match[1] == self._queue]


def lock_directory(kind: DeviceKind, home: Path, *, machine: Sequence[Path] = MACHINE_DIRECTORIES) -> Path:
    """Return the directory of locks for this kind, made if needed: machine-wide for GPUs, else the home's.

    `machine` are candidates for the machine-wide directory, best first. Raises StorageError if none can be used.
    """
    if kind is not DeviceKind.GPU:
        return home / "locks"
    # One that exists wins over a better one that does not: all users must meet in the same place.
    for path in machine:
        if os.path.lexists(path):
            return _checked_shared(path)
    refusals = []
    for path in machine:
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o1777)  # mkdir's own mode is cut by the umask
        except FileExistsError:  # another process was faster
            return _checked_shared(path)
        except OSError as error:
            refusals.append(f"{path}: {error.strerror}")
        else:
            return path
    raise StorageError(
        f"No directory for the machine-wide GPU locks can be made ({'; '.join(refusals)}).",
        hint=f"make one that everybody can write: `sudo install -d -m 1777 {machine[0]}`",
    )


def _checked_shared(path: Path) -> Path:
    """Return `path` if it is a directory that we can write; wait a moment for one that is just being made."""
    for _ in range(10):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise StorageError(
                f"{path} must be a directory for GPU locks and is something else.",
                hint=f"see what it is with `ls -ld {path}`, then remove it",
            )
        if os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return path
        time.sleep(PAUSE_S)
    raise StorageError(
        f"The directory for GPU locks, {path}, cannot be written by this user.",
        hint=f"open it for everybody: `sudo chmod 1777 {path}`",
    )


def _take(directory: int, uuid: str) -> int | LockHolder | Quarantine:
    """Return an open, locked file; or who holds the device; or why it must not be lent."""
    name = f"{_checked(uuid)}.lock"
    for _ in range(3):
        with contextlib.ExitStack() as opened:
            fd = open_file(directory, name)
            opened.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(fd, uuid)
            if not is_named(directory, name, fd):
                continue
            # Read after locking: the holder before us writes its note before it lets go.
            note = _read_quarantine(directory, uuid)
            if note is not None:
                return note
            opened.pop_all()
            return fd
    raise StorageError(f"The lock file {name} is deleted again and again while it is being taken.")


def _waits(directory: int, name: str) -> bool:
    """Return whether a ticket's owner lives; a dead one's ticket is cleared away where we may."""
    try:
        fd = os.open(name, os.O_RDONLY | OPEN, dir_fd=directory)
    except OSError:  # given up meanwhile, or not a ticket at all
        return False
    try:
        if is_taken(fd):
            return True
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
    return False


def _checked(uuid: str) -> str:
    if not _UUID.fullmatch(uuid):
        raise InvalidValue(f"{uuid!r} is not a device uuid.")
    return uuid


def _write(fd: int, content: LockHolder | Quarantine | int) -> None:
    text = msgspec.json.encode(content)
    # Written first and cut after: at no moment is the file empty, which would read as "no quarantine".
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def holder_run_id(note: bytes) -> str:
    """Return the run of a lock's note, or "" for a note that is not one."""
    try:
        return from_json(note, LockHolder).run_id
    except msgspec.MsgspecError:
        return ""


def _read_holder(fd: int, uuid: str) -> LockHolder:
    try:
        holder = from_json(read_note(fd), LockHolder)
    except msgspec.MsgspecError:  # taken this moment and not yet written, or not written by us
        return LockHolder(uuid=uuid, run_id="", user="", pid=0, since_wall_ns=0)
    return msgspec.structs.replace(holder, uuid=uuid, run_id=_plain(holder.run_id), user=_plain(holder.user))


def _read_quarantine(directory: int, uuid: str) -> Quarantine | None:
    try:
        fd = os.open(f"{uuid}.quarantine", os.O_RDONLY | OPEN, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Quarantine(f"the quarantine note cannot be read: {error.strerror}", 0)
    try:
        text = read_note(fd)
        note = from_json(text, Quarantine) if text else None
    except (OSError, msgspec.MsgspecError) as error:
        return Quarantine(f"the quarantine note cannot be read: {error}", 0)
    finally:
        os.close(fd)
    return note and msgspec.structs.replace(note, reason=_plain(note.reason))


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_TEXT_MAX]
