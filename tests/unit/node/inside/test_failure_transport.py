"""Exceptions from a rank to the caller: told, pickled where that is proven, rebuilt, and never replaced by another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from serverless_gpu.client.runs import outcome
from serverless_gpu.errors import RemoteError, RunError
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.inside import failure, payload
from tests.support.golden import golden


class TwoArguments(Exception):
    """Pickles, and then cannot be loaded: its args have one entry, its constructor wants two."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class FileTrouble(OSError):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(5, why, path)
        self.why = why


class BadReduce(Exception):
    def __reduce__(self) -> str | tuple[object, ...]:
        raise RuntimeError("the __reduce__ of the user's exception")


class BadReduceAlways(BadReduce):
    def __init__(self) -> None:
        super().__init__("told")
        self.lock = threading.Lock()


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("the __str__ of the user's exception")


class Lossy(Exception):
    """Loads without complaint, as something else."""

    def __reduce__(self) -> tuple[object, ...]:
        return Exception, ("something else",)


class Endless(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        return Endless, (Endless(),)


@dataclass(frozen=True)
class Frozen(Exception):
    size: int


class Plain:
    """A value that only knows identity, with its address in its repr."""


class BadGroup(ExceptionGroup[Exception]):
    def __new__(cls, errors: list[Exception]) -> BadGroup:
        return super().__new__(cls, "several", errors)


def raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:  # noqa: BLE001 - whatever it is, is what the test asked for
        return error


def rebuilt(error: BaseException, directory: Path) -> BaseException:
    path = str(directory / "error.pkl")
    pickled = failure.pickle_exception(error)
    if pickled is not None:
        Path(path).write_bytes(pickled)
    description = json.loads(json.dumps(failure.describe(error)))
    return outcome.rebuild_exception(
        description, path if pickled is not None else None, rank=1, host="node1", run_id="r7", log_path="/logs/1"
    )


# --- described --------------------------------------------------------------------------------------------------------


def test_a_description_is_json_with_everything_in_it() -> None:
    error = raised(lambda: TwoArguments(4, "two"))
    error.add_note("a note")
    described = json.loads(json.dumps(failure.describe(error)))
    assert described == {
        "type": "TwoArguments",
        "module": __name__,
        "message": "4: two",
        "notes": ["a note"],
        "traceback": described["traceback"],
        "kind": "exception",
        "exit_code": None,
        "peer_lost": False,
        "gpu_oom": False,
    }
    assert described["traceback"].startswith("Traceback (most recent call last):\n  File ")
    assert described["traceback"].endswith("TwoArguments: 4: two\na note\n")


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (ValueError(), "exception", None),
        (SystemExit(), "system_exit", 0),
        (SystemExit(3), "system_exit", 3),
        (SystemExit(True), "system_exit", 1),
        (SystemExit("why"), "system_exit", 1),
        (KeyboardInterrupt(), "interrupt", None),
        (asyncio.CancelledError(), "cancelled", None),
        (concurrent.futures.CancelledError(), "exception", None),
        (GeneratorExit(), "base", None),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), "base", None),
    ],
)
def test_kinds_and_exit_codes(error: BaseException, kind: str, exit_code: int | None) -> None:
    described = failure.describe(error)
    assert (described["kind"], described["exit_code"]) == (kind, exit_code)


def test_causes_contexts_and_groups_are_in_the_traceback() -> None:
    def group() -> BaseException:
        try:
            try:
                raise KeyError("deepest")
            except KeyError:
                raise OSError("middle")  # noqa: B904 - the context is what is tested
        except OSError as middle:
            top = ExceptionGroup("top", [ValueError("left"), TypeError("right")])
            top.__cause__ = middle
            return top

    text = str(failure.describe(raised(group))["traceback"])
    assert all(word in text for word in ("deepest", "middle", "top", "left", "right"))
    assert text.index("deepest") < text.index("middle") < text.index("top")


