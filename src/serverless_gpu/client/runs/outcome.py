"""Converts the final state of a run into results or into one exception.

The client reads all results from the run directory. Only the calling process, or an attached process of the same user,
unpickles the run's files.

If user code raises an `Exception`, the caller gets an exception of the same type with the remote traceback as its
cause. A serverless-gpu error replaces any exception that would end the caller's process (`SystemExit`,
`KeyboardInterrupt`, cancellation). A serverless-gpu error also replaces any exception that the caller's process cannot
load.
"""

from __future__ import annotations

import contextlib
import json
import operator
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, SupportsIndex, TypeVar

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import (
    BudgetExhausted,
    CollectiveHang,
    CommandFailed,
    EngineHeadLost,
    InvalidOption,
    InvalidValue,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RemoteError,
    ResultNotSerializable,
    ResultTooLarge,
    ResultUnavailableHere,
    RunCancelled,
    RunError,
    RunTimedOut,
    RuntimeLost,
    UntrustedResult,
)
from serverless_gpu.model.hangs import idleness
from serverless_gpu.model.hangs.stacks import readable
from serverless_gpu.model.lifecycle import failure_advice
from serverless_gpu.model.lifecycle.attempt import MEANINGS, SUPERVISOR_GONE, Hang, Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.inside import failure, payload
from serverless_gpu.node.inside.raycluster.share import files_of
from serverless_gpu.node.processes.spawn import INSIDE
from serverless_gpu.units import format_bytes

_RAISED = frozenset(
    {Reason.RANK_RAISED, Reason.GPU_OOM, Reason.SYSTEM_EXIT, Reason.RANK_INTERRUPTED, Reason.RANK_CANCELLED}
)
_CLASSES: dict[Reason, type[RunError]] = {
    Reason.RANK_SIGNAL: RankCrashed,
    Reason.NO_RESULT: RankCrashed,
    Reason.HOST_OOM: OutOfMemory,
    Reason.RESULT_UNSERIALISABLE: ResultNotSerializable,
    Reason.RESULT_TOO_LARGE: ResultTooLarge,
    Reason.COLLECTIVE_HANG: CollectiveHang,
    Reason.CANCELLED: RunCancelled,
    Reason.SESSION_ENDED: RunCancelled,
    Reason.TIMEOUT: RunTimedOut,
    Reason.IDLE: RunTimedOut,
    Reason.BUDGET: BudgetExhausted,
    Reason.SUPERVISOR_LOST: NodeLost,
    Reason.SUPERVISOR_KILLED: NodeLost,
    Reason.NODE_LOST: NodeLost,
    Reason.RUNTIME_LOST: RuntimeLost,
    Reason.NODE_PARTITIONED: NodeLost,
    Reason.NODE_REBOOTED: NodeLost,
    Reason.NODE_GONE: NodeLost,
    Reason.PREEMPTED: RunCancelled,
    Reason.DRAINED: RunCancelled,
    Reason.COMMAND_FAILED: CommandFailed,
    Reason.ENGINE_HEAD_LOST: EngineHeadLost,
}
# Values of "kind" in the failure record of a Ray cluster.
_OF_A_CLUSTER = (Reason.ENGINE_HEAD_LOST.value, Reason.START_FAILED.value)
_CONSEQUENCES_MAX = 8
_CONSEQUENCE_CHARACTERS_MAX = 300


class Origin(NamedTuple):
    """The node that stored a run's files, and the owner of the run."""

    node: str = ""  # The server's node that ran the attempt, or "" for a local run.
    untrusted: str = ""  # Owner of the run if this process must not load the results, else "".


HERE = Origin()


def checked_rank(rank: object, count: int | None, run_id: str) -> int:
    """Return a valid rank, or raise InvalidOption or InvalidValue.

    `count` is None if the number of ranks is unknown.
    """
    if not isinstance(rank, SupportsIndex):
        raise InvalidOption(f"rank must be a number, not {rank!r}")
    number = operator.index(rank)
    if number < 0 or (count is not None and number >= count):
        has = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}" if count else "ranks from 0 on"
        raise InvalidValue(f"run {run_id} has {has}, not {number}")
    return number


