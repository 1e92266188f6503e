"""Attempts of the agent: their supervisors and the owners of their stems.

The agent has one standby supervisor, one supervisor per running attempt, and the supervisors that an earlier agent
started. The agent sends the attempt and the client's socket to a supervisor over a channel. An end of file on the
channel tells the agent that the supervisor has ended.

    rank of a principal's run ──connect──▶ agent: pid ▸ parent ▸ … ▸ a stem that the agent made: its owner

A rank can call the local agent like any process with the same uid. The agent therefore ignores the owner that a rank
claims, and determines the owner from the process tree. Every descendant stays below its stem in the process tree, even
after a double fork, because a stem is a subreaper.

The owner is `UNKNOWN_OWNER` if the process ends before the agent's check, or if an earlier agent created the stem. The
agent never shares a zygote with a run of an unknown owner.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.agent.zygotes import Key
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.claim import try_lock
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.attempt.server_attempt_record import has_remote
from serverless_gpu.node.attempt.supervisor_loss import has_used_devices, lost_ending, note_life, settle_loss
from serverless_gpu.node.attempt.usage_account import write_json
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import UNKNOWN_OWNER, AttemptStatus, Kind
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.processes.process_tree import ProcessIdentity, look_at
from serverless_gpu.node.processes.spawn import clean_process

# Number of tries to lock, 10 ms apart, while the kernel closes the descriptors of a dead supervisor.
_LOCK_TRIES = 5
_STEM = "sgpu-stem"
_STEMS_MAX = 4_096
_DEPTH_MAX = 4_096


class SupervisorLink:
    """The agent's end of the channel to one supervisor."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = 0
        self.run_id = ""
        self.kind: Kind = "function"
        self.adopted = False
        self.directory: Path | None = None
        self.ended_ns: int | None = None  # Time on the boottime clock at which the channel closed, in nanoseconds.
        self.key: Key | None = None  # Key of the zygote that a session keeps running.
        self.stem_pid = 0  # Pid of the stem that the agent sent to the supervisor; 0 without a stem.
        self.environment = ""  # Address of the snapshot that the attempt's ranks use.

    def give_stem(self, stem: protocol.Stem, fd: int) -> None:
        """Send a stem to the supervisor and close the agent's copy of the descriptor."""
        try:
            with contextlib.suppress(OSError):
                protocol.send(self.channel, stem, (fd,))
        finally:
            os.close(fd)

    def give_problem(self, problem: str, reason: Reason = Reason.START_FAILED) -> None:
        """Report to the supervisor the reason for a missing stem."""
        with contextlib.suppress(OSError):
            protocol.send(self.channel, protocol.Stem(problem=problem, reason=reason))

    def tell(self, sentence: str) -> None:
        """Report to the supervisor the progress of the environment that its stem needs."""
        with contextlib.suppress(OSError):
            protocol.send(self.channel, protocol.PreparingNote(sentence=sentence))


