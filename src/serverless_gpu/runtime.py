"""Reports where this process stands in its gang, and whether it is to stop: `from serverless_gpu import runtime as rt`.

The variables torch and torchrun use come first, so that the answers are right under `torchrun` and `accelerate`, too.
Outside of any gang a process is rank 0 of 1, and never asked to stop.

The checkpoint contract, for runs that are to go on where they were stopped:

    supervisor ── stop_reason (a file), SIGTERM ──▶ rank: should_stop(), on_stop ── saves, returns ──▶ next attempt
                                                          └──▶ checkpoint_dir() ─────────────────────▶ resume_dir()

SIGTERM ends a process at once, as it always does, until one of `should_stop`, `stop_reason` and `on_stop` is called:
from then on the process has the run's grace for what it wants to save. Failure cases: the main thread is in a
collective that a rank left already, then Python hears no signal and the grace ends it (how ranks leave together:
docs/how-to/checkpoints-and-stopping.md); a child that a rank forked is not asked to stop and keeps the usual SIGTERM,
but may look.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from serverless_gpu.errors import InvalidOption, SecretMissing, StorageError, UsageError
from serverless_gpu.node.inside.checkpoints import AGREED, newest_before

__all__ = [
    "checkpoint_dir",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_size",
    "on_stop",
    "resume_dir",
    "secret",
    "should_stop",
    "stop_reason",
]

_STOP_FILE = "SGPU_STOP_FILE"
_STOP_REASON = "SGPU_STOP_REASON"
_CHECKPOINT_DIR = "SGPU_CHECKPOINT_DIR"
_SECRETS_DIR = "SGPU_SECRETS_DIR"
_OUTSIDE = "checkpoints"
_NAME_IT = 'name it at the call: secrets=["HF_TOKEN"]; `sgpu secret set HF_TOKEN` makes it'
_UNEXPLAINED = "cancel"  # SIGTERM came from another process than the supervisor

C = TypeVar("C", bound=Callable[[], object])


def get_global_rank() -> int:
    """Return this process's rank among all, from 0."""
    return _number("RANK", default=0)


def get_local_rank() -> int:
    """Return this process's rank on its node, from 0; the index of its GPU."""
    return _number("LOCAL_RANK", default=0)


def get_world_size() -> int:
    """Return the number of ranks on all nodes."""
    return _number("WORLD_SIZE", default=1)


def get_node_rank() -> int:
    """Return the number of this node in the gang, from 0."""
    return _number("NODE_RANK", "GROUP_RANK", default=0)


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return _number("LOCAL_WORLD_SIZE", default=1)


def should_stop() -> bool:
    """Return whether this run was asked to stop: save what is worth saving, and return.

    Ranks may hear of it a step apart: let them agree before they leave a loop with collectives.

    Raises:
        UsageError: the first call came from a thread other than the main one, which alone can listen to signals.
    """
    _listen()
    return _stop.signalled or _word() is not None


def stop_reason() -> str | None:
    """Return why this run is to stop, or None while it is not.

    Returns:
        ``"cancel"``, ``"preempt"``, ``"timeout"``, ``"budget"``, ``"drain"`` or ``"idle"``; or ``"failure"`` when
        another rank has failed, and only two seconds are left.

    Raises:
        UsageError: as `should_stop`.
    """
    _listen()
    word = _word()
    if word is None and _stop.signalled:
        word = _UNEXPLAINED
    if word is not None:
        os.environ[_STOP_REASON] = word  # for programs this process starts from now on
    return word


def on_stop(callback: C) -> C:
    """Have a function called when this run is asked to stop; also as a decorator.

    It runs once, in the main thread, between two steps of whatever that does then. What it raises is raised there.

    Args:
        callback: takes no arguments.

    Returns:
        The callback.

    Raises:
        InvalidOption: it cannot be called.
        UsageError: as `should_stop`.
    """
    if not callable(callback):
        raise InvalidOption(f"on_stop takes a function, not {callback!r}")
    if should_stop():
        callback()
    else:
        _stop.callbacks.append(callback)
    return callback