def load_result(directory: Path, rank: int, run_id: str, origin: Origin = HERE) -> object:
    """Load a rank's result.

    Raise UntrustedResult or ResultUnavailableHere if this process cannot load the result.
    """
    path = directory / "results" / f"{rank}.pkl"
    if origin.untrusted:
        raise UntrustedResult(
            f"run {run_id} belongs to {origin.untrusted}; loading the result would run that user's code here",
            hint=f"if you trust this user, call serverless_gpu.attach({run_id!r}, "
            f"allow_pickle_from={origin.untrusted!r})",
            run_id=run_id,
            rank=rank,
            reason=Reason.COMPLETED.value,
        )
    try:
        return payload.load(str(path))
    except FileNotFoundError as error:
        if path.exists():  # Unpickling failed to find some file other than the result file.
            raise _not_loadable(error, path, rank, run_id) from error
        raise _files_deleted(directory, path, rank, run_id) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Loading a result executes user code, which may raise SystemExit.
        raise _not_loadable(error, path, rank, run_id) from error


def make_exception(
    stopped: Stopped,
    directory: Path,
    run_id: str,
    spec: RunSpec | None,
    origin: Origin = HERE,
    *,
    with_tail: bool = True,
) -> BaseException:
    """Return the exception for a run's final state.

    If `with_tail` is True, add the failed rank's last output to the exception.
    """
    rank, origin = _raising_rank(stopped), _failed_origin(stopped, origin)
    error: BaseException
    if rank is None:
        error = _run_error(stopped, directory, run_id, spec, origin, with_tail=with_tail)
    else:
        error = _rank_exception(rank, _detail(stopped), directory, run_id, origin)
    for text in (stopped.hint, *_consequences(stopped)):
        if text:
            add_note(error, text)
    return error


def failed_rank(stopped: Stopped) -> int | None:
    """Return the first rank that failed, or None if no rank failed."""
    if stopped.state is not State.FAILED:
        return None
    failures = (stopped.cause, *stopped.consequences)
    return next((each.rank for each in failures if each is not None and each.rank is not None), None)


def carries_tail(stopped: Stopped) -> bool:
    """Return True if the exception for a final state includes the failed rank's last output."""
    cause = stopped.cause
    return cause is not None and cause.rank is not None and _raising_rank(stopped) is None and bool(stopped.log_tail)


def untold_tails(stopped: Stopped, *, with_tail: bool = True) -> dict[int, str]:
    """Return the ranks' last output by rank.

    If `with_tail` is True, omit the rank whose output the exception includes.
    """
    told = stopped.cause.rank if with_tail and stopped.cause is not None and carries_tail(stopped) else None
    return {rank: tail for rank, tail in stopped.tails.items() if rank != told}


def ending_text(stopped: Stopped, directory: Path, run_id: str, spec: RunSpec | None, origin: Origin = HERE) -> str:
    """Return a run's final state as text, without loading or running user code."""
    rank, origin = _raising_rank(stopped), _failed_origin(stopped, origin)
    if rank is None:
        error = _run_error(stopped, directory, run_id, spec, origin)
        parts = [error.message, *getattr(error, "__notes__", [])]
    else:
        traceback = str(_record(directory, rank).get("traceback") or "").rstrip()
        parts = [f"{_rank_name(stopped, rank)}: {_detail(stopped) or MEANINGS[stopped.reason].sentence}", traceback]
    return "\n".join(part for part in (*parts, stopped.hint, *_consequences(stopped)) if part)


def _failed_origin(stopped: Stopped, origin: Origin) -> Origin:
    """Return the origin of a run's files. For a run on several nodes, the origin names the failed node."""
    node = _node(stopped)
    return origin._replace(node=node) if node else origin


def _node(stopped: Stopped) -> str:
    """For a run on several nodes, return the name of the failed node. Otherwise return ""."""
    return stopped.cause.node if stopped.cause is not None else ""


def _rank_name(stopped: Stopped, rank: int) -> str:
    """Return a rank's name for messages, including the node if the run uses several nodes."""
    node = _node(stopped)
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def _raising_rank(stopped: Stopped) -> int | None:
    """Return the rank whose exception ended the run, or None if no exception ended the run."""
    return stopped.cause.rank if stopped.cause is not None and stopped.reason in _RAISED else None


def _detail(stopped: Stopped) -> str:
    return stopped.cause.detail if stopped.cause is not None else ""


