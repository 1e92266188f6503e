"""Implements the `distributed` decorator and the function wrapper that the decorator returns.

A decorated function offers these calls:

    @distributed(gpus=8, gpu_type="H100")
    def train(lr): ...

    train(3e-4)                       the plain function, in this process
    train.distributed(lr=3e-4)        on 8 GPUs; blocks; one result per rank
    train.submit(lr=3e-4)             starts the run and returns a Run
    train.map([1e-4, 3e-4])           one Run per item, in a list that has .results()
    train.starmap([(1e-4, 8), …])     one Run per tuple of arguments
    train.estimate(lr=3e-4)           estimates the start time and starts nothing
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, Unpack, cast, overload

import msgspec

from serverless_gpu.client.caller_context import terminable
from serverless_gpu.client.launch.launch import launch, prewarm, should_prewarm
from serverless_gpu.client.launch.preflight import check_function
from serverless_gpu.client.launch.snapshot_environment import shared_environment
from serverless_gpu.client.runs.outcome import in_notebooks, without_own_frames
from serverless_gpu.client.runs.run import Run
from serverless_gpu.client.runs.run_list import RunList
from serverless_gpu.errors import ArgumentMismatch, InvalidOption, ServerlessGpuError, UnknownGpuType
from serverless_gpu.lazy_import import load
from serverless_gpu.model.spec import Options, RunSpec, make_spec
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import find_home

if TYPE_CHECKING:
    from serverless_gpu.client.estimating import Estimate

_WHERE_RETURN_EXCEPTIONS = "pass return_exceptions to .results(): .map(…).results(return_exceptions=True)"
# Only `estimate` loads this module, to keep other calls fast.
_ESTIMATING = "serverless_gpu.client.estimating"
P = ParamSpec("P")
R = TypeVar("R")


class DistributedFunction(Generic[P, R]):
    """A Python function that can run on many GPUs. A direct call runs in this process."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], spec: RunSpec) -> None:
        self.spec = spec
        self.__wrapped__ = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the original function in this process."""
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<distributed {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)!s}>"

    @overload
    def __get__(self, instance: None, owner: type) -> DistributedFunction[P, R]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> DistributedFunction[..., R]:
        """Bind the function to an instance to support decorated methods."""
        if instance is None:
            return self
        return DistributedFunction(cast("Callable[..., R]", types.MethodType(self.__wrapped__, instance)), self.spec)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function on every rank and return the results by global rank.

        The rank process sets the parameters ``rank`` and ``world_size`` if the caller omits these parameters.

        Returns:
            The results, one per rank.

        Raises:
            UsageError: the arguments do not fit the function or cannot be pickled. No run was started.
            HardwareError: this machine does not have the requested GPUs.
            RunError: the run ended without success.
            Exception: the exception that the first failing rank raised, with its own type.
            KeyboardInterrupt: the user pressed Ctrl-C. The client cancelled the run, and the GPUs of the run are free.
        """
        __tracebackhide__ = True
        with terminable():
            run = self._start(args, kwargs, watch=True)
            try:
                error = run.follow()
            except KeyboardInterrupt:
                # Raising a new exception removes about twenty internal frames from the traceback.
                raise in_notebooks(KeyboardInterrupt()) from None
        if error is not None:
            raise in_notebooks(error)
        return run.results()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start a run and return its handle immediately. Raise the same start errors as `distributed`."""
        __tracebackhide__ = True
        return self._start(args, kwargs)

    def estimate(self, *args: P.args, **kwargs: P.kwargs) -> Estimate:
        """Estimate the start time of a call without starting a run.

        Returns:
            An estimate with `start`, `seconds`, `is_bound` and `basis`. `start` and `seconds` are None if the start
            time is unknown. `print` shows the estimate as a sentence.

        Raises:
            UsageError: the arguments do not fit the function or cannot be pickled.
            HardwareError: this machine does not have the requested GPUs.
            ServerlessGpuError: a call of the function would fail for another reason.
        """
        __tracebackhide__ = True
        try:
            found: Estimate = load(_ESTIMATING).estimate(self.__wrapped__, args, kwargs, self.spec)
        except ServerlessGpuError as error:
            raise in_notebooks(without_own_frames(error)) from error.__cause__
        return found

    def map(self, *iterables: Iterable[object], **kwargs: object) -> RunList[R]:
        """Start one run per item and return the run handles. `map(xs, ys)` calls f(x, y) for each pair.

        Runs wait in the queue until GPUs are free. If one run fails to start, the client cancels the runs of this call
        that have already started.

        Args:
            iterables: one iterable per positional argument. The shortest iterable sets the number of runs.
            kwargs: keyword arguments for all runs.

        Raises:
            InvalidOption: no iterable was passed, or an argument is not iterable.
        """
        __tracebackhide__ = True
        if not iterables:
            raise InvalidOption(
                "map requires at least one iterable of arguments", hint="for a single run, call .submit()"
            )
        for iterable in iterables:
            _refuse_single(iterable, "map", "call .map([…]), or .submit(…) for a single run")
        return self.starmap(zip(*iterables, strict=False), **kwargs)

    def starmap(self, items: Iterable[Iterable[object]], **kwargs: object) -> RunList[R]:
        """Start one run per tuple of positional arguments, and return the run handles.

        Args:
            items: tuples of positional arguments.
            kwargs: keyword arguments for all runs.

        Raises:
            InvalidOption: an item is not a tuple of arguments.
        """
        __tracebackhide__ = True
        _refuse_single(items, "starmap", "write .starmap([(x, y), …])")
        runs: RunList[R] = RunList()
        try:
            with shared_environment():  # All runs of one `starmap` call share one environment scan.
                for item in items:
                    _refuse_single(item, "starmap", "write .starmap([(x, y), …]), or .map(items)")
                    runs.append(self._start(tuple(item), kwargs))
        except BaseException as error:
            runs.cancel()
            if isinstance(error, ArgumentMismatch) and "return_exceptions" in kwargs:
                raise ArgumentMismatch(error.message, hint=_WHERE_RETURN_EXCEPTIONS) from None
            raise
        return runs

    def _start(self, args: Sequence[object], kwargs: Mapping[str, object], *, watch: bool = False) -> Run[R]:
        """Launch a run. Remove frames of this package from error tracebacks."""
        __tracebackhide__ = True  # IPython and pytest hide frames with this local variable.
        try:
            run = self._launch(args, kwargs, watch=watch)
        except ServerlessGpuError as error:
            raise in_notebooks(without_own_frames(error)) from error.__cause__
        if not watch:
            run._note_started()
        return run

    def _launch(self, args: Sequence[object], kwargs: Mapping[str, object], *, watch: bool) -> Run[R]:
        """Launch a run. The session subclass overrides this method."""
        return launch(self.__wrapped__, args, kwargs, self.spec, watch=watch)


def _refuse_single(items: object, name: str, hint: str) -> None:
    if not isinstance(items, Iterable):
        raise InvalidOption(f"{name} requires iterables of arguments, not {items!r}", hint=hint)


def distributed(
    gpus: int | None = None,
    gpu_type: str | None = None,
    remote: bool = False,
    timeout: float | str | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make a function callable on GPUs of this machine or of a server's pool.

    Args:
        gpus: number of GPUs, with one rank per GPU. None means every GPU of the node.
        gpu_type: GPU type in any case, such as ``"H100"`` or ``"a10"``, or ``"CPU"`` for CPU slots. None means the only
            available type.
        remote: run through a server instead of on this machine.
        timeout: maximum duration of user code, in seconds or as text such as ``"5m"``. None means no limit.
        options: further options, as listed in the reference documentation.

    Returns:
        A decorator. The decorated function has `.distributed`, `.submit`, `.map`, `.starmap` and `.estimate`.

    Raises:
        InvalidOption: an option does not exist or has the wrong type.
        InvalidValue: an option has an impossible value.
    """
    if callable(gpus):
        raise InvalidOption("distributed needs parentheses", hint="write @distributed(), or @distributed(gpus=8)")
    return decorator(parse_options(gpus, gpu_type, remote, timeout, cast("Mapping[str, object]", options)))


def decorator(spec: RunSpec) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Return a decorator that attaches a run spec to functions."""

    def decorate(function: Callable[P, R]) -> DistributedFunction[P, R]:
        if isinstance(function, DistributedFunction):
            function = function.__wrapped__
        check_function(function)
        if should_prewarm(getattr(function, "__module__", "")):
            prewarm(spec)
        name = str(getattr(function, "__qualname__", type(function).__qualname__))
        return DistributedFunction(function, msgspec.structs.replace(spec, name=name))

    return decorate


def parse_options(
    gpus: object, gpu_type: object, remote: object, timeout: object, options: Mapping[str, object]
) -> RunSpec:
    """Build a run spec from a user's options.

    If the GPU catalogue lacks the GPU type, the function looks up the type in the user's configuration file. Raises
    InvalidOption for an unknown option or a wrong type. Raises InvalidValue for an option value out of range.
    """
    try:
        return make_spec(gpus, gpu_type, remote, timeout, options, ())
    except UnknownGpuType:
        own = read_configuration(find_home(os.environ)).types
        if not own:
            raise
        return make_spec(gpus, gpu_type, remote, timeout, options, own)
