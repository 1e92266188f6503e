"""Device locks: a flock file per device uuid, and a queue of tickets for waiting processes.

    <directory>/<uuid>.lock              flock held = device lent; the content only names the holder
    <directory>/<uuid>.quarantine        not empty = the device must not be lent; the content names the reason
    <directory>/<queue>.<number>.ticket  flock held = this waiter runs; the lowest number is first
    <directory>/*.mutex                  held briefly; prevents two processes from locking half of the devices each

The kernel releases a flock when the last copy of its descriptor (`LockedDevices.fds`) is closed. Crashes require no
cleanup, because the kernel closes the descriptors of killed processes.

This module does not choose devices, wait, or call NVML.

Failure cases:

Users of one machine share the locks of real GPUs. The lock directory is world-writable like /tmp, and its files have
mode 0666. If another user has replaced a lock file with a link or a pipe, the functions raise StorageError. A user can
bypass the advisory locks and use any GPU.

If a cleanup service for temporary directories deletes a locked file, a second process could lock the device. After
locking a file, the module therefore checks that the file's path still exists. Each lock also includes a flock on the
directory, so that systemd-tmpfiles skips the directory.

A process waits for the mutex for at most a second, and then continues without the mutex. Without the mutex, the queue
may be unfair. The locks remain exclusive.

Other users may write arbitrary data to lock files. Readers of lock files therefore limit the size, validate the
content, and remove control characters.
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
"""Directories for the locks of real GPUs, best first. On some systems, not all users can write to /run/lock."""

_TEXT_MAX = 1000
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOT_QUEUE = re.compile(r"[^A-Za-z0-9_-]")
_TICKET = re.compile(r"(.+)\.(\d{18})\.ticket")
_DEVICES = "devices.mutex"


class LockHolder(Struct, frozen=True):
    """The run or session that holds a device, with the lock's start in nanoseconds since 1970.

    `run_id` is empty if the note in the lock file is unreadable. A session holds its devices even while no run uses
    them.
    """

    uuid: str
    run_id: str
    user: str
    pid: int
    since_wall_ns: int
    session: bool = False


class Quarantine(Struct, frozen=True):
    """Quarantine of a device: the reason, and the start in nanoseconds since 1970."""

    reason: str
    since_wall_ns: int
    # Processes that the supervisor could not end. The device stays in quarantine while any of these processes runs.
    left: tuple[ProcessIdentity, ...] = ()
    fault: str = ""  # Kind of the device's fault (a `model.xid.XidKind`), or "".
    boot_id: str = ""  # Identifier of the boot with the fault, or "".


class Busy(Struct, frozen=True):
    """Result of `try_lock` if too few devices are free: holders and quarantined devices."""

    holders: tuple[LockHolder, ...]
    quarantined: tuple[str, ...] = ()


class LockedDevices:
    """Locked devices. The lock ends on `release`, or when all processes with copies of `fds` have ended."""

    def __init__(self, uuids: tuple[str, ...], fds: tuple[int, ...], held: contextlib.ExitStack) -> None:
        self.uuids = uuids  # Uuids of the devices, in the order of the candidates.
        # Lock descriptors, one per device. Another process with a copy of a descriptor keeps the device locked.
        self.fds = fds
        self._held = held

    def release(self) -> None:
        """Close this process's lock descriptors. A second `release` does nothing.

        A device is free once no other process has a copy of its lock descriptor.
        """
        self.fds = ()
        self._held.close()

    def __enter__(self) -> LockedDevices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class DeviceLocks:
    """Device locks and quarantine notes in a lock directory (`lock_directory`).

    Methods create the directory with mode 0700 if needed. The methods raise StorageError if a file operation fails.
    """

    def __init__(self, directory: Path, *, clock: Clock | None = None) -> None:
        self.directory = directory
        self._clock: Clock = clock or SystemClock()

    def try_lock(self, uuids: Sequence[str], count: int, holder: LockHolder) -> LockedDevices | Busy:
        """Lock the first `count` free devices in the given order, or none, without waiting for a device.

        Each device's uuid replaces the `uuid` of `holder`. Raises InvalidValue for an impossible `count`.
        """
        candidates = tuple(dict.fromkeys(uuids))
        if not 1 <= count <= len(candidates):
            raise InvalidValue(f"{count} is not a valid number of devices for {len(candidates)} candidates.")
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
            # The lock on the directory keeps cleanup services from deleting its files.
            guard = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            held.callback(os.close, guard)
            # If a cleanup service holds the lock on the directory now, `is_named` later detects deleted files.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return LockedDevices(tuple(taken), tuple(taken.values()), held.pop_all())

    def holders(self, uuids: Sequence[str]) -> tuple[LockHolder, ...]:
        """Return the holders of devices. The result omits free and quarantined devices."""
        held: list[LockHolder] = []
        # The mutex keeps other processes from mistaking this test for a lock holder.
        with opened_directory(self.directory) as directory, mutex(directory, _DEVICES):
            for uuid in dict.fromkeys(uuids):
                found = _take(directory, uuid)
                if isinstance(found, int):
                    os.close(found)
                elif isinstance(found, LockHolder):
                    held.append(found)
        return tuple(held)

    def waiting(self, queue: str) -> int:
        """Return the number of processes that wait in a queue."""
        return Ticket(self.directory, queue).ahead()

    def quarantine(self, uuid: str, reason: str, left: tuple[ProcessIdentity, ...] = (), *, fault: str = "") -> None:
        """Put a device in quarantine until `lift`. The caller must still hold the device's lock.

        After a `fault`, only a reboot or an operator can make the device usable again.
        """
        boot_id = self._clock.boot_id() if fault else ""
        note = Quarantine(reason[:_TEXT_MAX], self._clock.wall_ns(), left, fault, boot_id)
        with opened_directory(self.directory) as directory, opened(directory, f"{_checked(uuid)}.quarantine") as fd:
            _write(fd, note)

    def quarantined(self) -> dict[str, Quarantine]:
        """Return the devices in quarantine.

        A device with an unreadable quarantine note is also in quarantine.
        """
        with opened_directory(self.directory) as directory:
            names = sorted(name for name in os.listdir(directory) if name.endswith(".quarantine"))
            notes = {uuid: _read_quarantine(directory, uuid) for uuid in (name.rpartition(".")[0] for name in names)}
        return {uuid: note for uuid, note in notes.items() if note is not None}

    def is_settled(self, note: Quarantine) -> bool:
        """Return True if no check can lift a quarantine before a reboot, because the driver reported a fault."""
        return bool(note.boot_id) and note.boot_id == self._clock.boot_id()

    def noted_ns(self, uuid: str) -> int:
        """Return the modification time of a device's quarantine note in nanoseconds since 1970, or 0."""
        try:
            return os.stat(self.directory / f"{_checked(uuid)}.quarantine", follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    def lift(self, uuid: str) -> None:
        """Lift the quarantine of a device, if any."""
        with opened_directory(self.directory) as directory, opened(directory, f"{_checked(uuid)}.quarantine") as fd:
            # Any user may lift a quarantine. This function empties the note, because in a sticky directory only the
            # file's owner may delete the note.
            os.ftruncate(fd, 0)


class Ticket:
    """A position in a first-come, first-served queue. The position is lost when the process ends.

    As a context manager, the ticket takes the next number on entry and releases the number on exit. Raises StorageError
    on entry.
    """

    def __init__(self, directory: Path, queue: str) -> None:
        self.directory = directory
        # Two queue names may produce the same file name, which only merges the queues.
        self._queue = _NOT_QUEUE.sub("_", queue)
        self._number = 0
        self._fd = -1

    def __enter__(self) -> Ticket:
        with opened_directory(self.directory) as directory, mutex(directory, f"{self._queue}.mutex") as counter:
            self._number = max(self._numbers(directory), default=0)
            with contextlib.suppress(msgspec.MsgspecError):
                self._number = max(from_json(read_note(counter), int), self._number, 0)
            while self._fd < 0:
                self._number += 1
                # A ticket with the next number can exist only if the mutex timed out.
                with contextlib.suppress(FileExistsError):
                    self._fd = create(directory, self._name(self._number))
            with contextlib.ExitStack() as undo:
                undo.callback(self._give_up)
                # The ticket must be locked before the mutex is free, so that no other process considers the ticket
                # abandoned.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Removing an abandoned ticket cannot remove a new ticket of the same name, because the queue never
                # reuses a number.
                _write(counter, self._number)
                undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up()

    def ahead(self) -> int:
        """Return the number of processes ahead in the queue, or of all waiting processes before entry."""
        with opened_directory(self.directory) as directory:
            numbers = [number for number in self._numbers(directory) if number < self._number or not self._number]
            return sum(_waits(directory, self._name(number)) for number in numbers)

    def _give_up(self) -> None:
        if self._fd >= 0:
            # Closing the ticket file releases the ticket. Deleting the ticket file keeps the directory small.
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
    """Return the lock directory of a device kind. Create the directory if needed. Raises StorageError.

    All users share a machine-wide directory for GPUs. `machine` lists candidates for the machine-wide directory, best
    first.
    """
    if kind is not DeviceKind.GPU:
        return home / "locks"
    # An existing lock directory has priority over candidates that do not exist, because all users must share one
    # directory.
    for path in machine:
        if os.path.lexists(path):
            return _checked_shared(path)
    refusals = []
    for path in machine:
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o1777)  # The umask removes bits from the mode that `mkdir` gets.
        except FileExistsError:  # Another process has created the lock directory first.
            return _checked_shared(path)
        except OSError as error:
            refusals.append(f"{path}: {error.strerror}")
        else:
            return path
    raise StorageError(
        f"Could not create a directory for the machine-wide GPU locks ({'; '.join(refusals)}).",
        hint=f"create a directory that every user can write to: `sudo install -d -m 1777 {machine[0]}`",
    )