def _consequences(stopped: Stopped) -> list[str]:
    if stopped.state is not State.FAILED:
        return []
    shown = []
    for consequence in stopped.consequences[:_CONSEQUENCES_MAX]:
        who = "the attempt" if consequence.rank is None else f"rank {consequence.rank}"
        who = f"{who} on {consequence.node}" if consequence.node else who
        text = f"{who}: {consequence.detail or MEANINGS[consequence.reason].sentence}"
        shown.append(f"consequence: {text[:_CONSEQUENCE_CHARACTERS_MAX]}")
    more = len(stopped.consequences) - _CONSEQUENCES_MAX
    return shown + ([f"consequence: {more} more ranks failed"] if more > 0 else [])


def _not_loadable(error: BaseException, path: Path, rank: int, run_id: str) -> ResultUnavailableHere:
    return ResultUnavailableHere(
        f"rank {rank} returned a value that this process cannot load: {type(error).__name__}: {error_text(error)}",
        hint=f"import the modules of the value and call results() again; the pickled bytes are in {path}",
        run_id=run_id,
        rank=rank,
        reason=Reason.COMPLETED.value,
    )


def _files_deleted(directory: Path, path: Path, rank: int, run_id: str) -> ResultUnavailableHere:
    cleaned = not directory.exists()
    message = f"the files of run {run_id} were deleted" if cleaned else f"the file {path} is missing"
    return ResultUnavailableHere(
        f"rank {rank} returned a value, but {message}",
        hint="fetch results before `[retention]` in config.toml or `sgpu clean` deletes them",
        run_id=run_id,
        rank=rank,
        reason=Reason.COMPLETED.value,
    )


def _rank_exception(rank: int, detail: str, directory: Path, run_id: str, origin: Origin) -> BaseException:
    record = _record(directory, rank)
    if not record:  # On a full disk, only the short description of the failure exists.
        record = {"kind": "exception", "type": detail, "message": "", "traceback": ""}
    if origin.untrusted:
        record["untrusted"] = origin.untrusted
    pickled, logs = directory / "failures" / f"{rank}.pkl", directory / "logs"
    # If the rank wrote to stderr, the last output is stderr output.
    log = next((path for path in (logs / f"{rank}.stderr", logs / f"{rank}.stdout") if path.exists()), logs)
    return rebuild_exception(
        record,
        str(pickled) if record.get("pickled") else None,
        rank=rank,
        host=origin.node or socket.gethostname(),
        run_id=run_id,
        log_path=f"`sgpu logs {run_id} --rank {rank}`" if origin.node else str(log),
    )


def _run_error(
    stopped: Stopped,
    directory: Path,
    run_id: str,
    spec: RunSpec | None,
    origin: Origin,
    *,
    with_tail: bool = True,
) -> RunError:
    cause = stopped.cause
    rank = cause.rank if cause is not None and stopped.state is State.FAILED else None
    logs = directory / "logs"
    error = _CLASSES.get(stopped.reason, RunError)(
        _message(stopped, rank, directory, spec),
        hint=failure_advice.advice(stopped.reason, run_id, node=origin.node, rank=rank)
        if origin.node
        else _hint(stopped.reason, directory, f"{failure_advice.logs_text(run_id, rank)} (files: {logs})"),
        run_id=run_id,
        rank=rank,
        reason=stopped.reason.value,
        log_tail=stopped.log_tail,
    )
    if isinstance(error, CommandFailed) and cause is not None:
        error.exit_code = cause.exit_code or error.exit_code
    if isinstance(error, CollectiveHang) and stopped.hang is not None:
        _explain_hang(error, stopped.hang, directory)
    if isinstance(error, (EngineHeadLost, OutOfMemory)) and rank is not None:
        _explain_loss(error, _record(directory, rank))
    if rank is not None:
        stack = readable(_read(directory / "failures" / f"{rank}.stack"), f"{INSIDE}/")
        if stack:
            error.add_note(f"Python stack of rank {rank} when it was ended:\n{stack}")
        if stopped.log_tail and with_tail:
            # Control characters in notes would reach the terminal, because Python prints exception notes unchanged.
            lines = "\n".join(safe(line, tty=True) for line in stopped.log_tail.split("\n"))
            error.add_note(f"last output of rank {rank}:\n{lines}")
    return error


def _explain_hang(error: CollectiveHang, hang: Hang, directory: Path) -> None:
    error.ranks_waiting, error.ranks_elsewhere = list(hang.waiting), list(hang.elsewhere)
    error.hint = f"Python stacks of all ranks: {directory / hang.file}"
    for rank, stack in hang.stacks.items():
        does = "waits here" if rank in hang.waiting else "is here"
        error.add_note(f"rank {rank} {does} (most recent call first):\n{stack}")