def checkpoint_dir() -> Path:
    """Return the directory for checkpoints of this attempt, made if needed; the same one in all ranks.

    It outlives the attempt and the run, and nothing in it is ever deleted for you. Outside of a run it is
    ``checkpoints`` in the working directory.

    Raises:
        StorageError: it cannot be made.
    """
    given = os.environ.get(_CHECKPOINT_DIR)
    directory = Path(given) if given else Path.cwd() / _OUTSIDE
    try:
        for path in (directory.parent, directory) if given else (directory,):  # not their root: that must be mounted
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the directory for checkpoints {directory} cannot be made: {error.strerror}",
            hint="`[checkpoints]` in config.toml of the node says where they lie; that directory has to exist",
        ) from error
    return directory


def resume_dir() -> Path | None:
    """Return the checkpoints of the newest earlier attempt of this run that saved any, or None: start from scratch.

    Names that begin with a dot or end in ``.tmp`` do not count: write a checkpoint under such a name, then rename it. A
    later attempt that finds nothing says so on stderr, once: it may run where the others' directory cannot be seen.
    """
    given = os.environ.get(_CHECKPOINT_DIR)
    found = newest_before(given, os.environ.get(AGREED)) if given else None
    if found is not None:
        return Path(found)
    if given and _number("SGPU_FENCE", default=1) > 1 and get_global_rank() == 0 and not _stop.missed:
        _stop.missed = True
        sys.stderr.write(
            f"serverless-gpu: no earlier attempt left checkpoints in {Path(given).parent}; this one starts from "
            "scratch. On several nodes `[checkpoints]` in config.toml has to name a directory that all of them see\n"
        )
    return None


def secret(name: str) -> str:
    """Return a secret that this run was given, ``secrets=["HF_TOKEN"]``, as text.

    Bytes that are no text are read from the file of that name in the directory that ``SGPU_SECRETS_DIR`` names.

    Args:
        name: of the secret.

    Raises:
        SecretMissing: the run was not given it.
    """
    directory = os.environ.get(_SECRETS_DIR)
    if not directory:
        raise SecretMissing(f"this process was given no secrets, and {name[:80]!r} is asked for", hint=_NAME_IT)
    try:
        return Path(directory, os.path.basename(name)).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise SecretMissing(f"this run was not given the secret {name!r}", hint=_NAME_IT) from None


class _Stop:
    """What this process knows of being asked to stop, and has said."""

    def __init__(self, *, forked: bool = False) -> None:
        self.forked = forked
        self.listening = False
        self.signalled = False
        self.missed = False
        self.callbacks: list[Callable[[], object]] = []
        self.handler_before: object = signal.SIG_DFL


_stop = _Stop()


def _listen() -> None:
    """Take SIGTERM over, once, in the process that is sent it; one that a rank forked can look at the file."""
    if _stop.listening or _stop.forked or _STOP_FILE not in os.environ:
        return
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return  # a spawned child
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "a thread cannot be the first to ask whether this run is to stop: only the main thread can take signals",
            hint="call serverless_gpu.runtime.should_stop() once in the main thread, before the thread starts",
        )
    _stop.listening = True
    _stop.handler_before = signal.signal(signal.SIGTERM, _terminated)
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Give a child the usual SIGTERM back: a program that terminates a data-loader worker means to end it."""
    global _stop
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _stop = _Stop(forked=True)


def _terminated(number: int, frame: types.FrameType | None) -> None:
    first, _stop.signalled = not _stop.signalled, True
    stop_reason()
    try:
        if first:
            _call_all(_stop.callbacks)
    finally:
        if callable(_stop.handler_before):
            _stop.handler_before(number, frame)


def _call_all(callbacks: list[Callable[[], object]]) -> None:
    """Call all of them, also when one raises; what is raised first is raised, once the others have run."""
    if callbacks:
        try:
            callbacks[0]()
        finally:
            _call_all(callbacks[1:])


def _word() -> str | None:
    """Return what the supervisor has written, or None where it has written nothing."""
    path = os.environ.get(_STOP_FILE)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip() or _UNEXPLAINED
    except OSError:
        return None


def _number(*names: str, default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return default
