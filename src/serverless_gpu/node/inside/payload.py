"""Reads and writes files of pickled Python values. Only this module unpickles values.

A file holds a magic string, one JSON line, the pickle stream and the out-of-band buffers. The JSON line is `{python,
cloudpickle, stream, buffers}`, where `stream` and `buffers` are sizes in bytes. Each buffer starts at the next multiple
of 64. Arrays and CPU tensors are stored as buffers. Neither `dump` nor `load` copies a buffer. `dump` writes buffers
directly from memory, and `load` maps the file's pages privately.

The writer and the reader of a pickle may import this package under different names. Each process therefore registers
the vendored cloudpickle module under one name, `_sgpu_cloudpickle`. Pickle streams refer to cloudpickle by the name
`_sgpu_cloudpickle`. The `portable` decorator marks functions of this package that a pickle stream may refer to.
Portable functions belong to the module `_sgpu_portable`, independent of the import name of this package.

Failure cases:

* Another version of Python or cloudpickle wrote the file (`PayloadMismatch`).
* The value exceeds the size limit (`PayloadTooLarge`). For a value above the limit, `dump` writes no file.
* The file is truncated or not a payload (`PayloadDamaged`).
* The disk is full (`PayloadNotWritten`). On a full disk, `dump` removes the partial file.

The pickler's own errors pass through unchanged. PyTorch cannot resize a loaded tensor beyond its storage, because
PyTorch did not allocate the memory.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import dis
import functools
import importlib.util
import io
import json
import mmap
import operator
import os
import pickle
import sys
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, ModuleType, prepare_class, resolve_bases
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

_CLOUDPICKLE_NAME = "_sgpu_cloudpickle"
_CLOUDPICKLE_VERSION = "3.1.2"
_PORTABLE_NAME = "_sgpu_portable"

_MAGIC = b"SGPU\x01\n"
_ALIGNMENT = 64
_HEADER_SIZE_MAX = 1 << 28  # A payload header takes about 10 bytes per buffer.
# An array smaller than one page is cheaper in the stream than as a separate buffer.
_BUFFER_SIZE_MIN = 4096
# Limit the size of one write, because Python handles Ctrl-C only between two writes.
_WRITE_SIZE_MAX = 8 << 20
_WRITE_COUNT_MAX = 512  # The kernel's limit for one `writev` call is 1024 buffers (IOV_MAX).
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ARGUMENTS = ("transformers.training_args", "TrainingArguments")
# `_setup_devices` is a cached property that creates the attributes in `_OF_ONE_PROCESS`.
_set_up = operator.attrgetter("_setup_devices")
_late: list[weakref.ref[object]] = []
# Attributes of `TrainingArguments` that describe the process that created them. Other processes must not use the
# attributes in `_OF_ONE_PROCESS`.
_OF_ONE_PROCESS = frozenset({"_setup_devices", "__cached__setup_devices", "_n_gpu", "distributed_state"})


class PayloadError(Exception):
    """Base class of payload errors."""


class PayloadTooLarge(PayloadError):
    """`dump` wrote no file, because the value exceeds the size limit in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"the value takes {self.size} bytes, but the limit is {self.limit} bytes"


class PayloadNotWritten(PayloadError, OSError):
    """The payload file could not be written. No partial file remains.

    The exception carries the operating system's errno.
    """


class PayloadMismatch(PayloadError):
    """This process cannot load a payload that a different version of Python or cloudpickle wrote."""


class PayloadDamaged(PayloadError):
    """The file is truncated or not a payload."""


def _load_vendored() -> ModuleType:
    loaded = sys.modules.get(_CLOUDPICKLE_NAME)
    if loaded is not None:
        return loaded
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendor", "cloudpickle.py")
    spec = importlib.util.spec_from_file_location(_CLOUDPICKLE_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the bundled cloudpickle from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CLOUDPICKLE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_CLOUDPICKLE_NAME]
        raise
    return module


_cloudpickle = _load_vendored()
_names_of_code: weakref.WeakKeyDictionary[CodeType, dict[str, None]] = weakref.WeakKeyDictionary()


def _code_globals(code: CodeType) -> dict[str, None]:
    """Return the global names that a code object and its class bodies may use, in order."""
    names = _names_of_code.get(code)
    if names is None:
        names = dict.fromkeys((*_cloudpickle._walk_global_ops(code), *_read_by_class_body(code)))
        for constant in code.co_consts or ():
            if isinstance(constant, CodeType):
                names.update(_code_globals(constant))
        _names_of_code[code] = names
    return names


