"""Frames of this node's monitor, which is started if needed and again after it ended.

Device locks name the runs of other homes and users.

Failure cases: it cannot be started, or ends repeatedly (`problem`, tried every few seconds), or it is silent for a
while (`problem`). Each version has its own socket.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.cli.top.picture import Around, DeviceOwner
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.devices.locks import DeviceLocks, LockHolder, lock_directory
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages

_AGAIN_NS = 3_000_000_000
_SILENT_NS = 5_000_000_000


class Feed:
    """Frames of the monitor; `connect` returns a connection to it, started if needed."""

    def __init__(self, connect: Callable[[], Channel], fakes: str, clock: Clock) -> None:
        self._connect = connect
        self._fakes = fakes
        self._clock = clock
        self._channel: Channel | None = None
        self._heard_ns = self._tried_ns = clock.boottime_ns()
        self._failure = ""
        self._is_same = False  # whether the last frame is of the monitor that is connected: counters start again
        self.frame: messages.NodeFrame | None = None
        self.before: messages.NodeFrame | None = None

    @property
    def problem(self) -> str:
        """Return why there is nothing new, or ""."""
        if self._channel is None:
            return self._failure
        silent_ns = self._clock.boottime_ns() - self._heard_ns
        return f"the monitor has said nothing for {silent_ns // 10**9} s" if silent_ns > _SILENT_NS else ""

    def fds(self) -> list[int]:
        """Return the descriptors that are readable when there is news."""
        return [] if self._channel is None else [self._channel.fileno()]

    def open(self) -> None:
        """Subscribe to the monitor's frames; raises OSError when it has just ended."""
        channel = self._connect()
        try:
            messages.say(channel, messages.WatchNode(fakes=self._fakes))
            channel.sock.setblocking(False)
        except OSError:
            channel.close()
            raise
        self._channel, self._is_same = channel, False
        self._heard_ns = self._clock.boottime_ns()

    def take(self) -> bool:
        """Read frames, reconnecting to a monitor that has ended; return whether there is a new frame."""
        if self._channel is None:
            self._open_again()
        new = False
        while self._channel is not None:
            try:
                word = messages.hear(self._channel)
            except BlockingIOError:
                break
            except (OSError, msgspec.MsgspecError):
                word = None
            if word is None:
                self.close()
                self._failure = "the monitor has ended; it is started again"
            elif isinstance(word, messages.NodeFrame):
                self.before = self.frame if self._is_same else None
                self.frame, self._is_same, new = word, True, True
                self._heard_ns = self._clock.boottime_ns()
        return new

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open_again(self) -> None:
        now_ns = self._clock.boottime_ns()
        if now_ns - self._tried_ns < _AGAIN_NS:
            return
        self._tried_ns = now_ns
        try:
            self.open()
        except ServerlessGpuError as error:
            self._failure = error.message
        except OSError as error:
            self._failure = f"the monitor cannot be reached: {error.strerror}"


def look_around(devices: Iterable[Device], home: Path, environ: Mapping[str, str]) -> Around:
    """Return names, lock holders and quarantined devices, which a frame lacks."""
    holders: dict[str, DeviceOwner] = {}
    quarantined: dict[str, str] = {}
    by_kind: dict[DeviceKind, list[str]] = {}
    for device in devices:
        by_kind.setdefault(device.kind, []).append(device.uuid)
    for kind, uuids in by_kind.items():
        with contextlib.suppress(StorageError):  # no locks yet, or none that can be read: nothing is known
            directory = lock_directory(kind, home)
            notes = DeviceLocks(directory).quarantined()
            quarantined |= {uuid: notes[uuid].reason for uuid in uuids if uuid in notes}
            holders |= {uuid: owner for uuid in uuids if (owner := _holder(directory, uuid)) is not None}
    return Around(node=socket.gethostname(), user=user_name(environ), holders=holders, quarantined=quarantined)


def user_name(environ: Mapping[str, str]) -> str:
    """Return this user's name, or the number in a container without names."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return environ.get("USER") or str(os.getuid())


def _holder(directory: Path, uuid: str) -> DeviceOwner | None:
    note = held_note(directory / f"{uuid}.lock")
    if note is None:
        return None
    try:
        holder = from_json(note, LockHolder)
    except msgspec.MsgspecError:  # taken this moment, or not by us
        return DeviceOwner(run_id="", name="", rank=None, user="")
    return DeviceOwner(run_id=holder.run_id, name="(session)" if holder.session else "", rank=None, user=holder.user)
