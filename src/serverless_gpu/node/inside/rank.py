"""Runs one rank: applies the caller's context, calls the function and stores the outcome.

The same `execute` runs in a rank forked from a zygote, in a cold rank, and under `torchrun <run directory>/_air.py`.

    stand by ──▶ exec ──▶ load call.pkl ──▶ enter ──▶ function(*args) ──▶ results/<rank>.pkl  ──▶ returned
                 (user code starts here)                         └─ raises ─▶ failures/<rank>.json, .pkl ─▶ failed

A rank with a program runs the program instead of a function (`command.py`). A rank with a Ray cluster calls the
function in a child process, the cluster's driver (`raycluster/task.py`).

The rank stores an outcome durably in the run directory before reporting the outcome. A supervisor that receives
`returned` therefore finds a complete result file. After storing the outcome, the rank joins its threads and runs the
`atexit` functions, but skips the interpreter's teardown. SIGTERM keeps its default action until user code calls the
checkpoint functions of `serverless_gpu/runtime.py`. A Python signal handler would not run while the rank is blocked in
a collective.

Failure cases: A result has its own failure kind if it cannot be pickled, exceeds the size limit or does not fit on the
disk. The failure record of an unusable result states that the user's function finished.
"""

from __future__ import annotations

import atexit
import binascii
import contextlib
import faulthandler
import fcntl
import io
import json
import locale
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import actor as actor  # A pickled call may refer to `actor.serve_actor`.
from . import blas, command, linux, process_group, protocol
from .call import RankCall, fill_rank, load_call
from .channel import Channel
from .failure import (
    describe,
    pickle_exception,
    tell_of_copies,
    tell_of_joining,
    tell_of_torch,
)
from .mlflow import hook as mlflow_hook
from .payload import (
    PayloadNotWritten,
    PayloadTooLarge,
    dump,
    dumps,
    join_late,
    loads,
    write_whole,
)
from .process_group import pass_gate, trained_alone
from .raycluster import task
from .raycluster.share import read_share

_STAY_S = 5.0  # Time in seconds that a rank other than 0 waits for its peers after its function has returned.
# Time in seconds that a failed rank waits for the upload of its last metric points. The supervisor receives the failure
# after this wait.
_SETTLE_FAILED_S = 1.0
_SPARE = 4  # Number of descriptors that the rank reserves for writing its outcome files.
_spare: list[int] = []
_FRAMES_MAX = 100  # Maximum number of frames in a stack, the same as in faulthandler.
_REPR_CHARACTERS_MAX = 10_000
# Maximum length of an error message in a failure event. The failure file contains the whole message.
_MESSAGE_CHARACTERS_MAX = 4_000


class RankOutput(NamedTuple):
    """Output paths, descriptors and rank numbers of one rank.

    `gate` is a pipe that blocks the node's other ranks until the node's first rank has entered the function. The node's
    first rank has the writing end of `gate`.

    `release` is a pipe that closes when every rank has returned. `stack` is the descriptor to which the rank writes
    Python stacks at the supervisor's request. `copies` maps directories of captured code to the original directories.
    """

    directory: str
    rank: int
    world_size: int
    result_bytes_max: int | None
    gate: int | None = None
    release: int | None = None
    stack: int = -1
    copies: Mapping[str, str] = {}
    local_rank: int = 0
    local_world_size: int = 1


