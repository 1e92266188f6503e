"""Describes a rank's exception, and pickles the exception if the caller can load the pickle.

Failure cases: Methods of the user's exception (`__str__`, `__reduce__`, `__init__`, `__notes__`) may fail while this
module examines the exception, even with `SystemExit`. A failing method must not hide the user's original error. If a
method of the exception fails, this module writes a shorter description and no pickle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import cast

from . import payload

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MESSAGE_CHARACTERS_MAX = 64_000
_TRACEBACK_BYTES_MAX = 200_000
_NOTES_MAX = 100
_PICKLE_SIZE_MAX = 64 << 20
_CHAIN_MAX = 20
_COMPARE_DEPTH_MAX = 20

# The default repr of an object and its copy contain different addresses.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_COPY_ERRNOS = {errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM}
_PEER_TYPES = {
    "torch.distributed.DistNetworkError",
    "builtins.ConnectionResetError",
    "builtins.ConnectionAbortedError",
    "builtins.BrokenPipeError",
}
# torch's DistBackendError and DistStoreError are subclasses of RuntimeError.
_TEXT_TYPES = {"builtins.RuntimeError", "builtins.OSError"}
_PEER_TEXT = re.compile(
    r"connection (was )?(likely )?(closed|reset|aborted|refused)"
    r"|(closed|reset) by (remote )?peer"
    r"|remote (process|peer|side) (has )?(exited|closed)"
    r"|broken pipe|socket (was )?closed|peer (has )?(closed|exited)"
    r"|ncclremoteerror|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
_GPU_OOM_TYPES = {"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "torch._C.OutOfMemoryError"}
_JOINED_TWICE = "initialize the default process group twice"
_JOINED_NOTE = (
    "the call carries TrainingArguments, which joined the process group before the function began. Remove "
    "init_process_group from the function, or create the TrainingArguments in the function after "
    "init_process_group"
)
_MADE_NOTE = (
    "the call has init=, so this rank joined the process group before the function began. Remove "
    "init_process_group from the function, or init= from the decorator"
)
_NO_GROUP = "Default process group has not been initialized"
_NO_GROUP_NOTE = (
    'create the process group first: write init="gloo" (or init="nccl" on GPUs) in @distributed(...), or call '
    "torch.distributed.init_process_group() in the function"
)
_NO_CUDA = re.compile(
    "Found no NVIDIA (driver|GPU)|Torch not compiled with CUDA enabled|No CUDA GPUs are available|CUDA driver"
    "|no CUDA-capable device is detected|no GPUs found|doesn't have NCCL built in"
    "|deserialize object on a CUDA device but torch.cuda.is_available\\(\\) is False"
)
_NO_CUDA_OF = {
    "FAKE-": "the GPUs of this run are declared by SERVERLESS_GPU_FAKE and have no CUDA",
    "CPU-": "this run has CPU slots, which have no CUDA",
}
_NO_CUDA_NOTE = (
    'Choose the device by availability: torch.device("cuda", local_rank) if torch.cuda.is_available() else '
    'torch.device("cpu"), and "gloo" for a process group without CUDA'
)
_DATABRICKS_NOTE = (
    "databricks.air exists on Databricks only. Write `from serverless_gpu import distributed` here, and "
    "`from serverless_gpu import runtime` for ranks (docs/how-to/from-databricks.md)"
)
_CANCELLED_TYPE = "asyncio.exceptions.CancelledError"


# --- description ------------------------------------------------------------------------------------------------------


def describe(error: BaseException) -> dict[str, object]:
    """Return a description of `error` as JSON values.

    `type` is the exception's qualified name within `module`. `kind` is "exception", "system_exit", "interrupt",
    "cancelled" or "base". `exit_code` is the exit code of a SystemExit, else None. `peer_lost` is True if the error is
    a consequence of another rank's end.
    """
    kind = type(error)
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "message": _text(error),
        "notes": _notes(error),
        "traceback": _traceback(error),
        "kind": _kind(error),
        "exit_code": _exit_code(error),
        "peer_lost": any(_says_peer_lost(link) for link in _causes(error)),
        "gpu_oom": bool(_GPU_OOM_TYPES & _type_names(error)),
    }


def _text(error: object) -> str:
    try:
        return _cut(str(error), _MESSAGE_CHARACTERS_MAX)
    except BaseException:  # noqa: BLE001 - the user's __str__ method may raise any exception
        return f"<{type(error).__qualname__}: its __str__ method failed>"


def _notes(error: BaseException) -> list[str]:
    try:
        notes = getattr(error, "__notes__", None)
    except BaseException:  # noqa: BLE001 - the user's property or __getattr__ may raise any exception
        return []
    return [_text(note) for note in notes[:_NOTES_MAX]] if isinstance(notes, list) else []


def _kind(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "system_exit"
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    if _CANCELLED_TYPE in _type_names(error):
        return "cancelled"
    return "exception" if isinstance(error, Exception) else "base"


def _exit_code(error: BaseException) -> int | None:
    """Return the interpreter's exit status for a SystemExit, or None for other exceptions."""
    if not isinstance(error, SystemExit):
        return None
    try:
        code: object = error.code
    except BaseException:  # noqa: BLE001 - the user's property may raise any exception
        return 1
    return 0 if code is None else int(code) if isinstance(code, int) else 1


