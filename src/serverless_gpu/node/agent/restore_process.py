"""The restoring process: a clean interpreter that restores environments in child processes.

    agent ──RestoreRequest──▶ this process ─ fork ─▶ child: fetch, verify, unpack, lay out, compile
          ◀── RestoreProgress, RestoreDone + descriptor of the lock, RestoreFailed ──┘

The agent must not wait for disks or stores. The agent must not fork, because it uses NVML in a thread. Each restore
runs in a separate child process, because the threads of a store's client do not survive a fork. The restoring process
itself never opens a store.

Failure cases: If the store, the disk or the environment fails, the child sends `RestoreFailed` with the error's code.
If a child process is killed, the restoring process sends `RestoreFailed`. If the restoring process is killed, the
kernel also kills its child processes. The agent replaces a lost restoring process. The replacement reuses the unpacked
units. If the agent exits, the restoring process reads end of file and exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.documents import ProgressPoint, Snapshot
from serverless_gpu.environment.restore.cache.cache_directory import DiskFull, is_full, read_document
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoredTree, RestoreMethod, compile_rest, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import read_snapshot
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentProblem, EnvironmentUnsupported, ServerlessGpuError, StorageError
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.base.protocol import EnvironmentRequest, Mode
from serverless_gpu.node.base.requirements import is_noexec, require_symlinks
from serverless_gpu.node.inside import linux, namespaces
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.units import format_bytes

_REPORT_S = 0.25
_NICE = 19
_FULL_PAUSE_S = 0.2
_can_mount: set[Path] = set()


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="Want"):
    """Request to restore an environment.

    `environ` contains the environment variables for opening the store.
    """

    number: int
    wanted: EnvironmentRequest
    environ: dict[str, str] = {}
    patience_s: float = 0.0  # Seconds to wait for other processes to free a full disk.


class CompileRequest(msgspec.Struct, frozen=True, kw_only=True, tag="Finish"):
    """Request to compile the remaining modules of a restored environment at low priority."""

    number: int
    snapshot: str


class RestoreProgress(msgspec.Struct, frozen=True, kw_only=True, tag="Getting"):
    """Message with the progress of a restore."""

    number: int
    sentence: str


class RestoreDone(msgspec.Struct, frozen=True, kw_only=True, tag="Done"):
    """Answer for a restored environment, with a descriptor that holds the environment's lock."""

    number: int
    restored: RestoredTree
    snapshot: Snapshot


class RestoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer that the restore of an environment failed."""

    number: int
    code: str
    message: str


Request = RestoreRequest | CompileRequest
Answer = RestoreProgress | RestoreDone | RestoreFailed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(channel: Channel, message: Request | Answer, fds: tuple[int, ...] = ()) -> None:
    """Send a message with attached descriptors."""
    channel.send(_encoder.encode(message), fds)


def receive_answer(channel: Channel) -> tuple[Answer, tuple[int, ...]] | None:
    """Return the next answer and its descriptors, or None at end of file."""
    received = channel.receive()
    return None if received is None else (_answers.decode(received[0]), received[1])


def main(channel_fd: int, environments: str) -> NoReturn:
    """Restore environments on request until the agent exits."""
    linux.set_name("sgpu-restore")
    linux.be_ordinary()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    children: dict[int, int] = {}  # Maps the pid of each child to its request number.
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(children, channel)
        if channel.fileno() in ready:
            received = channel.receive()
            if received is None:
                os._exit(0)
            request = _requests.decode(received[0])
            if isinstance(request, RestoreRequest) and request.wanted.mode != "links":
                # The parent process tests mounts, so that later children inherit the cached result.
                mount_problem(Path(environments))
            children[_fork(request, channel, Path(environments))] = request.number


def _fork(request: Request, channel: Channel, environments: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            linux.die_with_parent(parent)
            if isinstance(request, RestoreRequest):
                _restore(request, channel, environments)
            else:
                os.nice(_NICE)
                # If the disk is full, each rank compiles the modules that it imports.
                with contextlib.suppress(ServerlessGpuError):
                    compile_rest(request.snapshot, UnitCache(environments))
            code = 0
        finally:
            if code:
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(code)
    return pid


def _reap(children: dict[int, int], channel: Channel) -> None:
    """Reap child processes, and send the agent a message for each child that was killed or crashed."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            number = children.pop(ended[0], None)
            if number is not None and ended[1]:
                how = os.waitstatus_to_exitcode(ended[1])
                told = f"was killed by signal {-how}" if how < 0 else f"exited with code {how}"
                message = f"the process that restored the environment {told}"
                send(channel, RestoreFailed(number=number, code=EnvironmentProblem.code, message=message))


