"""Manages restored environments: restores each environment once and keeps used environments.

    have(wanted) ─ available ───────────────▶ ready, at once
                 └ not ─▶ restoring process ─▶ ready, or failed with a reason; progress meanwhile
    restoring process ──RestoreDone + lock──▶ RestoredEnvironment ──▶ zygotes, stems (each with the lock's copy)

An environment stays on the disk while any process has a copy of its lock's descriptor. The agent holds the locks of
recently used environments, so that garbage collection cannot remove the next call's environment. Every zygote and stem
in an environment holds a copy of the lock's descriptor. No function in this module blocks.

Failure cases:

If the disk is full, the agent drops unused environments and repeats the restore once. If the second restore fails, the
attempt ends with the reason `NODE_DISK`. The server then tries another node.

If the restoring process dies, the agent starts another process, which repeats each restore once. If the restore fails,
the agent reports the reason to all waiting runs. The next run starts the restore again.

If a process deleted a restored environment, the agent restores the environment again.

If a rank changed an environment through a link, the restoring process repairs the environment. The restoring process
checks linked files before each start, and mounted files every `LOOK_S` seconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.restore.cache.cache_directory import LINKED
from serverless_gpu.environment.restore.cache.unit_integrity import LOOK_S
from serverless_gpu.environment.restore.interpreters import LoadedModules, UnitFindings, changed_units, fits, row_of
from serverless_gpu.environment.restore.restore import RestoredTree
from serverless_gpu.environment.restore.tree_plan import moved, site_of
from serverless_gpu.environment.service_messages import store_variables
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, StorageError
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.agent.restore_process import (
    CompileRequest,
    RestoreDone,
    RestoreFailed,
    RestoreProgress,
    RestoreRequest,
    receive_answer,
    send,
)
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Context, EnvironmentRequest, EnvironmentStatus, original, portable
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.processes.spawn import clean_process
from serverless_gpu.units import format_bytes

KEPT_MAX = 8
TRIES_MAX = 2
ROOM_S = 10.0
"""Seconds for idle interpreters to leave their environments if the disk is full."""
_SHORT = 12
_PATH_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PATHS = ("VIRTUAL_ENV", "PYTHONUSERBASE")
_HOOK_MODULES = ("sitecustomize", "usercustomize")
_TORCH_POINTS = b"[torch.backends]"  # Entry-point group that `import torch` loads.
_REASONS = {
    StorageError.code: Reason.NODE_DISK,
    EnvironmentCorrupt.code: Reason.ENV_CORRUPT,
    EnvironmentMissing.code: Reason.ENV_CORRUPT,
}


class EnvironmentWaiter(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks `ready(environment, restored)`, `failed(reason)` and `told(progress)` of a waiting run."""

    ready: Callable[[RestoredEnvironment, bool], None]
    failed: Callable[[Reason, str], None]
    told: Callable[[str], None]


class _Work(msgspec.Struct, kw_only=True):
    """A restore in progress, with the runs that wait for the environment."""

    want: RestoreRequest
    waiters: list[EnvironmentWaiter]
    tries: int = 1
    sentence: str = ""


