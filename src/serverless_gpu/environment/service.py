"""The environment service: a process that recognizes and captures environments for its caller.

    caller ── EnvironmentQuestion ──▶ service ─ watches? ─ gate ─┬─ Unchanged, by the watches ──▶ FilesChecked: nothing
                                                                 ├─ Unchanged ─▶ child ──▶ FilesChecked: what changed
                                                                 └─ UnknownEnvironment, or changed ───┐
           ◀── CapturedEnvironment, CaptureProgress …, CaptureDone, CaptureFailed ──── child captures ◀┘

After a capture or an unchanged check, a forked process places watches on the libraries (`watch_process.py`). While no
watch reports an event, the service only runs the gate and does not check every file.

The service reads, hashes and compresses all files outside of the user's process. The service has one thread and opens
only directory stores. The service answers the next question at once, because forked children do all slow operations.
Concurrent questions about the same environment share one capture. An environment check answers only questions that
arrived before the check started. All questions that arrive during a check share the next check.

`client/launch/environment_process.py` implements the connections between a caller and the service. `scan.py` recognizes
environments, and `snapshot_capture.py` captures them.

Failure cases: If the capture fails, the disk is full, or the store does not answer, the service sends `CaptureFailed`
with the error's code. If a child process is killed, the service also sends `CaptureFailed`. If the caller's process has
ended or closed the connection, the service ends its children and exits. If watches are unavailable or report a change,
the service checks every file and logs the reason. If the caller gives up (`Abandon`), the service ends a capture that
no caller wants. The next capture uses the objects that the ended capture has already sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.capture.snapshot_capture import CaptureResult, capture, capture_remarks
from serverless_gpu.environment.compression import LEVEL_LOCAL, LEVEL_REMOTE
from serverless_gpu.environment.documents import ProgressPoint, Snapshot
from serverless_gpu.environment.scan.changes import differences
from serverless_gpu.environment.scan.description import Description, read_description
from serverless_gpu.environment.scan.index import ENTRIES_MAX
from serverless_gpu.environment.scan.scan import Recogniser, Scan
from serverless_gpu.environment.service_messages import (
    Abandon,
    Answer,
    CapturedEnvironment,
    CaptureDone,
    CaptureFailed,
    CaptureProgress,
    EnvironmentQuestion,
    FilesChecked,
    Unchanged,
    UnknownEnvironment,
    decode_answer,
    decode_question,
    encode,
)
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.store_urls import is_remote, is_served, open_store
from serverless_gpu.environment.watch_process import WatchBackoff, WatchProcess
from serverless_gpu.errors import EnvironmentProblem, ServerlessGpuError, StorageError
from serverless_gpu.operating_system import is_thread_limit, lacks_inodes, thread_limit

CHANGES_TOLD_MAX = 3
WATCHED_MAX = 4
"""Maximum number of environments that the service watches.