def _restore(want: RestoreRequest, channel: Channel, environments: Path) -> None:
    try:
        done, lock = _restored_in_time(want, environments, channel)
    except ServerlessGpuError as error:
        # The agent interprets the code of `StorageError` as a full disk.
        cause = error.__cause__
        is_full_disk = isinstance(error, DiskFull) or (isinstance(cause, OSError) and is_full(cause))
        code = EnvironmentProblem.code if isinstance(error, StorageError) and not is_full_disk else error.code
        send(channel, RestoreFailed(number=want.number, code=code, message=str(error)))
    except OSError as error:
        problem = storage_error(error, environments)
        code = problem.code if is_full(error) else EnvironmentProblem.code
        send(channel, RestoreFailed(number=want.number, code=code, message=str(problem)))
    else:
        send(channel, done, (lock,))


def _restored_in_time(want: RestoreRequest, environments: Path, channel: Channel) -> tuple[RestoreDone, int]:
    clock = SystemClock()
    limit_ns = clock.boottime_ns() + round(want.patience_s * 1e9)
    while True:
        try:
            return restored(want, environments, reporter(want.number, channel, clock))
        except StorageError:
            if clock.boottime_ns() >= limit_ns:
                raise
        select.select([], [], [], _FULL_PAUSE_S)


def restored(
    want: RestoreRequest, environments: Path, report: Callable[[ProgressPoint], None]
) -> tuple[RestoreDone, int]:
    """Restore an environment. Return the answer for the agent and the lock descriptor.

    Raises EnvironmentProblem. Raises StorageError if the disk is full or does not support symbolic links.
    """
    address = want.wanted.snapshot
    wanted = want.wanted
    blobs = StoreBlobs(open_store(wanted.store, want.environ, token=wanted.token, ca=wanted.ca))
    cache = UnitCache(environments)
    # The child holds the environment's lock during the restore. Processes that use the environment get copies of the
    # lock descriptor.
    lock = cache.hold(address)
    require_symlinks(environments)
    made = restore(address, blobs, cache, way=way_for(want.wanted.mode, environments), report=report)
    snapshot = read_document(cache.environment(address) / "snapshot", Snapshot) or read_snapshot(blobs, address)
    return RestoreDone(number=want.number, restored=made, snapshot=snapshot), lock


def way_for(asked: Mode, environments: Path) -> RestoreMethod:
    """Return the restore method for this machine. If `asked` is "", any method is allowed.

    Raises EnvironmentUnsupported if mounts are requested but impossible, or if code cannot be loaded from links.
    """
    if asked == "links":
        return _links(environments, "SERVERLESS_GPU_RESTORE=links")
    problem = mount_problem(environments)
    if not problem:
        return RestoreMethod(mode="overlay")
    if asked == "overlay":
        raise EnvironmentUnsupported(
            f"SERVERLESS_GPU_RESTORE=overlay is set, but this machine cannot mount environments: {problem}",
            hint="unset SERVERLESS_GPU_RESTORE to use links, or run `sgpu doctor` to see how to enable mounts",
        )
    return _links(environments, f"no mounts: {problem}")


def _links(environments: Path, why: str) -> RestoreMethod:
    if is_noexec(environments):
        raise EnvironmentUnsupported(
            f"{environments} is on a file system that is mounted noexec, so Python cannot load compiled modules "
            f"from a tree of links ({why})",
            hint="set SERVERLESS_GPU_HOME to a directory on a file system without noexec, or remount the file "
            "system: sudo mount -o remount,exec …",
        )
    return RestoreMethod(mode="links", why=why)


def mount_problem(environments: Path) -> str:
    """Return why this machine cannot mount environments, or "". Caches the result ""."""
    if environments not in _can_mount:
        problem = namespaces.probe_mounts(str(environments))
        if problem:
            return problem
        _can_mount.add(environments)
    return ""


def reporter(number: int, channel: Channel, clock: Clock) -> Callable[[ProgressPoint], None]:
    """Return a function that sends progress messages a few times per second."""
    told = [0, 0]  # Boottime of the last progress message, in a list that `report` can change.

    def report(progress: ProgressPoint) -> None:
        now_ns = clock.boottime_ns()
        if now_ns - told[0] < _REPORT_S * 1e9:
            return
        told[0] = now_ns
        with contextlib.suppress(OSError):  # The restoring process exits after the agent.
            send(channel, RestoreProgress(number=number, sentence=sentence(progress)))

    return report


_DOING: Mapping[str, str] = {"fetch": "fetching", "restore": "laying out", "compile": "compiling"}


def sentence(progress: ProgressPoint) -> str:
    """Return the progress of a restore as text."""
    if progress.waits_for:
        return f"waiting for another process on this node to fetch {progress.waits_for}"
    doing = _DOING.get(progress.phase, progress.phase)
    if progress.bytes_total:
        return f"{doing} {format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
    if progress.files_total:
        return f"{doing} {progress.files_done} of {progress.files_total} files"
    return doing