def main(channel: Channel, events: Channel) -> int:
    """Run one rank in a process forked from the stem. Return the exit code.

    The rank waits in standby until the stem sends a message on `channel`. The stem closes `channel` if this rank is not
    needed. `events` is the channel to the supervisor.
    """
    linux.set_name("sgpu-rank")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # With a separate process group, `os.killpg(0, ...)` in user code reaches only the processes of this rank.
    os.setpgid(0, 0)
    _rehearse()
    stack = _offer_stacks()
    received = channel.receive()
    if received is None:
        return 0
    channel.close()
    message, (stdout, stderr, gate, release) = protocol.decode(received[0]), received[1]
    _take_output(stdout, stderr)
    place = RankOutput(
        directory=protocol.text(message, "directory"),
        rank=protocol.integer(message, "rank"),
        world_size=protocol.integer(message, "world_size"),
        result_bytes_max=protocol.integer(message, "result_bytes_max"),
        gate=gate,
        # The other nodes of a Ray cluster return only after the driver has ended.
        release=None if message.get("ray") is not None else release,
        stack=stack,
        copies=copies if isinstance(copies := message.get("copies"), dict) else {},
        local_rank=protocol.integer(message, "local_rank"),
        local_world_size=protocol.integer(message, "local_world_size"),
    )
    linux.set_name(f"sgpu-rank{place.rank}")
    if message.get("fenced") is True:
        linux.keep_signals_in()  # `sgpu doctor` reports nodes that cannot confine signals.

    def report(event: protocol.Message) -> None:
        with contextlib.suppress(OSError):  # If the supervisor has ended, sending fails and the stem ends this rank.
            events.send(protocol.encode({"at": protocol.now_ns(), **event, "rank": place.rank}))

    with _stack_on_signal(place):
        try:
            _take_context(message)
        except OSError as error:
            _fail(place, error, report)
            return 1
        if message.get("command") is None:
            call = _call(place, tracked=message.get("tracked") is True)
            if isinstance(cluster := message.get("ray"), dict):
                drive = _with_threads(call, protocol.integer(message, "threads"))
                return task.run(read_share(cluster), _node_task(place, _environment(message), report, drive))
            return call(report)
    work = protocol.text(message, "work") or os.path.join(place.directory, "work")
    return command.run(protocol.strings(message, "command"), report, work if message.get("tty") is True else None)


def _call(place: RankOutput, *, tracked: bool) -> Callable[[protocol.Report], int]:
    def call(report: protocol.Report) -> int:
        if tracked:
            mlflow_hook.install(place.directory, place.rank)
        return execute(place, report)

    return call


def _with_threads(call: Callable[[protocol.Report], int], count: int) -> Callable[[protocol.Report], int]:
    """Return the call for a Ray driver, a fork of the rank in which libraries may start threads.

    The kernel refuses to create a user namespace for a multi-threaded process. A fork of a multi-threaded process would
    wait for threads that do not exist in the fork.
    """

    def drive(report: protocol.Report) -> int:
        _set_threads(count)
        return call(report)

    return drive


def _node_task(
    place: RankOutput, environment: dict[str, str], report: protocol.Report, drive: Callable[[protocol.Report], int]
) -> task.RayTaskWork:
    return task.RayTaskWork(
        directory=place.directory,
        environment=environment,
        report=report,
        drive=drive,
        finish=lambda: _return(place, None, report),
        fail=lambda error: _fail(place, error, report),
        lose=lambda record: _store_failure(place, record, None, report),
    )


