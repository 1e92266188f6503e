"""`distributed`: the decorator, and the wrapper it makes.

@distributed(gpus=8, gpu_type="H100")
def train(lr): ...

train(3e-4)                       the plain function, in this process
train.distributed(lr=3e-4)        on 8 GPUs; blocks; one result per rank
train.submit(lr=3e-4)             the same as a Run to wait for
train.map([1e-4, 3e-4])           one Run per item, in a list that has .results()
train.starmap([(1e-4, 8), …])     the same, with the arguments of each in a tuple
train.estimate(lr=3e-4)           when it would start; nothing is started
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

_WHERE_RETURN_EXCEPTIONS = "keywords of .map() go to the function; write .map(…).results(return_exceptions=True)"
_ESTIMATING = "serverless_gpu.client.estimating"  # loaded when it is asked for: a call has no use for it
P = ParamSpec("P")
R = TypeVar("R")


class DistributedFunction(Generic[P, R]):
    """A function that can run on many GPUs; calling it directly calls the plain function in this process."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], spec: RunSpec) -> None:
        self.spec = spec
        self.__wrapped__ = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plain function in this process."""
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<distributed {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)!s}>"

    @overload
    def __get__(self, instance: None, owner: type) -> DistributedFunction[P, R]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> DistributedFunction[..., R]:
        """Bind to an instance, so that methods can be decorated, too."""
        if instance is None:
            return self
        return DistributedFunction(cast("Callable[..., R]", types.MethodType(self.__wrapped__, instance)), self.spec)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function on every rank and return what each returned, by global rank.

        Parameters named ``rank`` and ``world_size`` that are not given are filled in for each rank.

        Returns:
            One entry per rank.

        Raises:
            UsageError: the arguments do not fit, or cannot be pickled; nothing was started.
            HardwareError: this machine does not have the GPUs.
            RunError: the run ended without success.
            Exception: what user code raised in the rank that failed first, as its own type.
            KeyboardInterrupt: Ctrl-C; the run was cancelled and its GPUs handed back.
        """
        __tracebackhide__ = True
        with terminable():
            run = self._start(args, kwargs, watch=True)
            try:
                error = run.follow()
            except KeyboardInterrupt:
                raise in_notebooks(KeyboardInterrupt()) from None  # one frame of ours, not the twenty that were waiting
        if error is not None:
            raise in_notebooks(error)
        return run.results()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start the run and return its handle at once; raises as `distributed` does before a run starts."""
        __tracebackhide__ = True
        return self._start(args, kwargs)

    def estimate(self, *args: P.args, **kwargs: P.kwargs) -> Estimate:
        """Return when this call would start, and what that rests on; it is checked as the call is, and not made.

        Returns:
            `start` and `seconds` (None where that is unknown), `is_bound`, `basis`; `print` says it in words.

        Raises:
            UsageError: the arguments do not fit, or cannot be pickled.
            HardwareError: this machine does not have the GPUs.
            ServerlessGpuError: the call would be refused for another reason.
        """
        __tracebackhide__ = True
        try:
            found: Estimate = load(_ESTIMATING).estimate(self.__wrapped__, args, kwargs, self.spec)
        except ServerlessGpuError as error:
            raise in_notebooks(without_own_frames(error)) from error.__cause__
        return found

    def map(self, *iterables: Iterable[object], **kwargs: object) -> RunList[R]:
        """Start one run per item and return their handles: `map(xs, ys)` calls f(x, y) for each pair, as `map` does.

        Runs beyond the free GPUs wait their turn. If one cannot be started, those that were are cancelled.

        Args:
            iterables: the first arguments, the second ones and so on; the shortest decides how many runs there are.
            kwargs: keyword arguments for all of them.

        Raises:
            InvalidOption: nothing to map over, or something that cannot be iterated over.
        """
        __tracebackhide__ = True
        if not iterables:
            raise InvalidOption("map takes at least one iterable of arguments", hint="for one call, write .submit()")
        for iterable in iterables:
            _refuse_single(iterable, "map", "write .map([…]), or .submit(…) for one call")
        return self.starmap(zip(*iterables, strict=False), **kwargs)

    def starmap(self, items: Iterable[Iterable[object]], **kwargs: object) -> RunList[R]:
        """Start one run per item, whose elements are the positional arguments, as `itertools.starmap` does.

        Args:
            items: tuples of positional arguments.
            kwargs: keyword arguments for all of them.

        Raises:
            InvalidOption: an item is not a tuple of arguments.
        """
        __tracebackhide__ = True
        _refuse_single(items, "starmap", "write .starmap([(x, y), …])")
        runs: RunList[R] = RunList()
        try:
            with shared_environment():  # one look at the environment is enough for all of them
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
        """Launch a run; what refuses it is the caller's mistake, and our frames say nothing about that."""
        __tracebackhide__ = True  # IPython and pytest leave such frames out
        try:
            run = self._launch(args, kwargs, watch=watch)
        except ServerlessGpuError as error:
            raise in_notebooks(without_own_frames(error)) from error.__cause__
        if not watch:
            run._note_started()
        return run

    def _launch(self, args: Sequence[object], kwargs: Mapping[str, object], *, watch: bool) -> Run[R]:
        """Launch a run; a session overrides this."""
        return launch(self.__wrapped__, args, kwargs, self.spec, watch=watch)


def _refuse_single(items: object, name: str, hint: str) -> None:
    if not isinstance(items, Iterable):
        raise InvalidOption(f"{name} takes iterables of arguments, not {items!r}", hint=hint)


def distributed(
    gpus: int | None = None,
    gpu_type: str | None = None,
    remote: bool = False,
    timeout: float | str | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make a function run on GPUs of this machine, or of the team's pool.

    Args:
        gpus: number of GPUs, one rank each; None means every GPU of the node.
        gpu_type: ``"H100"``, ``"A10"`` …, any case; ``"CPU"`` for CPU slots; None for the type that is there.
        remote: run through a server instead of on this machine.
        timeout: seconds from the first user byte, or text such as ``"5m"``, or None.
        options: see the reference of options.

    Returns:
        A decorator; what it returns has `.distributed`, `.submit`, `.map`, `.starmap` and `.estimate`.

    Raises:
        InvalidOption: an option does not exist, or has the wrong type.
        InvalidValue: a value is not possible.
    """
    if callable(gpus):
        raise InvalidOption("distributed needs parentheses", hint="write @distributed(), or @distributed(gpus=8)")
    return decorator(parse_options(gpus, gpu_type, remote, timeout, cast("Mapping[str, object]", options)))


def decorator(spec: RunSpec) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Return a decorator whose functions run as a spec says."""

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
    """Return the spec for a user's options; own GPU types are read only if the catalogue lacks one.

    Raises InvalidOption for an unknown option or a wrong type, and InvalidValue for an impossible value.
    """
    try:
        return make_spec(gpus, gpu_type, remote, timeout, options, ())
    except UnknownGpuType:
        own = read_configuration(find_home(os.environ)).types
        if not own:
            raise
        return make_spec(gpus, gpu_type, remote, timeout, options, own)