def test_our_own_frames_at_the_top_are_left_out(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pkl"
    bad.write_bytes(b"")
    with pytest.raises(payload.PayloadDamaged) as caught:
        failure.load_exception(str(bad))
    told = traceback.TracebackException.from_exception(caught.value)
    del told.stack[0]  # this file: as if the rank's own loop had been the first frame
    ours = len(told.stack)
    failure.leave_out_own_frames(told)
    assert len(told.stack) == ours  # an error of ours alone keeps its frames
    told.stack.append(traceback.FrameSummary("/home/user/train.py", 3, "train"))
    failure.leave_out_own_frames(told)
    assert [frame.filename for frame in told.stack] == ["/home/user/train.py"]


def test_a_traceback_is_bounded() -> None:
    error = ValueError("x" * 3_000_000)
    for _ in range(50):
        error.add_note("y" * 10_000)
    described = failure.describe(error)
    assert len(str(described["traceback"]).encode()) <= 200_000
    assert len(str(described["message"])) <= 64_000
    assert "bytes left out" in str(described["message"])


def test_endless_recursion_and_odd_text_can_be_described() -> None:
    def left(n: int) -> int:
        return right(n + 1)

    def right(n: int) -> int:
        return left(n + 1)

    with pytest.raises(RecursionError) as caught:
        left(0)
    assert "RecursionError" in str(failure.describe(caught.value)["traceback"])
    described = failure.describe(ValueError("lone \udce9 surrogate"))
    assert json.dumps(described).encode() and "\\udce9" in str(described["message"])
    odd = ValueError("odd")
    odd.__notes__ = "not a list"  # type: ignore[assignment]  # what a user might do
    assert failure.describe(odd)["notes"] == []


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:23457: Connection reset by peer."),
            True,
        ),
        (RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.2]:4242"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.27"), True),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (ConnectionResetError(104, "whatever"), True),
        (OSError("Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection reset by peer"), False),
        (TimeoutError("waited"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_the_ranks_own(error: BaseException, is_lost: bool) -> None:
    assert failure.describe(error)["peer_lost"] is is_lost


def test_a_lost_peer_shows_through_a_wrapping_exception() -> None:
    def wrapped() -> BaseException:
        wrapper = ValueError("the trainer stopped")
        wrapper.__cause__ = ConnectionResetError("peer")
        return wrapper

    assert failure.describe(raised(wrapped))["peer_lost"] is True
    hidden = ValueError("mine")
    hidden.__context__, hidden.__suppress_context__ = ConnectionResetError("peer"), True
    assert failure.describe(hidden)["peer_lost"] is False


@pytest.mark.torch
def test_torchs_own_types_are_recognised() -> None:
    torch = importlib.import_module("torch")  # late: it takes a second, and need not be installed
    distributed = importlib.import_module("torch.distributed")
    assert failure.describe(distributed.DistNetworkError("timed out"))["peer_lost"] is True
    assert failure.describe(distributed.DistBackendError("remote process exited"))["peer_lost"] is True
    assert failure.describe(distributed.DistBackendError("unhandled cuda error"))["peer_lost"] is False
    assert failure.describe(torch.OutOfMemoryError("CUDA out of memory"))["gpu_oom"] is True
    assert failure.describe(type("Own", (torch.OutOfMemoryError,), {})("x"))["gpu_oom"] is True
    assert failure.describe(MemoryError("CUDA out of memory"))["gpu_oom"] is False


# --- rebuilt ----------------------------------------------------------------------------------------------------------


def test_F06_an_exception_comes_back_as_its_own_type_with_cause_and_note(tmp_path: Path) -> None:
    error = raised(lambda: ValueError("bad value", 7))
    error.add_note("from the user")
    back = rebuilt(error, tmp_path)
    assert type(back) is ValueError and back.args == ("bad value", 7)
    assert back.__notes__ == ["from the user", golden("node.failure_transport.rank-host-node1")]
    assert isinstance(back.__cause__, outcome.RemoteTraceback)
    shown = "".join(traceback.format_exception(back))
    assert "in raised\n" in shown and "raise make()" in shown and "direct cause" in shown


@pytest.mark.parametrize(
    "make",
    [
        lambda: TwoArguments(404, "not there"),
        lambda: FileTrouble("/data/x", "gone"),
        lambda: FileNotFoundError(2, "No such file", "/data/y"),
        lambda: BadReduce("text", 1),
        lambda: Frozen(3),
        lambda: ImportError("no", name="module", path="/m.py"),
        lambda: SyntaxError("bad", ("file.py", 3, 1, "x =", 3, 2)),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        lambda: KeyError(("a", 1)),
        lambda: ValueError(float("nan")),
    ],
    ids=lambda make: type(make()).__name__,
)
def test_F56_exceptions_that_pickle_badly_keep_their_type(make: Callable[[], BaseException], tmp_path: Path) -> None:
    error = raised(make)
    back = rebuilt(error, tmp_path)
    assert type(back) is type(error) and str(back) == str(error) and repr(back.args) == repr(error.args)
    for name in ("code", "detail", "errno", "filename", "why", "name", "path", "lineno", "reason", "size"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_F56_an_exception_whose_text_raises_keeps_its_type(tmp_path: Path) -> None:
    error = raised(lambda: BadText(1))
    assert golden("node.failure_transport.badtext-whose-text") in str(failure.describe(error)["message"])
    assert "BadText" in str(failure.describe(error)["traceback"])
    back = rebuilt(error, tmp_path)
    assert type(back) is BadText and back.args == (1,)


def test_F56_arguments_without_equality_do_not_cost_the_type(tmp_path: Path) -> None:
    back = rebuilt(raised(lambda: ValueError(Plain(), {"key": Plain()}, [1.5])), tmp_path)
    assert type(back) is ValueError and isinstance(back.args[0], Plain)


@pytest.mark.parametrize("make", [BadReduceAlways, lambda: ValueError(threading.Lock()), Endless])
def test_F56_what_cannot_be_pickled_is_told_and_never_replaced(
    make: Callable[[], BaseException], tmp_path: Path
) -> None:
    error = raised(make)
    back = rebuilt(error, tmp_path)
    if type(back) is not type(error):
        assert isinstance(back, RemoteError) and type(error).__name__ in str(back)
        assert (back.run_id, back.rank, back.reason) == ("r7", 1, Reason.RANK_RAISED)
        assert golden("node.failure_transport.rank-could-pickle") in back.hint
    assert "in raised\n" in str(back.__cause__)
    assert sorted(tmp_path.iterdir()) in ([], [tmp_path / "error.pkl"])


def test_F56_what_loads_as_something_else_is_not_sent_that_way(tmp_path: Path) -> None:
    back = rebuilt(raised(lambda: Lossy("mine")), tmp_path)
    assert type(back) is Lossy and back.args == ("mine",)


def test_F56_groups_work_at_every_level(tmp_path: Path) -> None:
    inner = BadGroup([TwoArguments(1, "one"), BadReduce("x")])
    back = rebuilt(raised(lambda: ExceptionGroup("outer", [inner, ValueError(2)])), tmp_path)
    assert isinstance(back, ExceptionGroup) and back.message == "outer"
    first, second = back.exceptions
    assert type(first) is BadGroup and [type(e) for e in first.exceptions] == [TwoArguments, BadReduce]
    assert isinstance(first.exceptions[0], TwoArguments) and first.exceptions[0].detail == "one"
    assert isinstance(second, ValueError)


def test_an_exception_over_the_size_limit_is_told_in_words(tmp_path: Path) -> None:
    back = rebuilt(raised(lambda: ValueError(np.zeros(65 << 20, dtype=np.uint8))), tmp_path)
    assert isinstance(back, RemoteError) and len(str(back)) < 100_000


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (SystemExit(0), Reason.SYSTEM_EXIT, "rank 1 called sys.exit before it returned a result: exit code 0\n"),
        (SystemExit("no data"), Reason.SYSTEM_EXIT, "exit code 1 (no data)"),
        (KeyboardInterrupt(), Reason.RANK_INTERRUPTED, "rank 1 raised KeyboardInterrupt"),
        (asyncio.CancelledError("stop"), Reason.RANK_CANCELLED, "raised a cancellation"),
    ],
)
def test_F07_what_would_end_the_caller_becomes_a_run_error(
    error: BaseException, reason: Reason, words: str, tmp_path: Path
) -> None:
    back = rebuilt(error, tmp_path)
    assert type(back) is RunError and words in str(back)
    assert (back.reason, back.rank, back.run_id) == (reason, 1, "r7")
    assert isinstance(back.__cause__, outcome.RemoteTraceback)


def test_other_base_exceptions_become_remote_errors(tmp_path: Path) -> None:
    back = rebuilt(BaseExceptionGroup("g", [SystemExit(1)]), tmp_path)
    assert isinstance(back, RemoteError) and golden("node.failure_transport.would-end-process") in back.hint


def test_an_incomplete_description_still_gives_an_error() -> None:
    back = outcome.rebuild_exception({}, None, rank=0, host="h", run_id="r", log_path="/l")
    assert isinstance(back, RemoteError) and golden("node.failure_transport.rank-raised-exception") in str(back)


@pytest.mark.parametrize(
    ("number", "path", "said"),
    [
        (errno.ENOENT, "/view/code/1/data/x.csv", "The original of this file would be /proj/data/x.csv. Use that path"),
        (errno.ENOENT, b"/view/code/1/a/../x.csv", "The original of this file would be /proj/x.csv. Use that path"),
        (errno.EROFS, "/view/code/1/out.txt", "read-only. The original of this file would be /proj/out.txt. Write to"),
        (errno.EACCES, "/view/code/1/out.txt", "read-only. The original of this file would be /proj/out.txt. Write to"),
        (errno.ENOENT, "/proj/data/x.csv", ""),
        (errno.ENOENT, "/view/code/11/x.csv", ""),
        (errno.ENOENT, 7, ""),
        (errno.EISDIR, "/view/code/1/data", ""),
    ],
)
def test_a_file_that_is_missing_in_the_captured_copy_is_explained(number: int, path: object, said: str) -> None:
    def wrapped() -> BaseException:
        try:
            raise OSError(number, os.strerror(number), path)
        except OSError as error:
            wrapping = ValueError("no data")
            wrapping.__cause__ = error
            return wrapping

    for error in (OSError(number, os.strerror(number), path), wrapped()):
        failure.tell_of_copies(error, {"/view/code/1": "/proj"})
        notes = failure.describe(error)["notes"]
        assert isinstance(notes, list) and len(notes) == bool(said)
        assert not said or (golden("node.failure_transport.captured-copy-proj") in notes[0] and said in notes[0])


def test_an_error_that_takes_no_note_is_told_without() -> None:
    class Bare(FileNotFoundError):
        @property
        def __notes__(self) -> list[str]:  # type: ignore[override]  # as a class of a user's may
            raise RuntimeError("no notes")

    error = Bare(errno.ENOENT, "gone", "/view/code/1/x")
    failure.tell_of_copies(error, {"/view/code/1": "/proj"})

    assert error.filename == "/view/code/1/x"


class Ending(BaseException):
    """No Exception: what must not get out of the user's code into ours."""


class Hostile(Exception):
    """Whatever it is asked, it ends the program that asks."""

    def __str__(self) -> str:
        raise SystemExit(3)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise Ending

    def __getattr__(self, name: str) -> object:
        raise SystemExit(4)


class HostileExit(SystemExit):
    @property
    def code(self) -> int:  # type: ignore[override]  # as a class of a user's may
        raise Ending


class HostileFile(FileNotFoundError):
    @property
    def filename(self) -> str:
        raise Ending


def test_23A7_an_exception_that_ends_whoever_looks_at_it_is_told_and_replaced_by_nothing() -> None:
    error = Hostile("x")
    failure.tell_of_copies(error, {"/copy": "/code"})
    failure.tell_of_joining(error)
    record = failure.describe(error)
    assert record["type"] == "Hostile" and golden("node.failure_transport.text-cannot-made") in str(record["message"])
    assert failure.pickle_exception(error) is not None  # made from its base, without its own methods
    assert failure.describe(HostileExit(1))["exit_code"] == 1
    failure.tell_of_copies(HostileFile(2, "gone"), {"/copy": "/code"})


class EndsReader(Exception):
    """Pickles, and ends the process that loads it."""

    def __reduce__(self) -> str | tuple[object, ...]:
        return sys.exit, (5,)


def test_23A7_a_failure_whose_loading_would_end_the_caller_becomes_a_remote_error(tmp_path: Path) -> None:
    path = tmp_path / "0.pkl"
    payload.dump(EndsReader("x"), str(path))
    record = failure.describe(EndsReader("x"))
    back = outcome.rebuild_exception(record, str(path), rank=0, host="h", run_id="r", log_path="/l")
    assert isinstance(back, RemoteError) and "SystemExit: 5" in str(back)


def test_23A7_a_ctrl_c_while_a_failure_is_loaded_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "0.pkl"
    path.write_bytes(payload.dumps(ctrl_c := Interrupting("x")))
    with pytest.raises(KeyboardInterrupt):
        outcome.rebuild_exception(failure.describe(ctrl_c), str(path), rank=0, host="h", run_id="r", log_path="/l")


class Interrupting(Exception):
    def __reduce__(self) -> str | tuple[object, ...]:
        return _interrupt, ()


def _interrupt() -> None:
    raise KeyboardInterrupt
