"""Checks a function call before its run starts, and pickles the call into a file.

The preflight checks run in the caller's process. The preflight checks report unsuitable functions, wrong arguments,
very large captured objects, and objects that cannot be pickled. For an object that cannot be pickled, the error shows
the path from the call to the object. Only the pickling step executes user code. If the disk is full, `pack` raises
`StorageError` and leaves no partial file.

The preflight checks refuse objects that depend on the state of the process that created them. Packages such as
accelerate and Lightning create objects that are set up for one process. If each rank got a copy of an accelerate or
Lightning object, each rank would train a separate model without an error. The client pickles transformers'
`TrainingArguments` without their process state (`node/inside/payload.py`). The preflight checks refuse data loaders,
optimizers and strategies that are set up for a single process. The client pickles Lightning modules and data modules
without their trainer.

Before a Ray cluster starts, the preflight checks refuse a missing or outdated Ray installation and references to other
clusters. The preflight checks also refuse a user's file or directory named `ray`, because ranks would import the file
instead of Ray. The preflight checks do not import Ray, because importing Ray takes a second. Some problems, such as
missing metadata, appear only when a rank imports Ray. A rank reports the problems of its Ray import.
"""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from serverless_gpu.client.launch.call_contents import explain_unpicklable, largest_captured
from serverless_gpu.client.runs.outcome import error_text
from serverless_gpu.errors import (
    ArgumentMismatch,
    NotDistributable,
    NotPicklable,
    RayMissing,
    StorageError,
)
from serverless_gpu.model.spec import RayCluster, RunSpec
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.inside import call, payload
from serverless_gpu.node.inside.payload import Reducer
from serverless_gpu.node.inside.raycluster import ray_installation
from serverless_gpu.operating_system import lacks_inodes
from serverless_gpu.units import format_bytes

if TYPE_CHECKING:
    from serverless_gpu.node.inside.payload import Reduced

__all__ = ["WrittenCall", "bind_arguments", "check_function", "check_travels", "explain_unpicklable"]
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SIZE_WARNED = 10_000_000
_SOURCES_SIZE_MAX = 2_000_000
_UNWRAP_MAX = 100
_OF_RAY = ("ray.remote_function", "ray.actor")
_PIP = "pip install {}'ray[default]'"
_PROCESS_STATE_KINDS = (
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "PartialState"),
    ("accelerate.state", "GradientState"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
)
_DATA_MODULES = (
    ("lightning.pytorch.core.datamodule", "LightningDataModule"),
    ("pytorch_lightning.core.datamodule", "LightningDataModule"),
)


__all__ += ["largest_captured", "pack"]


class WrittenCall(NamedTuple):
    """A pickled call: the file size in bytes, and an optional warning for the caller."""

    size_bytes: int
    warning: str | None


def check_function(function: object) -> None:
    """Raise NotDistributable for a function that ranks cannot run."""
    if not callable(function):
        hint = "put the decorator below @classmethod or @property" if hasattr(function, "__get__") else ""
        raise NotDistributable(
            f"{type(function).__qualname__!r} objects cannot run on ranks: they are not callable", hint=hint
        )
    if any(cls.__module__ in _OF_RAY for cls in type(function).__mro__):
        plain = getattr(function, "_function", None) or getattr(function, "__ray_actor_class__", None)
        name = _name(function if plain is None else plain)
        raise NotDistributable(
            f"{name} is a Ray task or actor, which a driver starts with .remote(...)",
            hint="remove @ray.remote, or decorate the driver function that calls .remote(...)",
        )
    body = _unwrap(function)
    if inspect.iscoroutinefunction(body):
        raise NotDistributable(
            f"{_name(function)} is an async function, which ranks do not await",
            hint="pass a plain function that calls asyncio.run(...)",
        )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise NotDistributable(
            f"{_name(function)} is a generator function, and a rank cannot return a generator",
            hint="return a list",
        )


def bind_arguments(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return a call's arguments by name, including defaults. The caller may omit `rank` and `world_size`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A builtin function may have no signature.
        return dict(kwargs)
    filled = call.fill_rank(function, args, kwargs, 0, 1)
    try:
        bound = signature.bind(*args, **filled)
    except TypeError as error:
        problems = _problems(signature, args, filled) or [str(error)]
        raise ArgumentMismatch(
            f"the arguments do not fit {_name(function)}{signature}: {'; '.join(problems)}",
            hint=_argument_hint(signature, args, filled),
        ) from None
    bound.apply_defaults()
    named = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name)
    return named


