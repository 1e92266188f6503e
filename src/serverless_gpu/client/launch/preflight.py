"""Checks a call before anything is started, and writes it to its file.

Reports a caller's mistakes in the caller's process: a function that ranks cannot run, arguments that do not fit,
captured objects that cannot travel (with the way to the culprit) or are surprisingly large. Only pickling runs user
code. A full disk raises `StorageError` and leaves no half-written file.
"""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.client.launch.call_contents import explain_unpicklable, largest_captured
from serverless_gpu.client.runs.rank_failures import text_of
from serverless_gpu.errors import ArgumentMismatch, NotDistributable, NotPicklable, StorageError
from serverless_gpu.inodes import lacks_inodes
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.inside import call, payload
from serverless_gpu.units import format_bytes

__all__ = ["WrittenCall", "bind_arguments", "check_function", "check_travels", "explain_unpicklable"]
__all__ += ["largest_captured", "pack"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SIZE_WARNED = 10_000_000
_SOURCES_SIZE_MAX = 2_000_000
_UNWRAP_MAX = 100
_OF_RAY = ("ray.remote_function", "ray.actor")


class WrittenCall(NamedTuple):
    """A written call: the size of its file in bytes, and a warning for the caller, if any."""

    size_bytes: int
    warning: str | None


def check_function(function: object) -> None:
    """Raise NotDistributable for a function that ranks cannot run."""
    if not callable(function):
        hint = "put the decorator below @classmethod or @property" if hasattr(function, "__get__") else ""
        raise NotDistributable(
            f"{type(function).__qualname__!r} objects cannot be run on ranks: not callable", hint=hint
        )
    if any(cls.__module__ in _OF_RAY for cls in type(function).__mro__):
        plain = getattr(function, "_function", None) or getattr(function, "__ray_actor_class__", None)
        name = _name(function if plain is None else plain)
        raise NotDistributable(
            f"{name} is a task or an actor of Ray's, which a driver starts with .remote(...)",
            hint="leave @ray.remote out, or decorate the function that starts it: that is the driver",
        )
    body = _body(function)
    if inspect.iscoroutinefunction(body):
        raise NotDistributable(
            f"{_name(function)} is an async function, which ranks do not await",
            hint="give a plain function that calls asyncio.run(...)",
        )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise NotDistributable(
            f"{_name(function)} is a generator function, and a generator cannot be returned by a rank",
            hint="return a list",
        )


def bind_arguments(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments by name with defaults; `rank` and `world_size` are optional."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins may have none
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
    """Write a call to `path`; return its size, and a warning naming large objects above 10 MB.

    `reducer` is asked first for each object, and may raise. An error leaves no file.
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
    except BaseException as error:  # pickling runs user code, which may raise anything
        raise _not_picklable(function, args, kwargs, error, reducer) from error
    return WrittenCall(size, _size_warning(size, function, args, kwargs) if size > _SIZE_WARNED else None)


def check_travels(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reducer: payload.Reducer | None = None,
) -> None:
    """Raise NotPicklable for a call that `pack` could not write."""
    try:
        call.measure_call(function, args, kwargs, _sources(function), reducer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pickling runs user code, which may raise anything
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
        f"{type(error).__name__}: {text_of(error)}",
        hint="make it inside the function, or pass what is needed to make it",
    )


def _body(function: Callable[..., object]) -> object:
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
        f"{surplus} positional too many" if surplus else "",
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
        return f"{' and '.join(ranked)} took a positional argument; pass the others by name to have it filled in"
    return ""


def _size_warning(
    size: int, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    largest = ", ".join(f"{path} {format_bytes(held)}" for path, held in largest_captured(function, args, kwargs)[:3])
    return (
        f"every rank loads the {format_bytes(size)} that this call to {_name(function)} carries; largest: {largest}\n"
        "hint: load large data inside the function, or pass a path to it"
    )


def _sources(function: Callable[..., object]) -> dict[str, list[str]]:
    """Return source lines of code outside files: the function's own first, then the newest."""
    code = getattr(_body(function), "__code__", None)
    own = getattr(code, "co_filename", None)
    sources: dict[str, list[str]] = {}
    left = _SOURCES_SIZE_MAX
    for name in sorted(reversed(list(linecache.cache)), key=lambda name: name != own):
        entry = linecache.cache.get(name)
        # A lazy entry has its loader only.
        lines = [] if entry is None or len(entry) != 4 or os.path.exists(name) else list(entry[2])
        size = sum(map(len, lines))
        if lines and size <= left:
            sources[name] = lines
            left -= size
    return sources
