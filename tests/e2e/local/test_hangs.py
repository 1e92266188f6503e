"""Runs that stand still: found, told with every rank's stack, ended where that was asked for. Rows F04 and F05.

Limits are short here; what is looked at, and how, is the same with ten minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import attach, distributed
from serverless_gpu.errors import InvalidValue, RankCrashed, RunCancelled
from serverless_gpu.node.inside.protocol import STACK_SIGNAL
from tests.support.golden import golden
from tests.support.local.hangs import WARNING, hung, report_of, section
from tests.support.local.observe import announced, wait_for
from tests.support.local.ranks import announce, rank_number, stay, wait_for_file


@contextlib.contextmanager
def accepted(where: str) -> Iterator[socket.socket]:
    """Listen, say so, and yield the first connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{where}/door")
    listener.listen()
    Path(where, "open").touch()
    connection, _ = listener.accept()
    with listener, connection:
        yield connection


def barrier(where: str, name: str = "") -> bytes:
    """Wait in rank 0 until rank 1 sends a word; rank 1 stays until the file `name` is there."""
    if rank_number() == 0:
        with accepted(where) as connection:
            announce(where, "rank0")
            return connection.recv(16)
    wait_for_file(where, "open")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{where}/door")
        announce(where, "rank1")
        if not name:
            time.sleep(600)
        wait_for_file(where, name)
        connection.sendall(b"word")
    return b""


# --- F04: one rank does not come -------------------------------------------------------------------------------------


def test_F04_a_rank_that_does_not_come_to_a_socket_barrier(warm: Path, where: str) -> None:
    run = distributed(gpus=2, quiet=True, hang_timeout=2.0)(barrier).submit(where)
    error = hung(run)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0], [1])
    assert re.match(r"no output for (?:[2-9]|\d\d)\.\d s, and rank 0 waits in test_hangs\.py:", error.message), (
        error.message
    )
    assert golden("local.hangs.rank-elsewhere-test") in error.message and error.message.endswith(" barrier")
    assert len(error.__notes__) == 1 and error.__notes__[0].startswith("rank 1 is here (most recent call first):\n")
    assert "in barrier" in error.__notes__[0] and "node/inside" not in error.__notes__[0]
    report = report_of(run)
    assert "---- rank 0 (waits) ----" in report and "---- rank 1 (elsewhere) ----" in report
    receipt = run.receipt()
    assert receipt.segments.run_ms is not None and 2_000 <= receipt.segments.run_ms < 50_000
    assert receipt.segments.stop_ms is not None and receipt.segments.stop_ms < 20_000, "its grace is 30 s"


def test_F04_a_rank_that_is_stopped_is_named_and_stays_stopped(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=2, quiet=True)(barrier).submit(where, "go")
    rank, _ = announced(Path(where), "rank1")
    announced(Path(where), "rank0")
    rank.send(signal.SIGSTOP)
    report = report_of(run)
    assert golden("local.hangs.rank-stopped-sigstop") in report
    assert golden("local.hangs.kill-cont-lets", pid=rank.pid) in section(report, 1)
    assert " in wait_for_file" in section(report, 1)
    wait_for(lambda: kernel_state(rank.pid) == "T", "it is stopped again")
    Path(where, "go").touch()
    rank.send(signal.SIGCONT)
    assert run.results(timeout=50) == [b"word", b""]


def test_F04_a_stopped_rank_is_elsewhere_when_the_run_is_ended(warm: Path, where: str) -> None:
    run = distributed(gpus=2, quiet=True, hang_timeout=2.0)(barrier).submit(where, "never")
    rank, _ = announced(Path(where), "rank1")
    rank.send(signal.SIGSTOP)
    error = hung(run)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0], [1])
    assert error.message.endswith(": rank 1 is stopped (SIGSTOP)")
    assert not rank.alive()


def test_F04_every_rank_in_the_same_place(warm: Path, where: str) -> None:
    def train() -> None:
        threading.Event().wait(600)

    run = distributed(gpus=2, quiet=True, hang_timeout=1.0)(train).submit()
    error = hung(run)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0, 1], [])
    assert golden("local.hangs.every-rank-waits") in error.message
    assert [note.partition(" (")[0] for note in error.__notes__] == ["rank 0 waits here", "rank 1 waits here"]


# --- F05: one rank returned early ------------------------------------------------------------------------------------


def test_F05_a_rank_that_returned_early_is_elsewhere_and_keeps_its_result(warm: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> str:
        if rank == 2:
            return "early"
        threading.Event().wait(600)
        return "never"

    run = distributed(gpus=4, quiet=True, hang_timeout=2.0)(train).submit(where)
    error = hung(run)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0, 1, 3], [2])
    assert error.message.endswith(": rank 2 has returned")
    assert (run.directory / "results" / "2.pkl").exists()
    assert "\n2                has returned\n" in report_of(run)


