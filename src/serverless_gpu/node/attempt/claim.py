"""Ensures that a single process controls an attempt, and that the attempt runs at most once.

    supervisor.lock   flock held = a supervisor runs (`attach` and the history test it)
    facts.jsonl       the attempt's facts; `exec` = user code began
    stopped.json      the final state of the attempt

A sender that does not know whether its launch request arrived sends the request again. Before a launch, the supervisor
takes the attempt's lock. The supervisor refuses an attempt that has already begun or ended. To prevent the start of an
attempt, a process takes the attempt's lock and writes `stopped.json` (`uplink/attempt_controller.py`).

If a local attempt loses its supervisor before user code begins, the agent records the loss. After a recorded loss, the
client launches the attempt again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from pathlib import Path

from serverless_gpu.model.lifecycle.attempt import SUPERVISOR_GONE, Attempt, Fact, FactKind
from serverless_gpu.node.attempt.history import REMOTE_FILE, first_facts, read_ending
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.base.requirements import REFUSED, lock_error

LOCK = "supervisor.lock"
_BEFORE_STARTING = frozenset({FactKind.RESERVED, FactKind.HYDRATING, FactKind.ALIVE, FactKind.FREED})
_TRIES = 100
_PAUSE_S = 0.01  # Seconds between attempts to lock. A process that tests the lock holds it briefly.


def first_of(launch: Launch) -> Attempt:
    """Return the initial state of a launched attempt."""
    numbers = launch.numbers
    return Attempt(
        run_id=launch.run_id,
        fence=launch.fence,
        world_size=len(numbers),
        first=numbers.start,
        limits=launch.spec.limits(),
        has_peers=len(launch.all_crews) > 1,
    )


def take_attempt(directory: Path) -> str:
    """Claim an attempt for the lifetime of this process. Return "" or the reason for a refusal.

    Raises StorageError if the file system refuses locks, and OSError if the directory is missing or read-only.
    """
    try:
        lock = try_lock(directory)
    except OSError as error:
        if error.errno in REFUSED:
            raise lock_error(directory, error.strerror or str(error)) from error
        raise
    if lock < 0:
        return f"another process controls the attempt in {directory}"
    stopped = directory / "stopped.json"
    if stopped.exists():
        # A new supervisor may replace `stopped.json` only if the earlier supervisor was lost and no server owns the
        # attempt.
        ending = read_ending(directory)
        if ending is None or ending.reason not in SUPERVISOR_GONE or (directory / REMOTE_FILE).exists():
            return f"the attempt in {directory} has ended"
    if has_begun(first_facts(directory)):
        return f"the attempt in {directory} has already begun"
    stopped.unlink(missing_ok=True)
    # If a full disk prevents the write, the kernel log cannot explain a later loss of the supervisor.
    with contextlib.suppress(OSError):
        os.pwrite(lock, b"%-20d\n" % os.getpid(), 0)
    return ""


def read_pid(directory: Path) -> int | None:
    """Return the pid of an attempt's last supervisor, or None if the lock file contains no pid."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        text = os.read(fd, 32).strip()
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(text) if text.isdigit() else None


def try_lock(directory: Path, *, tries: int = _TRIES) -> int:
    """Return the descriptor of an attempt's lock, or -1 after `tries` attempts to lock it, 10 ms apart."""
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(tries):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            select.select([], [], [], _PAUSE_S)
        else:
            return lock
    os.close(lock)
    return -1


def may_have_begun(facts: list[Fact]) -> bool:
    """Return True if user code may have begun.

    A supervisor writes `starting` before it contacts the stem.
    """
    return any(fact.kind not in _BEFORE_STARTING for fact in facts)


def has_begun(facts: list[Fact]) -> bool:
    """Return True if the facts show that user code began."""
    return any(fact.kind is FactKind.EXEC for fact in facts)
