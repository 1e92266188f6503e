"""Devices borrowed from a session: the counterpart of `Reservation` for a run on its own.

    supervisor ──Borrow──▶ session          the connection is the place in its queue, then the loan
               ◀──Lent──── lock descriptors, and the writing end of a pipe

The lock descriptors keep the devices locked if the session's process is killed. The pipe tells the session when the
loan ends: its end of file means that this supervisor and its stem are both gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.errors import AgentUnavailable, SessionEnded
from serverless_gpu.model.hardware import Device
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.base.usages import Usage
from serverless_gpu.node.devices.gpu_gate import Verdict
from serverless_gpu.node.devices.gpus import Provider
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.devices.reservation import find_provider, quarantine
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.processes.process_tree import Left

_ANSWER_S = 0.05  # usually a few hundred microseconds; then the supervisor has other things to do, and asks again


class Borrowed:
    """The devices of one attempt of a session: wanted, then lent, then given back."""

    def __init__(self, launch: Launch, home: Home, sockets: Path, machine: Provider | None) -> None:
        kind = launch.candidates[0].kind
        self.devices: tuple[Device, ...] = ()  # in LOCAL_RANK order; empty until `try_take` succeeded
        self.before: Mapping[str, Usage] = {}  # usage when they were lent
        self.ahead = 0
        self.fds: tuple[int, ...] = ()
        self.provider = find_provider(kind, launch.context.environ, home, machine)
        self._locks = DeviceLocks(lock_directory(kind, home.root))
        self._launch = launch
        self._sentence = f"waiting for session {launch.session} to answer"
        self._path = str(sockets / f"{launch.session}.sock")
        self._channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._asked = False

    def try_take(self) -> str | None:
        """Take the devices if they have been lent by now, or return what this run waits for.

        Raises SessionEnded before it lent them, AgentUnavailable if it has too many connections.
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

    def give_back(self, verdicts: Mapping[str, Verdict], left: tuple[Left, ...] = ()) -> tuple[str, ...]:
        """Give the devices back with their verdicts and the processes left; return the uuids in quarantine."""
        bad = quarantine(self._locks, verdicts, self._launch.run_id, left)
        with contextlib.suppress(OSError):  # the session's process is gone: the notes above are what counts
            protocol.send(self._channel, protocol.Returned(unfit=bad))
        self.close()
        return bad

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
        self._channel.close()

    def _ask(self) -> None:
        self._channel.sock.setblocking(False)
        self._channel.sock.connect(self._path)
        with contextlib.suppress(BrokenPipeError):  # closed at once: its last words say why
            protocol.send(self._channel, protocol.Borrow(run_id=self._launch.run_id, count=self._launch.world_size))
        self._asked = True
        self._channel.sock.settimeout(_ANSWER_S)

    def _take(self, message: protocol.AnyMessage, fds: tuple[int, ...]) -> None:
        if isinstance(message, protocol.Lent):
            self.devices, self.fds = message.devices, fds
        elif isinstance(message, protocol.Waiting):
            self._sentence = message.sentence
            self._channel.sock.setblocking(False)  # the first answer comes at once, the next when something changes
        elif isinstance(message, protocol.Refused):
            self._channel.close()
            raise AgentUnavailable(message.message, hint=message.hint)

    def _ended(self) -> SessionEnded:
        self._channel.close()
        return SessionEnded(
            f"session {self._launch.session} has ended, so run {self._launch.run_id} cannot use its devices",
            hint="open another with serverless_gpu.session(...)",
        )
