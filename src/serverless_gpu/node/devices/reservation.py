"""Reserves devices for a gang, or borrows devices from a session.

An attempt calls `DeviceReservation.try_take` repeatedly until it has reserved all of its devices. The attempt must be
first in the queue for its device type. A reservation takes all of the attempt's devices or none. The reservation checks
quarantined devices again and uses them once they are clean. The reservation skips devices that other processes use,
unless `ignore_busy=True`. `BorrowedDevices` is the counterpart for a run in a session:

    supervisor ──Borrow──▶ session          the connection represents the queue position, then the loan
               ◀──Lent──── lock descriptors, and the writing end of a pipe

If the session's process is killed, the lock descriptors keep the devices locked. The session reads end of file from the
loan's pipe when the supervisor and its stem have ended.

Failure cases: If a supervisor is killed, its stem keeps copies of the lock descriptors until every rank has ended. When
the last rank has ended, the kernel releases the device locks. If a waiting process is killed, the kernel releases its
ticket.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, format_clock
from serverless_gpu.errors import AgentUnavailable, SessionEnded, StorageError
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.devices.gpu_gate import Verdict, foreign, judge
from serverless_gpu.node.devices.inventory import FakeProvider, Provider, providers
from serverless_gpu.node.devices.locks import (
    Busy,
    DeviceLocks,
    LockedDevices,
    LockHolder,
    Quarantine,
    Ticket,
    lock_directory,
)
from serverless_gpu.node.devices.nvml import Usage, unknown_usage
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.processes.process_tree import ProcessIdentity

_NAMED_MAX = 4
# Seconds to wait for the session's answer, which usually takes less than a millisecond. After the timeout, the
# supervisor continues and tries again.
_ANSWER_S = 0.05


class DeviceReservation:
    """Reserves, holds and releases the devices of one attempt."""

    def __init__(self, launch: Launch, home: Home, clock: Clock, machine: Provider | None) -> None:
        kind = launch.candidates[0].kind
        self.devices: tuple[Device, ...] = ()  # Devices in LOCAL_RANK order; empty until `try_take` succeeds.
        self.before: Mapping[str, Usage] = {}  # Device usage at the time of the reservation.
        self.ahead = 0  # Number of runs ahead of this run in the queue.
        self.provider = find_provider(kind, launch.context.environ, home, machine)
        self._launch = launch
        self._clock = clock
        self._locks = DeviceLocks(lock_directory(kind, home.root), clock=clock)
        self._locked: LockedDevices | None = None
        self._queue = contextlib.ExitStack()
        self._ticket = self._queue.enter_context(Ticket(self._locks.directory, launch.candidates[0].type))

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the device lock descriptors. The stem keeps copies of the descriptors while a rank may run."""
        return self._locked.fds if self._locked else ()

    def try_take(self) -> str | None:
        """Reserve the devices now, or return the reason why the run must wait. Raises StorageError."""
        ahead = self.ahead = self._ticket.ahead()
        uuids = [device.uuid for device in self._launch.candidates]
        if ahead:
            cause = f"{ahead} {'run is' if ahead == 1 else 'runs are'} ahead in the queue"
            return self._sentence(cause, self._holders(uuids))
        busy = self.retest_quarantined()
        usage = self.provider.usage(uuids)
        free: list[str] = []
        for uuid in uuids:
            used_by = foreign(usage.get(uuid, unknown_usage("the driver returned no usage for this device")))
            if uuid in busy:
                continue
            if used_by is not None and not self._launch.spec.resources.ignore_busy:
                busy[uuid] = used_by
            else:
                free.append(uuid)
        count = self._launch.world_size
        if len(free) < count:
            return self._sentence(_foreign_text(busy), self._holders(uuids))
        session = self._launch.idle_timeout_s is not None
        holder = LockHolder("", self._launch.run_id, user_name(), os.getpid(), self._clock.wall_ns(), session)
        taken = self._locks.try_lock(free, count, holder)
        if isinstance(taken, Busy):
            return self._sentence(_foreign_text(busy), taken.holders)
        self._locked = taken
        by_uuid = {device.uuid: device for device in self._launch.candidates}
        self.devices = tuple(by_uuid[uuid] for uuid in taken.uuids)
        self.before = {uuid: usage[uuid] for uuid in taken.uuids if uuid in usage}
        self._queue.close()
        return None

    def give_back(self, verdicts: Mapping[str, Verdict], left: tuple[ProcessIdentity, ...] = ()) -> tuple[str, ...]:
        """Release the devices. Quarantine the devices that failed verification, and return their uuids.

        `left` contains processes of the run that the supervisor could not end.
        """
        bad = quarantine(self._locks, verdicts, self._launch.run_id, left)
        self.close()
        return bad

    def close(self) -> None:
        """Release all device locks and the queue ticket."""
        self._queue.close()
        if self._locked is not None:
            self._locked.release()

    def fds_of(self, uuids: Collection[str]) -> tuple[int, ...]:
        """Return the lock descriptors of some of the devices."""
        return tuple(fd for device, fd in zip(self.devices, self.fds, strict=True) if device.uuid in uuids)

    def retest_quarantined(self) -> dict[str, str]:
        """Lift the quarantine of clean devices. Return the reasons of the remaining quarantines by uuid."""
        notes = retest_quarantined(self._locks, self.provider, [device.uuid for device in self._launch.candidates])
        return {uuid: f"in quarantine {note.reason}" for uuid, note in notes.items()}

    def _holders(self, uuids: list[str]) -> tuple[LockHolder, ...]:
        """Return the current holders of devices by trying to lock all of the devices."""
        probe = self._locks.try_lock(uuids, len(uuids), LockHolder("", self._launch.run_id, "", os.getpid(), 0))
        if isinstance(probe, Busy):
            return probe.holders
        probe.release()
        return ()

    def _sentence(self, cause: str, holders: tuple[LockHolder, ...]) -> str:
        count, kind = self._launch.world_size, self._launch.candidates[0]
        noun = "CPU slot" if kind.kind is DeviceKind.CPU else kind.type
        wanted = f"waiting for {count} {noun}{'s' if count > 1 and kind.kind is DeviceKind.CPU else ''}"
        by_run: dict[str, list[LockHolder]] = {}
        for holder in holders:
            by_run.setdefault(holder.run_id, []).append(holder)
        parts = [_held_text(held) for held in list(by_run.values())[:_NAMED_MAX]]
        if len(by_run) > _NAMED_MAX:
            parts.append(f"and {len(by_run) - _NAMED_MAX} more runs")
        return f"{wanted}: " + "; ".join(part for part in [cause, *parts] if part)


