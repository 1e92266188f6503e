"""A held session: devices, locks and a warm interpreter kept between calls.

    with serverless_gpu.session(gpus=8, gpu_type="H100") as s:
        s.distributed(train, lr=3e-4)      no waiting for GPUs, no cold start
        s.distributed(evaluate)

The devices are held by a process of the node (`node/supervisor/session.py`) that lives as long as this one is connected
to it. Between calls, a daemon thread listens to that process: the session has been idle for long, or it ended. The next
call raises the reason. The death of this process ends the session, but not its runs.
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
    """The handle of a session's process, spoken to like a run without ranks."""

    devices: tuple[Device, ...] = ()

    def wait_held(self, display: Display) -> None:
        """Wait for the devices, and show the reason of the wait."""
        self._display = display
        self._hear_until(lambda: bool(self.devices) or self.over, None)
        if not self.devices:
            raise self._error(None) or SessionEnded(f"session {self.id} was ended before it had its devices")

    def listen(self) -> None:
        """Print the session's messages until it has ended."""
        with contextlib.suppress(OSError):
            self._hear_until(lambda: self.over and not self._source.is_open, None)

    @property
    def over(self) -> bool:
        """Return whether the session has ended."""
        return self._stopped is not None or self._refused is not None or not self._source.is_open

    def _take(self, message: protocol.AnyMessage | ConnectionNote) -> None:
        if isinstance(message, protocol.SessionReady):
            self.devices, self._state, self._waiting = message.devices, State.RUNNING, ""
        else:
            super()._take(message)


class Session:
    """GPUs, their locks and a warm interpreter, kept from one call to the next.

    Made by `serverless_gpu.session(...)`. As a context manager it waits for its runs at the end of the block (an
    exception cancels them) and hands the devices back; `close()` does the same.

    Attributes:
        id: the session's identifier.
        devices: identifiers of the devices it holds.
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
        # Neither the thread nor the finalizer refers to this object: forgetting it ends the session.
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
        """Run a function on the session's devices and return what each rank returned, by global rank.

        Args:
            function: a plain function, which gets every device of the session; or a decorated one, which gets as many
                as its decorator says.
            args: its arguments; `rank` and `world_size` are filled in where they are parameters.
            kwargs: its named arguments.

        Raises:
            SessionEnded: the session has ended.
            ServerlessGpuError: nothing was started; the message says why.
            RunError: the run ended without success.
            Exception: what user code raised in the rank that failed first, as its own type.
        """
        return self._bind(function).distributed(*args, **kwargs)

    def submit(self, function: Callable[P, R] | DistributedFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start a run on the session's devices and return its handle at once; raises as `distributed` before that."""
        return self._bind(function).submit(*args, **kwargs)

    def map(
        self, function: Callable[..., R] | DistributedFunction[..., R], *iterables: Iterable[object], **kwargs: object
    ) -> RunList[R]:
        """Start one run per item and return their handles, as `map` of a decorated function does.

        As many run at once as the session's devices allow: decorate the function with `gpus=1` to have one each.
        """
        return self._bind(function).map(*iterables, **kwargs)

    def starmap(
        self,
        function: Callable[..., R] | DistributedFunction[..., R],
        items: Iterable[Iterable[object]],
        **kwargs: object,
    ) -> RunList[R]:
        """Start one run per item, whose elements are the positional arguments, and return their handles."""
        return self._bind(function).starmap(items, **kwargs)

    def actors(self, cls: Callable[..., object], *args: object, **kwargs: object) -> Actors:
        """Make one object of a class in each rank and keep it, and its process, from call to call.

        Each rank calls ``cls(*args, **kwargs)``, then the object's ``setup()`` if it has one. Where they are
        parameters, `rank` and `world_size` are filled in. The session's idle limit holds for the actors, too.

        Args:
            cls: a plain class, which gets every device of the session; or a decorated one, which gets as many as its
                decorator says.
            args: of the class.
            kwargs: of the class.

        Returns:
            The actors, whose methods are called as ``actors.method.distributed(...)``.

        Raises:
            SessionEnded: the session has ended.
            NotDistributable: `cls` is not a class.
            ServerlessGpuError: nothing was started; the message says why.
            Exception: what the class raised in the rank that failed first, as its own type.
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
        """Wait for the session's runs, hand its devices back and print its receipt; a second call does nothing.

        Raises:
            KeyboardInterrupt: Ctrl-C while runs were waited for; they were cancelled (unless they are to be detached)
                and the devices handed back.
        """
        if self._closed or os.getpid() != self._owner:  # a forked child has a copy of this object, and no session
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
            # Made now: in a notebook the cell that closes a session is not the one that opened it.
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
            why = "it was closed" if self._closed else self._hold.last_sentence() or "its process is gone"
            hint = "open another with serverless_gpu.session(...)"
            raise SessionEnded(f"session {self.id} cannot be used any more: {why}", hint=hint)

    def _stop_runs(self, *, interrupted: bool) -> None:
        """Cancel and await running runs, except those that Ctrl-C leaves; then forget all."""
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
            self._display.say(f"left; {_runs_text(len(going))} of session {self.id} are still being cancelled")


def _end_in(owner: int, held: _Hold) -> None:
    """End the session of the process that opened it; a forked child of that one ends, too, and must not."""
    if os.getpid() == owner:
        held.cancel()


def _wait_for(runs: Sequence[Run[object]]) -> None:
    for run in runs:
        with contextlib.suppress(ServerlessGpuError):  # it has no receipt, because its supervisor was killed
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
    """Hold GPUs of this machine for several calls, and wait until they are there.

    Args:
        gpus: number of GPUs; None means every GPU of the node.
        gpu_type: ``"H100"``, ``"A10"`` …, any case; ``"CPU"`` for CPU slots; None for the type that is there.
        timeout: limit of each run of a plain function, in seconds from its first user byte, or None.
        idle_timeout: seconds without a run after which the devices are given back; said when four fifths are over.
        options: of the session's plain functions, as `distributed` takes them.

    Returns:
        The session, which holds its devices.

    Raises:
        InvalidOption: an option does not exist, or has the wrong type.
        InvalidValue: a value is not possible.
        HardwareError: this machine does not have the GPUs.
        KeyboardInterrupt: Ctrl-C while they were waited for; nothing is held.
    """
    others = dict(cast("Mapping[str, object]", options))
    spec = parse_options(gpus, gpu_type, others.pop("remote", False), timeout, others)
    if spec.remote:
        raise UsageError(
            "a session holds devices of this machine; there are none through a server yet",
            hint="leave remote out, or call functions with remote=True one by one",
        )
    idle_timeout_s = seconds("idle_timeout", idle_timeout)
    held = launch_session(_Hold, msgspec.structs.replace(spec, name="session"), idle_timeout_s)
    display = TerminalDisplay(quiet=spec.quiet)
    try:
        held.wait_held(display)
    except KeyboardInterrupt:
        held.cancel()
        display.say("not waiting any more; nothing is held")
        raise KeyboardInterrupt from None
    except BaseException:
        held.cancel()
        raise
    return Session(held, spec, display, idle_timeout_s)
