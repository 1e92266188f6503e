"""A rank's failure as the caller sees it: an exception to raise.

An `Exception` of user code is raised as its own type with the remote traceback as its cause. What would end the
caller's own process (`SystemExit`, `KeyboardInterrupt`, cancellation), and a class that cannot be loaded here, becomes
an error of ours.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from serverless_gpu.client.display.terminal_screen import safe
from serverless_gpu.errors import RemoteError, RunError
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.inside import failure

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
    """The traceback of another process, as the cause of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text.rstrip("\n")


def without_own_frames(error: BaseException) -> BaseException:
    """Return the error without frames of this package in its traceback and in its causes'."""
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
    """Renders an error for IPython: the caller's frames and the remote traceback, none of ours.

    IPython leaves out frames with `__tracebackhide__`, but always shows the last one, which raised.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        return (NotebookTraceback, ())  # the error can be pickled; elsewhere it is shown as any other

    def __call__(self) -> list[str]:
        """Return the lines; called by IPython, which falls back to its own where this raises."""
        error = self._error
        assert error is not None
        shell = sys.modules["IPython"].get_ipython()
        frames = _caller_frames(error.__traceback__)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, frames, tb_offset=1)
        return lines


def in_notebooks(error: E) -> E:
    """Return a user's error for a public method to raise: IPython shows it without our frames.

    Internal errors (bugs of ours) do not pass here and keep all frames.
    """
    if "IPython" in sys.modules and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(Exception):  # an exception class of the user's may refuse attributes
            object.__setattr__(error, "_render_traceback_", NotebookTraceback(error))
    return error


def _caller_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package."""
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
    """Return the exception for a rank's failure: the user's own, or a `RunError`.

    The remote traceback is its `__cause__`, and a note names the place. `description` is that of
    `inside.failure.describe`; `pickled_path` is None where the exception did not pickle.
    """
    kind = description.get("kind", "exception")
    error: BaseException
    if isinstance(kind, str) and kind in _CONTROL_REASONS:
        error = _control_error(kind, description, rank, run_id)
    else:
        error = _load(description, pickled_path, rank, run_id)
    text = _printable(str(description.get("traceback") or ""))
    # By way of object: an exception class may refuse assignment, as frozen dataclasses do.
    object.__setattr__(error, "__cause__", RemoteTraceback(text))
    add_note(error, _printable(f"rank {rank} on host {host}, run {run_id}; log: {log_path}"))
    if (description.get("module"), description.get("type")) == _DEBUGGER_LEFT:
        add_note(error, _debugging_hint(Path(log_path).parent.parent / "_air.py"))
    return error


def _debugging_hint(program: Path) -> str:
    """Return how to debug a function, from the local program that repeats the run."""
    by_hand = (
        f"`python {program}` repeats rank 0 in this terminal, and stops there"
        if program.is_absolute() and program.exists()  # of a run elsewhere there is no path
        else "call the function itself in a terminal"
    )
    return (
        "a rank has no terminal, so breakpoint() and pdb end at once; what works: "
        f"{by_hand}; or attach an editor to a rank with debugpy (docs/how-to/debugging.md)"
    )


def _load(description: Mapping[str, object], path: str | None, rank: int, run_id: str) -> BaseException:
    if description.get("untrusted"):
        why = f"the run is {description['untrusted']}'s, and loading it would run their code here"
        return _remote_error(description, rank, run_id, why)
    if path is None or description.get("kind") == "base":
        is_base = description.get("kind") == "base"
        why = "not being an Exception, it would end this process" if is_base else "the rank could not pickle it"
        return _remote_error(description, rank, run_id, why)
    try:
        return failure.load_exception(path)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001 - loading runs user code, which must not hide what the rank raised
        return _remote_error(description, rank, run_id, f"{type(problem).__name__}: {error_text(problem)}")


def _remote_error(description: Mapping[str, object], rank: int, run_id: str, why: str) -> RemoteError:
    reason = Reason.GPU_OOM if description.get("gpu_oom") else Reason.RANK_RAISED
    error = RemoteError(
        f"rank {rank} raised {_name(description)}",
        hint=f"the exception itself cannot be rebuilt here ({why}); its traceback is above",
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
            hint="return from the function instead; a rank that exits has no result, whatever its code",
            run_id=run_id,
            rank=rank,
            reason=reason,
        )
    if kind == "interrupt":
        return RunError(f"rank {rank} raised KeyboardInterrupt", run_id=run_id, rank=rank, reason=reason)
    message = f"rank {rank} was cancelled from inside: {_name(description)}"
    return RunError(message, run_id=run_id, rank=rank, reason=reason)


def _printable(text: str) -> str:
    """Return a rank's text made safe for printing: tracebacks end up on terminals."""
    return "\n".join(safe(line, tty=True) for line in text.split("\n"))


def _name(description: Mapping[str, object]) -> str:
    module, name = str(description.get("module") or ""), str(description.get("type") or "an exception")
    full = name if module in ("", "builtins", "__main__") else f"{module}.{name}"
    message = str(description.get("message") or "")
    return _printable(f"{full}: {message}" if message else full)


def error_text(error: BaseException) -> str:
    """Return the text of an error, even if its `__str__` fails."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's __str__ may raise anything, SystemExit among it
        return "its text cannot be made"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, even if its class refuses assignment; skip one that takes none."""
    with contextlib.suppress(Exception, SystemExit, GeneratorExit):
        notes = vars(error).get("__notes__")
        object.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else []), note])