A newly watched environment replaces the oldest watched environment.
"""
_REPORT_S = 0.1
_NOT_THERE = "the server does not have the environment, or has deleted it"
_SENTENCE_CHARACTERS_MAX = 500
_PACKET_BYTES_MAX = 60_000


class ServiceConnection(Protocol):
    """Connection from the service to its caller."""

    def fileno(self) -> int: ...

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes | None:
        """Return the next message from the caller, or None after the caller has disconnected."""


class _Task(msgspec.Struct, kw_only=True):
    """A child process and the questions that wait for its result."""

    key: bytes
    described: dict[str, object]
    pid: int
    sock: socket.socket
    asks: list[EnvironmentQuestion]
    checks: bool
    found: CapturedEnvironment | None = None
    over: bool = False
    unchanged: bool = False  # True if the environment's index is up to date


class Service:
    """Answers one caller's questions about environments."""

    def __init__(self, wire: ServiceConnection, index: Path) -> None:
        self._wire = wire
        self._index = index
        self._recogniser = Recogniser(index)
        self._tasks: list[_Task] = []
        self._pending: dict[
            bytes, list[EnvironmentQuestion]
        ] = {}  # questions that arrived after the running check started
        self._put_off: dict[
            bytes, list[EnvironmentQuestion]
        ] = {}  # questions that arrived while a child recorded a capture
        self._watches: dict[bytes, WatchProcess] = {}
        self._patience: dict[bytes, WatchBackoff] = {}
        # Process IDs of terminated watching processes. The kernel needs time to close the watches of a terminated
        # process.
        self._ended: list[int] = []
        self._selector = selectors.DefaultSelector()

    def serve(self, caller_fd: int) -> None:
        """Answer questions until the caller disconnects.

        `caller_fd` becomes readable when the caller's process ends, even if a forked child of the caller still runs.
        `caller_fd` is -1 without a descriptor.
        """
        self._selector.register(self._wire.fileno(), selectors.EVENT_READ, self._hear)
        if caller_fd >= 0:
            self._selector.register(caller_fd, selectors.EVENT_READ, lambda: False)
        try:
            while all([key.data() for key, _ in self._selector.select()]):
                self._ended = [pid for pid in self._ended if not os.waitpid(pid, os.WNOHANG)[0]]
        except OSError:  # The caller disconnected while the service sent an answer.
            pass
        for task in self._tasks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.pid, signal.SIGKILL)
        for watch in self._watches.values():
            watch.close()

    # --- questions -----------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        data = self._wire.receive()
        if data is None:
            return False
        question = decode_question(data)
        if isinstance(question, Abandon):
            self._abandon(question.number)
            return True
        self._safely([question], partial(self._answer, question))
        return True

    def _safely(self, asks: Sequence[EnvironmentQuestion], work: Callable[[], None]) -> None:
        """Run `work`, and answer the questions with the error if `work` raises an error."""
        try:
            work()
        except ServerlessGpuError as error:
            for ask in asks:
                self._say(_failed(ask.number, error))
        except OSError as error:
            for ask in asks:
                self._say(_failed(ask.number, capture_error(error)))
        except RuntimeError as error:
            if not is_thread_limit(error):
                raise
            for ask in asks:
                self._say(_failed(ask.number, thread_limit()))

    def _answer(self, ask: EnvironmentQuestion) -> None:
        description = read_description(ask.description)
        key = description.key()
        if any(task.over and task.key == key and not task.checks for task in self._tasks):
            self._put_off.setdefault(key, []).append(ask)
            return
        watched = self._watched(key)
        snapshot = self._recogniser.gate(description, watched)
        if snapshot is not None and _is_stored(ask, snapshot):
            self._say(Unchanged(number=ask.number, snapshot=snapshot.address))
            if not watched or self._recogniser.generation() != watched:
                self._check([ask], key, fresh=True)
                return
            self._watches[key].saved += 1
            if is_served(ask.store):

                def check_server(tell: Callable[[Answer], None]) -> None:
                    tell(FilesChecked(number=ask.number, changes=() if _has(ask, snapshot) else (_NOT_THERE,)))

                self._fork([ask], key, checks=True, work=check_server)
            else:
                self._say(FilesChecked(number=ask.number))
            return
        self._say(UnknownEnvironment(number=ask.number))
        if ask.capture:
            self._take(ask, key)

    def _watched(self, key: bytes) -> bytes:
        """Return the index generation whose libraries the watches prove unchanged, or b"" without a proof."""
        watch = self._watches.get(key)
        if watch is None or not watch.generation:
            return b""
        watched = watch.ask()
        if not watched:
            self._unwatch(key)
        return watched

    def _watch(self, key: bytes, description: Description) -> None:
        """Start watching an environment's libraries if the watches will probably save checks."""
        if key in self._watches or not self._patience.setdefault(key, WatchBackoff()).is_due():
            return
        while len(self._patience) > ENTRIES_MAX:
            self._patience.pop(next(iter(self._patience)))
        while len(self._watches) >= WATCHED_MAX:
            self._unwatch(next(iter(self._watches)))
        try:
            watch = WatchProcess(self._recogniser, description, self._leave)
        except OSError as error:
            self._log(key, str(error))
            return
        self._watches[key] = watch
        self._selector.register(watch.sock, selectors.EVENT_READ, lambda: self._hear_watch(key, watch))

    def _hear_watch(self, key: bytes, watch: WatchProcess) -> bool:
        if self._watches.get(key) is watch and not watch.hear():
            self._unwatch(key)
        return True

    def _unwatch(self, key: bytes) -> None:
        watch = self._watches.pop(key)
        self._selector.unregister(watch.sock)
        watch.close()
        self._ended.append(watch.pid)
        if key in self._patience:
            self._patience[key].count(watch.saved)
        if watch.reason:
            self._log(key, watch.reason)

    def _log(self, key: bytes, reason: str) -> None:
        patience = self._patience.setdefault(key, WatchBackoff())
        if patience.reason != reason:
            patience.reason = reason
            print(f"no watches cover the environment, so every file is checked: {reason}", file=sys.stderr)

    def _leave(self) -> None:
        """Close inherited sockets in a watching process, so that peers notice the end of the service."""
        os.close(self._wire.fileno())
        for task in self._tasks:
            task.sock.close()
        for watch in self._watches.values():
            watch.sock.close()

    def _abandon(self, number: int) -> None:
        for waiting in (*self._pending.values(), *self._put_off.values()):
            waiting[:] = [ask for ask in waiting if ask.number != number]
        for task in self._tasks:
            asks = [ask for ask in task.asks if ask.number != number]
            if task.asks and not asks and not task.checks:
                # The service reaps the child process when the child's socket closes.
                os.kill(task.pid, signal.SIGKILL)
            task.asks[:] = asks

    # --- child processes -----------------------------------------------------------------------------------------

    def _check(self, asks: list[EnvironmentQuestion], key: bytes, *, fresh: bool) -> None:
        """Check every file of an environment, now or after the running check.

        `fresh` is True if the gate has just found the environment unchanged.
        """
        if any(task.checks and task.key == key for task in self._tasks):
            self._pending.setdefault(key, []).extend(asks)
            return
        self._fork(asks, key, checks=True, work=lambda tell: _check(self._recogniser, tuple(asks), fresh, tell))

    def _take(self, ask: EnvironmentQuestion, key: bytes) -> None:
        for task in self._tasks:
            if task.asks and not task.checks and not task.over and task.key == key and task.asks[0].store == ask.store:
                task.asks.append(ask)
                if task.found is not None:
                    self._say(msgspec.structs.replace(task.found, number=ask.number))
                return
        self._fork([ask], key, checks=False, work=lambda tell: _take(self._index, ask, tell))

    def _fork(
        self,
        asks: list[EnvironmentQuestion],
        key: bytes,
        *,
        checks: bool,
        work: Callable[[Callable[[Answer], None]], None],
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            _be_child(theirs, asks[0].number, work)
        theirs.close()
        task = _Task(key=key, described=asks[0].description, pid=pid, sock=ours, asks=asks, checks=checks)
        self._tasks.append(task)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear_task(task))

    def _hear_task(self, task: _Task) -> bool:
        try:
            data = task.sock.recv(_PACKET_BYTES_MAX)
        except OSError:
            data = b""
        if not data:
            self._bury(task)
            return True
        answer = decode_answer(data)
        task.over = task.over or not isinstance(answer, CapturedEnvironment | CaptureProgress)
        task.found = answer if isinstance(answer, CapturedEnvironment) else task.found
        task.unchanged = isinstance(answer, CaptureDone) or (isinstance(answer, FilesChecked) and not answer.changes)
        for ask in task.asks:
            self._say(msgspec.structs.replace(answer, number=ask.number))
        if isinstance(answer, FilesChecked) and answer.changes:
            for ask in task.asks:
                if ask.capture:
                    self._safely([ask], partial(self._take, ask, task.key))
        return True

    def _bury(self, task: _Task) -> None:
        self._selector.unregister(task.sock)
        task.sock.close()
        self._tasks.remove(task)
        status = os.waitpid(task.pid, 0)[1]
        if not task.over:
            how = os.waitstatus_to_exitcode(status)
            told = f"was killed by signal {-how}" if how < 0 else f"exited with code {how}"
            doing = "checked" if task.checks else "captured"
            message = f"the process that {doing} the environment {told}"
            for ask in task.asks:
                self._say(CaptureFailed(number=ask.number, code=EnvironmentProblem.code, message=message))
        waiting = self._pending.pop(task.key, []) if task.checks else []
        if waiting:
            self._safely(waiting, partial(self._check, waiting, task.key, fresh=False))
        if not task.checks:
            # A new `Recogniser` reads the index that the child has written.
            self._recogniser = Recogniser(self._index)
            for ask in self._put_off.pop(task.key, []):
                self._safely([ask], partial(self._answer, ask))
            if task.key in self._watches:  # The existing watches belong to the previous index.
                self._unwatch(task.key)
        if task.unchanged and not status:
            self._watch(task.key, read_description(task.described))

    def _say(self, answer: Answer) -> None:
        self._wire.send(encode(answer))


