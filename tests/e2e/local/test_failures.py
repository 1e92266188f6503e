"""How a run ends that does not succeed: the truth, as one exception, at once.

Rows F01, F02, F06, F07, F13, F52 and F54 to F59 of the failure matrix.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.errors import (
    NotPicklable,
    OutOfMemory,
    RankCrashed,
    RemoteError,
    ResultNotSerializable,
    ResultTooLarge,
    ResultUnavailableHere,
    RunError,
)
from serverless_gpu.node.inside.payload import PayloadMismatch
from tests.support.golden import golden
from tests.support.local.observe import announced, run_directories, run_script
from tests.support.local.ranks import announce, rank_number, stay, wait_for_file

MIB = 1 << 20


class Wrong(Exception):
    """An exception of the user's own whose constructor wants two arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Stubborn(Exception):
    """Cannot be pickled, and cannot be made anew from its arguments."""

    def __init__(self) -> None:
        super().__init__("what went wrong")
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("never")


# --- F01: signals -----------------------------------------------------------------------------------------------------


def own_signal() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def null_read() -> None:
    ctypes.string_at(0)


@pytest.mark.parametrize("crash", [own_signal, null_read])
def test_F01_a_segfault_names_rank_and_signal_with_the_stack(warm: Path, where: str, crash: Callable[[], None]) -> None:
    def train(where: str, rank: int = -1) -> None:
        if rank == 1:
            print("last words", file=sys.stderr)
            crash()
        stay(where)

    run = distributed(gpus=2, quiet=True)(train).submit(where)
    with pytest.raises(RankCrashed, match=re.escape(golden("local.failures.rank-ended-sigsegv"))) as caught:
        run.results(timeout=50)
    error = caught.value
    assert (error.rank, error.reason, error.run_id) == (1, "rank_signal", run.id)
    assert "last words" in error.log_tail
    notes = "\n".join(error.__notes__)
    assert f'{Path(__file__).name}", line' in notes and crash.__name__ in notes, notes
    receipt = run.receipt(timeout=50)
    assert receipt.state == "FAILED" and receipt.reason == "rank_signal"
    assert not list(Path(run.directory).rglob("core*"))


def test_F01_exit_code_139_is_not_a_signal(warm: Path) -> None:
    run = distributed(gpus=2, quiet=True)(os._exit).submit(139)
    with pytest.raises(RankCrashed, match="exited with code 139") as caught:
        run.results(timeout=50)
    assert caught.value.reason == "no_result" and "SIG" not in str(caught.value)


# --- F02: memory ------------------------------------------------------------------------------------------------------


def test_F02_a_rank_over_its_memory_limit_is_out_of_memory(own: Path) -> None:
    def grow(rank: int = -1) -> int:
        if rank == 1:
            held = [bytearray(16 * MIB) for _ in range(128)]
            return len(held)
        threading.Event().wait(60)
        return 0

    @distributed(gpus=2, quiet=True)
    def small() -> None:
        pass

    small.distributed()  # from now on ranks stand by before they are told their limit
    for _ in range(2):
        run = distributed(gpus=2, quiet=True, memory="600MiB")(grow).submit()
        try:
            run.results(timeout=60)
        except OutOfMemory as error:
            assert error.reason == "host_oom"
        else:
            notes = run.receipt(timeout=50).notes
            if any("not enforced" in note for note in notes):
                pytest.skip(f"no memory controller can be written to here: {notes}")
            raise AssertionError("2 GiB fit into 600 MiB")
        assert run.receipt(timeout=50).reason == "host_oom"


def test_F02_exit_code_137_and_a_sigkill_are_not_out_of_memory(warm: Path) -> None:
    for end in (lambda: os._exit(137), lambda: os.kill(os.getpid(), signal.SIGKILL)):
        with pytest.raises(RankCrashed) as caught:
            distributed(gpus=1, quiet=True)(end).distributed()
        assert "memory" not in str(caught.value)


# --- F06: exceptions --------------------------------------------------------------------------------------------------


def test_F06_an_exception_arrives_as_its_own_type_with_the_remote_lines(warm: Path) -> None:
    def train(rank: int = -1) -> None:
        if rank == 1:
            deeper(rank)
        threading.Event().wait(60)

    def deeper(rank: int) -> None:
        error = Wrong(7, f"rank {rank}")
        error.add_note("a note of the user's")
        raise error

    run = distributed(gpus=2, quiet=True)(train).submit()
    with pytest.raises(Wrong, match="7: rank 1") as caught:
        run.results(timeout=50)
    error = caught.value
    assert (error.code, error.text) == (7, "rank 1")
    assert error.__notes__[0] == golden("local.failures.note-user")
    assert any(
        "rank 1 on host" in note and run.id in note and str(run.directory / "logs") in note for note in error.__notes__
    )
    shown = "".join(traceback.format_exception(error))
    assert "raise error" in shown and "deeper(rank)" in shown and "in train" in shown
    assert run.receipt(timeout=50).reason == "rank_raised"