# --- no hang ---------------------------------------------------------------------------------------------------------


def one_place() -> None:
    time.sleep(0.01)


def another_place() -> None:
    time.sleep(0.01)


def test_ranks_that_move_without_a_word_are_left_alone(warm: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(seconds: float) -> str:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            one_place()
            another_place()
        return "done"

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=2, quiet=True, hang_timeout=1.5)(train).submit(5.0)
    assert run.results(timeout=50) == ["done", "done"]
    assert run.receipt(timeout=50).notes == () and not list(run.directory.glob("hang-*"))


def test_a_program_that_waits_at_one_line_nearly_all_the_time_is_left_alone(warm: Path, where: str) -> None:
    def train(seconds: float) -> str:  # in one call in C, as one is that waits for a GPU
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)
        return "done"

    run = distributed(gpus=2, quiet=True, hang_timeout=1.5)(train).submit(6.0)
    assert run.results(timeout=50) == ["done", "done"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_one_long_call_that_computes_is_no_hang(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    def train(seconds: float) -> int:
        started, count = time.monotonic(), 1 << 18
        while time.monotonic() - started < seconds / 4:  # how long it takes here decides the length of the last call
            sum(range(count))
            count *= 2
        return sum(range(count * 4))

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=gpus, quiet=True, hang_timeout=1.5)(train).submit(2.0)
    assert len(run.results(timeout=60)) == gpus
    assert run.receipt(timeout=50).notes == ()


def test_output_of_any_rank_is_a_sign_of_progress(warm: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(where: str) -> bytes:
        def talk() -> None:
            for _ in range(30):
                print("still there")
                time.sleep(0.2)
            Path(where, "go").touch()

        if rank_number() == 1:  # whose output is not shown
            threading.Thread(target=talk).start()
        return barrier(where, "go")

    monkeypatch.setenv(WARNING, "3.5")
    run = distributed(gpus=2, quiet=True, hang_timeout=4.0)(train).submit(where)
    assert run.results(timeout=50) == [b"word", b""]
    assert run.receipt(timeout=50).notes == ()


def test_a_warning_ends_nothing_and_is_told_to_everybody(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WARNING, "1")
    function = distributed(gpus=2)(barrier)
    results: list[object] = []
    caller = threading.Thread(target=lambda: results.append(function.distributed(where, "go")))
    caller.start()
    announced(Path(where), "rank1")
    run_id = wait_for(lambda: sorted(os.listdir(warm / "runs")), "the run has a directory")[-1]
    run = attach(run_id)
    report_of(run, 2)
    late = attach(run_id)
    assert (late.status(), run.status()) == ("RUNNING", "RUNNING")
    for handle in (run, late):  # a third one may have come by now
        said = wait_for(handle.last_sentence, "the sentence came")
        assert golden("local.hangs.rank-waits-test") in said
        assert golden("local.hangs.stacks-all-ranks", directory=run.directory) in said
    Path(where, "go").touch()
    caller.join(30)
    assert results == [[b"word", b""]]
    notes = run.receipt(timeout=50).notes
    lines = capfd.readouterr().err.splitlines()
    for number, note in enumerate(notes[:2], 1):
        name, _, sentence = note.partition(": ")
        assert name == golden("local.hangs.hang-txt-stacks", number=number)
        assert (
            golden("local.hangs.serverless-gpu-stacks", sentence=sentence, directory=run.directory, number=number)
            in lines
        )
    text = run.receipt().text()
    assert golden("local.hangs.hang-txt-stacks-all") in text and "hang-2.txt has" in text


def test_a_run_that_gets_on_after_a_warning_says_so_once(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(where: str) -> bytes:
        word = barrier(where, "go")
        while not Path(where, "end").exists():
            print("on we go")
            time.sleep(0.1)
        return word

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=2)(train).submit(where)
    follower = threading.Thread(target=run.follow)
    follower.start()
    report_of(run)
    other = attach(run.id)
    wait_for(other.last_sentence, "the warning is told")
    Path(where, "go").touch()
    wait_for(lambda: not other.last_sentence(), "it is taken back")
    Path(where, "end").touch()
    follower.join(30)
    assert run.results(timeout=50) == [b"word", b""]
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("serverless-gpu: the ranks make progress again, after ") for line in lines), lines
    assert "serverless-gpu:" not in [line.strip() for line in lines]


# --- what the look must not do ---------------------------------------------------------------------------------------


def test_a_rank_that_has_become_another_program_is_not_ended_by_the_look(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str, rank: int = -1) -> None:
        announce(where, f"rank{rank}")
        if rank == 1:
            os.execvp("sleep", ["sleep", "600"])
        threading.Event().wait(600)

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=2, quiet=True)(train).submit(where)
    rank, _ = announced(Path(where), "rank1")
    assert golden("local.hangs.stack-runs-another") in section(report_of(run), 1)
    assert rank.alive() and run.status() == "RUNNING"
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(timeout=50)


