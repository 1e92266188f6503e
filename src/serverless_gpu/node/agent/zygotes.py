"""An agent's zygote: its process, stems, waiting runs and containment.

    key = (owner, interpreter, its options, start-up variables, environment)   →   Zygote: process, channel,
    standby stems, waiting runs
    launcher enters cgroups ──▶ zygote, its start-up code, their child processes ──▶ killed with the zygote
                                  └─ stem ──▶ moves to its own cgroups and outlives the zygote

A zygote serves one owner, because it runs code that its owner's ranks could have written. Each zygote of a server's
principal, and each of its stems, has a separate user namespace (`inside/namespaces.py`). Without separate user
namespaces, a rank could write the memory of another owner's zygote.

A zygote is stale if a loaded file has changed. If a package that the zygote has not loaded changes, ranks use the new
version. A zygote can move to another restored environment if all of its loaded files are equal in both
(`environment/restore/interpreters.py`). If an environment is deleted and restored again, its zygote still uses the
deleted directories. The agent ends zygotes of deleted environments.

`.pth` files, `sitecustomize` and preloaded modules are the user's code and may start processes. No run pays for
processes of start-up code, because the processes belong to no run. No supervisor ends processes of start-up code.

Failure cases:

If the zygote dies or cannot preload, waiting runs get the zygote's output.

If forking a zygote is unsafe, the pool records the zygote's key. Each later run with the recorded key starts a zygote
without preloaded modules.

If an idle zygote dies, the next run starts a new zygote. The receipt of the next run contains the reason for the cold
start.

If the agent cannot create a cgroup, it kills the zygote's descendants one by one. The descendants include detached
processes while the zygote runs.

If a stem cannot leave the zygote's cgroups, the agent does not kill the stem and its ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.restore.interpreters import LoadedModules
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.isolation import NONE, SANDBOX, USER, Level
from serverless_gpu.node.agent.environments import RestoredEnvironment
from serverless_gpu.node.base.protocol import Context, original
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside import sandbox
from serverless_gpu.node.inside.channel import close_all, pair
from serverless_gpu.node.inside.linux import children, descendants
from serverless_gpu.node.isolation.inspection import (
    ZYGOTE_PID,
    SandboxProcess,
    memory_of,
    sandbox_processes,
    strangers,
)
from serverless_gpu.node.isolation.principals import Principal
from serverless_gpu.node.isolation.views import MEMORY_BYTES_MAX
from serverless_gpu.node.processes.process_tree import (
    ZYGOTE,
    CgroupRoot,
    ProcessIdentity,
    cgroup_pids,
    kill_cgroup,
    look_at,
    pids_in_namespace,
    remove_cgroup,
)
from serverless_gpu.node.processes.spawn import CallerInterpreter, one_name, separating_variables, zygote_process
from serverless_gpu.node.spawner.verbs import Spawner, ZygoteOrder, ZygoteProcess

LEAVING_S = 5.0  # Seconds within which the last forked stem must leave the zygote's cgroups.
_STEMS_MAX = 4_096
RANKS_STANDBY_MAX = 16
_PROBLEM_BYTES_MAX = 4_000
_NAMES_MAX = 4
StemTaker = Callable[[int, int], None]  # Receives the stem's pid and descriptor.
ProblemTaker = Callable[[str], None]
Stamp = tuple[int, int, int]


class Key(msgspec.Struct, frozen=True):
    """Identity of a shared zygote. `python` is the canonical name of the interpreter."""

    python: str
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    environment: str = ""  # Snapshot address of the stems; "" for the caller's files.
    owner: str = ""  # Owner as in `protocol.Launch`; "" for the user of this node.
    uid: int = 0  # Uid of the zygote's principal; 0 at the isolation level `none`.
    level: Level = NONE

    def elsewhere(self) -> Key:
        """Return the key without its snapshot.

        A zygote may move between two keys that differ only in the snapshot.
        """
        return msgspec.structs.replace(self, environment="restored", python="") if self.environment else self


class ZygoteRequest(NamedTuple):
    """The zygote that a run needs: caller, restored environment (or None) and owner (as in `Key`).

    The zygote runs with the uid of `principal` at the isolation level `level`, or with the agent's uid if `principal`
    is None.
    """

    context: Context
    environment: RestoredEnvironment | None = None
    owner: str = ""
    principal: Principal | None = None
    level: Level = NONE

    @property
    def key(self) -> Key:
        """Return the key of a zygote that can serve this request."""
        variables = tuple(separating_variables(self.context.environ).items())
        address = "" if self.environment is None else self.environment.address
        uid = 0 if self.principal is None else self.principal.uid
        return Key(one_name(self.context.python), self.context.flags, variables, address, self.owner, uid, self.level)


def first_run(key: Key, others: Sequence[Key]) -> str:
    """Return the reason for a cold start with a key that had no earlier zygote."""
    same = [other for other in others if (other.python, other.flags) == (key.python, key.flags)]
    if not same:
        return "first run with this interpreter"
    same = [other for other in same if other.owner == key.owner]
    if not same:
        return "first run of this owner with this interpreter, and owners do not share interpreters"
    nearest = min((set(key.variables) ^ set(other.variables) for other in same), key=len)
    names = sorted({name for name, _ in nearest})
    if len(names) > _NAMES_MAX:
        names[_NAMES_MAX - 1 :] = [f"{len(names) - _NAMES_MAX + 1} more variables"]
    listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part) if names else "its settings"
    return f"first run with this value of {listed}, which Python and its libraries read only when they start"


class StemWaiter(NamedTuple):
    """A run that waits for a stem, with the run's environment."""

    environment: RestoredEnvironment | None
    take: StemTaker
    fail: ProblemTaker