class BorrowedDevices:
    """Borrows devices of a session for one attempt and returns the devices."""

    def __init__(self, launch: Launch, home: Home, sockets: Path, machine: Provider | None) -> None:
        kind = launch.candidates[0].kind
        self.devices: tuple[Device, ...] = ()  # Devices in LOCAL_RANK order; empty until `try_take` succeeds.
        self.before: Mapping[str, Usage] = {}  # Device usage at the time of the loan.
        self.ahead = 0
        self.fds: tuple[int, ...] = ()
        self.provider = find_provider(kind, launch.context.environ, home, machine)
        self._locks = DeviceLocks(lock_directory(kind, home.root))
        self._launch = launch
        self._sentence = f"waiting for an answer from session {launch.session}"
        self._path = str(sockets / f"{launch.session}.sock")
        self._channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._asked = False

    def try_take(self) -> str | None:
        """Take the devices that the session has lent, or return the reason why this run waits.

        Raises SessionEnded if the session has ended, and AgentUnavailable if the session has too many connections.
        """
        try:
            if not self._asked:
                self._ask()
            while not self.devices:
                received = protocol.receive(self._channel)
                if received is None:
                    raise self._ended()
                self._take(received[0], received[1])
        except (BlockingIOError, TimeoutError):
            self._channel.sock.setblocking(False)
            return self._sentence
        except (OSError, msgspec.MsgspecError):
            raise self._ended() from None
        self.before = dict(self.provider.usage([device.uuid for device in self.devices]))
        return None

    def give_back(self, verdicts: Mapping[str, Verdict], left: tuple[ProcessIdentity, ...] = ()) -> tuple[str, ...]:
        """Give the devices back to the session. Return the uuids of quarantined devices."""
        bad = quarantine(self._locks, verdicts, self._launch.run_id, left)
        with contextlib.suppress(OSError):  # A failed send means that the session's process has ended.
            protocol.send(self._channel, protocol.Returned(unfit=bad))
        self.close()
        return bad

    def close(self) -> None:
        """Close all descriptors of the loan. A second `close` does nothing."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
        self._channel.close()

    def _ask(self) -> None:
        self._channel.sock.setblocking(False)
        self._channel.sock.connect(self._path)
        # If the session has already closed the connection, its last message contains the reason.
        with contextlib.suppress(BrokenPipeError):
            protocol.send(self._channel, protocol.Borrow(run_id=self._launch.run_id, count=self._launch.world_size))
        self._asked = True
        self._channel.sock.settimeout(_ANSWER_S)

    def _take(self, message: protocol.AnyMessage, fds: tuple[int, ...]) -> None:
        if isinstance(message, protocol.Lent):
            self.devices, self.fds = message.devices, fds
        elif isinstance(message, protocol.WaitingNote):
            self._sentence = message.sentence
            # The session sends its first answer at once, and later answers only after a change.
            self._channel.sock.setblocking(False)
        elif isinstance(message, protocol.Refused):
            self._channel.close()
            raise AgentUnavailable(message.message, hint=message.hint)

    def _ended(self) -> SessionEnded:
        self._channel.close()
        return SessionEnded(
            f"session {self._launch.session} has ended, so run {self._launch.run_id} cannot use its devices",
            hint="open another session with serverless_gpu.session(...)",
        )


def retest_quarantined(locks: DeviceLocks, provider: Provider, uuids: Collection[str]) -> dict[str, Quarantine]:
    """Lift the quarantine of clean devices. Return the remaining quarantines by uuid.

    Raises StorageError.
    """
    notes = {uuid: note for uuid, note in locks.quarantined().items() if uuid in uuids}
    if not notes:
        return {}
    usage = provider.usage(list(notes))
    for uuid, note in list(notes.items()):
        used = usage.get(uuid, unknown_usage("the driver returned no usage for this device"))
        if locks.is_settled(note):
            continue
        if not any(left.is_there() for left in note.left) and judge(None, used, kind=provider.kind).ok:
            locks.lift(uuid)
            del notes[uuid]
    return notes


def quarantine(
    locks: DeviceLocks, verdicts: Mapping[str, Verdict], run_id: str, left: tuple[ProcessIdentity, ...] = ()
) -> tuple[str, ...]:
    """Quarantine the devices that failed verification after a run, while the caller holds their locks.

    Return the uuids of the quarantined devices.
    """
    bad = tuple(uuid for uuid, verdict in verdicts.items() if not verdict.ok)
    noted: Mapping[str, Quarantine] = {}
    with contextlib.suppress(StorageError):
        noted = locks.quarantined() if bad else {}
    for uuid in bad:
        fault = noted[uuid].fault if uuid in noted and locks.is_settled(noted[uuid]) else ""
        if fault and not left:
            continue  # A fault that the driver reported is stronger evidence than the device check.
        # Even without a quarantine note, the next device check refuses the device. The receipt also lists the device.
        with contextlib.suppress(StorageError):
            locks.quarantine(uuid, f"after run {run_id}: {verdicts[uuid].evidence}", left, fault=fault)
    return bad


def _held_text(held: Sequence[LockHolder]) -> str:
    """Return a description of the holder of some devices."""
    first = held[0]
    names = ", ".join(holder.uuid for holder in held[:_NAMED_MAX])
    if len(held) > _NAMED_MAX:
        names += f" and {len(held) - _NAMED_MAX} more"
    are = f"{names} {'is' if len(held) == 1 else 'are'} held"
    if not first.run_id:
        return are
    # The message contains a time instead of a duration, because the supervisor sends each changed message again.
    since = format_clock(first.since_wall_ns)
    what = "session" if first.session else "run"
    return f"{are} by {what} {first.run_id} of {first.user} (pid {first.pid}, since {since})"


def user_name() -> str:
    """Return the user name of this process, or its uid."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # In a container, the user may have no entry in the user database.
        return f"uid {os.getuid()}"


def find_provider(kind: DeviceKind, environ: Mapping[str, str], home: Home, machine: Provider | None) -> Provider:
    """Return the device provider for a kind of devices."""
    if kind is DeviceKind.GPU and machine is not None:
        return machine
    for provider in providers(home.root, environ, read_configuration(home).types):
        if provider.kind is kind:
            return provider
    return FakeProvider("", home.root)


def _foreign_text(busy: Mapping[str, str]) -> str:
    named = [f"{uuid}: {why}" for uuid, why in list(busy.items())[:_NAMED_MAX]]
    if len(busy) > _NAMED_MAX:
        named.append(f"and {len(busy) - _NAMED_MAX} more")
    return "; ".join(named)