def _type_names(error: BaseException) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the exceptions in its chain of causes."""
    link: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _says_peer_lost(error: BaseException) -> bool:
    names = _type_names(error)
    if names & _PEER_TYPES:
        return True
    return bool(names & _TEXT_TYPES) and _PEER_TEXT.search(_text(error)) is not None


def _traceback(error: BaseException) -> str:
    try:
        told = traceback.TracebackException.from_exception(error, compact=True)
        leave_out_own_frames(told)
        text = "".join(told.format())
    except BaseException:  # noqa: BLE001 - the text is shorter if user code (__str__, __notes__, __getattr__) fails
        text = f"{type(error).__module__}.{type(error).__qualname__}: {_text(error)}\n"
    return _cut(text, _TRACEBACK_BYTES_MAX)


def leave_out_own_frames(error: traceback.TracebackException) -> None:
    """Remove the package's stack frames before the first frame of user code.

    If no frame of user code follows, keep the package's frames.
    """
    pending: list[traceback.TracebackException | None] = [error]
    while pending:
        told = pending.pop()
        if told is None:
            continue
        first = _first_foreign(told.stack)
        if first < len(told.stack):  # An error without frames of user code keeps its frames.
            del told.stack[:first]
        pending += [told.__cause__, told.__context__, *(told.exceptions or [])]


def _first_foreign(stack: traceback.StackSummary) -> int:
    """Return the index of the first user frame, after the package's frames and the import machinery."""
    index = 0
    while index < len(stack) and stack[index].filename.startswith(_HERE):
        index += 1
    machinery = os.path.join("", "importlib", "__init__.py")
    while 0 < index < len(stack) and (
        stack[index].filename.startswith("<frozen importlib") or stack[index].filename.endswith(machinery)
    ):
        index += 1
    return index


def _cut(text: str, size_max: int) -> str:
    """Shorten text to `size_max` bytes of UTF-8 by omitting its middle. Replace lone surrogates."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= size_max:
        return data.decode("utf-8")
    half = size_max // 2 - 50
    head, tail = data[:half].decode("utf-8", "ignore"), data[-half:].decode("utf-8", "ignore")
    return f"{head}\n... {len(data) - 2 * half} bytes left out ...\n{tail}"


# --- notes ------------------------------------------------------------------------------------------------------------


def tell_of_copies(error: BaseException, copies: Mapping[str, str]) -> None:
    """Add a note to an error about a file that is missing or read-only in a captured copy.

    `copies` maps the directories of captured copies to their originals.
    """
    for link in _causes(error):
        note = ""
        if isinstance(link, OSError):
            with contextlib.suppress(BaseException):  # Attributes of a user's exception may raise errors.
                note = _copy_note(link, copies) if link.errno in _COPY_ERRNOS else ""
        if note:
            _add_note(error, note)
            return


def tell_of_joining(error: BaseException, *, by_init: bool = False) -> None:
    """Add a note to torch's error about a second process group.

    `by_init` is True if `init=` created the first process group, and False if captured `TrainingArguments` did.
    """
    if any(type(link) is ValueError and _JOINED_TWICE in _text(link) for link in _causes(error)):
        _add_note(error, _MADE_NOTE if by_init else _JOINED_NOTE)


def tell_of_torch(error: BaseException, environ: Mapping[str, str]) -> None:
    """Add a remedy to errors about a missing process group, CUDA on fake GPUs, or `databricks.air`."""
    held = environ.get("SGPU_GPU_UUIDS", "")
    without_cuda = next((why for prefix, why in _NO_CUDA_OF.items() if held.startswith(prefix)), "")
    for link in _causes(error):
        text = _text(link)
        if _NO_GROUP in text:
            _add_note(error, _NO_GROUP_NOTE)
            return
        if without_cuda and _NO_CUDA.search(text) is not None:
            _add_note(error, f"{without_cuda}. {_NO_CUDA_NOTE}")
            return
        if isinstance(link, ModuleNotFoundError) and _is_databricks_air(text, link):
            _add_note(error, _DATABRICKS_NOTE)
            return


def _is_databricks_air(text: str, error: ModuleNotFoundError) -> bool:
    """Return True if the missing module is `databricks.air`, which Python may report as `databricks`."""
    if "'databricks.air" in text:
        return True
    if "'databricks'" not in text:
        return False
    asked: set[str] = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        asked.update(frame.f_code.co_names)
        asked.update(value for value in frame.f_code.co_consts if isinstance(value, str))
    return {"databricks", "air"} <= asked or any(f"{name}.".startswith("databricks.air.") for name in asked)


def _add_note(error: BaseException, note: str) -> None:
    # If the user's exception class refuses the note, the exception stays unchanged.
    with contextlib.suppress(BaseException):
        notes = getattr(error, "__notes__", None)
        object.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else []), note])


def _copy_note(error: OSError, copies: Mapping[str, str]) -> str:
    for name in (error.filename, error.filename2):
        path = os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes)) and name else ""
        for copy, directory in copies.items():
            if not path.startswith(copy + os.sep):
                continue
            inside = path[len(copy) + 1 :]
            theirs = os.path.join(directory, inside)
            if error.errno == errno.ENOENT:
                return (
                    f"ranks run a captured copy of {directory}, without files that git or .sgpuignore excludes. "
                    f"The original of this file would be {theirs}. Use that path, or include the file with a line "
                    "!name in .sgpuignore"
                )
            return (
                f"ranks run a captured copy of {directory}, which is read-only. The original of this file would "
                f"be {theirs}. Write to that path, or to a path relative to the working directory"
            )
    return ""


# --- pickling ---------------------------------------------------------------------------------------------------------


def pickle_exception(error: BaseException) -> bytes | None:
    """Return `error` pickled, or None if the pickle does not load as the same exception.

    `pickle_exception` loads the pickle once as a test. If an exception's constructor does not accept its `args`, the
    pickle skips the constructors of the exception and of nested exceptions. For a `BaseException` that is not an
    `Exception`, the result is None, because loading the pickle could end the caller's process.
    """
    if not isinstance(error, Exception):
        return None
    for reducer in (None, _reduce_bare):
        try:
            data = payload.dumps(error, limit=_PICKLE_SIZE_MAX, reducer=reducer)
            is_proven = _is_same(error, payload.loads(data))
        except BaseException:  # noqa: BLE001 - an error in user code while pickling must not replace the user's error
            continue
        if is_proven:
            return data
    return None


def load_exception(path: str) -> BaseException:
    """Load an exception that `pickle_exception` pickled. Raises any error of the exception's classes."""
    error = payload.load(path)
    if not isinstance(error, BaseException):
        raise TypeError(f"{path} holds a {type(error).__qualname__}, not an exception")
    return error