class Zygote:
    """One zygote process and its stems. Raises OSError if the interpreter cannot start."""

    def __init__(
        self,
        request: ZygoteRequest,
        preload: tuple[str, ...],
        log: tuple[Path, int],
        cgroups: CgroupRoot,
        spawner: Spawner,
    ) -> None:
        context, environment, owner, principal, level = request
        ours, theirs = pair()
        log_path, log_fd = log
        self.channel = ours
        self.key = request.key
        self.environment = environment  # Environment of the stems that the zygote forks next.
        self.loaded = LoadedModules()
        self._born_in = environment
        self.ready = False
        self.why = ""  # Reason why the agent had to start the zygote.
        self.cold = ""  # Reason why the zygote cannot fork stems safely.
        self.dead = False
        self.context = context
        self.principal = principal
        self.level = level
        self.used_ns = 0
        self.started_ns = 0
        self.ranks = 1  # Number of ranks in the last run, and of standby processes for the next run.
        self._log_path = log_path
        self._log_start = os.lseek(log_fd, 0, os.SEEK_END)
        self._cgroups = cgroups
        self._spawner = spawner
        self.containment = Containment(cgroups.make(ZYGOTE))
        # Stems get separate user namespaces if several runs will fork from this zygote.
        self._apart = bool(owner and preload and principal is None)
        self.memory_bytes = 0
        self.weighed_ns = 0
        self.pid = 0  # Pid of the zygote on this node, once it is ready.
        self._mounts = b""  # Mounts of the zygote's sandbox before any code of its principal.
        self._stamps: dict[str, Stamp] = {}
        self._packages: dict[str, str] = {}
        self._stems: deque[tuple[int, int, int]] = deque()  # The pid, channel and pidfd of each standby stem.
        # Environments of the requested stems, in the order of the requests.
        self._asked: deque[tuple[RestoredEnvironment | None, tuple[str, ...]]] = deque()
        self.stem_cgroups: dict[int, tuple[str, ...]] = {}  # Cgroups that the agent made, by the stem's pid.
        self._takers: deque[StemWaiter] = deque()
        try:
            self.process = self._start(request, preload, theirs.fileno(), log_fd)
            if level != SANDBOX:  # The processes of a sandbox end with its pid namespace.
                self.containment.hold(self.process.pid)
            if environment is not None:
                ours.send(inside.encode({"op": "hold"}), environment.fds)
        except OSError:
            ours.close()
            for path in self.containment.paths:
                remove_cgroup(path)
            raise
        finally:
            theirs.close()

    def _start(self, request: ZygoteRequest, preload: tuple[str, ...], channel_fd: int, log: int) -> ZygoteProcess:
        interpreter = _interpreter_of(request, self.containment.paths, shared=bool(preload))
        if request.principal is None:
            return zygote_process(interpreter, preload, channel_fd=channel_fd, log=log)
        trees = [] if request.environment is None else [request.environment.tree]
        order = ZygoteOrder(request.owner, request.level, interpreter, trees, preload)
        try:
            return self._spawner.start_zygote(order, channel_fd=channel_fd, log=log)
        except IsolationUnavailable as error:
            raise OSError(errno.EPERM, f"{error.message} ({error.hint})") from None

    @property
    def waited_for(self) -> bool:
        """Return True while a run waits for a stem of this zygote."""
        return bool(self._takers)

    def take_stem(self, take: StemTaker, fail: ProblemTaker) -> None:
        """Give a run a stem from standby, or the next stem that the zygote forks.

        `take` receives the stem's pid and a descriptor that the receiver must close.
        """
        while self._stems:
            pid, fd, process = self._stems.popleft()
            poll = select.poll()
            poll.register(process, select.POLLIN)
            alive = not poll.poll(0)
            os.close(process)
            if alive:
                take(pid, fd)
                return
            os.close(fd)  # The kernel may have killed the standby stem because memory was short.
        self._takers.append(StemWaiter(self.environment, take, fail))
        waiting = sum(taker.environment is self.environment for taker in self._takers)
        if sum(asked is self.environment for asked, _ in self._asked) < waiting:
            self.ask_stem()

    def refill(self) -> None:
        """Request a stem unless a stem is already on standby or requested."""
        if self.ready and not self.dead and not self._stems and not self._asked:
            self.ask_stem()

    def ask_stem(self) -> None:
        """Request another stem. A zygote that is still preloading modules answers later."""
        cgroups = self._cgroups.make()
        self.containment.note_stem_cgroups(cgroups)
        request: inside.Message = {
            "op": "stem",
            "cgroups": [str(path) for path in cgroups],
            "ranks": min(self.ranks, RANKS_STANDBY_MAX),
            "apart": self._apart,
        }
        moved = self.environment if self.environment is not self._born_in else None
        fds: tuple[int, ...] = () if moved is None else moved.fds
        opened: list[int] = []
        if self.principal is None and moved is not None:
            request["mounts"] = list(moved.mounts)
        elif self.principal is not None:
            try:
                opened = self._isolation_request(request, moved)
            except (OSError, IsolationUnavailable) as error:
                self._fail_takers(f"the isolation of the attempt cannot be prepared: {error}")
                return
        try:
            self.channel.send(inside.encode(request), (*opened, *fds))
        except OSError:
            return  # After the end of the zygote, `hear` still reads the last messages.
        finally:
            close_all(opened)
        self._asked.append((self.environment, tuple(str(path) for path in cgroups)))

    def _isolation_request(self, request: inside.Message, moved: RestoredEnvironment | None) -> list[int]:
        """Add the isolation of an attempt to the request for a stem.

        Return descriptors for the caller to close. The stem receives descriptors of its cgroups and its environment,
        because it may not open the paths of both.
        """
        opened = [os.open(f"{path}/cgroup.procs", os.O_WRONLY) for path in inside.strings(request, "cgroups")]
        trees: list[str] = []
        if moved is not None:
            trees = [str(moved.mounts[0]["at"])]
            opened.append(self._spawner.environment(moved.mounts))
        limits = (Path(path, "pids.max").exists() for path in inside.strings(request, "cgroups"))
        tasks_max = 0 if any(limits) else self._cgroups.tasks_max
        request["isolation"] = {
            "level": self.level,
            "trees": trees,
            "memory": MEMORY_BYTES_MAX,
            "tasks_max": tasks_max,
        }
        return opened

    def hear(self) -> bool:
        """Read one message. Return False once the zygote has ended."""
        fds: tuple[int, ...] = ()
        try:
            received = self.channel.receive()
            if received is not None:
                fds = received[1]
                if not self._understand(inside.decode(received[0]), fds):
                    close_all(fds)
                return True
        # The zygote runs user code and may send an invalid message.
        except (OSError, ValueError, TypeError, OverflowError, IndexError):
            close_all(fds)
        self.fail()
        return False

    def _understand(self, message: inside.Message, fds: tuple[int, ...]) -> bool:
        """Handle a zygote's message. Return True if the handler took over the message's descriptors.

        Raises ValueError, TypeError, OverflowError, IndexError or OSError for an invalid message. The caller must close
        the descriptors of an invalid message.
        """
        match message.get("event"):
            case "ready":
                self.ready = True
                self.pid = self._host_pid(ZYGOTE_PID) if self.level == SANDBOX else self.process.pid
                files = message.get("modules")
                packages = message.get("packages")
                self._packages = packages if isinstance(packages, dict) else {}
                loaded = [str(file) for file in files] if isinstance(files, list) else []
                self._meet(loaded, message)
            case "mounts" if not self._mounts:
                # The launcher sends this message before any code of the principal runs. The agent ignores later ones.
                self._mounts = inside.text(message, "view").encode("utf-8", "surrogateescape")
            case "cold":
                self.cold = inside.text(message, "reason")
            case "stem":
                (fd,) = fds
                pid = self._host_pid(inside.integer(message, "pid"))
                self.containment.note_stem(pid)
                environment, self.stem_cgroups[pid] = self._asked.popleft()
                self._offer(environment, pid, fd)
                return True
        return False

    def _host_pid(self, pid: int) -> int:
        """Return the pid of a stem on this node. Raises ValueError if the stem has already ended."""
        if self.principal is None:
            return pid
        if self.level == SANDBOX:
            found = pids_in_namespace(self.process.pid, sandbox.PRINCIPAL_DEPTH).get(pid)
        else:  # The zygote runs code of the principal and may name any process.
            found = pid if pid in descendants(self.process.pid) else None
        if found is None:
            raise ValueError(f"process {pid} of the sandbox ended before the agent received it")
        return found

    def lives_in(self, environment: RestoredEnvironment | None) -> bool:
        """Return True if the zygote's stems use the same directories as `environment`."""
        if self.environment is None or environment is None:
            return self.environment is environment
        return self.environment.is_one_with(environment)

    def misfit(self, environment: RestoredEnvironment) -> str:
        """Return the reason why the zygote cannot move to another environment, or ""."""
        if not self.ready or self._born_in is None:
            return "the warm interpreter was still starting, in another environment"
        if self.level == USER:
            return "at the isolation level `user`, an interpreter cannot move to another environment"
        return environment.misfit(self.loaded, self._born_in)

    def move(self, environment: RestoredEnvironment) -> None:
        """Fork later stems in another, compatible environment. End the current standby stems."""
        self.environment = environment
        self.key = msgspec.structs.replace(self.key, environment=environment.address)
        self._drop_stems()

    def _meet(self, files: Sequence[str], ready: inside.Message) -> None:
        """Record the files, libraries and names that the zygote has loaded from its environment."""
        tree = "" if self.environment is None else self.environment.tree
        self._stamps = {file: stamp(file) for file in files if not tree or not file.startswith(f"{tree}/")}
        if self.environment is not None:
            known = ready.get("libraries") is not None
            libraries = inside.strings(ready, "libraries") if known else []
            names = inside.strings(ready, "names")
            self.loaded = LoadedModules(
                names=frozenset(names), files=frozenset({*files, *libraries}), libraries_known=known
            )

    def damage(self) -> str:
        """Return the reason why no run may use the zygote any more, or ""."""
        for file, known in self._stamps.items():
            if stamp(file) != known:
                return f"{file} has changed"
        if self.level != SANDBOX or not self.ready:
            return ""  # Without a sandbox, the zygote cannot mount, and its mounts change with the files of attempts.
        mounts = sandbox.mounts_of(self.pid)
        if not mounts:
            return "the previous zygote died"
        return "" if mounts == self._mounts else "the mounts of the previous interpreter's sandbox have changed"

    def weigh(self, now_ns: int) -> None:
        """Measure the memory of the zygote and its standby processes, which takes a few milliseconds."""
        self.weighed_ns = now_ns
        if self.ready and not self.dead:
            stems = [pid for pid, _, _ in self._stems]
            pids = [self.pid, *stems, *(pid for stem in stems for pid in children(stem))]
            if self.principal is None:
                self.memory_bytes = memory_of(pids)
                return
            with contextlib.suppress(OSError, IsolationUnavailable):  # Without an answer, the last memory counts.
                self.memory_bytes = self._spawner.memory_of(pids)

    def strangers(self) -> tuple[SandboxProcess, ...] | None:
        """Return processes of no run in the zygote's sandbox, or None while a stem is being forked."""
        if self.level != SANDBOX or self.dead:
            return ()
        if not self.ready or self._asked:
            return None
        stems = self.containment.stems()
        return strangers(sandbox_processes(self.process.pid, stems), stems)

    def differs(self, packages: Mapping[str, str]) -> str | None:
        """Describe a loaded module that the caller imports from a different file, or return None."""
        for name, file in packages.items():
            theirs, mine = original(file), self._packages.get(name)
            if mine is not None and theirs != mine:
                has = "Python's own" if name in sys.stdlib_module_names else mine
                return f"{name} is {theirs} for the caller, but the warm interpreter has {has}"
        return None

    def fail(self) -> None:
        """Tell all waiting runs that the zygote has failed."""
        self.dead = True
        self._fail_takers(self._problem())

    def _fail_takers(self, problem: str) -> None:
        while self._takers:
            self._takers.popleft().fail(problem)

    def release_takers(self) -> list[StemWaiter]:
        """Remove and return the runs that wait for a stem."""
        takers = list(self._takers)
        self._takers.clear()
        return takers

    def close(self) -> None:
        """Close the channels, so that the zygote and its unused stems read end of file and exit."""
        self.dead = True
        self._drop_stems()
        self.channel.close()

    def _drop_stems(self) -> None:
        while self._stems:
            pid, fd, process = self._stems.popleft()
            os.close(fd)
            os.close(process)
            self.end_stem(pid)

    def end_stem(self, pid: int) -> None:
        """Kill a principal's stem that no attempt uses. Other stems end by themselves."""
        cgroups = self.stem_cgroups.pop(pid, ())
        if self.principal is not None:
            self.containment.end_stem(pid)
            for path in cgroups:
                kill_cgroup(Path(path))

    def _offer(self, environment: RestoredEnvironment | None, pid: int, fd: int) -> None:
        for taker in self._takers:
            if taker.environment is environment:
                self._takers.remove(taker)
                taker.take(pid, fd)
                return
        if environment is not self.environment:
            os.close(fd)  # The agent requested the stem before the zygote moved to another environment.
            self.end_stem(pid)
            return
        try:
            self._stems.append((pid, fd, os.pidfd_open(pid)))
        except ProcessLookupError:
            os.close(fd)

    def _problem(self) -> str:
        code = self.process.poll()
        written = ""
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _PROBLEM_BYTES_MAX))
            written = file.read(_PROBLEM_BYTES_MAX).decode("utf-8", "replace").strip()
        ended = "ended" if code is None else f"exited with code {code}"
        return f"{self.context.python}, started as a zygote, {ended}:\n{written or '(no output)'}"


