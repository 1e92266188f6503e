"""Implements sessions, which hold devices and a warm interpreter between calls.

    with serverless_gpu.session(gpus=8, gpu_type="H100") as s:
        s.distributed(train, lr=3e-4)      no wait for GPUs, no cold start
        s.distributed(evaluate)

A session process on the node (`node/supervisor/session.py`) holds the devices while the client process is connected.
Between calls, a daemon thread of the client reads the session process's messages: idle warnings and the session's end.
A call in an ended session raises an error with the reason. When the client process exits, the session ends. The
session's runs continue.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import ParamSpec, TypeVar, Unpack, cast

import msgspec

from serverless_gpu.client.actors import Actors
from serverless_gpu.client.decorator import DistributedFunction, parse_options
from serverless_gpu.client.display.run_display import Display, TerminalDisplay, make_display, second_interrupt_text
from serverless_gpu.client.launch.launch import LendingSession, launch, launch_session
from serverless_gpu.client.launch.preflight import bind_arguments, check_function
from serverless_gpu.client.runs.run import Run, own_sessions
from serverless_gpu.client.runs.run_list import RunList
from serverless_gpu.client.runs.run_source import ConnectionNote
from serverless_gpu.errors import NotDistributable, ServerlessGpuError, SessionEnded, UsageError
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import RunSpec, SessionOptions, seconds
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.actor import serve_actor
from serverless_gpu.operating_system import start_thread

P = ParamSpec("P")
R = TypeVar("R")

IDLE_TIMEOUT_S = 3600.0
_HAND_BACK_S = 30.0


class _Hold(Run[None]):
    """Handle of a session process, which uses the message protocol of a run without ranks."""

    devices: tuple[Device, ...] = ()

    def wait_held(self, display: Display) -> None:
        """Wait until the session holds its devices, and display the wait reason."""
        self._display = display
        self._hear_until(lambda: bool(self.devices) or self.over, None)
        if not self.devices:
            raise self._error(None) or SessionEnded(f"session {self.id} ended before it got its devices")

    def listen(self) -> None:
        """Print messages about the session until the session ends."""
        with contextlib.suppress(OSError):
            self._hear_until(lambda: self.over and not self._source.is_open, None)

    @property
    def over(self) -> bool:
        """True after the session has ended."""
        return self._stopped is not None or self._refused is not None or not self._source.is_open

    def _take(self, message: protocol.AnyMessage | ConnectionNote) -> None:
        if isinstance(message, protocol.SessionReady):
            self.devices, self._state, self._waiting = message.devices, State.RUNNING, ""
        else:
            super()._take(message)


class Session:
    """Reserved GPUs and a warm interpreter for several calls.

    `serverless_gpu.session(...)` creates a session. At the end of a `with` block, the session waits for its runs and
    releases the devices. An exception in the block cancels the session's runs. `close()` has the same effect as the end
    of the block.

    Attributes:
        id: the session's identifier.
        devices: identifiers of the devices that the session holds.
    """

    def __init__(self, held: _Hold, spec: RunSpec, display: Display, idle_timeout_s: float = IDLE_TIMEOUT_S) -> None:
        self.id = held.id
        self.devices = tuple(device.uuid for device in held.devices)
        self._hold = held
        self._spec = spec
        self._display = display
        self._idle_timeout_s = idle_timeout_s
        self._actors: list[Actors] = []
        self._runs: list[Run[object]] = []
        self._pruned_at = 64
        self._closed = False
        self._owner = os.getpid()
        own_sessions.add(self.id)
        # The thread and the finalizer hold no reference to the Session object, so that garbage collection of the object
        # ends the session.
        weakref.finalize(self, _end_in, self._owner, held)
        start_thread(held.listen, f"serverless-gpu-session-{held.id}")

    def __repr__(self) -> str:
        return f"<Session {self.id} of {', '.join(self.devices)}{' (ended)' if self._hold.over else ''}>"

    def __enter__(self) -> Session:
        self._refuse_if_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and os.getpid() == self._owner:
            self._stop_runs(interrupted=issubclass(kind, KeyboardInterrupt))
        self.close()

    def distributed(
        self, function: Callable[P, R] | DistributedFunction[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run a function on the session's devices and return the results by global rank.

        Args:
            function: a plain function, which gets every device of the session, or a decorated function, which gets the
                number of devices in its decorator.
            args: positional arguments of the function. The rank process fills in the parameters `rank` and
                `world_size`.
            kwargs: keyword arguments of the function.

        Raises:
            SessionEnded: the session has ended.
            ServerlessGpuError: no run was started. The message gives the reason.
            RunError: the run ended without success.
            Exception: the exception that the first failing rank raised, with its own type.
        """
        return self._bind(function).distributed(*args, **kwargs)

    def submit(self, function: Callable[P, R] | DistributedFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start a run on the session's devices and return its handle at once.

        Before the run starts, the method raises the same errors as `distributed`.
        """
        return self._bind(function).submit(*args, **kwargs)

    def map(
        self, function: Callable[..., R] | DistributedFunction[..., R], *iterables: Iterable[object], **kwargs: object
    ) -> RunList[R]:
        """Start one run per item and return the run handles, like `map` of a decorated function.

        The number of devices in the session limits the number of parallel runs. Decorate the function with `gpus=1` to
        run one item per device.
        """
        return self._bind(function).map(*iterables, **kwargs)

    def starmap(
        self,
        function: Callable[..., R] | DistributedFunction[..., R],
        items: Iterable[Iterable[object]],
        **kwargs: object,
    ) -> RunList[R]:
        """Start one run per tuple of positional arguments and return the run handles."""
        return self._bind(function).starmap(items, **kwargs)

    def actors(self, cls: Callable[..., object], *args: object, **kwargs: object) -> Actors:
        """Create one object of a class in each rank. The object and the rank process persist between calls.

        Each rank calls ``cls(*args, **kwargs)`` and then the object's ``setup()`` method, if any. The rank process
        fills in the parameters `rank` and `world_size`. The session's idle limit also applies to the actors.

        Args:
            cls: a plain class, which gets every device of the session, or a decorated class, which gets the number of
                devices in its decorator.
            args: positional arguments of the class.
            kwargs: keyword arguments of the class.

        Returns:
            The actors. Call their methods with ``actors.method.distributed(...)``.

        Raises:
            SessionEnded: the session has ended.
            NotDistributable: `cls` is not a class.
            ServerlessGpuError: no run was started. The message gives the reason.
            Exception: the exception that the first failing rank raised, with its own type.
        """
        bound = self._bind(cls)
        plain = bound.__wrapped__
        if not isinstance(plain, type):
            raise NotDistributable(
                f"session.actors takes a class, not {plain!r}", hint="call functions with session.distributed"
            )
        bind_arguments(plain, args, kwargs)
        spec = msgspec.structs.replace(bound.spec, hang_warning_s=0, hang_timeout_s=None)

        def start(address: str) -> Run[None]:
            return self._launch(serve_actor, (address, plain, args, kwargs), {}, spec)

        self._actors = [other for other in self._actors if not other._ended_by]
        made = Actors(plain, start, grace_s=spec.grace_s, idle_timeout_s=self._idle_timeout_s)
        self._actors.append(made)
        return made

    def close(self) -> None:
        """Wait for the session's runs, release its devices and print its receipt.

        Closing a session twice has no effect.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C during the wait. The devices are free, and the runs were
                cancelled unless `on_interrupt` detaches them.
        """
        # Only the parent process owns the session, even if a forked child process has a copy of the Session object.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        try:
            for actors in self._actors:
                actors.close()
            _wait_for(self._runs)
        except KeyboardInterrupt:
            self._stop_runs(interrupted=True)
            raise KeyboardInterrupt from None
        finally:
            own_sessions.discard(self.id)
            self._hold.cancel()
            self._say_end()

    def _say_end(self) -> None:
        try:
            receipt = self._hold.receipt(_HAND_BACK_S)
            # `close` creates a new display, because another notebook cell may have opened the session.
            make_display(quiet=self._spec.quiet, logs=self._hold.directory / "logs").receipt(receipt)
        except (TimeoutError, ServerlessGpuError) as error:
            self._display.say(f"session {self.id}: {error}")

    def _bind(self, function: Callable[P, R] | DistributedFunction[P, R]) -> _InSession[P, R]:
        if isinstance(function, DistributedFunction):
            spec, plain = function.spec, cast("Callable[P, R]", function.__wrapped__)
        else:
            check_function(function)
            resources = msgspec.structs.replace(self._spec.resources, gpus=None)
            name = str(getattr(function, "__qualname__", type(function).__qualname__))
            spec, plain = msgspec.structs.replace(self._spec, resources=resources, name=name), function
        return _InSession(plain, spec, self)

    def _launch(
        self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object], spec: RunSpec
    ) -> Run[R]:
        self._refuse_if_over()
        run = launch(function, args, kwargs, spec, LendingSession(self.id, self._hold.devices))
        run.session = self.id
        if len(self._runs) >= self._pruned_at:
            self._runs = [other for other in self._runs if not other.wait(0)]
            self._pruned_at = max(64, 2 * len(self._runs))
        self._runs.append(cast("Run[object]", run))
        return run

    def _refuse_if_over(self) -> None:
        if self._closed or self._hold.over:
            why = (
                "the caller closed the session"
                if self._closed
                else self._hold.last_sentence() or "the session's process has ended"
            )
            hint = "open a new session with serverless_gpu.session(...)"
            raise SessionEnded(f"session {self.id} cannot be used any more: {why}", hint=hint)

    def _stop_runs(self, *, interrupted: bool) -> None:
        """Cancel the session's runs and wait until they end.

        Skip runs with `on_interrupt="detach"`. Drop all handles.
        """
        runs, self._runs = self._runs, []
        going = [run for run in runs if not run._abandoned(interrupted=interrupted) and not run.wait(timeout=0)]
        if not going:
            return
        for run in going:
            run.cancel()
        self._display.say(f"cancelling {_runs_text(len(going))}; {second_interrupt_text()} to leave at once")
        try:
            _wait_for(going)
        except KeyboardInterrupt:
            self._display.say(
                f"the client stopped waiting; {_runs_text(len(going))} of session {self.id} are still being cancelled"
            )


def _end_in(owner: int, held: _Hold) -> None:
    """End a session in the process that opened it. Do nothing in a forked child process."""
    if os.getpid() == owner:
        held.cancel()


def _wait_for(runs: Sequence[Run[object]]) -> None:
    for run in runs:
        with contextlib.suppress(ServerlessGpuError):  # If the supervisor was killed, the session has no receipt.
            run.receipt()


def _runs_text(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


class _InSession(DistributedFunction[P, R]):
    def __init__(self, function: Callable[P, R], spec: RunSpec, session: Session) -> None:
        super().__init__(function, spec)
        self._session = session

    def _launch(self, args: Sequence[object], kwargs: Mapping[str, object], *, watch: bool) -> Run[R]:
        return self._session._launch(self.__wrapped__, args, kwargs, self.spec)


def session(
    gpus: int | None = None,
    gpu_type: str | None = None,
    timeout: float | None = None,
    idle_timeout: float = IDLE_TIMEOUT_S,
    **options: Unpack[SessionOptions],
) -> Session:
    """Wait for free GPUs of this machine and hold the GPUs for several calls.

    Args:
        gpus: number of GPUs. None means every GPU of the node.
        gpu_type: GPU type in any case, such as ``"H100"`` or ``"a10"``, or ``"CPU"`` for CPU slots. None means the only
            available type.
        timeout: maximum duration of user code in each run of a plain function, in seconds. None means no limit.
        idle_timeout: maximum seconds without a run. The session then ends. A warning appears after four fifths of this
            time.
        options: options for runs of plain functions, as for `distributed`.

    Returns:
        The session, which holds its devices.

    Raises:
        InvalidOption: an option does not exist or has the wrong type.
        InvalidValue: an option has an impossible value.
        HardwareError: this machine does not have the requested GPUs.
        KeyboardInterrupt: the user pressed Ctrl-C during the wait. The session holds no devices.
    """
    others = dict(cast("Mapping[str, object]", options))
    spec = parse_options(gpus, gpu_type, others.pop("remote", False), timeout, others)
    if spec.remote:
        raise UsageError(
            "a session can hold only devices of this machine, not devices of a server",
            hint="remove remote=True from the session, or call each function with remote=True",
        )
    idle_timeout_s = seconds("idle_timeout", idle_timeout)
    held = launch_session(_Hold, msgspec.structs.replace(spec, name="session"), idle_timeout_s)
    display = TerminalDisplay(quiet=spec.quiet)
    try:
        held.wait_held(display)
    except KeyboardInterrupt:
        held.cancel()
        display.say("stopped waiting; the session holds no devices")
        raise KeyboardInterrupt from None
    except BaseException:
        held.cancel()
        raise
    return Session(held, spec, display, idle_timeout_s)