def _checked_shared(path: Path) -> Path:
    """Return `path` if it is a writable directory.

    Waits briefly while another process creates the directory.
    """
    for _ in range(10):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise StorageError(
                f"{path} must be a directory for GPU locks, but is not a directory.",
                hint=f"inspect the path with `ls -ld {path}`, then remove it",
            )
        if os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return path
        time.sleep(PAUSE_S)
    raise StorageError(
        f"This user cannot write to the directory for GPU locks, {path}.",
        hint=f"make the directory writable for all users: `sudo chmod 1777 {path}`",
    )


def _take(directory: int, uuid: str) -> int | LockHolder | Quarantine:
    """Lock a device. Return the lock's descriptor, or the device's current holder or quarantine."""
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
            # This process must read the note after locking, because the previous holder writes a quarantine note before
            # it unlocks.
            note = _read_quarantine(directory, uuid)
            if note is not None:
                return note
            opened.pop_all()
            return fd
    raise StorageError(f"Another program repeatedly deletes the lock file {name} while it is being locked.")


def _waits(directory: int, name: str) -> bool:
    """Return True if the process of a ticket runs. Delete tickets of ended processes if permitted."""
    try:
        fd = os.open(name, os.O_RDONLY | OPEN, dir_fd=directory)
    except OSError:  # Another process has released the ticket, or the file is not a ticket.
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
    # A quarantine note must never be empty by accident, because an empty note means "no quarantine". The function
    # therefore writes before it truncates.
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def holder_run_id(note: bytes) -> str:
    """Return the run id in a lock's note, or "" for an invalid note."""
    try:
        return from_json(note, LockHolder).run_id
    except msgspec.MsgspecError:
        return ""


def _read_holder(fd: int, uuid: str) -> LockHolder:
    try:
        holder = from_json(read_note(fd), LockHolder)
    except msgspec.MsgspecError:  # The holder has not written its note yet, or another program has written the file.
        return LockHolder(uuid=uuid, run_id="", user="", pid=0, since_wall_ns=0)
    return msgspec.structs.replace(holder, uuid=uuid, run_id=_plain(holder.run_id), user=_plain(holder.user))


def _read_quarantine(directory: int, uuid: str) -> Quarantine | None:
    try:
        fd = os.open(f"{uuid}.quarantine", os.O_RDONLY | OPEN, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Quarantine(f"could not read the quarantine note: {error.strerror}", 0)
    try:
        text = read_note(fd)
        note = from_json(text, Quarantine) if text else None
    except (OSError, msgspec.MsgspecError) as error:
        return Quarantine(f"could not read the quarantine note: {error}", 0)
    finally:
        os.close(fd)
    return note and msgspec.structs.replace(note, reason=_plain(note.reason))


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_TEXT_MAX]
