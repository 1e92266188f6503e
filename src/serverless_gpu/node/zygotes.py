"""The agent's zygotes: one per interpreter and start-up variables, at most a few, none older than its use.

    key = (interpreter, its options, start-up variables)   →   Zygote: process, channel, stems standing by, runs waiting
    for one

A zygote is stale when a file it loaded has changed since (another version installed, a file edited): what a rank would
get from it is not what the caller's next interpreter would import. A package it never loaded may change freely; ranks
see the new one.

Failure cases: the zygote cannot preload or dies (whoever waits for a stem is told what it wrote); it is not fit to
be forked (the key is remembered and runs start cold: a zygote without preload, for one run each); it dies while
idle (the next run starts a new one and the receipt says so).
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside.channel import pair
from serverless_gpu.node.processes import CgroupRoot
from serverless_gpu.node.protocol import Context, original
from serverless_gpu.node.spawning import startup_variables, zygote_process

PRELOAD = ("numpy", "torch", "torch.distributed")
PRELOAD_ROOTS = ("numpy", "torch")
RANKS_STANDBY_MAX = 16
_PROBLEM_BYTES_MAX = 4_000

StemTaker = Callable[[int, int], None]  # pid, descriptor
ProblemTaker = Callable[[str], None]
Stamp = tuple[int, int, int]


class Key(msgspec.Struct, frozen=True):
    """What makes two callers share a zygote; `python` is the interpreter's one name."""

    python: str
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def key_of(context: Context) -> Key:
    """Return the key of a caller's context."""
    return Key(one_name(context.python), context.flags, tuple(startup_variables(context.environ).items()))


def one_name(python: str) -> str:
    """Return the same name for all names of an interpreter in its directory: `python` is `python3` there.

    The directory stays as it is: by it an interpreter knows its environment.
    """
    for name in ("python3", "python"):
        beside = os.path.join(os.path.dirname(python), name)
        with contextlib.suppress(OSError):
            if os.path.samefile(python, beside):
                return beside
    return python


def first_run(key: Key, others: Sequence[Key]) -> str:
    """Return why there is no zygote for a key that never had one.

    Args:
        key: the caller's.
        others: those of zygotes that are there.
    """
    same = [other for other in others if (other.python, other.flags) == (key.python, key.flags)]
    if not same:
        return "first run with this interpreter"
    nearest = min((set(key.variables) ^ set(other.variables) for other in same), key=len)
    names = sorted({name for name, _ in nearest})
    return f"the warm interpreter was started with other values of {', '.join(names)}"


class Zygote:
    """One zygote process and the stems it has made.

    Args:
        context: the caller it is started for.
        preload: modules it imports; empty for a cold start.
        log_path: the file its output is appended to.
        cgroups: where stems get their cgroups.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(
        self, context: Context, preload: tuple[str, ...], log_path: Path, log: int, cgroups: CgroupRoot
    ) -> None:
        ours, theirs = pair()
        self.channel = ours
        self.key = key_of(context)
        self.ready = False
        self.why = ""  # why it had to be started
        self.cold = ""  # why it cannot be forked from
        self.dead = False
        self.context = context
        self.used_ns = 0
        self.started_ns = 0
        self.ranks = 1  # of the last run: as many stand by for the next
        self._log_path = log_path
        self._log_start = os.lseek(log, 0, os.SEEK_END)
        self._cgroups = cgroups
        self._stamps: dict[str, Stamp] = {}
        self._packages: dict[str, str] = {}
        self._stems: deque[tuple[int, int, int]] = deque()  # pid, channel, pidfd
        self._asked = 0
        self._takers: deque[tuple[StemTaker, ProblemTaker]] = deque()
        try:
            self.process: subprocess.Popen[bytes] = zygote_process(
                context.python,
                context.flags,
                {original(name): original(value) for name, value in context.environ.items()},
                preload,
                channel_fd=theirs.fileno(),
                log=log,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def waited_for(self) -> bool:
        """Return whether a run waits for a stem of this zygote."""
        return bool(self._takers)

    def take_stem(self, take: StemTaker, fail: ProblemTaker) -> None:
        """Hand a stem to a run, now or as soon as there is one.

        Args:
            take: called with the stem's pid and a descriptor that it then owns.
            fail: called with what went wrong instead.
        """
        while self._stems:
            pid, fd, process = self._stems.popleft()
            alive = not _readable(process)
            os.close(process)
            if alive:
                take(pid, fd)
                return
            os.close(fd)  # the kernel may end what stands by when memory is short
        self._takers.append((take, fail))
        if self._asked < len(self._takers):
            self.ask_stem()

    def refill(self) -> None:
        """Have one stem standing by."""
        if self.ready and not self.dead and not self._stems and not self._asked:
            self.ask_stem()

    def ask_stem(self) -> None:
        """Ask for one more stem; a zygote that is still preloading answers when it is ready."""
        cgroups = [str(path) for path in self._cgroups.make()]
        ranks = min(self.ranks, RANKS_STANDBY_MAX)
        try:
            self.channel.send(inside.encode({"op": "stem", "cgroups": cgroups, "ranks": ranks}))
        except OSError:
            return  # it has ended; what it said last is still to be heard
        self._asked += 1

    def hear(self) -> bool:
        """Take one message; return False when the zygote is gone."""
        try:
            received = self.channel.receive()
            message = inside.decode(received[0]) if received is not None else None
        except (OSError, ValueError):
            received = message = None
        if received is None or message is None:
            self.fail()
            return False
        fds = received[1]
        match message.get("event"):
            case "ready":
                self.ready = True
                files = message.get("modules")
                packages = message.get("packages")
                self._packages = packages if isinstance(packages, dict) else {}
                self._stamps = {str(file): stamp(str(file)) for file in files} if isinstance(files, list) else {}
            case "cold":
                self.cold = inside.text(message, "reason")
            case "stem":
                self._asked -= 1
                self._offer(inside.integer(message, "pid"), fds[0])
        return True

    def stale(self) -> str | None:
        """Return the first loaded file that changed since, or None."""
        for file, known in self._stamps.items():
            if stamp(file) != known:
                return file
        return None

    def differs(self, packages: Mapping[str, str]) -> str | None:
        """Return in words which loaded module the caller imports from elsewhere, or None."""
        for name, file in packages.items():
            theirs, mine = original(file), self._packages.get(name)
            if mine is not None and theirs != mine:
                has = "Python's own" if name in sys.stdlib_module_names else mine
                return f"{name} is {theirs} for the caller, the warm interpreter has {has}"
        return None

    def fail(self) -> None:
        """Tell everyone who waits that there will be no stem."""
        self.dead = True
        problem = self._problem()
        while self._takers:
            self._takers.popleft()[1](problem)

    def release_takers(self) -> list[tuple[StemTaker, ProblemTaker]]:
        """Return those who wait for a stem, and forget them."""
        takers = list(self._takers)
        self._takers.clear()
        return takers

    def close(self) -> None:
        """Let the zygote and its unused stems end: they read end of file."""
        self.dead = True
        while self._stems:
            _, fd, process = self._stems.popleft()
            os.close(fd)
            os.close(process)
        self.channel.close()

    def _offer(self, pid: int, fd: int) -> None:
        if self._takers:
            self._takers.popleft()[0](pid, fd)
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
        ended = "ended" if code is None else f"ended with code {code}"
        return f"{self.context.python}, which was to become a zygote, {ended}:\n{written or '(it wrote nothing)'}"


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def stamp(file: str) -> Stamp:
    """Return what tells that a file is another one, or was written to."""
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