def _explain_loss(error: RunError, record: dict[str, object]) -> None:
    """Add notes about a Ray cluster's lost component and about the exception in user code."""
    notes = record.get("notes")
    lost = [] if isinstance(error, EngineHeadLost) else [record.get("message")]
    for text in (*lost, *(notes if isinstance(notes, list) else []), record.get("traceback")):
        if text:
            error.add_note("\n".join(safe(line, tty=True) for line in str(text).rstrip().split("\n")))


def _hint(reason: Reason, directory: Path, logs: str) -> str:
    if reason in (Reason.START_FAILED, Reason.RUNTIME_LOST, *SUPERVISOR_GONE):
        killed = f"{failure_advice.KILLED}; " if reason is Reason.RUNTIME_LOST else ""
        files = (
            f"the run's files: {directory}; log of the agent and its processes: {directory.parents[2] / 'agent.log'}"
        )
        return f"{killed}{files}"
    if reason is Reason.NODE_DISK:
        return "free some disk space (`sgpu env gc` helps), or set SERVERLESS_GPU_HOME to a directory on another disk"
    if reason is Reason.ENV_CORRUPT:
        return (
            "call the function again, so that the client captures the missing part of the environment, and check the "
            "disk if the error returns"
        )
    if reason is Reason.ENV_UNAVAILABLE:
        return f"log of the agent and its processes: {directory.parents[2] / 'agent.log'}"
    if reason is Reason.IDLE:
        return f"{failure_advice.KEEPS}; {logs}"
    if reason is Reason.NO_PROGRESS:
        return f"{failure_advice.SAVES}; {logs}"
    if reason is Reason.RESULT_STORAGE:
        return "free some space, or set SERVERLESS_GPU_HOME to a directory on another disk"
    if reason is Reason.ENGINE_HEAD_LOST:
        return f"Ray's logs: {files_of(str(directory))}; {logs}"
    return logs


def _limit(reason: Reason, spec: RunSpec) -> str:
    """Return text about the limit that a run exceeded and the source of the limit, or ""."""
    by = spec.limited_by
    idle_s = idleness.limit_s(spec)
    if reason is Reason.IDLE and idle_s:
        whose = f"; {by} may have set this limit" if spec.policy else ""
        return f": no device was busy and no rank printed output for {idle_s:g} s{whose}"
    if reason is not Reason.TIMEOUT or not spec.limit_s:
        return ""
    if spec.is_capped:
        return (
            f" of {spec.limit_s:g} s: {by} sets this maximum for an attempt; with resume=True the run continues "
            "as another attempt"
        )
    return f" of {spec.limit_s:g} s (ranks get SIGTERM one grace period earlier)"


def _message(stopped: Stopped, rank: int | None, directory: Path, spec: RunSpec | None) -> str:
    detail = _detail(stopped)
    meaning = MEANINGS[stopped.reason].sentence
    limit = "" if spec is None else _limit(stopped.reason, spec)
    node = _node(stopped)
    if limit:
        return f"{meaning}{limit}"
    if stopped.state not in (State.FAILED, State.LOST):
        # The server's message explains the stop request, unlike later messages from ranks.
        is_why = stopped.cause is not None and stopped.cause.rank is None and detail.startswith(meaning)
        return detail if is_why else meaning
    if stopped.reason is Reason.COLLECTIVE_HANG and detail:
        return detail
    if rank is None and stopped.reason is Reason.HOST_OOM:
        ranks = f"the ranks on {node}" if node else "the ranks"
        return f"{ranks} were {detail}" if "memory" in detail else f"{ranks} were ended because host memory ran out"
    if stopped.reason is Reason.ENGINE_HEAD_LOST and detail:
        return detail
    if rank is None:
        is_whole = detail.startswith(meaning)  # The server's text already contains the explanation.
        what = detail if is_whole else f"{meaning}: {detail}" if detail and detail not in meaning else meaning
        return f"node {node}: {what}" if node else what
    who = _rank_name(stopped, rank)
    match stopped.reason:
        case Reason.RESULT_UNSERIALISABLE | Reason.RESULT_TOO_LARGE | Reason.RESULT_STORAGE:
            return _result_message(stopped.reason, who, detail, _record(directory, rank))
        case Reason.NO_RESULT:
            return f"{who} {detail} before it returned a result"
        case Reason.COMMAND_FAILED:
            return f"{who}: the command {detail}"
        case Reason.START_FAILED if detail:
            return f"{who}: {detail}" if node else detail
        case Reason.HOST_OOM if _record(directory, rank).get("kind") in _OF_A_CLUSTER:
            return f"a process of the run's Ray cluster{f' on {node}' if node else ''} was {detail}"
        case Reason.HOST_OOM if "memory" not in detail:
            return f"{who} was ended because host memory ran out ({detail})"
        case _:
            return f"{who} was {detail}" if detail else f"{who}: {meaning}"


