"""Starts and stops the ranks of one node and turns their messages into lifecycle events.

`gang.py` only holds descriptors and sends messages. `model/lifecycle/attempt_lifecycle.py` decides how an attempt
proceeds.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.endpoint import EndpointTarget
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.isolation import USER
from serverless_gpu.model.lifecycle.attempt import (
    Event,
    Failure,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    Reason,
    StemLost,
)
from serverless_gpu.model.placement import share_of_cores, threads_per_rank
from serverless_gpu.model.redaction import Redactor
from serverless_gpu.model.spec import Command
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.usage_account import AttemptAccount, write_bytes, write_text
from serverless_gpu.node.base.home import in_pool
from serverless_gpu.node.base.protocol import Context, Launch, original
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside import sandbox
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.inside.process_group import ALONE_NOTE_SWITCH
from serverless_gpu.node.output.logs import RankLog, Viewer
from serverless_gpu.node.processes.process_tree import (
    CpuLimit,
    MemoryWatch,
    ProcessIdentity,
    cgroup_empty,
    cgroup_pids,
    kill_cgroup,
    left_in,
    pids_in_namespace,
    remove_cgroup,
    uid_of,
)
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.supervisor.attempt_files import AttemptFiles, attempt_files
from serverless_gpu.node.supervisor.outcome_redaction import mask_failure, unmasked_notes
from serverless_gpu.node.supervisor.rank_environment import Network, RankEnvironment, place_of
from serverless_gpu.node.supervisor.ray_cluster import AttemptCluster, memory_bytes
from serverless_gpu.units import format_bytes

RESULT_BYTES_MAX = 16 << 30
_HOLDS_AT_ONCE = 200  # Linux accepts at most 253 descriptors per message (SCM_MAX_FD).
_SENTENCE_CHARACTERS_MAX = 1_000
_SENTENCES_MAX = 50
_DETAIL_CHARACTERS_MAX = 10_000

_FAILURE_REASONS = {
    "exception": Reason.RANK_RAISED,
    "system_exit": Reason.SYSTEM_EXIT,
    "interrupt": Reason.RANK_INTERRUPTED,
    "cancelled": Reason.RANK_CANCELLED,
    "base": Reason.RANK_CANCELLED,
    "result_too_large": Reason.RESULT_TOO_LARGE,
    "result_unserialisable": Reason.RESULT_UNSERIALISABLE,
    "result_storage": Reason.RESULT_STORAGE,
    "engine_head_lost": Reason.ENGINE_HEAD_LOST,
    "start_failed": Reason.START_FAILED,
}
_LARGE = 20  # A rank with this part of the machine's memory is large.
_PRIVATE_UMASK = 0o077  # Other principals may not read files that a rank creates.
_OF_A_CLUSTER = frozenset({Reason.ENGINE_HEAD_LOST, Reason.START_FAILED})


class HostStem(NamedTuple):
    """The stem of an attempt as the agent sees it: pid on this node, and cgroups that the agent made."""

    pid: int = 0
    cgroups: Sequence[str] = ()


class LocalGang:
    """All ranks of one attempt on this node.

    `context` replaces the caller's context if the restored environment has different paths. `stem` is the attempt's
    stem as the agent sees it. A stem in a sandbox sees another pid.
    """

    def __init__(
        self,
        launch: Launch,
        channel: Channel,
        account: AttemptAccount,
        context: Context | None = None,
        *,
        stem: HostStem | None = None,
        files: AttemptFiles | None = None,
    ) -> None:
        self.launch = launch
        self.context = context or launch.context
        self.channel = channel
        self.account = account
        self.numbers = launch.numbers
        self._command = launch.spec.payload if isinstance(launch.spec.payload, Command) else None
        self._files = files or attempt_files(launch)
        self.environment = RankEnvironment(launch, self.context, self._files)
        self._failed: set[int] = set()
        self._alone: set[int] = set()  # Ranks that trained without communicating with another rank.
        self.redactor: Redactor | None = None  # Masks the run's secrets, if any.
        self.logs: dict[int, RankLog] = {}
        self.pids: dict[int, int] = {}
        self.devices: tuple[Device, ...] = ()  # Devices by LOCAL_RANK, known once the ranks have started.
        self.stacks: dict[int, int] = {}  # Numbers of the ranks' stack dump descriptors, by rank.
        self.on_said: Callable[[str], None] = lambda sentence: None  # Callback for messages from ranks.
        self._sentences_left = _SENTENCES_MAX
        self._cluster: AttemptCluster | None = None  # The Ray cluster of the run on this node.
        self._host_stem = stem or HostStem()
        self.stem_pid = self._host_stem.pid
        self.stem_pidfd = -1
        self._spawner = find_spawner(os.environ)
        self._endpoint_environment: dict[str, str] = {}  # Variables of the node's first rank.
        self._mounts = -1  # Mount namespace of an isolated attempt.
        self.memory: MemoryWatch | None = None
        self._cpus: CpuLimit | None = None
        self._cgroups: tuple[Path, ...] = ()
        self._cgroup: Path | None = None  # The v2 cgroup of the attempt, whose cgroup.kill file ends all processes.
        self.proven = False  # True once it is certain that no process of the attempt exists.

    @property
    def cgroup(self) -> Path | None:
        """Return the cgroup directory through which the kernel can kill the attempt's processes, or None."""
        return self._cgroup

    @property
    def standby(self) -> bool:
        """Return True once the stem has reported that it is ready."""
        return self.stem_pidfd >= 0

    def hear(self) -> list[Event] | None:
        """Read one message from the stem or a rank and return its events, or None at end of file.

        Raises OSError for an unreadable message, and ValueError for an invalid message.
        """
        received = self.channel.receive()
        if received is None:
            return None
        close_all(received[1])
        try:
            return list(self._events(inside.decode(received[0])))
        # A field of the message has the wrong type, or a number is out of range.
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None

    def _events(self, message: inside.Message) -> Iterator[Event]:
        match message.get("event"):
            case "standby":
                self._meet_stem(message)
            case "forked":
                pids = message.get("pids")
                if isinstance(pids, dict):
                    self.pids = self._host_pids({int(rank): int(pid) for rank, pid in pids.items()})
            case "problem":
                yield StemLost(detail=inside.text(message, "detail")[:_DETAIL_CHARACTERS_MAX])
            case "exec":
                self.stacks[self._rank(message)] = inside.integer(message, "stack")
                yield RankExecuting(self._rank(message))
            case "enter":
                self.account.mark("enter", inside.integer(message, "at"))
            case "returned":
                self._alone |= {self._rank(message)} if message.get("alone") is True else set()
                yield RankReturned(self._rank(message))
            case "failed":
                self._store(message)
                record = message.get("failure")
                if self.redactor is not None:
                    record = self.redactor.value(record, {})  # The file of the failure contains the same texts.
                    self.account.notes += mask_failure(Path(self.launch.directory), self._rank(message), self.redactor)
                failure = self._explained(_failure(self._rank(message), message, record))
                self._failed.add(self._rank(message))
                yield RankFailed(failure)
            case "exited":
                exited = self._exited(message)
                if self._command is not None and exited.signal is None and exited.rank not in self._failed:
                    yield _command_ended(exited.rank, message)
                yield exited
            case "say":
                self._pass_on(inside.text(message, "text"), note=message.get("note") is True)
            case "empty":
                self.proven = not self._files.uid

    def start(self, devices: Sequence[Device], network: Network, holds: tuple[int, ...], viewer: Viewer) -> None:
        """Fork all ranks, one per device in LOCAL_RANK order.

        The stem keeps the descriptors in `holds` open until it exits. Raises NoDirectory if no directory for Ray's
        files can be created. Raises OSError if the stem has exited, no descriptor is free or a secret is not readable.
        """
        spec, directory = self.launch.spec, Path(self.launch.directory)
        self.devices = tuple(devices)
        self.memory = MemoryWatch(self._cgroup, self.stem_pid, spec.resources.memory_bytes)
        # Ranks with the uid of the node get threads for their cores, but no limit.
        self._cpus = CpuLimit(self._cgroup, self.stem_pid, spec.resources.cpus if self._files.uid else None)
        self.account.notes += [note for note in (self.memory.note, self._cpus.note) if note]
        if self.launch.secrets is not None:
            self.environment.secrets = secret_files.read(Path(self.launch.secrets.directory), os.geteuid())
            self.redactor = Redactor(self.environment.secrets)
            self.account.redacted = self.redactor.counts
            self.account.notes += unmasked_notes(self.redactor)
        if spec.ray is not None:
            self._cluster = AttemptCluster(
                self.launch, devices, network, ranks_path=self._files.ranks_cluster, redactor=self.redactor
            )
            holds = (*holds, self._cluster.fd)
        cluster = "" if self._cluster is None else self._cluster.own
        self._mounts, note = self._files.show(self._spawner, self.stem_pidfd, devices, cluster, self._cgroup)
        self.account.notes += [note] if note else []
        if self._files.uid:
            secret_files.remove(directory)  # The ranks have copies.
        for start in range(0, len(holds), _HOLDS_AT_ONCE):
            self._say({"op": "hold"}, holds[start : start + _HOLDS_AT_ONCE])
        for local, rank in enumerate(self.numbers):
            shown = spec.ranks_log is None or rank in spec.ranks_log
            log = self.logs[rank] = RankLog(
                rank, directory / "logs", viewer if shown else None, SystemClock(), self.redactor
            )
            environment = self.environment.of(local, devices, network)
            self._endpoint_environment = self._endpoint_environment or environment
            self._say({"op": "rank", "rank": rank, "local_rank": local, "env": environment}, log.write_ends())
            log.close_write_ends()
        self._say(self._go_message())
        if self._cluster is not None and self._cluster.note:
            self._pass_on(self._cluster.note, note=True)

    def open_endpoint(self, target: EndpointTarget, fd: int) -> None:
        """Ask the stem to connect a socket to a target in the attempt. Raises OSError if the stem has ended."""
        request: inside.Message = {
            "op": "open",
            "target": msgspec.to_builtins(target),
            "env": self._endpoint_environment,
            "work": self._files.ranks_work or str(Path(self.launch.directory, "work")),
            "cwd": original(self.context.cwd),
        }
        self._say(request, (fd,))

    def release(self) -> None:
        """Let the ranks exit after all ranks have returned."""
        with contextlib.suppress(OSError):
            self._say({"op": "release"})

    def terminate(self, why: str) -> None:
        """Send SIGTERM to every rank.

        A rank that returns after SIGTERM exits without waiting for other ranks. The gang writes the reason `why` to a
        file before the signal. Commands read the stop reason from the file, because a running process cannot receive a
        new environment variable.
        """
        try:
            write_text(self._files.stop_file, f"{why}\n")
        except OSError as error:
            self.account.notes.append(f"could not write the stop reason for the ranks: {error.strerror}")
        self.release()
        self.signal(signal.SIGTERM, self.numbers)

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Ask the stem to send a signal to each running rank in `ranks`."""
        with contextlib.suppress(OSError):
            if ranks:
                self._say({"op": "signal", "signal": int(number), "ranks": list(ranks)})

    def kill(self) -> None:
        """Kill the stem and all of its descendants."""
        if self._files.uid and self.standby:
            # The stem is pid 1 of its pid namespace, so the kernel ends the namespace with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):  # Without rights, the cgroup ends the stem.
                signal.pidfd_send_signal(self.stem_pidfd, signal.SIGKILL)
        if self._cgroup is not None:
            kill_cgroup(self._cgroup)
            return
        with contextlib.suppress(OSError):
            self._say({"op": "kill"})

    def empty(self) -> bool:
        """Return True once no process of the attempt remains, as far as this node can observe.

        `proven` is True if it is certain that no process of the attempt remains.
        """
        if not self.standby:
            self.proven = True
        elif self._cgroup is not None:
            self.proven = cgroup_empty(self._cgroup) and not (self._files.uid and self._stem_lives())
        else:
            poll = select.poll()
            poll.register(self.stem_pidfd, select.POLLIN)
            # This loop reads the last messages without blocking, because an escaped process may hold the socket open.
            if poll.poll(0):
                self.channel.sock.setblocking(False)
                with contextlib.suppress(OSError, ValueError):
                    while self.hear() is not None:
                        pass
                return True
        return self.proven

    def _stem_lives(self) -> bool:
        poll = select.poll()
        poll.register(self.stem_pidfd, select.POLLIN)
        return not poll.poll(0)

    def left(self) -> tuple[ProcessIdentity, ...]:
        """Return the processes of the attempt that still exist."""
        return left_in(self._cgroup, [*self.pids.values(), *descendants(self.stem_pid)] if self.stem_pid else [])

    def processes(self) -> set[int]:
        """Return the known pids of the attempt's processes on this node."""
        known = {*self.pids.values(), *(descendants(self.stem_pid) if self.stem_pid else ())}
        return known if self._cgroup is None else known.union(cgroup_pids(self._cgroup))

    @property
    def behind(self) -> bool:
        """Return True if a log has omitted live output that `tend` must report soon."""
        return any(log.behind for log in self.logs.values())

    def tend(self) -> None:
        """Report the live output that logs have omitted, because no descriptor signals an omission."""
        for log in self.logs.values():
            log.tend()

    def out_of_memory(self, peak_bytes: int = 0) -> bool:
        """Return True if the kernel killed a process of this attempt because host memory ran out.

        `peak_bytes` is the peak memory of an ended rank. The counter of the machine includes kills in other runs.
        Without a counter of the attempt, it is therefore evidence only for a large rank, because the kernel kills large
        processes.
        """
        if self.memory is None or not self.memory.out_of_memory():
            return False
        return self.memory.is_exact or peak_bytes >= memory_bytes()[0] // _LARGE

    def close(self) -> None:
        """Read the last output, add the final notes to the receipt and close all descriptors."""
        for log in self.logs.values():
            log.close()
        if self.memory is not None:
            self.account.peak_bytes = self.memory.peak_bytes()
            self.memory.close()
        if self._cpus is not None:
            self._cpus.close()
        for path in self._cgroups:
            remove_cgroup(path)
        if self._alone.issuperset(self.numbers):
            count = place_of(self.launch, 0).world_size
            self.account.notes.append(
                f"the run's {count} ranks trained without communicating (no process group, Ray or MPI), so they "
                f"made {count} separate models. Set {ALONE_NOTE_SWITCH}=0 to omit this note"
            )
        if self._cluster is not None:
            note = self._cluster.close()
            self.account.notes += [note] if note else []
        if self._mounts >= 0:
            note = self._files.take_back(self._spawner, self._mounts)
            self.account.notes += [note] if note else []
            os.close(self._mounts)
        if self.stem_pidfd >= 0:
            os.close(self.stem_pidfd)
        self.channel.close()

    def _meet_stem(self, message: inside.Message) -> None:
        if message.get("version") != inside.VERSION:
            raise ValueError(
                f"the stem uses protocol version {message.get('version')}, but the supervisor uses {inside.VERSION}"
            )
        named = inside.strings(message, "cgroups")
        if self._files.uid:
            # A principal's stem inherits memory that the principal's code has written, so its words prove nothing.
            named = list(self._host_stem.cgroups)
        else:
            self.stem_pid = inside.integer(message, "pid")
        self.stem_pidfd = os.pidfd_open(self.stem_pid)
        if self._files.uid and uid_of(self.stem_pid) != self._files.uid:
            raise ValueError(f"process {self.stem_pid} is not the stem of this attempt")
        self._cgroups = tuple(Path(path) for path in named)
        self._cgroup = next((path for path in self._cgroups if (path / "cgroup.kill").exists()), None)
        self.account.mark("stem")

    def _host_pids(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the pids of ranks on this node. In a sandbox, the stem reports the pids of its own namespace."""
        if not self._files.uid:
            return dict(pids)
        if self._files.level == USER:
            own = set(descendants(self.stem_pid))
            return {rank: pid for rank, pid in pids.items() if pid in own}
        known = pids_in_namespace(self.stem_pid, sandbox.ATTEMPT_DEPTH)
        return {rank: known[pid] for rank, pid in pids.items() if pid in known}

    def _pass_on(self, text: str, *, note: bool) -> None:
        """Send a rank's message to attached clients. With `note`, also add the message to the receipt."""
        if self._sentences_left > 0:
            self._sentences_left -= 1
            text = text if self.redactor is None else self.redactor.text(text)
            sentence = "".join(c if c.isprintable() else " " for c in text[:_SENTENCE_CHARACTERS_MAX]).strip()
            self.on_said(sentence)
            self.account.notes += [sentence] if note else []

    def _go_message(self) -> inside.Message:
        """Return the message that tells the stem to fork all ranks."""
        launch, context = self.launch, self.context
        argv: list[str] | None = None
        if self._command is not None:
            program, *arguments = self._command.argv
            if program == original(launch.context.python):  # A restored environment has its own interpreter.
                program = original(context.python)
            argv = [program, *arguments]
        share = share_of_cores(len(os.sched_getaffinity(0)), launch.world_size, launch.of_type)
        # A Ray driver mostly waits. The driver's own computation may therefore use all CPU cores of the run.
        threads = threads_per_rank(launch.spec.resources.cpus or share, 1 if launch.spec.ray else launch.world_size)
        return {
            "op": "go",
            "directory": self._files.ranks_directory,
            "work": self._files.ranks_work,
            "world_size": place_of(launch, 0).world_size,
            "local_world_size": len(self.numbers),
            "command": argv,
            "tty": self._command is not None and self._command.tty,
            "result_bytes_max": RESULT_BYTES_MAX,
            "umask": context.umask | (_PRIVATE_UMASK if self._files.uid else 0),
            "descriptors_max": context.descriptors_max,
            "cwd": original(context.cwd),
            "argv": [original(argument) for argument in context.argv],
            "sys_path": [original(path) for path in context.sys_path],
            "packages": {name: original(file) for name, file in context.packages.items()},
            "copies": {original(copy): original(directory) for copy, directory in context.copies.items()},
            "threads": threads,
            "tracked": launch.spec.tracker is not None,
            "fenced": in_pool(Path(launch.directory)),
            "ray": None if self._cluster is None else self._cluster.share(),
        }

    def _exited(self, message: inside.Message) -> RankExited:
        rank, status = self._rank(message), inside.integer(message, "status")
        self.account.peaks[rank] = inside.integer(message, "peak")
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        killed_for_memory = number == signal.SIGKILL and self.out_of_memory(inside.integer(message, "peak"))
        if killed_for_memory:
            return RankExited(rank=rank, signal=number, out_of_memory=True, detail=self.memory_text())
        detail = f"exited with code {os.WEXITSTATUS(status)}" if number is None else f"ended by {signal_name(number)}"
        return RankExited(rank=rank, signal=number, out_of_memory=killed_for_memory, detail=detail)

    def _rank(self, message: inside.Message) -> int:
        """Return the rank that a message names. Raises ValueError if another node runs the rank."""
        rank = inside.integer(message, "rank")
        if rank not in self.numbers:
            raise ValueError(f"this node has no rank {rank}")
        return rank

    def _store(self, message: inside.Message) -> None:
        """Store the unparsed failure of a rank that could not write the failure to a full disk."""
        rank, unstored = self._rank(message), message.get("unstored")
        for ending, text in unstored.items() if isinstance(unstored, dict) else ():
            if ending in inside.UNSTORED and isinstance(text, str):
                path = Path(self.launch.directory, "failures", f"{rank}.{ending}")
                with contextlib.suppress(OSError, ValueError):
                    write_bytes(path, base64.b64decode(text), Path(self.launch.directory))

    def _explained(self, failure: Failure) -> Failure:
        """Return a rank's failure, corrected with information that only the supervisor has."""
        # The rank's failure is not a start failure, because user code has begun.
        if failure.reason is Reason.START_FAILED and self.stacks:
            failure = msgspec.structs.replace(failure, reason=Reason.ENGINE_HEAD_LOST)
        if failure.reason in _OF_A_CLUSTER and self.out_of_memory():
            return msgspec.structs.replace(failure, reason=Reason.HOST_OOM, detail=self.memory_text())
        return failure

    def memory_text(self) -> str:
        """Describe an out-of-memory kill. Callers put the returned description after "was" or "were"."""
        limit = self.launch.spec.resources.memory_bytes
        peak = self.memory.peak_bytes() if self.memory is not None else None
        parts = [f"limit {format_bytes(limit)}"] if limit is not None else []
        parts += [f"peak {format_bytes(peak)}"] if peak is not None else []
        return f"killed by the kernel because host memory ran out{' (' + ', '.join(parts) + ')' if parts else ''}"

    def _say(self, message: inside.Message, fds: tuple[int, ...] = ()) -> None:
        self.channel.send(inside.encode(message), fds)


def signal_name(number: int) -> str:
    """Return a signal's name, for example ``SIGSEGV``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command_ended(rank: int, message: inside.Message) -> RankReturned | RankFailed:
    code = os.WEXITSTATUS(inside.integer(message, "status"))
    if code == 0:
        return RankReturned(rank)
    detail = f"exited with code {code}"
    at_ns = inside.integer(message, "at")
    return RankFailed(Failure(rank=rank, reason=Reason.COMMAND_FAILED, at_ns=at_ns, exit_code=code, detail=detail))


def _failure(rank: int, message: inside.Message, record: object) -> Failure:
    fields: dict[str, object] = record if isinstance(record, dict) else {}
    reason = _FAILURE_REASONS.get(str(fields.get("kind")), Reason.RANK_RAISED)
    if fields.get("gpu_oom") is True:
        reason = Reason.GPU_OOM
    detail = f"{fields.get('type', 'exception')}: {fields.get('message', '')}"
    if reason in _OF_A_CLUSTER:
        detail = str(fields.get("message", ""))
    return Failure(
        rank=rank,
        reason=reason,
        at_ns=inside.integer(message, "at"),
        peer_lost=fields.get("peer_lost") is True,
        detail=detail[:_DETAIL_CHARACTERS_MAX],
    )
