"""The agent's supervisors: a standby one, one per running attempt, and those of an earlier agent.

A supervisor gets its attempt once, over its channel, with the client's socket. After that the channel reports only, by
its end of file, that the supervisor has ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.agent.zygotes import Key
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.account import write_json
from serverless_gpu.node.attempt.claim import try_lock
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.attempt.server_attempt import has_remote
from serverless_gpu.node.attempt.supervisor_loss import has_used_devices, lost_ending, note_life, settle_loss
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.statuses import AttemptStatus, Kind
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.processes.spawn import clean_process

_LOCK_TRIES = 5  # 10 ms apart: the supervisor's descriptors are closed one after another


class Supervised:
    """The agent's end of one supervisor."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = 0
        self.run_id = ""
        self.kind: Kind = "function"
        self.adopted = False
        self.directory: Path | None = None
        self.ended_ns: int | None = None  # boottime at which its end was heard
        self.key: Key | None = None  # of the zygote a session keeps warm
        self.environment = ""  # address of the snapshot that its ranks import from

    def give_stem(self, stem: protocol.Stem, fd: int) -> None:
        """Hand over a stem; the descriptor is closed here in any case, so that only the supervisor holds it."""
        try:
            with contextlib.suppress(OSError):
                protocol.send(self.channel, stem, (fd,))
        finally:
            os.close(fd)

    def give_problem(self, problem: str, reason: Reason = Reason.START_FAILED) -> None:
        """Say that there will be no stem."""
        with contextlib.suppress(OSError):
            protocol.send(self.channel, protocol.Stem(problem=problem, reason=reason))

    def tell(self, sentence: str) -> None:
        """Say what the stem waits for."""
        with contextlib.suppress(OSError):
            protocol.send(self.channel, protocol.PreparingNote(sentence=sentence))