def _result_message(reason: Reason, who: str, detail: str, record: dict[str, object]) -> str:
    """Return the message for a lost result. If the disk was full, the cause may be unknown."""
    finished = f"{who} finished, but its result"
    if reason is Reason.RESULT_STORAGE:
        return f"{finished} could not be written: {detail}"
    if reason is Reason.RESULT_TOO_LARGE:
        size, limit = record.get("size"), record.get("limit")
        of, over = (f" of {format_bytes(count)}" if isinstance(count, int) else "" for count in (size, limit))
        return f"{finished}{of} is over the limit{over}; write it to a file in the function and return the path"
    if "value_type" not in record:
        return f"{finished} cannot be pickled: {detail}"
    why = f"({record.get('type')}: {record.get('message')})"
    return f"{finished} of type {record['value_type']} cannot be pickled {why}: {record.get('value_repr')}"


def _record(directory: Path, rank: int) -> dict[str, object]:
    try:
        record = json.loads((directory / "failures" / f"{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


E = TypeVar("E", bound=BaseException)
_PACKAGE = str(Path(__file__).resolve().parents[2])
_CHAIN_MAX = 20
_DEBUGGER_LEFT = ("bdb", "BdbQuit")
_CONTROL_REASONS = {
    "system_exit": Reason.SYSTEM_EXIT,
    "interrupt": Reason.RANK_INTERRUPTED,
    "cancelled": Reason.RANK_CANCELLED,
}


class RemoteTraceback(Exception):
    """A traceback from a rank process, used as the `__cause__` of the caller's exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text.rstrip("\n")


def without_own_frames(error: BaseException) -> BaseException:
    """Remove serverless-gpu's frames from the tracebacks of an error and its causes. Return the error."""
    link: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if link is None:
            break
        frames = link.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            frames = frames.tb_next
        link.__traceback__ = frames
        link = link.__cause__
    return error


class NotebookTraceback:
    """Renders an exception for IPython with the caller's frames and the remote traceback.

    The rendered traceback omits serverless-gpu's frames. `__tracebackhide__` does not suffice, because IPython always
    shows a traceback's last frame.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        # In a process that unpickles the exception, IPython uses its default renderer.
        return (NotebookTraceback, ())

    def __call__(self) -> list[str]:
        """Return the traceback lines for IPython.

        If this method raises an exception, IPython uses its default renderer.
        """
        error = self._error
        assert error is not None
        shell = sys.modules["IPython"].get_ipython()
        frames = _caller_frames(error.__traceback__)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, frames, tb_offset=1)
        return lines


def in_notebooks(error: E) -> E:
    """Attach `NotebookTraceback` to an exception that IPython shows, and return the exception.

    IPython shows all frames of serverless-gpu's internal errors, which bypass `in_notebooks`.
    """
    if "IPython" in sys.modules and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(Exception):  # The user's exception class may refuse new attributes.
            object.__setattr__(error, "_render_traceback_", NotebookTraceback(error))
    return error


def _caller_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without serverless-gpu's frames."""
    links: list[TracebackType] = []
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            links.append(frames)
        frames = frames.tb_next
    kept: TracebackType | None = None
    for link in reversed(links):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def rebuild_exception(
    description: Mapping[str, object],
    pickled_path: str | None,
    *,
    rank: int,
    host: str,
    run_id: str,
    log_path: str,
) -> BaseException:
    """Return the exception for a rank's failure: the exception that user code raised, or a `RunError`.

    The remote traceback becomes the exception's `__cause__`. A note names the rank and the host. `description` is a
    result of `inside.failure.describe`. `pickled_path` is None if the rank could not pickle the exception.
    """
    kind = description.get("kind", "exception")
    error: BaseException
    if isinstance(kind, str) and kind in _CONTROL_REASONS:
        error = _control_error(kind, description, rank, run_id)
    else:
        error = _load(description, pickled_path, rank, run_id)
    text = _printable(str(description.get("traceback") or ""))
    # `object.__setattr__` works even if the exception class refuses assignment, like a frozen dataclass.
    object.__setattr__(error, "__cause__", RemoteTraceback(text))
    add_note(error, _printable(f"rank {rank} on host {host}, run {run_id}; log: {log_path}"))
    if (description.get("module"), description.get("type")) == _DEBUGGER_LEFT:
        add_note(error, _debugging_hint(Path(log_path).parent.parent / "_air.py"))
    return error


def _debugging_hint(program: Path) -> str:
    """Return a hint that names a local program for debugging the failed function."""
    by_hand = (
        f"run `python {program}`, which repeats rank 0 in this terminal and stops at the breakpoint"
        if program.is_absolute() and program.exists()  # A run on another machine has no local program path.
        else "call the function directly in a terminal"
    )
    return (
        f"a rank has no terminal, so breakpoint() and pdb end at once; {by_hand}, or attach an editor to a rank "
        "with debugpy (docs/how-to/debugging.md)"
    )


def _load(description: Mapping[str, object], path: str | None, rank: int, run_id: str) -> BaseException:
    if description.get("untrusted"):
        why = (
            f"the run belongs to {description['untrusted']}, and loading the exception would run that user's code here"
        )
        return _remote_error(description, rank, run_id, why)
    if path is None or description.get("kind") == "base":
        is_base = description.get("kind") == "base"
        why = (
            "the exception is not a subclass of Exception and would end this process"
            if is_base
            else "the rank could not pickle the exception"
        )
        return _remote_error(description, rank, run_id, why)
    try:
        return failure.load_exception(path)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001 - errors of user code must not hide the rank's exception
        return _remote_error(description, rank, run_id, f"{type(problem).__name__}: {error_text(problem)}")


def _remote_error(description: Mapping[str, object], rank: int, run_id: str, why: str) -> RemoteError:
    reason = Reason.GPU_OOM if description.get("gpu_oom") else Reason.RANK_RAISED
    error = RemoteError(
        f"rank {rank} raised {_name(description)}",
        hint=f"this process cannot rebuild the exception ({why}); its traceback is above",
        run_id=run_id,
        rank=rank,
        reason=str(reason),
    )
    notes = description.get("notes")
    for note in notes if isinstance(notes, list) else []:
        error.add_note(_printable(str(note)))
    return error


def _control_error(kind: str, description: Mapping[str, object], rank: int, run_id: str) -> RunError:
    reason = str(_CONTROL_REASONS[kind])
    if kind == "system_exit":
        code, message = description.get("exit_code"), _printable(str(description.get("message") or ""))
        told = f" ({message})" if message not in ("", str(code)) else ""
        return RunError(
            f"rank {rank} called sys.exit before it returned a result: exit code {code}{told}",
            hint="return from the function instead; a rank that exits has no result, even with exit code 0",
            run_id=run_id,
            rank=rank,
            reason=reason,
        )
    if kind == "interrupt":
        return RunError(f"rank {rank} raised KeyboardInterrupt", run_id=run_id, rank=rank, reason=reason)
    message = f"user code in rank {rank} raised a cancellation: {_name(description)}"
    return RunError(message, run_id=run_id, rank=rank, reason=reason)


def _printable(text: str) -> str:
    """Replace control characters in a rank's text, which a terminal may print."""
    return "\n".join(safe(line, tty=True) for line in text.split("\n"))


def _name(description: Mapping[str, object]) -> str:
    module, name = str(description.get("module") or ""), str(description.get("type") or "an exception")
    full = name if module in ("", "builtins", "__main__") else f"{module}.{name}"
    message = str(description.get("message") or "")
    return _printable(f"{full}: {message}" if message else full)


def error_text(error: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` raises."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's __str__ may raise any exception, even SystemExit
        return "its __str__() failed"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, even if its class refuses assignment.

    Skip exceptions that do not support notes.
    """
    with contextlib.suppress(Exception, SystemExit, GeneratorExit):
        notes = vars(error).get("__notes__")
        object.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else []), note])
