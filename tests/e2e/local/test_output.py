r"""What ranks write, with real processes: every byte stored, shown live, bounded, safe for a terminal (F49, F50, 2.34).

The caller's terminal is a pty that this test is the other end of; `tiny_terminal` says what a person sees on it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path
from typing import Literal

import pytest

from serverless_gpu import distributed
from serverless_gpu.client.display.run_display import Display
from serverless_gpu.errors import InvalidValue, RankCrashed
from tests.support.golden import golden
from tests.support.local.observe import LIMIT_S, run_script, supervisor, wait_for
from tests.support.local.ranks import announce, rank_number, wait_for_file
from tests.support.paths import REPOSITORY
from tests.support.tiny_terminal import screen

pytestmark = pytest.mark.usefixtures("warm")

MB = 1_000_000


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def at_a_terminal(path: Path, *, columns: int = 80) -> str:
    """Run a script in a terminal of its own; return all that was printed on it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    printed = b""
    limit = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < limit and select.select([ours], [], [], LIMIT_S)[0]:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # nobody has it open any more
                break
            printed += piece
        assert process.wait(LIMIT_S) == 0, printed.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return printed.decode()


# --- capture ---------------------------------------------------------------------------------------------------------


def write_in_every_way() -> None:
    """Write past Python: by the C library, by system calls, by a child, by a grandchild."""
    libc = ctypes.CDLL(None)
    libc.puts(b"puts from C")
    libc.fflush(None)
    os.write(1, b"os.write\n")
    os.write(2, b"os.write to stderr\n")
    subprocess.run(["sh", "-c", "echo child; (echo grandchild >&2)"], check=True)
    print("print")


def test_output_is_captured_at_the_descriptor_whoever_writes(capfd: pytest.CaptureFixture[str]) -> None:
    distributed(gpus=2, quiet=True, ranks_log="all")(write_in_every_way).distributed()
    out, err = capfd.readouterr()
    for rank in (0, 1):
        tag = f"[rank {rank}] "
        mine = [line.removeprefix(tag) for line in out.splitlines() if line.startswith(tag)]
        assert mine == ["puts from C", "os.write", "child", "print"]
        assert [line for line in err.splitlines() if line.startswith(tag)] == [
            f"{tag}os.write to stderr",
            f"{tag}grandchild",
        ]


@pytest.mark.parametrize(
    ("ranks_log", "shown"), [(None, [0]), ("all", [0, 1, 2, 3]), ([0, 3], [0, 3])], ids=["default", "all", "some"]
)
def test_which_ranks_are_shown_live(
    capfd: pytest.CaptureFixture[str], ranks_log: Literal["all"] | list[int] | None, shown: list[int]
) -> None:
    four = distributed(gpus=4, quiet=True) if ranks_log is None else distributed(4, quiet=True, ranks_log=ranks_log)

    @four
    def speak(rank: int = -1) -> None:
        print(f"I am {rank}")

    run = speak.submit()
    run.follow()
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank {rank}] I am {rank}" for rank in shown]
    assert [run.logs(rank) for rank in range(4)] == [f"I am {rank}\n" for rank in range(4)], "all of it is stored"


def test_F50_bytes_are_stored_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    data = b"\xff\xfe invalid, \x00 null, \x1b[31mcolour, \r 10% \r 20%\r\n" + bytes(range(256)) + b"\n"

    def write(data: bytes) -> None:
        os.write(1, data)

    run = distributed(gpus=1, quiet=True)(write).submit(data)
    run.follow()
    assert (run.directory / "logs" / "0.stdout").read_bytes() == data
    assert "\ufffd\ufffd invalid, \x00 null" not in capfd.readouterr().out, "a rewritten line has its last state"
    assert run.logs().startswith("\ufffd\ufffd invalid, \x00 null")


