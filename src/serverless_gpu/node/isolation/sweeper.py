"""Looks for what principals have left on a node, removes it if that is safe, and keeps the findings.

    agent ── at its start and every 15 minutes ──▶ a clean process with low priority ──▶ findings.json
    `sgpu node sweep` ─────────────────────────────┘                                       │
    `sgpu doctor`, `sgpu node show` ◀──────────────────────────────────────────────────────┘

The sweeper looks at processes, at files in directories that all users can write, at SysV and POSIX interprocess
communication, and at scheduled jobs. It looks only at uids of the range for principals.

Failure cases: If a place contains too many files or is not readable, the findings name the place. An incomplete look
never frees a uid. If the sweeper cannot remove a file, it reports the file and continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import InvalidValue, IsolationUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.isolation.principals import MAP, PrincipalMap
from serverless_gpu.node.isolation.remains import Remain, RemainAction, RemainKind, judge
from serverless_gpu.node.isolation.survey import SHARED_PLACES, posix_queues, survey

FIRST_S, EVERY_S = 10.0, 900.0
"""Seconds from the agent's start to the first sweep, because the first run needs the CPU cores, and between sweeps."""
_FINDINGS = "findings.json"
_ATTEMPTS_MAX = 100_000
_NOTED_NS = 86_400 * 10**9  # A finding of the agent stays for a day.
_SENTENCES_MAX = 20
_NAMED_MAX = 3
_IPC_RMID = 0


class Noted(msgspec.Struct, frozen=True):
    """A finding of the agent, with the wall time."""

    at_ns: int
    sentence: str


class SweepFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The latest findings about the principals of a node. Tuples contain sentences."""

    swept_ns: int = 0
    removed: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    noted: tuple[Noted, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """Return the findings that an operator should read."""
        return (*self.reported, *self.unknown, *(each.sentence for each in self.noted))


class PrincipalFindings(NamedTuple):
    """Number of a node's principals, and the latest findings about them."""

    principals: int
    findings: SweepFindings


def sweep(known: PrincipalMap, shared: Sequence[str] = SHARED_PLACES) -> SweepFindings:
    """Remove what principals certainly left behind, and write and return the findings. Raises OSError."""
    looked = survey(known.uids, shared)
    owners = {uid: owner for owner, uid in known.read().items()}
    removed, reported = [], []
    for verdict in judge(looked.found, owners):
        if verdict.action is RemainAction.REPORT:
            reported.append(verdict.sentence)
        elif verdict.action is RemainAction.REMOVE:
            problem = _remove(verdict.remain)
            if problem:
                reported.append(f"{verdict.sentence}, and cannot be removed: {problem}")
            else:
                removed.append(verdict.sentence)
    now_ns = SystemClock().wall_ns()
    with known.locked():
        before = read_findings(known.place)
        findings = SweepFindings(
            swept_ns=now_ns,
            removed=_few(removed),
            reported=_few(reported),
            unknown=_few(looked.unknown),
            noted=tuple(each for each in before.noted if now_ns - each.at_ns < _NOTED_NS),
        )
        write_private(known.place / _FINDINGS, msgspec.json.encode(findings))
    return findings


def forget(known: PrincipalMap, name: str, *, delete_home: bool, shared: Sequence[str] = SHARED_PLACES) -> str:
    """Free the uid of a principal if nothing of it remains on this node. Return its owner.

    Raises InvalidValue for an unknown name, or IsolationUnavailable if something remains.
    """
    with known.locked():
        owners = known.read()
        matching = [owner for owner in owners if name in (owner, owner.partition(" of ")[0])]
        if len(matching) != 1:
            names = ", ".join(sorted(owners)[:_SENTENCES_MAX]) or "none"
            raise InvalidValue(f"{name!r} names {len(matching)} principals of this node", hint=f"principals: {names}")
        owner, uid = matching[0], owners[matching[0]]
        looked = survey((uid,), shared)
        left = [f"{each.kind} {each.name}" for each in looked.found] + looked.unknown
        left += [f"attempt {path}" for path in _attempts_of(known.homes(), uid)]
        home = known.place / str(uid)
        if not delete_home and home.is_dir() and any(home.iterdir()):
            left.append(f"home directory {home} (delete it with --delete-home)")
        if left:
            more = f" and {len(left) - _NAMED_MAX} more" if len(left) > _NAMED_MAX else ""
            raise IsolationUnavailable(
                f"uid {uid} of {owner} stays reserved, because something remains: {', '.join(left[:_NAMED_MAX])}{more}",
                hint="end the processes and remove the files, then run the command again   (attempts: sgpu clean)",
            )
        if home.exists():
            shutil.rmtree(home)
        known.write({each: number for each, number in owners.items() if each != owner})
    return owner