def execute(place: RankOutput, report: protocol.Report) -> int:
    """Load the call, run the function and store the outcome. Return the exit code."""
    report({"event": "exec", "stack": place.stack})
    process, joined, made_group = os.getpid(), False, False
    _spare.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_SPARE))
    try:
        call = load_call(os.path.join(place.directory, "call.pkl"))
        _fill_main(call)
        kwargs = fill_rank(call.function, call.args, call.kwargs, place.rank, place.world_size)
        pass_gate(place.gate, place.local_rank, place.local_world_size, has_store=place.rank == place.local_rank)
        report({"event": "enter"})
        made_group = process_group.join()
        joined = join_late()
        value = call.function(*call.args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the rank reports any exception of user code as its outcome
        _free_spare()
        if os.getpid() != process and not isinstance(error, SystemExit):
            sys.excepthook(*sys.exc_info())
        _leave_if_forked(process, error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
        mlflow_hook.settle(_SETTLE_FAILED_S)
        if joined or made_group:
            tell_of_joining(error, by_init=made_group)
        tell_of_torch(error, os.environ)
        code = _fail(place, error, report)
    else:
        _free_spare()
        _leave_if_forked(process, 0)
        mlflow_hook.settle()
        code = _return(place, value, report)
        del value
        if made_group and code == 0:
            process_group.leave()
    _finish()
    return code


def _free_spare() -> None:
    """Close the reserved descriptors, because user code may have exhausted the descriptor limit."""
    while _spare:
        os.close(_spare.pop())


def _leave_if_forked(process: int, code: int) -> None:
    """End a child process that user code forked. Only the child's parent reports the outcome."""
    if os.getpid() != process:
        os._exit(code)


def _return(place: RankOutput, value: object, report: protocol.Report) -> int:
    path = os.path.join(place.directory, "results", f"{place.rank}.pkl")
    try:
        size = dump(value, path, limit=place.result_bytes_max)
    except PayloadTooLarge as error:
        _fail(place, error, report, kind="result_too_large", size=error.size, limit=error.limit)
    except BaseException as error:  # noqa: BLE001 - pickling calls the user's __reduce__ and __getstate__ methods
        storage = isinstance(error, PayloadNotWritten)
        kind = "result_storage" if storage else "result_unserialisable"
        _fail(
            place,
            error,
            report,
            kind=kind,
            type=f"{type(value).__module__}.{type(value).__qualname__}",
            repr=_safe_repr(value),
        )
    else:
        report({"event": "returned", "size": size, "alone": trained_alone(place.world_size)})
        if place.release is not None:
            # The rank waits for its peers within a time limit, because peers may still communicate with the rank. All
            # ranks depend on rank 0, which hosts the store of the process group. Rank 0 therefore waits until the last
            # rank on any node has returned. A user's signal handler may raise an exception during this wait, after the
            # rank has stored the outcome.
            with contextlib.suppress(BaseException):
                select.select([place.release], [], [], _STAY_S if place.rank else None)
        return 0
    return 1


def _fail(place: RankOutput, error: BaseException, report: protocol.Report, **extra: object) -> int:
    """Store and report a failure. Return the exit code."""
    tell_of_copies(error, place.copies)
    record = describe(error)
    record.update({f"value_{key}" if key in ("type", "repr") else key: value for key, value in extra.items()})
    return _store_failure(place, record, error, report)


def _store_failure(
    place: RankOutput, record: protocol.Message, error: BaseException | None, report: protocol.Report
) -> int:
    """Store and report a failure, replacing any earlier failure. Return the exit code."""
    record = {**record, "rank": place.rank, "pickled": False}
    path = os.path.join(place.directory, "failures", str(place.rank))
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.pkl")
    # The supervisor reserves disk space for the failure files, so that a full disk does not hide the failure.
    unstored: dict[str, str] = {}
    pickled = None if error is None else pickle_exception(error)
    if pickled is not None:
        record["pickled"] = _is_stored(pickled, f"{path}.pkl", unstored)
    _is_stored(json.dumps(record).encode(), f"{path}.json", unstored)
    short = {
        key: value[-_MESSAGE_CHARACTERS_MAX:] if isinstance(value, str) else value for key, value in record.items()
    }
    report({"event": "failed", "failure": short, "unstored": unstored})
    code = record.get("exit_code")
    return code if isinstance(code, int) and 0 < code < 256 else 1


def _is_stored(data: bytes, path: str, unstored: dict[str, str]) -> bool:
    """Write data to a file, or add the data to `unstored` for the report.

    Return True if the data is in the file or in `unstored`.
    """
    try:
        write_whole(path, [memoryview(data)])
    except PayloadNotWritten:
        if len(data) > protocol.UNSTORED_BYTES_MAX:
            return False
        unstored[path.rpartition(".")[2]] = binascii.b2a_base64(data, newline=False).decode()
    return True


def _finish() -> None:
    """Run the interpreter's exit steps but leave freeing the memory to the kernel, which is faster."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined] # private CPython functions without type stubs
        try:
            step()
        except BaseException:  # noqa: BLE001 - atexit runs user code; print the error and continue, like the interpreter
            sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _rehearse() -> None:
    """Run every call's code path once, so that its page faults occur before the first call arrives."""
    loads(dumps((_rehearse, {"": b""})))
    protocol.decode(protocol.encode({"": 0}))
    os.environ.update(os.environ.copy())


def _take_output(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    # The output streams are unbuffered, as with PYTHONUNBUFFERED=1, so that a crash loses no printed output.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = open(fd, "wb", 0, closefd=False)  # noqa: SIM115 - the stream stays open until the process ends
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _offer_stacks() -> int:
    """Register two signals that write this process's Python stack to a memfd.

    Return the memfd, or -1 if the system does not support stack dumps.

    A Python handler answers while the main thread runs Python code. Only faulthandler, which is written in C, can
    answer during a blocking call such as a collective. The supervisor tries the Python handler first, because
    faulthandler may read frames while Python changes them. Reading changing frames has crashed Python 3.11 with
    SIGSEGV. Both handlers write only the main thread's stack. After a handler returns, the kernel resumes most
    interrupted system calls. Python itself restarts poll, select, nanosleep and similar calls, but not
    `signal.pause()`.
    """
    try:
        fd = os.memfd_create(protocol.STACK_FILE, os.MFD_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # The supervisor truncates the stack file after reading it.
        made = os.fstat(fd)
        faulthandler.register(protocol.STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    except (OSError, AttributeError):  # A system without memfd or faulthandler supports no stack dumps.
        return -1

    def pass_by(_number: int, frame: types.FrameType | None) -> None:
        with contextlib.suppress(OSError):
            # User code may have closed the stack descriptor and opened another file with its number.
            if os.path.samestat(os.fstat(fd), made):
                os.write(fd, _written(frame) + protocol.PASSED)

    signal.signal(protocol.PASS_SIGNAL, pass_by)
    signal.siginterrupt(protocol.PASS_SIGNAL, False)
    return fd


def _written(frame: types.FrameType | None) -> bytes:
    """Return a Python stack in faulthandler's format."""
    lines = ["Stack (most recent call first):"]
    while frame is not None and len(lines) <= _FRAMES_MAX:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    if frame is not None:
        lines.append("  ...")
    return "".join(f"{line}\n" for line in lines).encode("ascii", "backslashreplace")


@contextlib.contextmanager
def _stack_on_signal(place: RankOutput):  # type: ignore[no-untyped-def] # annotating the generator would import typing at run time
    """Write the Python stack to a file if a signal ends this rank.

    If no signal ends this rank, the function removes the file.
    """
    path = os.path.join(place.directory, "failures", f"{place.rank}.stack")
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - faulthandler keeps the descriptor until the process ends
    except OSError:
        yield
        return
    faulthandler.enable(file)
    yield
    faulthandler.disable()
    with contextlib.suppress(OSError):
        file.close()
        os.unlink(path)


def _take_context(message: protocol.Message) -> None:
    """Apply the caller's context to this process.

    Raises OSError if the working directory no longer exists.
    """
    os.environ.clear()
    os.environ.update(_environment(message))
    time.tzset()
    before = locale.setlocale(locale.LC_CTYPE)
    with contextlib.suppress(locale.Error):  # Ignore the error if the node lacks the caller's locale.
        # Python itself replaces the C and POSIX locales with UTF-8.
        if locale.setlocale(locale.LC_CTYPE, "") in ("C", "POSIX"):
            locale.setlocale(locale.LC_CTYPE, before)
    os.umask(protocol.integer(message, "umask"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = protocol.integer(message, "descriptors_max")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    sys.argv[:] = protocol.strings(message, "argv")
    sys.path[:] = protocol.strings(message, "sys_path")
    sys.path_importer_cache.clear()  # Directories may have changed since the zygote cached their contents.
    _forget(message.get("packages"))
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    _reseed()
    if message.get("ray") is None:
        _set_threads(protocol.integer(message, "threads"))
    try:
        os.chdir(protocol.text(message, "cwd"))
    except OSError:
        work = protocol.text(message, "work")
        if not work:
            raise
        os.chdir(work)  # A sandbox does not show the caller's directory.


def _forget(callers: object) -> None:
    """Unload modules of this runtime that the caller imports from another file.

    The runtime keeps references to its own modules. The agent does not use an interpreter that preloaded a module with
    the same name as a module of the caller. A preloaded module would still refer to the zygote's copy of the runtime
    module.
    """
    for name, file in callers.items() if isinstance(callers, dict) else ():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and loaded != file:
            for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
                del sys.modules[known]


def _reseed() -> None:
    """Reseed random generators that libraries seeded on import, so that ranks have different numbers.

    The standard library's `random` reseeds itself after a fork. CUDA random generators do not exist before the first
    CUDA call.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch_random = sys.modules.get("torch.random")
    if torch_random is not None:
        torch_random.default_generator.seed()


def _set_threads(count: int) -> None:
    """Divide the CPU cores among the node's ranks, unless the user has set the thread count.

    The function calls the setters of loaded libraries, which have already read their environment variables.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(count))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    blas.set_threads(count)


def _fill_main(call: RankCall) -> None:
    """Copy a `__main__` function's globals into the module that `pickle` and `multiprocessing` search."""
    function = call.function
    names = getattr(function, "__globals__", None)
    if getattr(function, "__module__", None) == "__main__" and isinstance(names, dict):
        main_module = sys.modules["__main__"].__dict__
        main_module.update({name: value for name, value in names.items() if name != "__builtins__"})


def _environment(message: protocol.Message) -> dict[str, str]:
    variables = message.get("env")
    if not isinstance(variables, dict):
        raise ValueError('field "env" of a rank message must be an object')
    return variables


def _safe_repr(value: object) -> str:
    try:
        return repr(value)[:_REPR_CHARACTERS_MAX]
    except BaseException as error:  # noqa: BLE001 - the user's __repr__ may raise any exception
        return f"<repr raised {type(error).__name__}>"