def pack(
    path: str,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reducer: payload.Reducer | None = None,
) -> WrittenCall:
    """Pickle a call into the file `path`.

    Return the size of the call, and a warning if the call exceeds 10 MB.

    The size warning names the call's largest objects. The pickler first passes each object to `reducer`, which may
    raise an exception. If pickling fails, no file remains.
    """
    try:
        size = call.dump_call(
            path, function=function, args=args, kwargs=kwargs, sources=_sources(function), reducer=reducer
        )
    except payload.PayloadNotWritten as error:
        if error.errno in _FULL and lacks_inodes(Path(path)):
            raise storage_error(error, Path(path)) from None
        hint = "set SERVERLESS_GPU_HOME to a directory you can write to"
        if error.errno in _FULL:
            hint = "free some space, or set SERVERLESS_GPU_HOME to a directory on another disk"
        raise StorageError(f"the call cannot be written to {path}: {error.strerror}", hint=hint) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Pickling runs user code, which may raise any exception.
        raise _not_picklable(function, args, kwargs, error, reducer) from error
    return WrittenCall(size, _size_warning(size, function, args, kwargs) if size > _SIZE_WARNED else None)


def check_travels(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reducer: payload.Reducer | None = None,
) -> None:
    """Raise NotPicklable for a call that `pack` could not pickle."""
    try:
        call.measure_call(function, args, kwargs, _sources(function), reducer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Pickling runs user code, which may raise any exception.
        raise _not_picklable(function, args, kwargs, error, reducer) from error


def _not_picklable(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: BaseException,
    reducer: payload.Reducer | None,
) -> NotPicklable:
    culprit = explain_unpicklable(function, args, kwargs, error, reducer)
    return NotPicklable(
        f"the call to {_name(function)} cannot be sent to its ranks, because of\n  {culprit}\n"
        f"{type(error).__name__}: {error_text(error)}",
        hint="create the object inside the function, or pass the data for creating the object",
    )


def _unwrap(function: Callable[..., object]) -> object:
    body: object = function
    for _ in range(_UNWRAP_MAX):
        if isinstance(body, functools.partial):
            body = body.func
        elif inspect.ismethod(body) or isinstance(body, staticmethod):
            body = body.__func__
        elif inspect.isfunction(body) or inspect.isbuiltin(body) or inspect.isclass(body):
            break
        else:
            body = inspect.getattr_static(type(body), "__call__", None)
    return body


def _name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__).rpartition("<locals>.")[2]


def _problems(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {parameter.name for parameter in positional[: len(args)]}
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in taken
        and not (p.name in kwargs and p.name in by_name)
    ]
    unknown = [] if inspect.Parameter.VAR_KEYWORD in kinds else [name for name in kwargs if name not in by_name]
    twice = [name for name in kwargs if name in taken and name in by_name]
    surplus = 0 if inspect.Parameter.VAR_POSITIONAL in kinds else max(0, len(args) - len(positional))
    told = [
        f"missing {', '.join(missing)}" if missing else "",
        f"unexpected {', '.join(unknown)}" if unknown else "",
        f"{', '.join(twice)} given twice" if twice else "",
        f"{surplus} positional argument(s) too many" if surplus else "",
    ]
    return [problem for problem in told if problem]


