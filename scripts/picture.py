"""Draws the README's terminal picture, `docs/images/terminal.svg`, from the output of real commands.

    commands ──pty──▶ their output ──▶ names of this machine replaced ──▶ rich ──▶ SVG

Run it with `make picture`. No test compares the picture. The program keeps the output unchanged except for paths and
the host name, and adds its own colours. Failure cases: A command ends with an unexpected exit code, or its output moves
the cursor, which this program does not support. Then the old picture stays.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from serverless_gpu.testing import stop_agent

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS = 120
BYTES_MAX = 100_000

FAILING = """\
from serverless_gpu import distributed

@distributed(gpus=2, gpu_type="CPU")
def train(rank):
    batch = [3.0, None][rank]
    return batch * 2

train.distributed()
"""


class Shown(NamedTuple):
    """One command of the picture and its expected exit code."""

    command: str
    code: int = 0


SCENE = (
    Shown("python examples/digits_ddp.py"),
    Shown("cat train.py"),
    Shown("python train.py", code=1),
)

INK, PAPER, RED, GREEN = (201, 209, 217), (22, 27, 34), (255, 123, 114), (126, 231, 135)
BLUE, VIOLET, CYAN, YELLOW = (121, 192, 255), (210, 168, 255), (165, 214, 255), (227, 179, 65)
THEME = TerminalTheme(PAPER, INK, [PAPER, RED, GREEN, YELLOW, BLUE, VIOLET, CYAN, INK])
STYLES = (
    (r"^\$ .*$", "bold green"),
    (r"^\[rank \d+\]", "cyan"),
    (r"^serverless-gpu:", "blue"),
    (r"^\w+Error:.*$", "bold red"),
)


def main() -> int:
    """Record the commands and draw the picture. Return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    try:
        text = _record(folder)
    finally:
        stop_agent(folder / "home")
        shutil.rmtree(folder, ignore_errors=True)
    svg = draw(text)
    if len(svg) > BYTES_MAX:
        print(f"error: the picture has {len(svg)} bytes, more than {BYTES_MAX}")
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(text.splitlines())} lines, {len(svg)} bytes")
    return 0


def _record(folder: Path) -> str:
    """Return the output of all commands in order, each below its prompt."""
    work = folder / "work"
    work.mkdir()
    (work / "train.py").write_text(FAILING, encoding="utf-8")
    (work / "examples").symlink_to(ROOT / "examples")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SERVERLESS_GPU_", "SGPU_"))}
    environ["TERM"] = "dumb"  # With a dumb terminal, programs do not redraw lines.
    environ |= {"SERVERLESS_GPU_HOME": str(folder / "home"), "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}
    for shown in SCENE:  # This first round warms up: a cold start prints a long line.
        run_under_pty(shown.command, work, environ)
    parts = []
    for shown in SCENE:
        printed, code = run_under_pty(shown.command, work, environ)
        if code != shown.code:
            raise SystemExit(f"error: {shown.command} ended with exit code {code}, not {shown.code}:\n{printed}")
        parts.append(f"$ {shown.command}\n{printed.rstrip()}\n")
    return without_names("\n".join(parts), folder)


def run_under_pty(command: str, directory: Path, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the terminal output of a command and its exit code.

    Raises:
        ValueError: the command moves the cursor.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    with subprocess.Popen(
        command.split(), cwd=directory, env=dict(environ), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        pieces = []
        while piece := _read(ours):
            pieces.append(piece)
    os.close(ours)
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    if found := re.search(r"\r|\x1b\[[0-9;?]*[A-HJKf]", text):
        raise ValueError(f"{command} moves the cursor: {found[0]!r}")
    return re.sub(r"\x1b\[[0-9;]*m", "", text), process.returncode


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65_536)
    except OSError:  # EIO means that the last process has closed the terminal.
        return b""


def without_names(text: str, folder: Path) -> str:
    """Return the text without names of this machine."""
    replaced = {
        str(folder / "home"): "~/.serverless_gpu",
        str(folder / "work"): "~/project",
        str(ROOT): "~/serverless-gpu",
    }
    for name, other in replaced.items():
        text = text.replace(name, other)
    return text.replace(f"on host {socket.gethostname()}", "on host gpu-box")


def draw(text: str) -> str:
    """Return an SVG that uses only system fonts."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    coloured = Text(text)
    for pattern, style in STYLES:
        coloured.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(coloured, overflow="fold")
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = re.sub(r"Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono", template)
    return console.export_svg(title="serverless-gpu", theme=THEME, code_format=template, unique_id="terminal")


if __name__ == "__main__":
    sys.exit(main())