def test_a_rank_that_does_not_catch_the_signal_is_not_ended_by_the_look(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str) -> str:
        signal.signal(STACK_SIGNAL, signal.SIG_DFL)
        announce(where, "rank0")
        wait_for_file(where, "go")
        return "alive"

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=1, quiet=True)(train).submit(where)
    assert golden("local.hangs.stack-runs-another") in section(report_of(run), 0)
    Path(where, "go").touch()
    assert run.results(timeout=50) == ["alive"]


def test_a_file_in_the_place_of_the_closed_descriptor_is_not_written_to(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str) -> bytes:
        os.closerange(3, 256)
        files = [os.open(f"{where}/{number}", os.O_RDWR | os.O_CREAT) for number in range(60)]
        announce(where, "rank0")
        wait_for_file(where, "go")
        return b"".join(os.pread(fd, 1000, 0) for fd in files)

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=1, quiet=True)(train).submit(where)
    assert golden("local.hangs.taken-signal-file") in section(report_of(run), 0)
    Path(where, "go").touch()
    run.wait(50)  # its result cannot be told: it has closed its connection, too
    assert all(not Path(where, str(number)).stat().st_size for number in range(60))
    run.receipt(timeout=50)


def test_user_code_keeps_its_signals(warm: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(where: str) -> tuple[bool, list[int]]:
        numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM, signal.SIGRTMIN, signal.SIGRTMAX]
        untouched = all(signal.getsignal(number) is signal.SIG_DFL for number in numbers)
        taken: list[int] = []
        for number in numbers:
            signal.signal(number, lambda number, _: taken.append(number))
        wait_for_file(where, "go")
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        return untouched, taken

    monkeypatch.setenv(WARNING, "1.5")
    run = distributed(gpus=1, quiet=True)(train).submit(where)
    assert " in wait_for_file" in section(report_of(run), 0)
    Path(where, "go").touch()
    assert run.results(timeout=50) == [(True, [signal.SIGUSR1, signal.SIGUSR2])]


def test_calls_that_are_looked_at_go_on_as_if_nothing_had_been(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str, rank: int = -1) -> tuple[object, ...]:
        started = time.monotonic()
        if rank == 0:
            time.sleep(4.0)
            return (time.monotonic() - started >= 4.0,)
        if rank == 1:
            lock = threading.Lock()
            lock.acquire()
            return lock.acquire(timeout=4.0), time.monotonic() - started >= 4.0
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            time.sleep(4.0)
            theirs.sendall(b"word")
            os._exit(3)
        word = ours.recv(16)  # in C, and interrupted by each look
        return word, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=3, quiet=True)(train).submit(where)
    assert run.results(timeout=50) == [(True,), (False, True), (b"word", 3)]
    assert "hang-1.txt" in run.receipt(timeout=50).notes[0]


def test_F01_a_crash_after_a_warning_has_its_own_stack_only(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str, rank: int = -1) -> None:
        if rank == 1:
            wait_for_file(where, "go")
            ctypes.string_at(0)
        stay(where)

    monkeypatch.setenv(WARNING, "1.5")
    run = distributed(gpus=2, quiet=True)(train).submit(where)
    assert " in wait_for_file" in section(report_of(run), 1)
    Path(where, "go").touch()
    with pytest.raises(RankCrashed, match=re.escape(golden("local.failures.rank-ended-sigsegv"))) as caught:
        run.results(timeout=50)
    stack = next(note for note in caught.value.__notes__ if note.startswith("Python stack of rank 1"))
    assert stack.count("most recent call first") == 1 and "string_at" in stack and "wait_for_file" not in stack


# --- the limit -------------------------------------------------------------------------------------------------------


def test_no_warning_is_given_where_none_is_wanted(warm: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARNING, "0")
    run = distributed(gpus=1, quiet=True)(time.sleep).submit(1.0)
    assert run.results(timeout=50) == [None]
    assert run.receipt(timeout=50).notes == ()


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused_before_anything_starts(
    warm: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(WARNING, text)
    before = sorted(os.listdir(warm / "runs")) if (warm / "runs").exists() else []
    with pytest.raises(InvalidValue, match=re.escape(golden("local.hangs.number-seconds-hint"))):
        distributed(gpus=1, quiet=True)(time.sleep).submit(0)
    assert (sorted(os.listdir(warm / "runs")) if (warm / "runs").exists() else []) == before


def kernel_state(pid: int) -> str:
    """Return the kernel's letter for a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
