"""Walks a call's objects to find the objects that pickle refuses, or the largest objects.

The object walk visits the same objects as the pickler. In a function that is pickled by value, the walk visits the
closure, the referenced globals and the defaults. For other objects, the walk visits the items of containers and the
state from `__reduce_ex__`. The walk limits the number of pickling attempts, objects and levels. If a limit or an
exception in user code stops the search, the walk returns the nearest known owner of the refused object. A size estimate
that stops early is too small.
"""

from __future__ import annotations

import functools
import inspect
import io
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple, Protocol, cast

from serverless_gpu.node.inside import payload

_PROBES_MAX = 1000
_DEPTH_MAX = 30
_CHILDREN_MAX = 1_000_000
_SAMPLE = 1000
_OBJECTS_MAX = 200_000
_REPR_MAX = 40
# An object that holds at least this share of its owner's bytes appears in the warning instead of the owner.
_SHARE_NAMED = 0.8
_CLASS_MACHINERY = {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__"}


class _Part(NamedTuple):
    label: str
    value: object


# --- objects that cannot be pickled -----------------------------------------------------------------------------------


def explain_unpicklable(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: BaseException,
    reducer: payload.Reducer | None = None,
) -> str:
    """Return the path to the refused object, such as ``global `x` of `train` -> _thread.lock``."""
    search = _Search(reducer)
    for root in _roots(function, args, kwargs):
        way = search.culprit(root.value, ())
        if way is not None:
            return " -> ".join(label for label in (root.label, *way) if label)
    return f"an object in the call ({type(error).__name__})"


class _Search:
    def __init__(self, reducer: payload.Reducer | None) -> None:
        self._reducer = reducer
        self._probes_left = _PROBES_MAX
        self._innocent: dict[int, object] = {}  # The values are references, so that Python cannot reuse an object's id.

    def culprit(self, value: object, above: tuple[object, ...]) -> list[str] | None:
        """Return the labels from `value` to the refused object, or None if pickle accepts `value`."""
        if id(value) in self._innocent or not self._fails([value]):
            return None
        if len(above) >= _DEPTH_MAX or self._is_refused(value):
            return [_culprit_name(value)]
        above = (*above, value)
        parts = list(islice(_parts(value), _CHILDREN_MAX))
        others = [part for part in parts if not any(part.value is owner for owner in above)]
        loops = len(others) < len(parts)
        start = 0
        while (index := self._first_failing(others, start)) is not None:
            way = self.culprit(others[index].value, above)
            if way is not None:
                return [others[index].label, *way]
            loops, start = True, index + 1
        if loops and len(above) > 1:
            self._innocent[id(value)] = value
            return None
        return [_culprit_name(value)]

    def _first_failing(self, parts: list[_Part], start: int) -> int | None:
        """Return the index of the first part, at `start` or later, that pickle refuses. Uses bisection."""
        low, high = start, len(parts)
        if low >= high or not self._fails([part.value for part in parts[low:high]]):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._fails([part.value for part in parts[low:middle]]):
                high = middle
            else:
                low = middle
        return low

    def _is_refused(self, value: object) -> bool:
        """Return True if pickle refuses the object itself, regardless of its references."""
        try:
            if self._reducer is not None:
                self._reducer(value)
        except Exception:  # noqa: BLE001 - the reducer also runs user code
            return True
        return False

    def _fails(self, values: list[object]) -> bool:
        if self._probes_left <= 0:
            return False
        self._probes_left -= 1
        try:
            payload.measure(values, self._reducer)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - pickling runs user code, which may raise any exception
            return True
        return False


def _culprit_name(value: object) -> str:
    """Return a description by which users can recognize the refused object."""
    if isinstance(value, io.IOBase):
        return f"open file {getattr(value, 'name', '')}".rstrip()
    if isinstance(value, FunctionType):
        return f"function `{value.__name__}`"
    if isinstance(value, type):
        return f"class `{value.__name__}`"
    return _type_name(value)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# --- object walk ------------------------------------------------------------------------------------------------------


def _roots(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[_Part]:
    called = getattr(function, "__name__", None) or type(function).__name__
    yield _Part("" if isinstance(function, FunctionType) else f"`{called}`", function)
    try:
        names = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # A builtin function may have no signature.
        names = []
    named = [parameter.name for parameter in names if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    for index, value in enumerate(args):
        yield _Part(f"argument `{named[index]}`" if index < len(named) else f"argument {index}", value)
    for name, value in kwargs.items():
        yield _Part(f"argument `{name}`", value)


def _parts(value: object) -> Iterator[_Part]:
    """Yield the parts of an object that the pickler visits separately. Yield nothing for an atomic object."""
    if isinstance(value, FunctionType):
        return _function_parts(value) if payload.is_by_value(value) else iter(())
    if isinstance(value, type):
        return _class_parts(value) if payload.is_by_value(value) else iter(())
    if isinstance(value, (ModuleType, str, bytes, bytearray, memoryview, int, float, complex, type(None))):
        return iter(())
    if type(value) is dict:
        pairs = cast("dict[object, object]", value).items()
        return (part for key, item in pairs for part in (_Part("a key", key), _Part(f"key {_short_repr(key)}", item)))
    if type(value) in (list, tuple, set, frozenset):
        items = cast("Iterable[object]", value)
        return (_Part(f"item {index}", item) for index, item in enumerate(items))
    return _object_parts(value)


def _function_parts(function: FunctionType) -> Iterator[_Part]:
    name = function.__name__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            contents = cell.cell_contents
        except ValueError:  # An empty closure cell has no contents.
            continue
        yield _Part(f"closure variable `{variable}` of `{name}`", contents)
    for variable, value in payload.referenced_globals(function).items():
        yield _Part(f"global `{variable}` of `{name}`", value)
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    for parameter, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield _Part(f"default of `{parameter}` of `{name}`", value)
    for parameter, value in (function.__kwdefaults__ or {}).items():
        yield _Part(f"default of `{parameter}` of `{name}`", value)
    for attribute, value in function.__dict__.items():
        yield _Part(f"attribute `{attribute}` of `{name}`", value)
    for parameter, value in function.__annotations__.items():
        yield _Part(f"annotation of `{parameter}` of `{name}`", value)


def _class_parts(cls: type) -> Iterator[_Part]:
    for base in cls.__bases__:
        yield _Part(f"base of class `{cls.__name__}`", base)
    for name, value in cls.__dict__.items():
        if name in _CLASS_MACHINERY:
            continue
        label = f"attribute `{name}` of class `{cls.__name__}`"
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            for accessor in (value.fget, value.fset, value.fdel):
                yield _Part(label, accessor)
        else:
            yield _Part(label, value)


def _short_repr(key: object) -> str:
    try:
        text = repr(key)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's __repr__ may raise any exception
        return f"<{_type_name(key)}>"
    return text if len(text) <= _REPR_MAX else text[: _REPR_MAX - 1] + "…"


def _object_parts(value: object) -> Iterator[_Part]:
    if isinstance(value, MethodType):
        yield _Part(f"the object `{value.__name__}` is bound to", value.__self__)
        yield _Part("", value.__func__)
    elif isinstance(value, functools.partial):
        yield _Part("", value.func)
        for index, item in enumerate(value.args):
            yield _Part(f"partial argument {index}", item)
        for name, item in value.keywords.items():
            yield _Part(f"partial argument `{name}`", item)
    else:
        yield from _reduced_parts(value)


def _reduced_parts(value: object) -> Iterator[_Part]:
    try:
        reduced = value.__reduce_ex__(5)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - user code and unpicklable types may raise any exception
        return
    if isinstance(reduced, str):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    yield from _state_parts(state)
    for argument in arguments if isinstance(arguments, tuple) else ():
        yield _Part(f"its class `{argument.__name__}`" if isinstance(argument, type) else "its contents", argument)
    for index, item in enumerate(items if items is not None else ()):
        yield _Part(f"item {index}", item)
    for key, item in pairs if pairs is not None else ():
        yield _Part(f"key {_short_repr(key)}", item)


def _state_parts(state: object) -> Iterator[_Part]:
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(half, (dict, type(None))) for half in state):
        for half in state:
            yield from _state_parts(half)
    elif isinstance(state, dict):
        for name, item in state.items():
            yield _Part(f"attribute `{name}`", item)
    elif state is not None:
        yield _Part("its state", state)


# --- large objects ----------------------------------------------------------------------------------------------------


def largest_captured(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> list[tuple[str, int]]:
    """Return a call's objects with their approximate additional bytes in the pickle, largest first."""
    scale = _Scale()
    found: list[tuple[str, int]] = []
    roots = _roots(function, args, kwargs)
    pending: list[tuple[tuple[str, ...], object]] = [((root.label,), root.value) for root in roots]
    expanded: set[int] = set()
    while pending and len(expanded) < _SAMPLE:
        labels, value = pending.pop(0)
        if isinstance(value, (FunctionType, MethodType, functools.partial, type)):
            if id(value) not in expanded:
                expanded.add(id(value))
                pending += [((*labels, part.label), part.value) for part in _parts(value)]
            continue
        size = scale.weigh(value)
        if size:
            labels, value = _narrow(labels, value, size)
            found.append((f"{' -> '.join(label for label in labels if label)}: {_type_name(value)}", size))
    return sorted(found, key=lambda entry: -entry[1])


def _narrow(labels: tuple[str, ...], value: object, size: int) -> tuple[tuple[str, ...], object]:
    """Descend to an attribute or a key that holds nearly all bytes of `value`."""
    for _ in range(_DEPTH_MAX):
        if type(value) in (list, tuple, set, frozenset) or _own_bytes(value) is not None:
            break
        parts = islice(_parts(value), _SAMPLE)
        inner = next((part for part in parts if _Scale().weigh(part.value) >= _SHARE_NAMED * size), None)
        if inner is None or inner.label in ("", "its contents", "its state", "a key"):
            break
        labels, value = (*labels, inner.label), inner.value
    return labels, value


class _Scale:
    """Estimates the pickled size of objects and counts each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # The values are references, so that Python cannot reuse an object's id.

    def weigh(self, value: object, depth: int = 0) -> int:
        if value is None or isinstance(value, bool):
            return 1
        if isinstance(value, (int, float)):
            return 9 if isinstance(value, float) else 2 + value.bit_length() // 8
        if id(value) in self._seen or depth > _DEPTH_MAX or len(self._seen) > _OBJECTS_MAX:
            return 2
        self._seen[id(value)] = value
        own = _own_bytes(value)
        if own is not None:
            return own
        if type(value) in (list, tuple, set, frozenset, dict):
            return self._weigh_sample(cast("Collection[object]", value), depth)
        return sum(self.weigh(part.value, depth + 1) for part in islice(_parts(value), _SAMPLE))

    def _weigh_sample(self, value: Collection[object], depth: int) -> int:
        count = len(value)
        if isinstance(value, dict):
            sample: list[object] = [thing for pair in islice(value.items(), _SAMPLE) for thing in pair]
            taken = len(sample) // 2
        else:
            # The size sample covers the whole sequence, because the first items may not be typical.
            step = max(1, count // _SAMPLE)
            sample = list(value[::step] if isinstance(value, (list, tuple)) else islice(value, _SAMPLE))
            taken = len(sample)
        return sum(self.weigh(item, depth + 1) for item in sample) * count // max(1, taken)


def _own_bytes(value: object) -> int | None:
    """Return the size of an object that occupies one block of memory, or None for any other object."""
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return int(value.nbytes)
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: _Tensor = value
        try:
            return tensor.untyped_storage().nbytes()
        # Tensors with other layouts, such as sparse tensors, have no single storage.
        except (RuntimeError, NotImplementedError):
            return tensor.numel() * tensor.element_size()
    return None


class _Storage(Protocol):
    def nbytes(self) -> int: ...


class _Tensor(Protocol):
    """Protocol for the `torch.Tensor` methods that the size estimate uses."""

    def untyped_storage(self) -> _Storage: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
