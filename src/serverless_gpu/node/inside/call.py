"""Reads and writes call files (function, arguments, cell sources), and runs cells as functions.

The caller pickles a function of an importable module by name, if the name resolves to the same function. The rank
imports the module and runs the module's version of the function. The caller pickles all other functions by value:
functions of `__main__` or a notebook, and nested functions.

Failure cases: If the rank cannot import the module, the caller gets the import error. If the imported module lacks the
pickled name, `load_call` raises `FunctionMoved`. `load_call` also raises the errors of the `payload` module.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import NamedTuple, TypeVar, cast

from . import payload

_MAIN_MODULES = ("__main__", "__mp_main__")
_UNWRAP_MAX = 100
_V = TypeVar("_V")


class RankCall(NamedTuple):
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class FunctionMoved(ImportError):
    """Raised if the module of a function, as imported by the rank, has no function of that name."""


class _Reference(NamedTuple):
    """Name of a function. `wrapped` is the number of functions in the function's `__wrapped__` chain."""

    module: str
    qualname: str
    wrapped: int


def dump_call(
    path: str,
    *,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    sources: Mapping[str, Sequence[str]],
    reducer: payload.Reducer | None = None,
) -> int:
    """Write a call file to `path` and return the file's size in bytes.

    For code without a source file, `sources` maps the file names of code objects to source lines with newlines.
    `reducer` is passed to `payload.dumps`.
    """
    return payload.dump(_fields(function, args, kwargs, sources), path, reducer=reducer)


def measure_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    sources: Mapping[str, Sequence[str]],
    reducer: payload.Reducer | None = None,
) -> int:
    """Return the approximate size of the file that `dump_call` would write.

    Raises the same errors as `dump_call`.
    """
    return payload.measure(_fields(function, args, kwargs, sources), reducer)


def _fields(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    sources: Mapping[str, Sequence[str]],
) -> dict[str, object]:
    reference = _reference(function)
    return {
        "reference": None if reference is None else tuple(reference),
        "function": function if reference is None else None,
        "args": tuple(args),
        "kwargs": dict(kwargs),
        "sources": {name: list(lines) for name, lines in sources.items()},
    }


def load_call(path: str) -> RankCall:
    """Return the call in `path` and register its source lines for tracebacks and `inspect`."""
    fields = cast("dict[str, object]", payload.load(path))
    for name, lines in cast("dict[str, list[str]]", fields["sources"]).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    reference = fields["reference"]
    if reference is None:
        function = cast("Callable[..., object]", fields["function"])
    else:
        function = _resolve(_Reference(*cast("tuple[str, str, int]", reference)))
    return RankCall(function, cast("tuple[object, ...]", fields["args"]), cast("dict[str, object]", fields["kwargs"]))


@payload.portable
def distributed_cell(
    body: CodeType, last: CodeType | None, notebook: FunctionType, rank: int, world_size: int
) -> object:
    """Run a notebook cell's code as the notebook would, and return the value of `last`.

    The cell runs in the globals of the function `notebook`, together with `rank` and `world_size`. The caller pickles
    `notebook` with its globals.
    """
    namespace = notebook.__globals__
    namespace.update(rank=rank, world_size=world_size)
    # `pickle` and `multiprocessing` look up names in the module `__main__`, whose `__getattr__` finds the cell's names.
    # Python cannot replace a module's dictionary.
    sys.modules["__main__"].__dict__["__getattr__"] = partial(_of_cell, namespace)
    exec(body, namespace)
    return None if last is None else eval(last, namespace)


def _of_cell(namespace: dict[str, object], name: str) -> object:
    if name not in namespace:
        raise AttributeError(f"module '__main__' has no attribute {name!r}")
    return namespace[name]


def fill_rank(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    rank: int,
    world_size: int,
) -> dict[str, object]:
    """Return `kwargs`, with missing `rank` and `world_size` if the function accepts them."""
    filled = dict(kwargs)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Built-in functions may have no signature.
        return filled
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # A signature shows the keyword arguments of a `functools.partial` as defaults.
    given = {*positional[: len(args)], *kwargs, *(function.keywords if isinstance(function, partial) else ())}
    for name, value in (("rank", rank), ("world_size", world_size)):
        if name in by_name - given:
            filled[name] = value
    return filled


def _reference(function: Callable[..., object]) -> _Reference | None:
    module_name = getattr(function, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if not isinstance(function, FunctionType) or module is None or module_name in _MAIN_MODULES:
        return None
    # Other processes cannot import a module without a spec, because it was created at run time.
    if getattr(module, "__spec__", None) is None or payload.is_by_value(module):
        return None
    try:
        found = _walk(module, function.__qualname__)
    except AttributeError:  # The name contains "<locals>", or the user deleted or rebound the name.
        return None
    if not any(step is function for step in _chain(found)):
        return None
    return _Reference(module.__name__, function.__qualname__, len(_chain(function)) - 1)


def _resolve(reference: _Reference) -> Callable[..., object]:
    module = importlib.import_module(reference.module)
    try:
        chain = _chain(_walk(module, reference.qualname))
    except AttributeError as error:
        raise FunctionMoved(_moved(reference, module.__dict__.get("__file__"))) from error
    # Count from the innermost function, because a decorator may wrap the function in only one of the two processes.
    if len(chain) <= reference.wrapped:
        raise FunctionMoved(_moved(reference, module.__dict__.get("__file__")))
    return cast("Callable[..., object]", chain[-1 - reference.wrapped])


def _moved(reference: _Reference, file: object) -> str:
    return f"module {reference.module!r}, imported from {file}, has no function {reference.qualname!r} in this rank"


def _walk(module: object, qualname: str) -> object:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _chain(function: _V) -> list[_V]:
    """Return `function` and the functions of its `__wrapped__` chain, outermost first."""
    chain = [function]
    while len(chain) < _UNWRAP_MAX:
        inner = getattr(chain[-1], "__wrapped__", None)
        if inner is None:
            break
        chain.append(inner)
    return chain