def _be_child(sock: socket.socket, number: int, work: Callable[[Callable[[Answer], None]], None]) -> NoReturn:
    """Run a child process's task, then exit the process.

    If the task raises an error, the child sends the error as its answer.
    """
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def tell(answer: Answer) -> None:
            sock.send(encode(answer))

        try:
            work(tell)
        except ServerlessGpuError as error:
            tell(_failed(number, error))
        except BrokenPipeError:  # The service and its caller have ended.
            pass
        except OSError as error:
            tell(_failed(number, capture_error(error)))
        except RuntimeError as error:
            if not is_thread_limit(error):
                raise
            tell(_failed(number, thread_limit()))
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def _check(
    recogniser: Recogniser, asks: Sequence[EnvironmentQuestion], fresh: bool, tell: Callable[[Answer], None]
) -> None:
    changes: tuple[str, ...] = ()
    snapshot = recogniser.known() if fresh else recogniser.gate(read_description(asks[0].description))
    if not fresh and snapshot is None:
        changes = ("an installed package or the project's code has changed since the gate",)
    else:
        changes = _told(tuple(change.sentence() for change in recogniser.check()))
    stores = {ask.store: ask for ask in asks if is_served(ask.store)}
    if not changes and snapshot is not None and not all(_has(ask, snapshot) for ask in stores.values()):
        changes = (_NOT_THERE,)
    tell(FilesChecked(number=asks[0].number, changes=changes))


