"""`sgpu top` on a terminal: drawn, redrawn, scrolled, ended, and the terminal is as it was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.node.monitor.messages import NodeFrame
from tests.support.cli.framed import NOW_NS, S, frame
from tests.support.cli.framing_monitor import FramingMonitor
from tests.support.golden import golden
from tests.support.tiny_terminal import screen

PATIENCE_S = 60.0
TOP = [sys.executable, "-m", "serverless_gpu.cli", "top"]
SCREEN, NO_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def frames(number: int) -> NodeFrame:
    return frame(at_ns=NOW_NS + number * S)


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "SERVERLESS_GPU_FAKE")}
    return kept | {"SERVERLESS_GPU_HOME": str(home), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | more


class Window:
    """A terminal with `sgpu top` in it."""

    def __init__(self, home: Path, *, columns: int, rows: int, **more: str) -> None:
        self.fd, self.inner = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.inner)
        self.output = ""
        self.process = subprocess.Popen(
            TOP, stdin=self.inner, stdout=self.inner, stderr=self.inner, env=environment(home, **more),
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), start_new_session=True,
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def rows(self) -> list[str]:
        """Return what is on the screen, as the last picture that is whole has it."""
        picture = self.output.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        return screen(re.sub(r"\x1b\[\?\d+[hl]", "", picture))

    def until(self, shown: Callable[[], bool]) -> None:
        """Read what is drawn until it is as wanted."""
        clock = SystemClock()
        deadline_ns = clock.boottime_ns() + int(PATIENCE_S * 1e9)
        while not shown():
            left_s = (deadline_ns - clock.boottime_ns()) / 1e9
            assert left_s > 0, f"not so: {self.rows()} of {self.output[-3000:]!r}"
            if select.select([self.fd], [], [], min(left_s, 0.5))[0]:
                with contextlib.suppress(OSError):
                    self.output += os.read(self.fd, 1 << 16).decode("utf-8", "replace")

    def end(self) -> int:
        """Wait until the command has ended, reading on; return its exit status."""
        self.until(lambda: self.process.poll() is not None)
        self.until(lambda: not select.select([self.fd], [], [], 0.1)[0])
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.fd)
        os.close(self.inner)


@contextlib.contextmanager
def window(home: Path, *, columns: int = 100, rows: int = 30, **more: str) -> Iterator[Window]:
    opened = Window(home, columns=columns, rows=rows, **more)
    try:
        yield opened
    finally:
        opened.close()


def piped(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *arguments], capture_output=True, text=True, env=environment(home, **more), timeout=60, check=False
    )


def test_a_pipe_gets_one_frame_without_sequences(home: Path) -> None:
    with FramingMonitor(home, frames) as monitor:
        done = piped(home, SERVERLESS_GPU_FAKE="H100:8")
        assert (done.returncode, done.stderr) == (0, "")
        assert "8 H100: 6 lent, 1 free" not in done.stdout, "nobody but this frame's runs has a device here"
        assert "8 H100: 5 lent, 3 free" in done.stdout and "train rank 3" in done.stdout
        assert "network ↓ 12.0 MB/s" in done.stdout, "two frames were waited for"
        assert "\x1b" not in done.stdout
        assert [watch.fakes for watch in monitor.watches] == ["H100:8"]


def test_json_is_one_frame(home: Path) -> None:
    with FramingMonitor(home, frames):
        value = json.loads(piped(home, "--json").stdout)
    assert [row["index"] for row in value["devices"]] == list(range(8))
    assert value["runs"][0]["state"] == "RUNNING"


def test_it_is_redrawn_and_gives_the_terminal_back(home: Path) -> None:
    with FramingMonitor(home, frames), window(home) as shown:
        shown.until(lambda: any("train rank 3" in row for row in shown.rows()))
        first = shown.rows()[-1]
        assert re.fullmatch(r"\d\d:\d\d:\d\d · q quits", first)
        shown.until(lambda: shown.rows()[-1] != first)
        assert len(shown.rows()) == 30
        assert "\x1b[31m" in shown.output, "in colour"
        shown.press("q")
        assert shown.end() == 0
        assert SCREEN in shown.output
        assert shown.output.endswith(NO_SCREEN)
        assert termios.tcgetattr(shown.inner) == shown.before


def test_another_size_is_another_picture(home: Path) -> None:
    with FramingMonitor(home, frames), window(home) as shown:
        shown.until(lambda: any("train rank 3" in row for row in shown.rows()))
        for columns, rows in ((40, 10), (9, 3), (1, 1), (300, 80)):
            shown.resize(columns, rows)
            shown.until(lambda rows=rows: len(shown.rows()) == rows)  # type: ignore[misc]  # bound now
            assert all(len(row) <= columns for row in shown.rows()), (columns, rows)
        shown.press("q")
        assert shown.end() == 0


def test_what_does_not_fit_is_scrolled_to(home: Path) -> None:
    with FramingMonitor(home, frames), window(home, rows=8) as shown:
        shown.until(lambda: below(shown) > 1 and "network" in shown.rows()[0] and "train rank 0" in shown.rows()[4])
        first, all_below = shown.rows()[0], below(shown)
        assert first.startswith(os.uname().nodename)
        shown.press("\x1b[B")
        shown.until(lambda: below(shown) == all_below - 1)
        assert shown.rows()[0] != first
        shown.press("\x1b[6~")
        shown.until(lambda: below(shown) == max(0, all_below - 11))
        shown.press("\x1b[6~")
        shown.until(lambda: below(shown) == 0)
        assert shown.rows()[-2].startswith("  rank 0: cpu 50 %")
        for _ in range(3):
            shown.press("\x1b[5~")
        shown.until(lambda: below(shown) == all_below and shown.rows()[0] == first)
        shown.press("q")
        assert shown.end() == 0


def below(shown: Window) -> int:
    found = re.match(r"(\d+) more lines below \(arrow keys\)", shown.rows()[-1])
    return int(found[1]) if found else 0


def test_ctrl_c_and_sigterm_give_the_terminal_back(home: Path) -> None:
    with FramingMonitor(home, frames):
        acts: list[tuple[Callable[[Window], None], int]] = [
            (lambda one: one.press("\x03"), 0),
            (lambda one: one.process.terminate(), 143),
        ]
        for act, status in acts:
            with window(home) as shown:
                shown.until(lambda shown=shown: any("train rank 3" in row for row in shown.rows()))  # type: ignore[misc]  # bound now
                act(shown)
                assert shown.end() == status
                assert shown.output.endswith(NO_SCREEN) and "Traceback" not in shown.output
                assert termios.tcgetattr(shown.inner) == shown.before


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(home: Path) -> None:
    with FramingMonitor(home, frames), window(home) as shown:
        shown.until(lambda: any("train rank 3" in row for row in shown.rows()))
        shown.process.send_signal(signal.SIGTSTP)
        shown.until(lambda: shown.output.endswith(NO_SCREEN))
        assert os.waitid(os.P_PID, shown.process.pid, os.WSTOPPED | os.WNOWAIT) is not None
        shown.process.send_signal(signal.SIGCONT)
        shown.until(lambda: shown.output.count(SCREEN) == 2 and len(shown.rows()) == 30)
        shown.press("q")
        assert shown.end() == 0


def test_no_color_and_a_dumb_terminal(home: Path) -> None:
    with FramingMonitor(home, frames):
        with window(home, NO_COLOR="1") as shown:
            shown.until(lambda: any("train rank 3" in row for row in shown.rows()))
            assert not re.search(r"\x1b\[\d*m", shown.output)
            shown.press("q")
            assert shown.end() == 0
        with window(home, TERM="dumb") as shown:
            assert shown.end() == 0
            assert "\x1b" not in shown.output and "train rank 3" in shown.output


def test_a_window_without_a_size_is_taken_for_a_usual_one(home: Path) -> None:
    with FramingMonitor(home, frames), window(home, columns=0, rows=0) as shown:
        shown.until(lambda: any("train rank 3" in row for row in shown.rows()))
        assert len(shown.rows()) == 24
        shown.press("q")
        assert shown.end() == 0


def test_a_monitor_that_says_nothing_is_told_of(home: Path) -> None:
    def dumb(number: int) -> NodeFrame:
        if number > 1:
            raise OSError  # it hangs up without a word: the fake ends this connection
        return frames(number)

    with FramingMonitor(home, dumb) as monitor, window(home) as shown:
        shown.until(lambda: golden("cli.top_live.monitor-ended-started") in shown.rows()[-1])
        assert any("train rank 3" in row for row in shown.rows()), "the last frame stays"
        shown.until(lambda: len(monitor.watches) > 1)
        shown.press("q")
        assert shown.end() == 0


def test_names_of_others_cannot_draw(home: Path) -> None:
    evil = msgspec.structs.replace(frame().attempts[0], name="\x1b[2J\x1b]0;title\x07\nline")
    shown_frame = msgspec.structs.replace(frame(), attempts=(evil, frame().attempts[1]))
    with FramingMonitor(home, lambda number: shown_frame), window(home) as shown:
        shown.until(lambda: any("rank 3" in row for row in shown.rows()))
        assert "\x1b]" not in shown.output and "\x1b[2J" not in shown.output
        shown.press("q")
        assert shown.end() == 0