class Attempts:
    """All supervisors of one agent."""

    def __init__(
        self,
        home: Home,
        sockets: Path,
        log: int,
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._home = home
        self._sockets = sockets
        self._log = log
        self._environ = environ
        self._selector = selector
        self._nursery: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._standby: Supervised | None = None
        self._busy: list[Supervised] = []
        self._ended: list[Supervised] = []

    def count(self) -> int:
        """Return how many attempts are looked after."""
        return len(self._busy)

    def kept(self) -> frozenset[Key]:
        """Return the keys of zygotes that sessions keep."""
        return frozenset(supervised.key for supervised in self._busy if supervised.key is not None)

    def statuses(self) -> tuple[AttemptStatus, ...]:
        """Return the status of each attempt."""
        return tuple(
            AttemptStatus(
                run_id=each.run_id,
                pid=each.pid,
                kind=each.kind,
                adopted=each.adopted,
                environment=each.environment,
            )
            for each in self._busy
        )

    def prepare(self) -> None:
        """Start a standby supervisor; raises OSError when no process can be started."""
        if self._standby is None:
            self._standby = self._spawn()

    def assign(self, message: protocol.Assign, client: Channel) -> Supervised:
        """Give an attempt and its client's socket to a supervisor; raises OSError when that fails."""
        supervised, self._standby = self._standby or self._spawn(), None
        try:
            protocol.send(supervised.channel, message, (client.fileno(),))
        except OSError:
            # The one standing by had died unnoticed; a fresh one has not.
            self._unwatch(supervised)
            supervised = self._spawn()
            protocol.send(supervised.channel, message, (client.fileno(),))
        supervised.directory = Path(message.launch.directory)
        supervised.run_id = message.launch.run_id
        supervised.environment = message.launch.environment.snapshot if message.launch.environment else ""
        supervised.kind = "session" if message.launch.idle_timeout_s is not None else "function"
        self._busy.append(supervised)
        return supervised

    def adopt(self) -> None:
        """Find the attempts that an earlier agent left running, by their sockets."""
        for path in self._sockets.glob("*.sock"):
            if path.name.startswith(("agent-", "monitor-")):
                continue
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(1.0)
            try:
                sock.connect(str(path))
                received = protocol.receive(Channel(sock))
            except ConnectionRefusedError:
                sock.close()
                path.unlink(missing_ok=True)  # its supervisor is gone
                self._bury_at(self._home.attempt(path.stem, 1))  # one of a server is the uplink's, whatever its number
                continue
            except (OSError, msgspec.MsgspecError):
                sock.close()  # busy, stopped, or of another version: not ours to look after, but alive
                continue
            if received is None or not isinstance(received[0], protocol.Snapshot):
                sock.close()
                continue
            snapshot = received[0]
            supervised = Supervised(Channel(sock))
            supervised.pid, supervised.run_id, supervised.kind = snapshot.pid, snapshot.run_id, snapshot.kind
            supervised.adopted = True
            supervised.directory = self._home.attempt(snapshot.run_id, snapshot.fence)
            self._busy.append(supervised)
            self._watch(supervised)

    def tend(self) -> bool:
        """Bury those that ended; return whether an attempt did."""
        ended, self._ended = self._ended, []
        for supervised in ended:
            if supervised is self._standby:
                self._standby = None  # not replaced at once: what ended it may end the next one, too
            if supervised in self._busy:
                self._busy.remove(supervised)
                if (directory := supervised.directory) is not None:
                    (self._sockets / f"{directory.parent.name}.sock").unlink(missing_ok=True)
                    secret_files.remove(directory)
                    self._bury_at(directory, supervised.ended_ns)
        return any(supervised.directory is not None for supervised in ended)

    def _bury_at(self, directory: Path, seen_ns: int | None = None) -> None:
        if not directory.exists() or (directory / "receipt.json").exists():
            return
        try:
            lock = try_lock(directory, tries=_LOCK_TRIES)
        except OSError:
            return
        if lock < 0:
            return
        try:
            has_facts, has_ended = bool(first_facts(directory)), (directory / "stopped.json").exists()
            if has_ended and not has_used_devices(directory):
                return  # a launch that was withdrawn: its client deletes the directory at this moment
            if not has_remote(directory):
                if has_facts or not has_ended:
                    settle_loss(directory, self._clock, seen_ns=seen_ns)
            elif has_facts:
                note_life(directory, self._clock, seen_ns)
                if not has_ended:
                    write_json(directory / "stopped.json", lost_ending(directory, self._clock))
        except OSError:
            return  # the disk is broken; who reads the directory finds an attempt without an end
        finally:
            os.close(lock)

    def _spawn(self) -> Supervised:
        ours, theirs = pair()
        try:
            self._ask_nursery(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        supervised = Supervised(ours)
        self._watch(supervised)
        return supervised

    def _ask_nursery(self, channel: Channel) -> None:
        """Have a supervisor forked for the other end of a channel; a nursery that died is replaced once."""
        if self._nursery is not None:
            try:
                self._nursery.send(b"supervisor", (channel.fileno(),))
                return
            except OSError:
                self._nursery.close()
        self._nursery, theirs = pair()
        try:
            self._process = clean_process(
                "serverless_gpu.node.agent.nursery",
                (theirs.fileno(), str(self._home.root), str(self._sockets)),
                fds=(theirs.fileno(),),
                log=self._log,
                environ=self._environ,
            )
        finally:
            theirs.close()
        self._nursery.send(b"supervisor", (channel.fileno(),))

    def _watch(self, supervised: Supervised) -> None:
        self._selector.register(supervised.channel, selectors.EVENT_READ, lambda: self._hear(supervised))

    def _unwatch(self, supervised: Supervised) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(supervised.channel)
        supervised.channel.close()

    def _hear(self, supervised: Supervised) -> None:
        # An adopted supervisor takes us for a watcher and tells us what happens: not our business.
        try:
            received = protocol.receive(supervised.channel)
        except (OSError, msgspec.MsgspecError):
            received = None
        if received is None:
            self._unwatch(supervised)
            supervised.ended_ns = self._clock.boottime_ns()
            self._ended.append(supervised)
        elif isinstance(received[0], protocol.Standby):
            supervised.pid = received[0].pid
        elif isinstance(received[0], protocol.Refused):
            supervised.directory = None  # its launch had come twice, and what it says is not the attempt's