def read_findings(place: Path) -> SweepFindings:
    """Return the latest findings of a node. Raises OSError if they are not readable."""
    try:
        return from_json((place / _FINDINGS).read_bytes(), SweepFindings)
    except (FileNotFoundError, msgspec.MsgspecError):  # The next sweep replaces damaged findings.
        return SweepFindings()


def note_finding(known: PrincipalMap, sentence: str) -> None:
    """Add a finding of the agent. Raises OSError."""
    with known.locked():
        before = read_findings(known.place)
        noted = (*before.noted, Noted(SystemClock().wall_ns(), sentence))[-_SENTENCES_MAX:]
        write_private(known.place / _FINDINGS, msgspec.json.encode(msgspec.structs.replace(before, noted=noted)))


def _few(sentences: Sequence[str]) -> tuple[str, ...]:
    more = len(sentences) - _SENTENCES_MAX
    return (*sentences[:_SENTENCES_MAX], *([f"{more} more findings"] if more > 0 else []))


def _attempts_of(homes: Sequence[Path], uid: int) -> Iterator[Path]:
    """Yield the directories of attempts and checkpoints that contain files of a uid."""
    left = _ATTEMPTS_MAX
    for home in homes:
        for pattern in ("runs/*/*/*", "checkpoints/*"):
            for path in home.glob(pattern):
                left -= 1
                with contextlib.suppress(OSError):
                    if left < 0 or path.lstat().st_uid == uid:
                        yield path


# --- removing --------------------------------------------------------------------------------------------------------


def _remove(remain: Remain) -> str:
    """Remove a remain that still is what the sweeper has seen. Return "" or the reason for a failure."""
    try:
        match remain.kind:
            case RemainKind.FILE:
                _remove_file(remain)
            case RemainKind.POSIX_QUEUE:
                posix_queues(remain.name)
            case _:
                _remove_system_v(remain)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _remove_file(remain: Remain) -> None:
    status = os.lstat(remain.name)
    if status.st_uid != remain.uid:
        raise PermissionError("it now belongs to another user")
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(remain.name)
    else:
        os.unlink(remain.name)


def _remove_system_v(remain: Remain) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = int(remain.name)
    match remain.kind:
        case RemainKind.SHARED_MEMORY:
            done = libc.shmctl(number, _IPC_RMID, None)
        case RemainKind.SEMAPHORES:
            done = libc.semctl(number, 0, _IPC_RMID)
        case _:
            done = libc.msgctl(number, _IPC_RMID, None)
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# --- the sweeper's process -------------------------------------------------------------------------------------------


class SweeperProcess(Protocol):
    """A process that runs one sweep."""

    def poll(self) -> int | None: ...


class SweepSchedule:
    """Starts sweeps, one at a time, if the machine has ever had a principal."""

    def __init__(self, clock: Clock, known: PrincipalMap, start: Callable[[], SweeperProcess]) -> None:
        self._clock = clock
        self._known = known
        self._start = start
        self._process: SweeperProcess | None = None
        self._due_ns = clock.boottime_ns() + round(FIRST_S * 1e9)

    def tend(self) -> None:
        """Start a sweep if the interval has passed and the previous sweep has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        now_ns = self._clock.boottime_ns()
        if now_ns < self._due_ns or self._process is not None:
            return
        self._due_ns = now_ns + round(EVERY_S * 1e9)
        if (self._known.place / MAP).exists():
            with contextlib.suppress(OSError):  # Without a free process, the next sweep is a quarter of an hour later.
                self._process = self._start()