def _argument_hint(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    names = list(signature.parameters)
    for name in kwargs:
        close = difflib.get_close_matches(name, names, n=1) if name not in names else []
        if close:
            return f"did you mean {close[0]}?"
    ranked = [name for name in names[: len(args)] if name in ("rank", "world_size")]
    if ranked:
        return (
            f"{' and '.join(ranked)} got a positional argument; pass the other arguments by name, so that each "
            f"rank can fill in {' and '.join(ranked)}"
        )
    return ""


def _size_warning(
    size: int, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    largest = ", ".join(f"{path} {format_bytes(held)}" for path, held in largest_captured(function, args, kwargs)[:3])
    return (
        f"every rank loads the {format_bytes(size)} that this call to {_name(function)} carries; largest: {largest}\n"
        "hint: load large data inside the function, or pass a path to the data"
    )


def _sources(function: Callable[..., object]) -> dict[str, list[str]]:
    """Return the source lines of code that has no file, such as notebook cells.

    The function's own source comes first.
    """
    code = getattr(_unwrap(function), "__code__", None)
    own = getattr(code, "co_filename", None)
    sources: dict[str, list[str]] = {}
    left = _SOURCES_SIZE_MAX
    for name in sorted(reversed(list(linecache.cache)), key=lambda name: name != own):
        entry = linecache.cache.get(name)
        # A lazy `linecache` entry contains a loader instead of source lines.
        lines = [] if entry is None or len(entry) != 4 or os.path.exists(name) else list(entry[2])
        size = sum(map(len, lines))
        if lines and size <= left:
            sources[name] = lines
            left -= size
    return sources


class RayInstallation(NamedTuple):
    """The version and the file of the Ray installation that `import ray` would load."""

    version: str
    origin: str  # Path of the file that `import ray` would load, or "".


def check_ray(cluster: RayCluster, found: RayInstallation | None = None) -> None:
    """Raise RayMissing if Ray is not installed, too old, hidden by another module, or incomplete."""
    version, origin = found if found is not None else find_ray()
    if version and origin and not _is_ray(origin):
        place = origin if os.path.basename(origin) != "__init__.py" else os.path.dirname(origin)
        raise RayMissing(
            f"{place} hides Ray {version}, because `import ray` loads this path instead", hint=f"rename {place}"
        )
    if not version and not (origin and _is_ray(origin)):
        raise RayMissing("ray_launch needs Ray, which this Python environment does not have", hint=_PIP.format(""))
    if () < ray_installation.release(version) < ray_installation.OLDEST:
        oldest = ".".join(map(str, ray_installation.OLDEST))
        raise RayMissing(
            f"ray_launch needs Ray {oldest} or newer, but Ray {version} is installed", hint=_PIP.format("--upgrade ")
        )
    if cluster.dashboard and (missing := ray_installation.missing_parts()):
        raise RayMissing(
            f"dashboard=True needs Ray's dashboard, but its dependency {missing[0]} is not installed",
            hint=_PIP.format(""),
        )


def find_ray() -> RayInstallation:
    """Return this environment's Ray installation without importing Ray."""
    return RayInstallation(ray_installation.version(), ray_installation.origin())


def ray_reference_reducer(spec: RunSpec) -> Reducer | None:
    """Return a pickle reducer that refuses objects of the caller's own Ray cluster, or None.

    Pickle accepts references to objects of the caller's Ray cluster. The run's driver belongs to a different Ray
    cluster, which cannot resolve references to the caller's cluster.
    """
    ray = sys.modules.get("ray")
    found = (getattr(ray, "ObjectRef", None), getattr(getattr(ray, "actor", None), "ActorHandle", None))
    kinds = tuple(kind for kind in found if isinstance(kind, type))
    if spec.ray is None or not kinds:
        return None

    def refuse(value: object) -> Reduced:
        if isinstance(value, kinds):
            raise TypeError(f"this {type(value).__name__} belongs to another Ray cluster, which the run cannot access")
        return cast("Reduced", NotImplemented)

    return refuse


def _is_ray(origin: str) -> bool:
    """Return True if a file is Ray's `__init__.py`, which has the compiled module `_raylet` beside it."""
    path = Path(origin)
    return path.name == "__init__.py" and any(path.parent.glob("_raylet*"))


def refusing_reducer(spec: RunSpec) -> Reducer | None:
    """Return a pickle reducer that refuses single-process objects and other Ray clusters' objects."""
    of_ray = ray_reference_reducer(spec)
    kinds, data_modules = _loaded_classes(_PROCESS_STATE_KINDS), _loaded_classes(_DATA_MODULES)
    if not kinds:
        return of_ray

    def refuse(value: object) -> Reduced:
        if isinstance(value, kinds):
            raise TypeError(
                f"this {type(value).__name__} is set up for a single process, so each rank would train a separate model"
            )
        if isinstance(value, data_modules):
            reduced: Reduced = value.__reduce_ex__(5)
            if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
                return reduced
            return reduced[0], reduced[1], {**reduced[2], "trainer": None}, *reduced[3:]
        return cast("Reduced", NotImplemented) if of_ray is None else of_ray(value)

    return refuse


def _loaded_classes(names: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    """Return the listed classes that this process has already imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if isinstance(kind, type))
