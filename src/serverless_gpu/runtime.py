"""Provides the rank and the stop requests of a process: `from serverless_gpu import runtime as rt`.

The variables of torch and torchrun have priority, so that the functions also return correct values under `torchrun` and
`accelerate`. Outside of any gang, a process is rank 0 of 1 and receives no stop requests.

Checkpoint contract for runs that continue after a stop:

    supervisor ── stop_reason (a file), SIGTERM ──▶ rank: should_stop(), on_stop ── saves, returns ──▶ next attempt
                                                          └──▶ checkpoint_dir() ─────────────────────▶ resume_dir()

By default SIGTERM ends a process at once. After the first call of `should_stop`, `stop_reason` or `on_stop`, the
process has the run's grace period to save its state.

Failure cases: If the main thread is in a collective that another rank has already left, Python runs no signal handler.
The supervisor kills a blocked process at the end of the grace period (see docs/how-to/checkpoints-and-stopping.md). A
child that a rank forked receives no stop request and keeps the default SIGTERM handler. A forked child can still call
`stop_reason`.
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
_NAME_IT = 'request the secret in the call: secrets=["HF_TOKEN"], and create the secret with `sgpu secret set HF_TOKEN`'
_UNEXPLAINED = "cancel"  # Stop reason for a SIGTERM from a process other than the supervisor.

C = TypeVar("C", bound=Callable[[], object])


def get_global_rank() -> int:
    """Return this process's rank among all ranks, from 0."""
    return _number("RANK", default=0)


def get_local_rank() -> int:
    """Return this process's rank on its node, from 0. The local rank is also the index of the rank's GPU."""
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
    """Return True if this run must stop. The caller should then save its state and return.

    Some ranks may see the stop request one training step before other ranks. In a loop with collectives, let the ranks
    agree on the step at which all of them stop.

    Raises:
        UsageError: the first call did not come from the main thread, the only thread that can receive signals.
    """
    _listen()
    return _stop.signalled or _word() is not None


def stop_reason() -> str | None:
    """Return the reason for the stop of this run, or None if the run need not stop.

    Returns:
        ``"cancel"``, ``"preempt"``, ``"timeout"``, ``"budget"``, ``"drain"``, ``"idle"`` or ``"failure"``. After
        ``"failure"``, another rank has failed and only two seconds remain for the stop.

    Raises:
        UsageError: the first call did not come from the main thread.
    """
    _listen()
    word = _word()
    if word is None and _stop.signalled:
        word = _UNEXPLAINED
    if word is not None:
        os.environ[_STOP_REASON] = word  # Programs that this process starts later inherit the stop reason.
    return word


def on_stop(callback: C) -> C:
    """Register a function to call when this run must stop. `on_stop` also works as a decorator.

    The signal handler calls a registered function once, in the main thread. An exception of the callback propagates
    from the interrupted code.

    Args:
        callback: takes no arguments.

    Returns:
        The callback.

    Raises:
        InvalidOption: the callback is not callable.
        UsageError: the first call did not come from the main thread.
    """
    if not callable(callback):
        raise InvalidOption(f"on_stop takes a function, not {callback!r}")
    if should_stop():
        callback()
    else:
        _stop.callbacks.append(callback)
    return callback


def checkpoint_dir() -> Path:
    """Return this attempt's checkpoint directory, which all ranks share. Create a missing directory.

    The checkpoint directory outlives the attempt and the run. The runtime never deletes checkpoint files. Outside of a
    run, the directory is ``checkpoints`` in the working directory.

    Raises:
        StorageError: the directory cannot be created.
    """
    given = os.environ.get(_CHECKPOINT_DIR)
    directory = Path(given) if given else Path.cwd() / _OUTSIDE
    try:
        # The root directory of all checkpoints must already exist, because the root may be a mount.
        for path in (directory.parent, directory) if given else (directory,):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the checkpoint directory {directory} cannot be created: {error.strerror}",
            hint="create the directory that `[checkpoints]` in config.toml of the node names, or mount it",
        ) from error
    return directory


def resume_dir() -> Path | None:
    """Return the checkpoint directory of the newest earlier attempt that saved a checkpoint, or None.

    If no earlier attempt saved a checkpoint, start from scratch. `resume_dir` ignores files whose names begin with a
    dot or end in ``.tmp``. Write each checkpoint under a ``.tmp`` name first, then rename the file. If a later attempt
    finds no checkpoints, `resume_dir` prints one message to stderr. The node may lack access to the checkpoint
    directory of earlier attempts.
    """
    given = os.environ.get(_CHECKPOINT_DIR)
    found = newest_before(given, os.environ.get(AGREED)) if given else None
    if found is not None:
        return Path(found)
    if given and _number("SGPU_FENCE", default=1) > 1 and get_global_rank() == 0 and not _stop.missed:
        _stop.missed = True
        sys.stderr.write(
            f"serverless-gpu: no earlier attempt left checkpoints in {Path(given).parent}, so this attempt starts "
            "from scratch. For several nodes, `[checkpoints]` in config.toml must name a directory that all "
            "nodes can read\n"
        )
    return None


def secret(name: str) -> str:
    """Return the text of a secret that this run requested, for example with ``secrets=["HF_TOKEN"]``.

    To get a binary secret, read the file with the secret's name in the directory ``SGPU_SECRETS_DIR``.

    Args:
        name: name of the secret.

    Raises:
        SecretMissing: this run did not request the secret.
    """
    directory = os.environ.get(_SECRETS_DIR)
    if not directory:
        raise SecretMissing(f"the secret {name[:80]!r} is missing: this process has no secrets", hint=_NAME_IT)
    try:
        return Path(directory, os.path.basename(name)).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise SecretMissing(f"the secret {name!r} is missing: this run did not request it", hint=_NAME_IT) from None


class _Stop:
    """The stop requests and callbacks of this process."""

    def __init__(self, *, forked: bool = False) -> None:
        self.forked = forked
        self.listening = False
        self.signalled = False
        self.missed = False
        self.callbacks: list[Callable[[], object]] = []
        self.handler_before: object = signal.SIG_DFL


_stop = _Stop()


def _listen() -> None:
    """Install the SIGTERM handler once, in the rank process.

    Forked children of the rank only read the stop file.
    """
    if _stop.listening or _stop.forked or _STOP_FILE not in os.environ:
        return
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return  # Spawned children keep the default handler.
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "the first call must come from the main thread: only the main thread can receive signals",
            hint="call serverless_gpu.runtime.should_stop() once in the main thread, before any other thread",
        )
    _stop.listening = True
    _stop.handler_before = signal.signal(signal.SIGTERM, _terminated)
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Restore the default SIGTERM handler in a child, so that a program can terminate its data loaders."""
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
    """Call all callbacks, even if one raises. Raise the first exception after the last callback."""
    if callbacks:
        try:
            callbacks[0]()
        finally:
            _call_all(callbacks[1:])


def _word() -> str | None:
    """Return the supervisor's stop reason, or None without a stop request."""
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