def _reduce_bare(value: object) -> payload.Reduced:
    """Reduce exceptions to their built-in base class, so that loading calls no constructor of user code."""
    if not isinstance(value, BaseException):
        return cast("payload.Reduced", NotImplemented)
    _, args, *rest = cast("tuple[object, ...]", _builtin_base(type(value)).__reduce__(value))
    # The `args` of an exception group may differ from its message and exceptions.
    made_of = (value.message, value.exceptions) if isinstance(value, BaseExceptionGroup) else args
    state = rest[0] if rest else None
    reduced = (_make_bare, (type(value), made_of, value.args), state, None, None, _set_bare_state)
    return cast("payload.Reduced", reduced)


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    """Return the built-in base class that creates instances of `cls`, such as OSError."""
    base: type[BaseException] = cls
    while base.__flags__ & 1 << 9:  # Classes that Python code defines have the flag Py_TPFLAGS_HEAPTYPE.
        base = base.__base__  # type: ignore[assignment]  # the bases of an exception class are exception classes, or object
    return base


@payload.portable
def _make_bare(cls: type[BaseException], made_of: tuple[object, ...], args: tuple[object, ...]) -> BaseException:
    base = _builtin_base(cls)
    error = base.__new__(cls, *made_of)
    base.__init__(error, *made_of)
    object.__setattr__(error, "args", args)
    return error


@payload.portable
def _set_bare_state(error: BaseException, state: dict[str, object]) -> None:
    for name, value in state.items():
        object.__setattr__(error, name, value)  # Frozen dataclasses refuse their own __setattr__.


def _is_same(one: object, other: object, depth: int = 0) -> bool:
    """Return True if `other` is a copy of `one`. Compare objects without `__eq__` by type."""
    if type(one) is not type(other) or depth > _COMPARE_DEPTH_MAX:
        return False
    if isinstance(one, BaseException) and isinstance(other, BaseException):
        same_text = _ADDRESS.sub("", _text(one)) == _ADDRESS.sub("", _text(other))
        return same_text and _notes(one) == _notes(other) and _is_same(one.args, other.args, depth + 1)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_is_same(*pair, depth + 1) for pair in zip(one, other, strict=True))
    if type(one).__eq__ is object.__eq__:
        return True
    equal: object = one == other
    # Comparing two arrays returns an array instead of a bool. A NaN is not equal to itself. A dict of objects without
    # `__eq__` is not equal to its copy.
    return equal is True or not isinstance(equal, bool) or _ADDRESS.sub("", repr(one)) == _ADDRESS.sub("", repr(other))