class Attempts:
    """All supervisors of one agent, with their attempts."""

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
        self._standby: SupervisorLink | None = None
        self._busy: list[SupervisorLink] = []
        self._ended: list[SupervisorLink] = []

    def count(self) -> int:
        """Return the number of running attempts."""
        return len(self._busy)

    def kept(self) -> frozenset[Key]:
        """Return the keys of zygotes that sessions keep running."""
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
        """Start a standby supervisor. Raises OSError if no process can start."""
        if self._standby is None:
            self._standby = self._spawn()

    def assign(self, message: protocol.Assign, client: Channel) -> SupervisorLink:
        """Send an attempt and its client's socket to a supervisor. Raises OSError if no supervisor can start."""
        supervised, self._standby = self._standby or self._spawn(), None
        try:
            protocol.send(supervised.channel, message, (client.fileno(),))
        except OSError:
            # A new supervisor gets the attempt, because the standby supervisor has died.
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
        """Find the running attempts of an earlier agent by their sockets."""
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
                # The supervisor of this socket has ended. This code can ignore the fence, because the uplink settles
                # attempts of a server.
                path.unlink(missing_ok=True)
                self._bury_at(self._home.attempt(path.stem, 1))
                continue
            except (OSError, msgspec.MsgspecError):
                # This agent cannot control an attempt whose supervisor is busy, stopped or of another version.
                sock.close()
                continue
            if received is None or not isinstance(received[0], protocol.AttemptSnapshot):
                sock.close()
                continue
            snapshot = received[0]
            supervised = SupervisorLink(Channel(sock))
            supervised.pid, supervised.run_id, supervised.kind = snapshot.pid, snapshot.run_id, snapshot.kind
            supervised.adopted = True
            supervised.directory = self._home.attempt(snapshot.run_id, snapshot.fence)
            self._busy.append(supervised)
            self._watch(supervised)

    def tend(self) -> list[SupervisorLink]:
        """Settle attempts whose supervisor has ended. Return the links of these attempts."""
        ended, self._ended = self._ended, []
        for supervised in ended:
            if supervised is self._standby:
                # The agent delays the next standby supervisor, because the same cause may also kill the replacement.
                self._standby = None
            if supervised in self._busy:
                self._busy.remove(supervised)
                if (directory := supervised.directory) is not None:
                    (self._sockets / f"{directory.parent.name}.sock").unlink(missing_ok=True)
                    secret_files.remove(directory)
                    self._bury_at(directory, supervised.ended_ns)
        return ended

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
                return  # The client withdrew the launch and is deleting the attempt directory.
            if not has_remote(directory):
                if has_facts or not has_ended:
                    settle_loss(directory, self._clock, seen_ns=seen_ns)
            elif has_facts:
                note_life(directory, self._clock, seen_ns)
                if not has_ended:
                    write_json(directory / "stopped.json", lost_ending(directory, self._clock))
        except OSError:
            return  # After a failed write, the attempt directory has no `stopped.json`.
        finally:
            os.close(lock)

    def _spawn(self) -> SupervisorLink:
        ours, theirs = pair()
        try:
            self._ask_nursery(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        supervised = SupervisorLink(ours)
        self._watch(supervised)
        return supervised

    def _ask_nursery(self, channel: Channel) -> None:
        """Request a supervisor for `channel` from the nursery. Replace a dead nursery once."""
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

    def _watch(self, supervised: SupervisorLink) -> None:
        self._selector.register(supervised.channel, selectors.EVENT_READ, lambda: self._hear(supervised))

    def _unwatch(self, supervised: SupervisorLink) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(supervised.channel)
        supervised.channel.close()

    def _hear(self, supervised: SupervisorLink) -> None:
        # An adopted supervisor treats the agent as an attached client. The agent ignores client messages from an
        # adopted supervisor.
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
            # The attempt continues, because the supervisor refused only a duplicate launch.
            supervised.directory = None


class _Stem(NamedTuple):
    process: ProcessIdentity
    owner: str


class StemOwners:
    """Maps stems to the owners of the runs that use the stems."""

    def __init__(self) -> None:
        self._stems: dict[int, _Stem] = {}

    def note(self, pid: int, owner: str) -> None:
        """Record the owner of the run that uses a stem."""
        seen = look_at(pid)
        if seen is not None:
            self._stems[pid] = _Stem(seen, owner)
        while len(self._stems) > _STEMS_MAX:
            self._stems.pop(next(iter(self._stems)))

    def owner_of(self, sock: socket.socket) -> str:
        """Return the owner of the attempt in which a Unix socket's peer runs, or "" for the node's own user."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        if pid == 0:
            return ""  # A process in another pid namespace has no ancestor in this namespace.
        above = _ancestors(pid)
        if above is None:
            return UNKNOWN_OWNER
        mine = set(_ancestors(os.getpid()) or ())
        for each in above:
            if each in mine:
                return ""
            stem = self._stems.get(each)
            if stem is not None and stem.process.is_there():
                return stem.owner
            seen = look_at(each)
            if seen is not None and seen.name == _STEM:
                return UNKNOWN_OWNER
        return ""


def combined(said: str, inside: str) -> str:
    """Return the owner of a run from the claimed owner and the owner of the enclosing attempt."""
    if UNKNOWN_OWNER in (said, inside):
        return UNKNOWN_OWNER
    return f"{said}, inside a run of {inside}" if said and inside else said or inside


def _ancestors(pid: int) -> list[int] | None:
    """Return a process and its ancestors, nearest first, or None if the process has ended."""
    found: list[int] = []
    while pid > 0 and len(found) < _DEPTH_MAX:
        try:
            line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found.append(pid)
        pid = int(line.rpartition(")")[2].split()[1])
    return found