class RestoredEnvironments:
    """The environments that one agent has restored or is restoring."""

    def __init__(
        self,
        home: Home,
        log: int,
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        let_go: Callable[[], bool],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._home = home
        self._log = log
        self._environ = environ
        self._selector = selector
        # Callback that ends all idle interpreters of an environment, and returns True if an interpreter ended.
        self._let_go = let_go
        self._clock = clock or SystemClock()
        # Restored environments by request, with the most recently used environment last.
        self._known: dict[EnvironmentRequest, RestoredEnvironment] = {}
        # Time of the last check of each environment, on the boottime clock.
        self._looked_ns: dict[EnvironmentRequest, int] = {}
        self._work: dict[EnvironmentRequest, _Work] = {}
        self._unfinished: set[str] = set()  # Addresses of restored environments that still have modules to compile.
        self._number = 0
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def statuses(self) -> tuple[EnvironmentStatus, ...]:
        """Return the status of each environment."""
        known = (
            EnvironmentStatus(snapshot=environment.address, state="ready", mode=environment.mode)
            for environment in self._known.values()
        )
        coming = (
            EnvironmentStatus(snapshot=wanted.snapshot, state="restoring", sentence=work.sentence)
            for wanted, work in self._work.items()
        )
        return (*known, *coming)

    def have(
        self,
        wanted: EnvironmentRequest,
        environ: Mapping[str, str],
        waiter: EnvironmentWaiter,
        entered: Callable[[str], bool],
    ) -> None:
        """Provide a restored environment to a waiting run, at once or after the restore.

        `entered(address)` returns True if an interpreter already runs in that snapshot.
        """
        known = self._known.get(wanted)
        if known is not None and known.is_there() and not self._may_have_changed(wanted, known, entered):
            self._known[wanted] = self._known.pop(wanted)
            waiter.ready(known, False)
            return
        work = self._work.get(wanted)
        if work is not None:
            work.waiters.append(waiter)
            if work.sentence:
                waiter.told(work.sentence)
            return
        self._number += 1
        variables = {name: original(value) for name, value in store_variables(environ).items()}
        work = self._work[wanted] = _Work(
            want=RestoreRequest(number=self._number, wanted=wanted, environ=variables), waiters=[waiter]
        )
        self._ask(work)

    def tend(self, *, idle: bool) -> None:
        """Compile one restored environment completely if `idle` is True (no run needs the cores)."""
        if idle and self._unfinished and self._channel is not None and not self._work:
            with contextlib.suppress(OSError):  # `_hear` handles the death of the restoring process.
                self._number += 1
                send(self._channel, CompileRequest(number=self._number, snapshot=self._unfinished.pop()))

    def _may_have_changed(
        self, wanted: EnvironmentRequest, known: RestoredEnvironment, entered: Callable[[str], bool]
    ) -> bool:
        """Return True if ranks may have changed the environment since the last check.

        Ranks can write to linked files. The restoring process checks all files periodically, because ranks can reach
        mounted files through the cache directory.
        """
        if self._clock.boottime_ns() - self._looked_ns.get(wanted, 0) >= LOOK_S * 10**9:
            return True
        if known.mode == "overlay" and entered(known.address):
            return False
        return os.path.lexists(self._home.environments / LINKED)

    def _ask(self, work: _Work) -> None:
        try:
            send(self._started(), work.want)
        except OSError as error:
            if self._channel is not None and work.tries < TRIES_MAX:
                work.tries += 1
                self._close()
                self._ask(work)
            else:
                self._fail(
                    work, Reason.ENV_UNAVAILABLE, f"could not start the process that restores the environment: {error}"
                )

    def _started(self) -> Channel:
        """Return the channel to the restoring process. Start the process if necessary."""
        if self._channel is not None:
            return self._channel
        ours, theirs = pair()
        try:
            self._process = clean_process(
                "serverless_gpu.node.agent.restore_process",
                (theirs.fileno(), str(self._home.environments)),
                fds=(theirs.fileno(),),
                log=self._log,
                environ=self._environ,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        return ours

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            received = receive_answer(self._channel)
        except (OSError, msgspec.MsgspecError):
            received = None
        if received is None:
            self._start_over()
            return
        answer, fds = received
        work = next((work for work in self._work.values() if work.want.number == answer.number), None)
        if work is None:
            for fd in fds:
                os.close(fd)
            return
        match answer:
            case RestoreProgress(sentence=sentence):
                work.sentence = f"preparing the environment: {sentence}"
                for waiter in work.waiters:
                    waiter.told(work.sentence)
            case RestoreDone():
                self._finish(
                    work, RestoredEnvironment(answer.snapshot, answer.restored, fds[0], self._home.environments)
                )
            case RestoreFailed(code=StorageError.code) if not work.want.patience_s and self._has_let_go():
                work.want = msgspec.structs.replace(work.want, patience_s=ROOM_S)
                self._ask(work)
            case RestoreFailed(code=code, message=message):
                self._fail(work, _REASONS.get(code, Reason.ENV_UNAVAILABLE), message)

    def _finish(self, work: _Work, environment: RestoredEnvironment) -> None:
        self._work.pop(work.want.wanted)
        known = self._known.pop(work.want.wanted, None)
        fetched = known is None or not known.is_one_with(environment)
        if known is not None and not fetched:
            environment = known  # The restoring process found the checked environment unchanged.
        else:
            self._unfinished.add(environment.address)
        if environment.mended:
            with contextlib.suppress(OSError):  # Writing to the log fails on a full disk.
                os.write(self._log, f"environment {environment.short}: {environment.mended}\n".encode())
        self._known[work.want.wanted] = environment
        self._looked_ns[work.want.wanted] = self._clock.boottime_ns()
        while len(self._known) > KEPT_MAX:
            gone = next(iter(self._known))
            self._known.pop(gone)
            self._looked_ns.pop(gone, None)
        for waiter in work.waiters:
            waiter.ready(environment, fetched)

    def _has_let_go(self) -> bool:
        """Release environments that no run uses. Return True if any environment was released."""
        was_known = bool(self._known)
        self._known.clear()
        self._looked_ns.clear()
        return self._let_go() or was_known

    def _fail(self, work: _Work, reason: Reason, message: str) -> None:
        self._work.pop(work.want.wanted, None)
        for waiter in work.waiters:
            waiter.failed(reason, message)

    def _start_over(self) -> None:
        """Repeat failed restores in a new restoring process, up to `TRIES_MAX` times each."""
        self._close()
        for work in list(self._work.values()):
            work.tries += 1
            if work.tries > TRIES_MAX:
                message = "the process that restores environments ended twice before the environment was ready"
                self._fail(work, Reason.ENV_UNAVAILABLE, message)
            else:
                self._ask(work)

    def _close(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.poll()


class RestoredEnvironment:
    """A restored snapshot on this node.

    The lock descriptor `lock` prevents the deletion of the environment until Python collects this object.
    """

    def __init__(self, snapshot: Snapshot, restored: RestoredTree, lock: int, environments: Path) -> None:
        self.snapshot = snapshot
        self.address = snapshot.address
        self.mode = restored.mode
        self.tree = restored.tree
        self.python = restored.python
        self.mended = restored.mended
        self.fds = (lock,)
        self.mounts: tuple[Mapping[str, object], ...] = tuple(
            {"at": mount.at, "layers": list(mount.layers), "directory": mount.directory} for mount in restored.mounts
        )
        self._restored = restored
        self._units = environments / "units"
        self._places = self._needed()
        self._identities = tuple(map(_identity, self._places))
        weakref.finalize(self, os.close, lock)

    def is_there(self) -> bool:
        """Return True while all directories of the environment are the originally restored directories.

        If a process deletes and recreates a directory, mounts of running processes still show the old directory.
        """
        return None not in self._identities and tuple(map(_identity, self._places)) == self._identities

    def is_one_with(self, other: RestoredEnvironment) -> bool:
        """Return True if both environments use the same directories, so that one process can serve both."""
        return (self._places, self._identities) == (other._places, other._identities)

    @property
    def short(self) -> str:
        """Return the snapshot's address in its short form for messages."""
        return self.address[:_SHORT]

    def text(self, *, fetched: bool) -> str:
        """Return the receipt's line about the environment. `fetched` is True if this run caused the restore."""
        count = len(self.snapshot.addresses())
        parts = [f"snapshot {self.short}", f"{count} unit{'' if count == 1 else 's'}", self.mode]
        if self._restored.why:
            parts[-1] += f" ({self._restored.why})"
        if fetched and self._restored.units_fetched:
            parts.append(f"{self._restored.units_fetched} fetched ({format_bytes(self._restored.fetched_bytes)})")
        if self._restored.note:
            parts.append(self._restored.note)
        if fetched and self.mended:
            parts.append(self.mended)
        return ", ".join(parts)

    def context(self, caller: Context) -> Context:
        """Return the caller's context with its paths changed to the restored environment."""
        cwd = original(caller.cwd)

        def there(path: str) -> str:
            """Return the restored path of a caller's path, or the same path if outside of the environment."""
            if not path:  # An empty path or list entry denotes the working directory.
                return moved(self.snapshot, self.tree, cwd) or path
            return moved(self.snapshot, self.tree, os.path.normpath(os.path.join(cwd, path))) or path

        environ = {name: original(value) for name, value in caller.environ.items()}
        for name in environ.keys() & {*_PATH_LISTS}:
            environ[name] = os.pathsep.join(map(there, environ[name].split(os.pathsep)))
        for name in environ.keys() & {*_PATHS}:
            environ[name] = there(environ[name])
        return msgspec.structs.replace(
            caller,
            python=self.python,
            environ={name: portable(value) for name, value in environ.items()},
            cwd=portable(cwd if os.path.isdir(cwd) and os.access(cwd, os.X_OK) else there(cwd)),
            sys_path=tuple(dict.fromkeys(portable(there(original(path))) for path in caller.sys_path)),
            packages={name: portable(there(original(file))) if file else "" for name, file in caller.packages.items()},
            copies={
                portable(f"{self.tree}/{site_of(self.snapshot, number)}"): portable(directory)
                for number, directory in enumerate(self.snapshot.facts.originals[: len(self.snapshot.roots)])
                if directory and self.snapshot.roots[number].kind == "code"
            },
        )

    def misfit(self, loaded: LoadedModules, older: RestoredEnvironment) -> str:
        """Return the reason why an interpreter of an older environment cannot serve this environment, or ""."""
        if self.mode != "overlay" or older.mode != "overlay":
            return "each environment made of links needs its own interpreter"
        if not older.is_there():  # The agent can no longer compare the files that the interpreter loaded.
            return "the interpreter's original environment was deleted"
        changed = changed_units(older.snapshot, self.snapshot)
        tops = {address: _tops(self._unit(address)) for address in changed}
        units = UnitFindings(
            used=self._used(loaded, older, tops),
            hooks={address: when for address in changed if (when := _runs_code(self._unit(address), tops[address]))},
            names={address: frozenset(map(_module_name, tops[address])) for address in changed},
        )
        return fits(loaded, older.snapshot, self.snapshot, units)

    def _needed(self) -> tuple[str, ...]:
        """Return the directories that the environment needs, which exclude the units of an environment made of
        links."""
        if not self.mounts:
            return (self.tree,)
        made = self._units.parent / "trees" / self.address / "overlay"
        layers = [str(made), *(str(mount["directory"]) for mount in self.mounts)]
        units = [str(self._unit(address)) for address in self.snapshot.addresses()]
        return (str(self.mounts[0]["at"]), *layers, *units)

    def _used(
        self, loaded: LoadedModules, older: RestoredEnvironment, tops: Mapping[str, Collection[str]]
    ) -> frozenset[str]:
        """Return the changed units that contain a loaded file.

        `tops` maps a unit to its top-level entries.
        """
        rows = [row for file in loaded.files if (row := row_of(older.snapshot, older.tree, file)) is not None]
        return frozenset(
            member.address
            for number, root in enumerate(older.snapshot.roots)
            for member in root.members
            if member.address in tops
            and any(
                row == number
                # Comparing the names avoids a slower file-system access.
                and "/".join(path.split("/", 2)[:2]) in tops[member.address]
                and os.path.lexists(self._unit(member.address) / path)
                for row, path in rows
            )
        )

    def _unit(self, address: str) -> Path:
        return self._units / address[:2] / address


def _identity(directory: str) -> tuple[int, int] | None:
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _tops(unit: Path) -> frozenset[str]:
    """Return the top-level entries of an environment unit, such as ``site/torch``."""
    found: list[str] = []
    for area in ("site", "prefix"):
        with contextlib.suppress(FileNotFoundError):
            found += [f"{area}/{name}" for name in os.listdir(unit / area)]
    return frozenset(found)


def _module_name(top: str) -> str:
    """Return the module name of a unit's top-level entry, or ""."""
    area, _, name = top.partition("/")
    stem, _, ending = name.partition(".")
    is_module = not ending or ending.endswith(("py", "pyc", "so"))
    return stem if area == "site" and is_module else ""


def _runs_code(unit: Path, tops: Collection[str]) -> str:
    """Return the event at which Python or torch runs code of a unit without an import statement, or ""."""
    names = [top.partition("/")[2] for top in tops if top.startswith("site/")]
    if any(name.endswith(".pth") or name.partition(".")[0] in _HOOK_MODULES for name in names):
        return "an interpreter starts"
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            with contextlib.suppress(OSError):
                if _TORCH_POINTS in (unit / "site" / name / "entry_points.txt").read_bytes():
                    return "torch is imported"
    return ""
