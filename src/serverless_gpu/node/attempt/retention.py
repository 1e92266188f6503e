"""Deletes expired run directories.

    agent ──periodically──▶ a clean process with low priority: scan runs/, apply model/lifecycle/retention.py, delete

The deletion runs in a separate process, because the agent's event loop never waits for a disk. Retention renames a run
within `runs/` before it deletes the run, so that no reader sees an incomplete run. After an interrupted deletion, the
next retention pass deletes the remaining files.

Failure cases: Retention keeps the directory of an unlaunched run for a day after its last write, because the client may
still be writing it. Retention keeps directories of other programs. Retention keeps a run for a month if its server has
not received all data. Retention deletes a link in `runs/` but not its target. Concurrent deletions of a run are safe.
If retention cannot delete a file, it reports the file and continues with the next run. If the configuration is
unreadable, retention deletes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from serverless_gpu.ambient import Clock, SystemClock, created_wall_ns
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.retention import Policy, RunDirectory, to_delete
from serverless_gpu.node.attempt.history import NOT_STARTED, UNREADABLE, RunRecord, read_run, run_ids, size_on_disk
from serverless_gpu.node.attempt.server_attempt_record import is_unsent
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside import linux
from serverless_gpu.units import format_bytes

# Delay of the first pass after the agent's start, in seconds, because the first run needs the CPU cores.
FIRST_S = 10.0
EVERY_S = 3_600.0
DELETED_MAX = 1_000  # Maximum number of deletions per retention pass.
_TRASH = ".trash-"
_QUEUED_BYTES_MAX = 1 << 20


class CleanupResult(msgspec.Struct, frozen=True):
    """Result of one retention pass: deleted runs, freed bytes, and error messages."""

    deleted: tuple[str, ...]
    freed_bytes: int
    problems: tuple[str, ...] = ()


class RetentionPass(Protocol):
    """A process that runs one retention pass."""

    def poll(self) -> int | None: ...


class RetentionSchedule:
    """Starts retention passes, one at a time.

    `start` receives a descriptor with the ids of queued runs.
    """

    def __init__(self, clock: Clock, start: Callable[[int], RetentionPass]) -> None:
        self._clock = clock
        self._start = start
        self._pass: RetentionPass | None = None
        self._due_ns = clock.boottime_ns() + int(FIRST_S * 1e9)

    def tend(self, queued: Collection[str]) -> None:
        """Start a retention pass if the interval has passed and the previous pass has ended."""
        if self._pass is not None and self._pass.poll() is not None:
            self._pass = None
        now_ns = self._clock.boottime_ns()
        if now_ns < self._due_ns or self._pass is not None:
            return
        self._due_ns = now_ns + int(EVERY_S * 1e9)
        with contextlib.suppress(OSError):  # If no process or memory is available, the agent tries again in an hour.
            fd = os.memfd_create("sgpu-queued")
            try:
                os.write(fd, "\n".join(queued).encode())
                self._pass = self._start(fd)
            finally:
                os.close(fd)


def main(home: str, queued_fd: int) -> NoReturn:
    """Run one retention pass and exit.

    `queued_fd` contains the ids of queued runs, one per line.
    """
    os.nice(19)
    linux.be_ordinary()
    queued = os.pread(queued_fd, _QUEUED_BYTES_MAX, 0).decode().split()
    try:
        policy = read_configuration(Home(Path(home))).retention
    except ServerlessGpuError as error:
        print(f"retention: no run was deleted, because the configuration is unreadable: {error}", flush=True)
        os._exit(1)
    done = clean(Home(Path(home)).runs, policy, queued, SystemClock())
    if done.deleted or done.problems:
        print("\n".join((f"retention: {cleaned_text(done)}", *done.problems)), flush=True)
    os._exit(0)


def clean(runs: Path, policy: Policy, queued: Collection[str], clock: Clock) -> CleanupResult:
    """Delete the runs that the policy no longer keeps."""
    empty_trash(runs)
    now_ns = clock.wall_ns()
    return delete_all(runs, to_delete(scan(runs, queued, now_ns), policy, now_ns)[:DELETED_MAX])


def scan(runs: Path, queued: Collection[str], now_ns: int) -> list[RunDirectory]:
    """Return all run directories in the form that the retention policy needs."""
    return [
        RunDirectory(
            run_id=run_id,
            ended_ns=None if is_unsent(runs / run_id, now_ns) else _ended_ns(read_run(runs, run_id, queued), now_ns),
            size_bytes=size_on_disk(runs / run_id),
        )
        for run_id in run_ids(runs)
    ]


def delete_all(runs: Path, chosen: Collection[RunDirectory]) -> CleanupResult:
    """Delete the chosen run directories.

    The result contains an error message for each run directory that could not be deleted.
    """
    deleted, problems, freed_bytes = [], [], 0
    for entry in chosen:
        try:
            delete(runs, entry.run_id)
        except OSError as error:
            problems.append(f"could not delete run {entry.run_id}: {error.strerror or error}")
        else:
            deleted.append(entry.run_id)
            freed_bytes += entry.size_bytes
    return CleanupResult(tuple(deleted), freed_bytes, tuple(problems))


def delete(runs: Path, run_id: str) -> None:
    """Delete the directory of one run, if it exists. Raises OSError if a file cannot be deleted."""
    trash = runs / f"{_TRASH}{run_id}-{os.getpid()}"
    try:
        (runs / run_id).rename(trash)
    except FileNotFoundError:
        return
    _remove(trash)


def empty_trash(runs: Path) -> None:
    """Delete files that interrupted deletions left behind."""
    with contextlib.suppress(OSError):
        for name in os.listdir(runs):
            if name.startswith(_TRASH):
                with contextlib.suppress(OSError):
                    _remove(runs / name)


def cleaned_text(done: CleanupResult) -> str:
    """Describe the result of a retention pass as text."""
    count = len(done.deleted)
    return f"deleted {count} run{'' if count == 1 else 's'}, {format_bytes(done.freed_bytes)}"


def _ended_ns(record: RunRecord, now_ns: int) -> int | None:
    if record.live or record.ended_ns is None:
        return None
    if record.state == UNREADABLE and created_wall_ns(record.run_id) is None:
        return None  # The run directory belongs to another program.
    if record.state in (NOT_STARTED, UNREADABLE) and now_ns - record.ended_ns < DAY_NS:
        return None  # The client may still be writing the run directory.
    return record.ended_ns


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # This process makes read-only directories of user code writable and tries again.
        for directory, _, _ in os.walk(path):
            with contextlib.suppress(OSError):
                os.chmod(directory, 0o700)
        shutil.rmtree(path)