def _take(index: Path, ask: EnvironmentQuestion, tell: Callable[[Answer], None]) -> None:
    clock = SystemClock()
    started_ns = clock.boottime_ns()
    told_ns = [0]

    def report(progress: ProgressPoint) -> None:
        now_ns = clock.boottime_ns()
        if now_ns - told_ns[0] >= _REPORT_S * 1e9:
            told_ns[0] = now_ns
            tell(CaptureProgress(number=ask.number, progress=progress))

    description: Description = read_description(ask.description)
    blobs = StoreBlobs(_store(ask))
    level = LEVEL_REMOTE if is_remote(ask.store) else LEVEL_LOCAL
    recogniser = Recogniser(index)
    last = recogniser.last(description)
    scan = recogniser.scan(description, report)
    tell(_found(ask, last, scan, blobs))
    taken = capture(scan, blobs, level=level, report=report)
    tell(_summary(ask.number, taken, (clock.boottime_ns() - started_ns) // 1_000_000))
    # A caller waits for the index write only if its question arrives during the write.
    recogniser.remember(taken.scan)


def _found(ask: EnvironmentQuestion, last: Snapshot | None, scan: Scan, blobs: StoreBlobs) -> CapturedEnvironment:
    """Return the answer that announces a capture, with changes and remarks."""
    told = capture_remarks(last, scan)
    if last is None:
        return CapturedEnvironment(number=ask.number, first=True, remarks=told)
    changes = tuple(change.sentence() for change in differences(last, scan.snapshot, scan.sources, blobs))
    if not changes and is_served(ask.store) and not _has(ask, last):
        told = (f"the environment is captured for the server: {_NOT_THERE}", *told)
    elif not changes and not _is_stored(ask, last):
        told = ("the service captures the environment again, because the store no longer has it", *told)
    return CapturedEnvironment(number=ask.number, first=False, changes=_told(changes), remarks=told)


def _summary(number: int, taken: CaptureResult, ms: int) -> CaptureDone:
    snapshot = taken.snapshot
    code = [member for root in snapshot.roots for member in root.members if member.kind == "code"]
    return CaptureDone(
        number=number,
        snapshot=snapshot.address,
        size=snapshot.size,
        files=snapshot.files,
        units=len(snapshot.addresses()),
        code_bytes=sum(member.size for member in code),
        sent_units=len(taken.units_new),
        sent_bytes=taken.sent_bytes,
        ms=ms,
    )


def _told(sentences: Sequence[str]) -> tuple[str, ...]:
    told = tuple(sentence[:_SENTENCE_CHARACTERS_MAX] for sentence in sentences[:CHANGES_TOLD_MAX])
    more = len(sentences) - CHANGES_TOLD_MAX
    return (*told, f"and {more} more") if more > 0 else told


def _is_stored(ask: EnvironmentQuestion, snapshot: Snapshot) -> bool:
    """Return True if a store still contains a snapshot and its units.

    The function returns True for remote stores without querying them. A later restore queries remote stores. The check
    of all files queries a server's store.
    """
    return is_remote(ask.store) or _has(ask, snapshot)


def _has(ask: EnvironmentQuestion, snapshot: Snapshot) -> bool:
    keys = [f"snapshots/{snapshot.address}", *(f"units/{address}" for address in snapshot.addresses())]
    return len(_store(ask).present(keys)) == len(keys)


def _store(ask: EnvironmentQuestion) -> Store:
    return open_store(ask.store, ask.environ, token=ask.token, ca=ask.ca)


def _failed(number: int, error: ServerlessGpuError) -> CaptureFailed:
    return CaptureFailed(number=number, code=error.code, message=error.message, hint=error.hint)


def capture_error(error: OSError) -> StorageError:
    """Return the error for an `OSError` on files of the environment or of the home directory."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full and error.filename is not None and lacks_inodes(Path(os.fsdecode(error.filename))):
        return StorageError(
            f"the environment cannot be captured, because no inodes are left for {os.fsdecode(error.filename)}",
            hint="delete files on this disk, or set SERVERLESS_GPU_HOME to a directory on a disk with more inodes",
        )
    return StorageError(
        f"the environment cannot be captured: {error}",
        hint="free some disk space, or set SERVERLESS_GPU_HOME to a directory on another disk"
        if is_full
        else "make this file readable and the home directory writable; `sgpu doctor` checks both",
    )