def _read_by_class_body(code: CodeType) -> Iterator[str]:
    """Yield the names that a class body may read before assigning them."""
    bound: set[str] = {"__name__", "__annotations__"}  # Every module defines `__name__` and `__annotations__`.
    is_straight, last = True, None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_NAME" and step.argval == "__annotations__" and isinstance(last, str):
            # With `from __future__ import annotations`, annotations are strings.
            with contextlib.suppress(SyntaxError, ValueError):
                tree = ast.parse(last, mode="eval")
                yield from [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        last = step.argval
        if step.opname == "STORE_NAME" and is_straight:
            bound.add(str(step.argval))
        elif step.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") and step.argval not in bound:
            yield str(step.argval)
        elif step.opcode in _JUMPS:
            is_straight = False


# cloudpickle's own `_extract_code_globals` ignores class bodies.
vars(_cloudpickle)["_extract_code_globals"] = _code_globals

if TYPE_CHECKING:
    from _pickle import _ReducedType
    from functools import _CacheParameters

    from typing_extensions import Buffer

    Reduced = _ReducedType
    _ClassArguments = tuple[type, str, tuple[type, ...], dict[str, object], str, None]

    _CloudPickler = pickle.Pickler
else:
    _CloudPickler = _cloudpickle.Pickler

Reducer = Callable[[object], "Reduced"]
_F = TypeVar("_F", bound=Callable[..., object])


class _Device(Protocol):
    type: str


class _UntypedStorage(Protocol):
    """The part of `torch.UntypedStorage` that this module uses, declared without importing torch."""

    device: _Device

    def nbytes(self) -> int: ...
    def data_ptr(self) -> int: ...


class _TypedStorage(Protocol):
    """The part of `torch.TypedStorage` that this module uses: a wrapper around one untyped storage."""

    _untyped_storage: _UntypedStorage
    dtype: object


def portable(function: _F) -> _F:
    """Make `function` unpicklable in every process that has loaded this package under any name."""
    home = sys.modules.setdefault(_PORTABLE_NAME, ModuleType(_PORTABLE_NAME))
    function.__module__ = _PORTABLE_NAME
    canonical: _F = home.__dict__.setdefault(function.__name__, function)
    return canonical


# --- writing ----------------------------------------------------------------------------------------------------------


def dump(value: object, path: str, *, limit: int | None = None, reducer: Reducer | None = None) -> int:
    """Write `value` to `path` atomically. Return the file size in bytes.

    Raises PayloadTooLarge before writing any byte. Raises PayloadNotWritten, an `OSError`, if the write fails.
    """
    parts = _serialise(value, limit, reducer)
    write_whole(path, parts)
    return sum(part.nbytes for part in parts)


def dumps(value: object, *, limit: int | None = None, reducer: Reducer | None = None) -> bytes:
    """Return `value` as bytes in the payload file format.

    Use `dumps` only for small values, because it copies the buffers.

    The pickler calls `reducer` for each object before its own reducers, like `reducer_override` of the standard
    pickler.
    """
    return b"".join(_serialise(value, limit, reducer))


def measure(value: object, reducer: Reducer | None = None) -> int:
    """Return the approximate number of bytes that `dump` would write, without storing the bytes."""
    sink = _Sink(limit=0)
    _Pickler(sink, reducer).dump(value)
    return sink.size


class _Sink:
    """Collects the pickler's output as references, not copies.

    Beyond the limit, counts bytes without storing the output.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.size = 0
        self.stream: list[memoryview] = []
        self.buffers: list[memoryview] = []

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self.size += view.nbytes
        self._keep(self.stream, view)
        return view.nbytes

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Store a buffer out of band. Return True if the pickler must write the buffer into the stream."""
        view = buffer.raw()  # The pickler itself rejects a non-contiguous buffer.
        if view.nbytes < _BUFFER_SIZE_MIN:
            return True
        self.size += view.nbytes
        self._keep(self.buffers, view)
        return False

    def _keep(self, kept: list[memoryview], view: memoryview) -> None:
        if self.limit is None or self.size <= self.limit:
            kept.append(view)
        else:
            self.stream.clear()
            self.buffers.clear()


class _Pickler(_CloudPickler):
    """Extends cloudpickle to write CPU tensors out of band."""

    def __init__(self, sink: _Sink, reducer: Reducer | None = None) -> None:
        super().__init__(sink, protocol=5, buffer_callback=sink.take)
        _share_by_value_registry()
        self._reducer = reducer
        # A partly imported torch, or another module named torch, has no storage classes.
        torch = sys.modules.get("torch")
        self._untyped: object = getattr(torch, "UntypedStorage", None)
        self._typed: object = getattr(torch, "TypedStorage", None)
        arguments = getattr(sys.modules.get(_ARGUMENTS[0]), _ARGUMENTS[1], None)
        self._arguments = arguments if isinstance(arguments, type) else None

    def reducer_override(self, value: object) -> Reduced:
        if self._reducer is not None:
            reduced = self._reducer(value)
            if reduced is not NotImplemented:
                return reduced
        kind: object = type(value)
        if kind is self._typed:
            typed = cast("_TypedStorage", value)
            return _typed_storage, (typed._untyped_storage, typed.dtype)
        if kind is self._untyped:
            memory = _storage_memory(cast("_UntypedStorage", value))
            if memory is None:
                return super().reducer_override(value)
            return _untyped_storage, (pickle.PickleBuffer(memory),)
        if kind is FunctionType:
            function = cast("FunctionType", value)
            module = function.__globals__.get("__name__")
            if function.__name__ == "open" and module == "IPython.core.interactiveshell":
                # IPython's `open` protects the file descriptors of the IPython kernel. Ranks use Python's built-in
                # `open`.
                return getattr, (builtins, "open")
        if self._arguments is not None and isinstance(value, self._arguments):
            return _reduce_arguments(value)
        reduced = _reduce_by_value(value)
        if reduced is not NotImplemented:
            return reduced
        reduced = super().reducer_override(value)
        return _with_slots(value, reduced) if isinstance(value, type) else reduced


def _with_slots(kind: type, reduced: Reduced) -> Reduced:
    """Keep the slots of a class that is pickled by value.

    The cloudpickle library keeps slots only as an attribute. Without the slots, instances of the class in the rank
    would also have a `__dict__`. The caller could not load a returned instance that has an additional `__dict__`.
    """
    slots = kind.__dict__.get("__slots__")
    # The class has no slots, or its slots were an iterator that is exhausted.
    if not isinstance(slots, (str, tuple, list, dict)):
        return reduced
    if isinstance(reduced, tuple) and reduced[0] is _cloudpickle._make_skeleton_class:
        made_by, name, bases, namespace, *_ = cast("_ClassArguments", reduced[1])
        kind_of_kind, *_ = prepare_class(name, resolve_bases(bases), {"metaclass": made_by})
        # Other metaclasses, such as the metaclass of NamedTuple, create slots themselves and accept no slots.
        if kind_of_kind in (type, ABCMeta):
            namespace["__slots__"] = slots
    return reduced


def _reduce_by_value(value: object) -> Reduced:
    """Reduce functools wrappers of functions that are pickled by value, or return NotImplemented."""
    if type(value) is functools._lru_cache_wrapper:
        found = _cloudpickle._lookup_module_and_qualname(value)
        if found is None or _cloudpickle._is_registered_pickle_by_value(found[0]):
            return _cached_function, (value.__wrapped__, value.cache_parameters())
    # Before Python 3.12, a cached_property contains a lock, which cannot be pickled.
    if type(value) is functools.cached_property:
        return _cached_property, (value.func, value.attrname)
    return cast("Reduced", NotImplemented)


@portable
def _cached_function(function: Callable[..., object], parameters: _CacheParameters) -> object:
    return functools.lru_cache(**parameters)(function)


@portable
def _cached_property(function: Callable[..., object], name: str | None) -> object:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _storage_memory(storage: _UntypedStorage) -> Buffer | None:
    """Return a CPU storage's memory; None for other devices, whose storages torch itself must pickle."""
    if storage.device.type != "cpu":
        return None
    if storage.nbytes() == 0:
        return bytearray()
    address = storage.data_ptr()
    if address == 0:  # A storage without memory belongs to a fake tensor or a similar object.
        return None
    # This function uses ctypes, because torch may be installed without numpy.
    memory = (ctypes.c_char * storage.nbytes()).from_address(address)
    # The storage may be a temporary object that the pickler made while reducing the storage's owner. The attribute
    # keeps the storage alive until the memory is written.
    memory._storage = storage  # type: ignore[attr-defined]  # ctypes instances accept attributes
    return memory


@portable
def _untyped_storage(buffer: Buffer) -> object:
    import torch

    if not memoryview(buffer).nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


@portable
def _typed_storage(untyped: object, dtype: object) -> object:
    import torch

    storage_type: Callable[..., object] = torch.storage.TypedStorage
    return storage_type(wrap_storage=untyped, dtype=dtype, _internal=True)


def _share_by_value_registry() -> None:
    """Use the modules that the user registered for pickling by value in the user's own cloudpickle."""
    own = getattr(sys.modules.get("cloudpickle"), "list_registry_pickle_by_value", None)
    if own is not None:
        vars(_cloudpickle)["_PICKLE_BY_VALUE_MODULES"] = own()


def is_by_value(value: FunctionType | type | ModuleType) -> bool:
    """Return whether cloudpickle pickles a function, class or module by definition instead of by name."""
    _share_by_value_registry()
    return not _cloudpickle._should_pickle_by_reference(value)


def referenced_globals(function: FunctionType) -> dict[str, object]:
    """Return the globals that cloudpickle pickles with `function` by value."""
    names = _cloudpickle._extract_code_globals(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _serialise(value: object, limit: int | None, reducer: Reducer | None = None) -> list[memoryview]:
    sink = _Sink(limit)
    _Pickler(sink, reducer).dump(value)
    header = {
        "python": list(sys.version_info[:2]),
        "cloudpickle": _CLOUDPICKLE_VERSION,
        "stream": sum(chunk.nbytes for chunk in sink.stream),
        "buffers": [buffer.nbytes for buffer in sink.buffers],
    }
    head = _MAGIC + json.dumps(header).encode("ascii") + b"\n"
    if limit is not None and sink.size + len(head) > limit:
        raise PayloadTooLarge(sink.size + len(head), limit)
    parts = [memoryview(head), *sink.stream]
    position = sum(part.nbytes for part in parts)
    for buffer in sink.buffers:
        padding = -position % _ALIGNMENT
        parts += [memoryview(bytes(padding)), buffer]
        position += padding + buffer.nbytes
    return parts


def write_whole(path: str, parts: Sequence[memoryview]) -> None:
    """Create or replace the file at `path` atomically. Raises `PayloadNotWritten`."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, parts)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PayloadNotWritten(error.errno, error.strerror, path) from error


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        for start in range(0, part.nbytes, _WRITE_SIZE_MAX):
            piece = part[start : start + _WRITE_SIZE_MAX]
            batch.append(piece)
            size += piece.nbytes
            if size >= _WRITE_SIZE_MAX or len(batch) == _WRITE_COUNT_MAX:
                _write_batch(descriptor, batch)
                batch, size = [], 0
    _write_batch(descriptor, batch)


def _write_batch(descriptor: int, batch: list[memoryview]) -> None:
    while batch:
        written = os.writev(descriptor, batch)
        while batch and written >= batch[0].nbytes:
            written -= batch.pop(0).nbytes
        if batch:
            batch[0] = batch[0][written:]


# --- process state of transformers' arguments -------------------------------------------------------------------------


def _reduce_arguments(value: object) -> Reduced:
    """Reduce `TrainingArguments` without the device and the process group of this process."""
    reduced = value.__reduce_ex__(5)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {name: held for name, held in reduced[2].items() if name not in _OF_ONE_PROCESS}
    return _training_arguments, (reduced[0], reduced[1]), state, *reduced[3:]


@portable
def _training_arguments(make: Callable[..., object], args: tuple[object, ...]) -> object:
    """Return `TrainingArguments` that find their device and process group on first use."""
    made = make(*args)
    for kind in type(made).__mro__:
        if (kind.__module__, kind.__name__) == _ARGUMENTS and "distributed_state" not in vars(kind):
            kind.distributed_state = _LateState()  # type: ignore[attr-defined]  # an attribute of transformers' class
    _late[:] = [reference for reference in _late if reference() is not None] + [weakref.ref(made)]
    return made


def join_late() -> bool:
    """Make the call's `TrainingArguments` join the process group.

    Return True if the call contains `TrainingArguments`. The transformers library joins the process group when it
    creates `TrainingArguments`. A transformers Trainer requires an initialized process group.
    """
    made = [value for value in (reference() for reference in _late) if value is not None]
    _late.clear()
    for value in made:
        _set_up(value)
    return bool(made)


class _LateState:
    """Replaces `TrainingArguments.distributed_state` until transformers sets it on the instance.

    The transformers library sets `distributed_state` together with the device, on the first read of the device. Reading
    the `_LateState` descriptor therefore reads the device first.
    """

    def __get__(self, instance: object, owner: type | None = None) -> object:
        if instance is not None:
            _set_up(instance)
            if "distributed_state" in vars(instance):
                return vars(instance)["distributed_state"]
        raise AttributeError("distributed_state")


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: str) -> object:
    """Return the value in the file at `path`. Raises PayloadMismatch, PayloadDamaged or OSError.

    Arrays and tensors of the loaded value are pages of a private mapping of the file. The mapped pages are writable.
    The kernel copies a page on the first write to the page. The mapped pages remain valid while they are in use, even
    after the file is removed.
    """
    with open(path, "rb") as file:
        header = _read_header(file, os.fstat(file.fileno()).st_size, path)
        if not header.buffers:
            return _Unpickler(file, ()).load()
        pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return _Unpickler(file, [pages[start:end] for start, end in header.spans()]).load()


def loads(data: bytes) -> object:
    """Return the value that `dumps` encoded in `data`."""
    file = io.BytesIO(data)
    header = _read_header(file, len(data), "data")
    return _Unpickler(file, [bytearray(data[start:end]) for start, end in header.spans()]).load()


class _Header(NamedTuple):
    stream_start: int
    stream: int
    buffers: list[int]

    def spans(self) -> Iterator[tuple[int, int]]:
        position = self.stream_start + self.stream
        for size in self.buffers:
            start = position + -position % _ALIGNMENT
            position = start + size
            yield start, position

    def end(self) -> int:
        return max((end for _, end in self.spans()), default=self.stream_start + self.stream)


def _read_header(file: IO[bytes], size: int, name: str) -> _Header:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise PayloadDamaged(f"{name} is not a payload of this version")
    try:
        fields = json.loads(file.readline(_HEADER_SIZE_MAX))
        python = tuple(fields["python"])
        cloudpickle = str(fields["cloudpickle"])
        header = _Header(file.tell(), int(fields["stream"]), [int(entry) for entry in fields["buffers"]])
    except (ValueError, KeyError, TypeError) as error:
        raise PayloadDamaged(f"{name} has an unreadable header: {error}") from error
    here = tuple(sys.version_info[:2])
    if python != here:
        raise PayloadMismatch(f"the call was pickled with Python {_dotted(python)}, but this rank runs {_dotted(here)}")
    if cloudpickle.split(".")[:2] != _CLOUDPICKLE_VERSION.split(".")[:2]:
        raise PayloadMismatch(
            f"the call was pickled with cloudpickle {cloudpickle}, but this rank runs {_CLOUDPICKLE_VERSION}"
        )
    if header.end() != size:
        raise PayloadDamaged(
            f"{name} has {size} bytes, but its header says {header.end()}: the file was cut short or changed"
        )
    return header


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


class _Unpickler(pickle.Unpickler):
    """An unpickler that leaves classes of this process unchanged.

    When a rank returns a class of `__main__`, the pickle contains the class definition. The unpickler recognizes the
    class as the caller's class. If the unpickler applied the rank's definition, the class's methods would use the
    rank's globals.
    """

    def __init__(self, file: IO[bytes], buffers: Sequence[Buffer]) -> None:
        super().__init__(file, buffers=buffers)
        with _cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
            # Keep references to the classes, because a later class could reuse the id of a deleted class.
            self._known: dict[int, type] = {id(known): known for known in _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS}

    def find_class(self, module_name: str, global_name: str, /) -> object:
        if module_name == _CLOUDPICKLE_NAME and global_name == "_class_setstate":
            # A bound method in the memo would keep this unpickler and all loaded values alive.
            return partial(_set_class_state, self._known)
        if module_name == "torch._utils" and global_name == "_rebuild_tensor_v3":
            return _rebuild_tensor_v3
        return super().find_class(module_name, global_name)


def _set_class_state(known: dict[int, type], cls: type, state: object) -> type:
    if id(cls) not in known:
        _cloudpickle._class_setstate(cls, state)
    return cls


def _rebuild_tensor_v3(storage: object, *rest: object) -> object:
    """Rebuild a tensor of a newer dtype, such as uint16.

    PyTorch pickles tensors of newer dtypes with an untyped storage, although PyTorch's reader expects a wrapped
    storage. Only `torch.save` wraps the storage.
    """
    import torch

    rebuild: Callable[..., object] = torch._utils._rebuild_tensor_v3
    return rebuild(_typed_storage(storage, torch.uint8), *rest)
