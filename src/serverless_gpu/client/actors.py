"""Keeps one object per rank of a session alive between calls.

    with serverless_gpu.session(gpus=2) as session, session.actors(Model, "weights.pt") as model:
        model.predict.distributed(batch)      each rank creates its object once; each call runs in all ranks

All method calls use a single run of the session. The run's ranks connect to a Unix socket in the client's private
directory. Method calls and answers bypass the agent, the supervisor and the server. The ranks exit when the client
closes the socket or exits. After the exit of all ranks, the supervisor verifies and releases the devices of the run.

If a method raises an exception in a rank, the client raises the same exception. The ranks keep running. After a rank
fails, the client cancels the run if another rank does not answer within the grace period. For example, another rank may
wait for the failed rank in a collective operation. Ctrl-C during a method call cancels the run. If a rank process dies,
the method call raises the run's error. If the session's idle timeout expires between calls, the client closes the
socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from serverless_gpu.client.runs.outcome import add_note, rebuild_exception
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import NotPicklable, ServerlessGpuError, SessionEnded
from serverless_gpu.node.inside import payload
from serverless_gpu.node.inside.actor import receive_frame, send_frame

_TICK_S = 0.2  # Interval in seconds between checks of the run state.
_PATH_BYTES_MAX = 100  # The kernel limits the address of a Unix socket to 107 bytes.
_HINT = "create new actors with session.actors(...)"

Start = Callable[[str], Run[None]]


class ActorMethod:
    """Actor method that the caller can invoke in all ranks simultaneously."""

    def __init__(self, actors: Actors, name: str) -> None:
        self._actors = actors
        self._name = name

    def distributed(self, *args: object, **kwargs: object) -> list[Any]:
        """Call the method in every rank and return the results by global rank.

        Raises:
            SessionEnded: the caller closed the actors, or the run has ended. The message gives the reason.
            NotPicklable: pickle refuses an argument.
            RunError: a rank died. The message names the rank.
            Exception: the exception that the first failing rank raised, with its own type.
        """
        return self._actors._call(self._name, args, kwargs)


class Actors:
    """One object of the same class in each rank, created by `session.actors(...)`.

    Attributes:
        run: the run whose ranks hold the objects.
    """

    def __init__(self, cls: type, start: Start, *, grace_s: float, idle_timeout_s: float) -> None:
        self._cls = cls
        self._grace_s = grace_s
        self._idle_timeout_s = idle_timeout_s
        self._ended_by = ""
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._directory = _private_directory()
        self._socks: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        weakref.finalize(self, _clean, os.getpid(), self._directory, self._socks, self._listener)
        self._listener.bind(f"{self._directory}/calls")
        self._listener.listen(1024)
        self.run = start(f"{self._directory}/calls")
        try:
            self._connect()
            self._answers()
        except BaseException:
            self._abort("the setup of the ranks failed")
            raise
        self._restart_timer()

    def __repr__(self) -> str:
        return f"<Actors {self._cls.__qualname__} of run {self.run.id}{' (ended)' if self._ended_by else ''}>"

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("_") or not callable(getattr(self._cls, name, None)):
            raise AttributeError(f"{self._cls.__qualname__} has no method {name!r}")
        return ActorMethod(self, name)

    def __enter__(self) -> Actors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks, and wait until the run's devices are free. Further calls of `close` do nothing."""
        self._end("the caller closed the actors")
        with contextlib.suppress(ServerlessGpuError):  # A run without a supervisor may have no receipt.
            self.run.receipt()

    def _call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
        with self._lock:
            if self._ended_by:
                raise SessionEnded(
                    f"the actors of {self._cls.__qualname__} (run {self.run.id}) have ended: {self._ended_by}",
                    hint=_HINT,
                )
            request = self._request(name, args, kwargs)
            self._stop_timer()
            try:
                for sock in self._socks.values():
                    # If a rank process has exited, the next read from the rank's socket detects the exit.
                    with contextlib.suppress(OSError):
                        send_frame(sock, request)
                answers = {rank: cast("tuple[bool, object]", answer) for rank, answer in self._answers().items()}
                for rank, (is_value, failure) in answers.items():
                    if not is_value:  # Raise the first failure in order of arrival.
                        raise self._with_note(self._error(rank, failure), len(answers))
                return [answers[rank][1] for rank in sorted(answers)]
            except KeyboardInterrupt:
                self._abort("Ctrl-C interrupted a call")
                raise KeyboardInterrupt from None
            finally:
                if not self._ended_by:
                    self._restart_timer()

    def _request(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
        try:
            return payload.dumps((name, tuple(args), dict(kwargs)))
        except Exception as error:  # noqa: BLE001 - user code in __reduce__ may raise
            cause = error
        raise NotPicklable(
            f"the arguments of {self._cls.__qualname__}.{name} cannot be pickled: {cause}",
            hint="pass plain data, arrays or CPU tensors, and open files and connections inside the method",
        ) from cause

    def _with_note(self, error: BaseException, answered: int) -> BaseException:
        if answered < len(self._socks):
            add_note(
                error,
                f"{len(self._socks) - answered} other rank(s) did not answer within grace={self._grace_s:g} s, "
                "for example because of a collective operation. The client cancelled the actors' run. To continue, "
                f"{_HINT}",
            )
        return error

    def _error(self, rank: int, failure: object) -> BaseException:
        description, pickled = cast("tuple[dict[str, object], bytes | None]", failure)
        path = Path(self._directory, "failure.pkl")
        if pickled is not None:
            path.write_bytes(pickled)
        log = self.run.directory / "logs" / f"rank-{rank}.stderr"
        return rebuild_exception(
            description,
            None if pickled is None else str(path),
            rank=rank,
            host=socket.gethostname(),
            run_id=self.run.id,
            log_path=str(log),
        )

    def _answers(self) -> dict[int, object]:
        """Return the answers by rank, in order of arrival. Omit ranks that exceed the grace period."""
        answers: dict[int, object] = {}
        deadline: float | None = None
        while waiting := {sock: rank for rank, sock in self._socks.items() if rank not in answers}:
            for sock in select.select(list(waiting), [], [], _TICK_S)[0]:
                data = receive_frame(sock)
                if data is None:
                    raise self._death()
                answer = answers[waiting[sock]] = payload.loads(data)
                if deadline is None and isinstance(answer, tuple) and not answer[0]:
                    deadline = time.monotonic() + self._grace_s
            if deadline is not None and time.monotonic() > deadline and len(answers) < len(self._socks):
                self._abort("a call failed in one rank, and other ranks did not answer")
                break
            if self.run.wait(0) and len(answers) < len(self._socks):
                raise self._death()
        return answers

    def _death(self) -> BaseException:
        """Return the error of the run after a rank process has exited."""
        self._end("a rank has ended")
        error = self.run._error(None)
        if error is None:
            return SessionEnded(f"the ranks of run {self.run.id} have exited", hint=_HINT)
        if isinstance(error, ServerlessGpuError) and not error.hint:
            error.hint = f"the actors have ended, so {_HINT}"
        else:
            add_note(error, f"the actors have ended, so {_HINT}")
        return error

    def _connect(self) -> None:
        world_size = 1
        while len(self._socks) < world_size:
            if select.select([self._listener], [], [], _TICK_S)[0]:
                sock, _ = self._listener.accept()
                hello = receive_frame(sock)
                if hello is not None:
                    rank, world_size = cast("tuple[int, int]", payload.loads(hello))
                    self._socks[rank] = sock
            elif self.run.wait(0):
                raise self._death()

    def _restart_timer(self) -> None:
        self._stop_timer()
        self._timer = threading.Timer(self._idle_timeout_s, _end_idle, (weakref.ref(self), self._idle_timeout_s))
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self, why: str) -> None:
        self._end(why)
        self.run.cancel()

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended_by = self._ended_by or why
            self._stop_timer()
            _clean(os.getpid(), "", self._socks, self._listener)


def _end_idle(reference: weakref.ref[Actors], limit_s: float) -> None:
    """End the actors after the idle timeout."""
    actors = reference()
    # If another thread holds the lock, a method call has just started.
    if actors is not None and actors._lock.acquire(blocking=False):
        try:
            actors._end(f"no method call arrived for {limit_s:g} s (idle_timeout)")
        finally:
            actors._lock.release()


def _private_directory() -> str:
    made = tempfile.mkdtemp(prefix="sgpu-actors-")
    if len(os.fsencode(made)) <= _PATH_BYTES_MAX - len("/calls"):
        return made
    os.rmdir(made)
    return tempfile.mkdtemp(prefix="sgpu-actors-", dir="/tmp")


def _clean(owner: int, directory: str, socks: Mapping[int, socket.socket], listener: socket.socket) -> None:
    """Close the sockets and delete the directory. In a forked child, close only the child's descriptors."""
    for sock in (*socks.values(), listener):
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    if directory and os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