def _interpreter_of(request: ZygoteRequest, cgroups: Sequence[Path], *, shared: bool) -> CallerInterpreter:
    """Return the interpreter of a zygote, with mounts and isolation. `shared` zygotes serve several runs."""
    context, environment, owner = request[:3]
    return CallerInterpreter(
        python=context.python,
        flags=context.flags,
        environ={original(name): original(value) for name, value in context.environ.items()},
        mounts=() if environment is None else environment.mounts,
        cgroups=[str(path) for path in cgroups],
        namespace="" if not owner else "required" if shared else "wanted",
    )


def stamp(file: str) -> Stamp:
    """Return the modification time, size and inode of a file, which change with every write."""
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class Containment:
    """The cgroups of one zygote, the v2 cgroup first; empty if the agent cannot create cgroups."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self._pid = 0
        self._stems: dict[int, ProcessIdentity] = {}
        self._all_can_leave = True
        self._ended_ns = 0

    def hold(self, pid: int) -> None:
        """Record the pid of the contained zygote."""
        self._pid = pid

    def note_stem(self, pid: int) -> None:
        """Record a stem, which leaves the containment and outlives the zygote."""
        seen = look_at(pid)
        if seen is not None:
            self._stems[pid] = seen
        while len(self._stems) > _STEMS_MAX:
            self._stems.pop(next(iter(self._stems)))

    def stems(self) -> set[int]:
        """Return the pids of the recorded stems that still exist."""
        return {pid for pid, stem in self._stems.items() if stem.is_there()}

    def end_stem(self, pid: int) -> None:
        """Kill a recorded stem. The kernel ends all processes of a sandboxed attempt with its stem."""
        stem = self._stems.get(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # Without rights, the cgroup ends the stem.
            process = os.pidfd_open(pid)
            try:
                if stem is not None and stem.is_there():  # The pidfd now refers to the recorded process.
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)

    def note_stem_cgroups(self, paths: tuple[Path, ...]) -> None:
        """Record the cgroups of a stem. A stem without its own cgroup stays in this containment."""
        self._all_can_leave = self._all_can_leave and len(paths) >= len(self.paths)

    def end(self, now_ns: int) -> bool:
        """Kill all contained processes except stems that have not left yet. Return True if no process remains.

        Call `end` repeatedly until it returns True. `now_ns` is a boottime.
        """
        self._ended_ns = self._ended_ns or now_ns
        stems = self.stems()
        spared = {*stems, *(pid for stem in stems for pid in descendants(stem))}
        if not self.paths:
            kill(pid for pid in descendants(self._pid) if pid not in spared)
            return True
        if self._all_can_leave and now_ns - self._ended_ns > LEAVING_S * 1e9:
            spared = set()
        for path in self.paths:
            pids = cgroup_pids(path)
            if not spared.intersection(pids):
                kill_cgroup(path)
            kill(pid for pid in pids if pid not in spared)
        return all([remove_cgroup(path) for path in self.paths])


def kill(pids: Iterable[int]) -> None:
    """Kill processes. Some of the processes may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