def test_F50_a_line_of_100_MB_is_stored_whole(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> int:
        block, written = b"0123456789" * 100_000, 0
        for _ in range(100):
            start = 0
            while start < len(block):
                start += os.write(1, block[start:])
            written += start
        os.write(1, b"\n")
        return written

    run = distributed(gpus=1, quiet=True)(write).submit()
    run.follow()
    assert run.results() == [100 * MB]
    stored = (run.directory / "logs" / "0.stdout").read_bytes()
    assert stored == b"0123456789" * (10 * MB) + b"\n"
    shown = capfd.readouterr()
    assert len(shown.out) < 10 * MB and "omitted" in shown.err


@pytest.mark.parametrize(("gpus", "valid"), [(2, "ranks 0 to 1"), (1, "rank 0 only")])
def test_only_ranks_that_do_not_exist_are_refused(warm: Path, gpus: int, valid: str) -> None:
    before = set((warm / "runs").iterdir())
    with pytest.raises(InvalidValue, match=golden("local.output.ranks-log-names", valid=valid)):
        distributed(gpus=gpus, ranks_log=[2, 7])(rank_number).distributed()
    assert set((warm / "runs").iterdir()) == before, "nothing was started"
    assert distributed(gpus=2, ranks_log=[1, 7], quiet=True)(rank_number).distributed() == [0, 1]


# --- F49: floods -----------------------------------------------------------------------------------------------------


def flood(where: str, size: int) -> int:
    """Rank 0 writes as fast as it can; rank 1 a line now and then until the flood is over."""
    if rank_number() == 0:
        wait_for_file(where, "speaking")
        block, written = b"y" * 63 + b"\n", 0
        block *= 1 << 14
        while written < size:
            written += os.write(1, block)
        os.write(1, b"\nlast words\n")
        announce(where, "flooded")
        wait_for_file(where, "looked at")
        return written
    lines = 0
    while not Path(where, "flooded").exists():
        print(f"line {lines}")
        lines += 1
        announce(where, "speaking")
        time.sleep(0.02)
    return lines


@pytest.mark.slow
def test_F49_a_flood_is_cut_and_counted_and_the_run_goes_on(
    warm: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = distributed(gpus=2, quiet=True, ranks_log="all")(flood).submit(where, 1000 * MB)
    guardian = supervisor(warm, run.id)
    status = Path(f"/proc/{guardian.pid}/status")
    wait_for(lambda: (Path(where) / "flooded").exists(), "the flood is over")
    peak_kib = int(status.read_text().partition("VmHWM:")[2].split()[0])
    (Path(where) / "looked at").touch()
    assert peak_kib < 100 << 10, "what is over the bounds is nowhere in memory"
    run.follow()
    written, lines = run.results()
    receipt = run.receipt()

    stored = (run.directory / "logs" / "0.stdout").read_bytes()
    assert stored.startswith(b"y" * 63) and stored.endswith(b"\nlast words\n")
    assert 256 * MB < len(stored) < 256 * MB + 200 * MB
    assert b" dropped until " in stored and "(limit 10 MB/s, 1 GiB per rank) —\n".encode() in stored
    assert any(golden("local.output.rank-output-kept") in note for note in receipt.notes), receipt.notes

    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line.startswith("[rank 1]")] == [
        f"[rank 1] line {number}" for number in range(lines)
    ]
    assert "[rank 0] last words" in out.splitlines(), "the end of a flood is shown"
    assert len(out) < 0.1 * written
    assert "[rank 0] — " in err and " dropped —" in err


def test_F49_every_rank_is_shown_to_its_end_when_all_of_them_flood(capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(gpus=8, quiet=True, ranks_log="all")
    def train(rank: int = -1) -> None:
        block = b"y\n" * (1 << 15)
        for _ in range(400):
            os.write(1, block)
        print("END of", rank)

    train.distributed()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if "END" in line) == [f"[rank {rank}] END of {rank}" for rank in range(8)]
    assert len(lines) < 8 * 300_000


def test_F49_short_outputs_of_all_ranks_arrive_complete(capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(gpus=8, quiet=True, ranks_log="all")
    def train() -> None:
        print("\n".join(f"step {number} loss 0.1234" for number in range(20_000)))

    train.distributed()
    lines = capfd.readouterr().out.splitlines()
    for rank in range(8):
        shown = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert shown == [f"[rank {rank}] step {number} loss 0.1234" for number in range(20_000)]


def test_F49_lines_of_others_come_through_live_during_a_flood(where: str) -> None:
    @distributed(gpus=2, quiet=True, ranks_log="all")
    def train(where: str, rank: int = -1) -> None:
        if rank == 1:
            announce(where, "here")
            wait_for_file(where, "flooding")
            print("heard?")
            wait_for_file(where, "heard")
            return
        wait_for_file(where, "here")
        block = b"y" * (1 << 16)
        for _ in range(1_000):  # more than the view takes, so that it is behind
            os.write(1, block)
        announce(where, "flooding")
        while not Path(where, "heard").exists():
            os.write(1, block)

    class Ear(Display):
        """Lets the flood go on until the line has come."""

        def output(self, rank: int, stream: str, text: str) -> None:
            if rank == 1 and "heard?" in text:
                Path(where, "heard").touch()

    run = train.submit(where)
    run._display = Ear()
    assert run.wait(timeout=LIMIT_S)
    assert run.results() == [None, None]


def test_F49_what_is_missing_is_said_while_the_rank_is_silent(where: str) -> None:
    def train(where: str) -> None:
        os.write(1, (b"x" * 99 + b"\n") * 50_000)
        wait_for_file(where, "told")

    class Ear(Display):
        """Ends the run when it has been told how much is missing."""

        missing = 0

        def skipped(self, rank: int, stream: str, bytes_: int, lost: bool) -> None:
            self.missing += bytes_
            Path(where, "told").touch()

    run = distributed(gpus=1, quiet=True)(train).submit(where)
    ear = run._display = Ear()
    assert run.wait(timeout=LIMIT_S)
    assert run.results() == [None] and 0 < ear.missing < 5 * MB


def test_F49_who_did_not_read_is_told_how_much_is_missing(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    def write(where: str) -> None:
        for number in range(500):
            os.write(1, (b"%03d " % number + b"x" * 95 + b"\n") * 200)
        announce(where, "written")
        wait_for_file(where, "go")
        print("the end")

    run = distributed(gpus=1, quiet=True)(write).submit(where)
    wait_for(lambda: (Path(where) / "written").exists(), "everything is written")
    Path(where, "go").touch()
    run.follow()
    out, err = capfd.readouterr()
    assert out.startswith("[rank 0] 000 x") and out.endswith("[rank 0] the end\n")
    assert golden("local.output.shown-too-fast", value=run.directory / "logs" / "0.stdout") in err
    assert len(run.logs()) == 500 * 200 * 100 + len("the end\n"), "the file has all of it"


# --- a terminal ------------------------------------------------------------------------------------------------------


def test_F50_a_terminal_gets_colours_and_nothing_else_that_ranks_send(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        r"""
        import os
        from serverless_gpu import distributed

        @distributed(gpus=1, quiet=True)
        def train():
            os.write(1, b"\x1b[31mred\x1b[0m \x1b]52;c;cm0gLXJmIH4K\x07clip \x1b]0;title\x1b\\ ")
            os.write(1, b"\x9b \x1b[2J\x1b[6n end\n")
            os.write(1, "\u202eodd\x07\n".encode())

        train.distributed()
        """,
    )
    printed = at_a_terminal(path)
    assert golden("local.output.rank-31mred-0m") in printed
    assert "[rank 0] \\u202eodd\\x07\r\n" in printed
    assert "cm0gLXJmIH4K" not in printed and "title" not in printed


BARS = r"""
    import sys, time
    from serverless_gpu import distributed

    @distributed(gpus=1, quiet=True)
    def train():
        from tqdm import tqdm
        for epoch in tqdm(range(3), desc="epochs", mininterval=0, ncols=50):
            for step in tqdm(range(3), desc="steps", mininterval=0, ncols=50, leave=False):
                time.sleep(0.06)
            tqdm.write(f"epoch {epoch} done", file=sys.stderr)
        print("trained")

    train.distributed()
"""


def test_F50_bars_below_each_other_on_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    printed = at_a_terminal(script(tmp_path, BARS))
    rows = screen(printed)
    assert [row for row in rows if "epoch " in row] == [f"[rank 0] epoch {number} done" for number in range(3)]
    assert [row[:22] for row in rows if "epochs" in row] == ["[rank 0] epochs: 100%|"]
    assert "[rank 0] trained" in rows and not any("steps" in row for row in rows)
    assert len(rows) == 6, "nothing else is left, the last one is empty"
    seen = ["\n".join(screen(printed[: drawn.end()])) for drawn in re.finditer(r"\x1b\[K", printed)]
    assert any("epochs:  33%" in look and "steps:  33%" in look for look in seen), "both moved, one below the other"


def test_F50_bars_below_each_other_in_a_pipe(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    done = run_script(script(tmp_path, BARS))
    rows = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, "[rank 0] trained\n")
    assert [row for row in rows if "epoch " in row] == [f"[rank 0] epoch {number} done" for number in range(3)]
    assert [row[:22] for row in rows if "epochs" in row] == ["[rank 0] epochs: 100%|"]
    assert len(rows) == 4 and "\r" not in done.stderr and "\x1b" not in done.stderr


def test_F50_one_bar_and_the_lines_of_another_rank_on_a_terminal(tmp_path: Path, where: str) -> None:
    path = script(
        tmp_path,
        f"""
        import sys
        sys.path.append({str(REPOSITORY)!r})
        from serverless_gpu import distributed
        from tests.support.local.ranks import announce, wait_for_file

        @distributed(gpus=2, quiet=True, ranks_log="all")
        def train(where, rank=-1):
            for percent in range(0, 101, 20):
                if rank == 0:
                    wait_for_file(where, f"line{{percent}}")
                    sys.stderr.write(f"\\r{{percent:3d}}% " + "█" * percent)
                    announce(where, f"bar{{percent}}")
                else:
                    if percent:
                        wait_for_file(where, f"bar{{percent - 20}}")
                    print(f"line at {{percent}}")
                    announce(where, f"line{{percent}}")

        train.distributed({where!r})
        """,
    )
    rows = screen(at_a_terminal(path, columns=40))
    assert [row for row in rows if row.startswith("[rank 1]")] == [f"[rank 1] line at {n}" for n in range(0, 101, 20)]
    assert [row[:15] for row in rows if row.startswith("[rank 0]")] == ["[rank 0] 100% █"]


# --- all on failure --------------------------------------------------------------------------------------------------


def test_hidden_ranks_are_shown_when_a_run_fails(capfd: pytest.CaptureFixture[str], where: str) -> None:
    @distributed(gpus=4)
    def train(where: str, rank: int = -1) -> None:
        print(f"rank {rank} was here")
        announce(where, f"rank{rank}")
        for other in range(4):
            wait_for_file(where, f"rank{other}")
        if rank == 2:
            raise ValueError("it was me")
        time.sleep(60)

    with pytest.raises(ValueError, match="it was me"):
        train.distributed(where)
    out, err = capfd.readouterr()
    assert out == golden("local.output.rank-rank-here")
    tails = [line for line in err.splitlines() if line.startswith("[rank") or "last output" in line]
    assert [line.partition(" (all output: ")[0] for line in tails] == [
        part
        for rank in (2, 1, 3)
        for part in (f"serverless-gpu: last output of rank {rank}", f"[rank {rank}] rank {rank} was here")
    ]


def test_the_last_output_that_the_exception_carries_is_not_shown_twice(
    capfd: pytest.CaptureFixture[str], where: str
) -> None:
    @distributed(gpus=3, quiet=True)
    def train(where: str, rank: int = -1) -> None:
        print(f"\x1b]0;title\x07rank {rank} was here")
        announce(where, f"rank{rank}")
        for other in range(3):
            wait_for_file(where, f"rank{other}")
        os._exit(3) if rank == 1 else time.sleep(60)

    with pytest.raises(RankCrashed) as caught:
        train.distributed(where)
    assert golden("local.output.last-output-rank") in caught.value.__notes__
    assert capfd.readouterr().err == golden("local.output.rank-title-rank")


def test_a_cancelled_run_shows_nothing_more(capfd: pytest.CaptureFixture[str], where: str) -> None:
    def train(where: str) -> None:
        print("hidden")
        announce(where, f"rank{rank_number()}")
        time.sleep(60)

    run = distributed(gpus=2, quiet=True, ranks_log=[1])(train).submit(where)
    wait_for(lambda: all((Path(where) / f"rank{rank}").exists() for rank in (0, 1)), "both are there")
    run.cancel()
    run.follow()
    out, err = capfd.readouterr()
    assert (out, err) == ("[rank 1] hidden\n", "")