def test_F06_an_exception_group_arrives_as_one(warm: Path) -> None:
    @distributed(gpus=1, quiet=True)
    def train() -> None:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise ExceptionGroup("several", [Wrong(1, "a"), ValueError("b")]) from cause

    with pytest.raises(ExceptionGroup) as caught:
        train.distributed()
    first, second = caught.value.exceptions
    assert isinstance(first, Wrong) and first.code == 1 and isinstance(second, ValueError)
    assert "KeyError: 'cause'" in "".join(traceback.format_exception(caught.value))


def test_F06_the_first_failure_wins_and_peers_are_stopped(warm: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> None:
        signal.signal(signal.SIGTERM, complain)
        if rank == 0:
            for peer in ("ready1", "ready2"):
                wait_for_file(where, peer)
            raise Wrong(0, "the cause")
        announce(where, f"ready{rank}")
        threading.Event().wait(60)

    def complain(*_: object) -> None:
        raise RuntimeError(f"consequence in {rank_number()}")

    run = distributed(gpus=3, quiet=True)(train).submit(where)
    with pytest.raises(Wrong, match="the cause") as caught:
        run.results(timeout=50)
    notes = [note for note in caught.value.__notes__ if note.startswith("consequence")]
    assert sorted(note.partition("RuntimeError: ")[2] for note in notes) == ["consequence in 1", "consequence in 2"]


def test_F06_a_failing_rank_does_not_wait_for_ranks_that_work(warm: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> None:
        if rank == 1:
            raise Wrong(1, "early")
        stay(where)

    run = distributed(gpus=2, quiet=True)(train).submit(where)
    with pytest.raises(Wrong):
        run.results(timeout=50)
    run.receipt(timeout=50)
    if Path(where, "rank0").exists():
        assert not announced(Path(where), "rank0")[0].alive()


# --- F07: ends without a result -------------------------------------------------------------------------------------


def test_F07_sys_exit_0_is_not_a_result(warm: Path) -> None:
    @distributed(gpus=2, quiet=True)
    def train(rank: int = -1) -> None:
        if rank == 1:
            sys.exit(0)

    with pytest.raises(RunError, match=golden("local.failures.rank-called-sys")) as caught:
        train.distributed()
    assert caught.value.reason == "system_exit"


def test_F07_an_exit_without_a_word_is_not_a_result(warm: Path) -> None:
    @distributed(gpus=2, quiet=True)
    def train(rank: int = -1) -> None:
        if rank == 1:
            os._exit(0)

    with pytest.raises(RankCrashed, match=re.escape(golden("local.failures.rank-exited-code"))) as caught:
        train.distributed()
    assert caught.value.reason == "no_result"


def test_F07_a_rank_that_raises_keyboard_interrupt_does_not_interrupt_the_caller(warm: Path) -> None:
    @distributed(gpus=1, quiet=True)
    def train() -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunError, match="rank 0 raised KeyboardInterrupt"):
        train.distributed()


# --- F13: the rendezvous port -----------------------------------------------------------------------------------------


PORTS = """
import socket
from serverless_gpu.node.base.network import NoPort, reserve_port

taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
port = taken.getsockname()[1]
with reserve_port([port, 0]) as reserved:
    other = reserved.getsockname()[1]
    assert other not in (port, 0)
    with socket.socket() as thief:
        try:
            thief.bind(("127.0.0.1", other))
        except OSError:
            print("refused to others")
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", other))
        store.listen()
        print("torch can listen")
try:
    reserve_port([port] * 5)
except NoPort as error:
    print(str(error).count(str(port)), "tried")
"""


def test_F13_a_taken_port_is_passed_over_and_five_taken_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ports.py"
    path.write_text(PORTS)  # its own process: this one may not bind a wildcard address
    done = run_script(path)
    assert done.stdout == golden("local.failures.refused-others-torch"), done.stderr


# --- F52, F55, F57: results -----------------------------------------------------------------------------------------


def test_F52_a_result_over_the_limit_is_refused_before_it_is_written(own: Path) -> None:
    @distributed(gpus=1, quiet=True)
    def huge() -> object:
        import numpy  # noqa: PLC0415 - in the rank

        return numpy.empty(17 << 30, dtype=numpy.uint8)  # never touched: takes no memory until somebody reads it

    run = huge.submit()
    with pytest.raises(ResultTooLarge, match=r"rank 0 finished.*limit") as caught:
        run.results(timeout=60)
    assert caught.value.reason == "result_too_large"
    assert not [path for path in (run.directory / "results").iterdir() if path.stat().st_size > MIB]


def test_F55_a_result_that_cannot_be_pickled(warm: Path) -> None:
    def lock() -> object:
        return {"model": [threading.Lock()]}

    def deep() -> object:
        nested: list[object] = []
        for _ in range(200_000):
            nested = [nested]
        return nested

    for function, words in ((lock, "_thread.lock"), (deep, "RecursionError")):
        with pytest.raises(
            ResultNotSerializable, match=re.escape(golden("local.failures.rank-finished-but"))
        ) as caught:
            distributed(gpus=1, quiet=True)(function).distributed()
        assert words in str(caught.value), str(caught.value)
        assert caught.value.reason == "result_unserialisable"


def test_F57_a_result_this_process_cannot_load(warm: Path, tmp_path: Path) -> None:
    (tmp_path / "only_in_ranks.py").write_text("class Thing:\n    pass\n")

    @distributed(gpus=1, quiet=True)
    def train(path: str) -> object:
        sys.path.insert(0, path)
        return importlib.import_module("only_in_ranks").Thing()

    run = train.submit(str(tmp_path))
    with pytest.raises(ResultUnavailableHere, match="only_in_ranks") as caught:
        run.results(timeout=50)
    assert str(run.directory) in caught.value.hint
    sys.path.insert(0, str(tmp_path))
    try:
        assert type(run.result()).__name__ == "Thing", "once it can be imported, the result is still there"
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["only_in_ranks"]


# --- F56, F54, F58, F59: what travels -------------------------------------------------------------------------------


def test_F56_an_exception_that_cannot_be_pickled_is_told_in_words(warm: Path) -> None:
    @distributed(gpus=1, quiet=True)
    def train() -> None:
        error = Stubborn()
        error.add_note("note")
        raise error

    with pytest.raises(RemoteError, match=re.escape(golden("local.failures.stubborn-went-wrong"))) as caught:
        train.distributed()
    assert "note" in caught.value.__notes__
    assert "raise error" in str(caught.value.__cause__) and "never" not in str(caught.value)


def test_F54_what_cannot_travel_is_named_and_nothing_is_started(own: Path, tmp_path: Path) -> None:
    lock = threading.Lock()
    with (tmp_path / "log").open("w") as log:

        def with_lock() -> None:
            lock.acquire()

        def with_file() -> None:
            log.write("")

        for function, name, kind in ((with_lock, "lock", "_thread.lock"), (with_file, "log", "open file")):
            with pytest.raises(NotPicklable) as caught:
                distributed(gpus=1, quiet=True)(function).distributed()
            assert f"closure variable `{name}`" in str(caught.value) and kind in str(caught.value)
        with pytest.raises(NotPicklable, match="generator"):
            distributed(gpus=1, quiet=True)(any).distributed(number > 1 for number in range(3))
    assert run_directories(own) == []


def test_F58_a_call_made_by_another_python_is_refused_in_words(own: Path) -> None:
    run = distributed(gpus=1, quiet=True)(rank_number).submit()
    run.wait(50)
    path = run.directory / "results" / "0.pkl"
    here = f"[{sys.version_info[0]}, {sys.version_info[1]}]".replace(" ", "")
    data = path.read_bytes()
    changed = data.replace(b"[3, 11]", b"[3, 99]").replace(here.encode(), b"[3,99]")
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(ResultUnavailableHere, match=r"3\.99") as caught:
        run.results()
    assert isinstance(caught.value.__cause__, PayloadMismatch)


def test_F59_a_large_captured_object_is_named_with_its_size(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = list(range(3_000_000))
    assert distributed(gpus=1)(lambda: len(table)).distributed() == [3_000_000]
    told = capsys.readouterr().err
    assert "`table`" in told and "MB" in told and "inside the function" in told


def test_F59_a_mutated_argument_stays_as_it_was_in_the_caller(warm: Path) -> None:
    @distributed(gpus=2, quiet=True)
    def change(settings: dict[str, int]) -> dict[str, int]:
        settings["lr"] += 1
        return settings

    settings = {"lr": 1}
    assert change.distributed(settings) == [{"lr": 2}] * 2
    assert settings == {"lr": 1}


class Hostile(Exception):
    """Ends the program that looks at it."""

    def __str__(self) -> str:
        raise SystemExit(3)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise SystemExit(4)


@pytest.mark.usefixtures("warm")
def test_23A7_a_hostile_failure_and_a_hostile_result_are_told_as_what_they_are() -> None:
    @distributed(gpus=1, quiet=True)
    def fail(*, returned: bool) -> object:
        if returned:
            return Hostile("x")
        raise Hostile("x")

    with pytest.raises(Hostile):
        fail.distributed(returned=False)
    with pytest.raises(ResultNotSerializable, match="SystemExit: 4"):
        fail.distributed(returned=True)
