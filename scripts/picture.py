"""The terminal picture of the README: real commands under a pseudo terminal, drawn as `docs/images/terminal.svg`.

    commands ──pty──▶ what they printed ──▶ names of this machine taken out ──▶ rich ──▶ SVG

Run as `make picture`; nothing else needs it, and no test compares it. What is printed is kept as it is but for paths
and the host's name; colours are the picture's own. Failure cases: a command ends otherwise than it should; its output
moves the cursor, which this is no terminal for. Then there is no new picture.
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
    """One command of the picture, and the exit code it has to end with."""

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
    """Record and draw; return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    try:
        text = _record(folder)
    finally:
        stop_agent(folder / "home")
        shutil.rmtree(folder, ignore_errors=True)
    svg = draw(text)
    if len(svg) > BYTES_MAX:
        print(f"error: the picture has {len(svg)} bytes, over {BYTES_MAX}")
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(text.splitlines())} lines, {len(svg)} bytes")
    return 0


def _record(folder: Path) -> str:
    """Return what the commands print, one after the other, each below its prompt."""
    work = folder / "work"
    work.mkdir()
    (work / "train.py").write_text(FAILING, encoding="utf-8")
    (work / "examples").symlink_to(ROOT / "examples")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SERVERLESS_GPU_", "SGPU_"))}
    environ["TERM"] = "dumb"  # a picture stands still: no line is redrawn
    environ |= {"SERVERLESS_GPU_HOME": str(folder / "home"), "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}
    for shown in SCENE:  # the first start is cold, and says so in a long line
        run_under_pty(shown.command, work, environ)
    parts = []
    for shown in SCENE:
        printed, code = run_under_pty(shown.command, work, environ)
        if code != shown.code:
            raise SystemExit(f"error: {shown.command} ended with {code}, not {shown.code}:\n{printed}")
        parts.append(f"$ {shown.command}\n{printed.rstrip()}\n")
    return without_names("\n".join(parts), folder)


def run_under_pty(command: str, directory: Path, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return what a command prints on a terminal, and its exit code.

    Raises:
        ValueError: it moves the cursor.
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
    except OSError:  # EIO: the last one who had the terminal is gone
        return b""


def without_names(text: str, folder: Path) -> str:
    """Return the text as it would be on anybody's machine."""
    replaced = {
        str(folder / "home"): "~/.serverless_gpu",
        str(folder / "work"): "~/project",
        str(ROOT): "~/serverless-gpu",
    }
    for name, other in replaced.items():
        text = text.replace(name, other)
    return text.replace(f"on host {socket.gethostname()}", "on host gpu-box")


def draw(text: str) -> str:
    """Return an SVG that needs no font from elsewhere."""
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
