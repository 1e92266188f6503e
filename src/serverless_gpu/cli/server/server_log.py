"""`sgpu server logs`: the server's own log as text, on its machine, from its home, without a server.

The server writes JSON lines and rotates the file at a size (`server/core/log_file.py`). This reads all files in the
order of writing. A line that is cut or not JSON is shown as it is; a file that rotates while it is followed is read to
its end first; names and messages cannot steer the terminal.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import msgspec

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_choice import durable_home
from serverless_gpu.errors import NotFound
from serverless_gpu.server.core.log_file import KEPT

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LOOK_S = 0.2
_LINE_BYTES_MAX = 1 << 20
_HEAD = ("ts", "level", "logger", "msg", "traceback")


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@click.option("--run", "run_id", default="", metavar="RUN", help="Lines about this run; the beginning of it is enough.")
@click.option(
    "--level", type=click.Choice(_LEVELS, case_sensitive=False), default="DEBUG", help="This level and those above it."
)
@click.option("-n", "--lines", type=click.IntRange(0), default=200, show_default=True, help="The last so many lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they are in the file.")
def server_logs(follow: bool, run_id: str, level: str, lines: int, as_json: bool) -> None:
    """Print the log of this home's server: what its loops did, its requests, and what went wrong."""
    path = durable_home("the log of its server is there").root / "server" / "server.log"
    if not path.exists():
        raise NotFound(f"there is no log of a server at {path}", hint="`sgpu up` starts one; it writes there")

    def is_wanted(line: bytes) -> bool:
        found = _parsed(line)
        if run_id and not str(found.get("run", "")).startswith(run_id):
            return False
        return found.get("level") not in _LEVELS[: _LEVELS.index(level.upper())]

    def show(line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\n")
        for each in (text if as_json else _told(line)).split("\n"):
            say(each)

    followed = FollowedFile(path)
    kept = deque((line for line in _before(path, followed) if is_wanted(line)), maxlen=lines)
    for line in kept:
        show(line)
    if run_id and lines and level.upper() == _LEVELS[0] and not kept and not follow:
        raise NotFound(
            f"no line of {path} is about a run {run_id}",
            hint=f"its oldest lines go as it grows; `sgpu show {run_id}` says what became of a run",
        )
    while follow:
        for line in filter(is_wanted, followed.more()):
            show(line)
        time.sleep(_LOOK_S)


class FollowedFile:
    """The file that is written now, read on from where it was read to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._held = b""

    def more(self) -> Iterator[bytes]:
        """Yield whole lines that were not yielded yet."""
        while True:
            if self._fd < 0 and not self._open():
                return
            yield from self._lines()
            try:
                is_same = os.fstat(self._fd).st_ino == self._path.stat().st_ino
            except FileNotFoundError:  # between two names
                return
            if is_same:
                return
            yield from self._lines()  # the lines before it are in rotated files
            os.close(self._fd)
            self._fd, self._held = -1, b""

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _lines(self) -> Iterator[bytes]:
        while data := os.read(self._fd, _LINE_BYTES_MAX):
            *whole, self._held = (self._held + data).split(b"\n")
            if len(self._held) > _LINE_BYTES_MAX:
                whole, self._held = [*whole, self._held], b""
            yield from whole


def _before(path: Path, followed: FollowedFile) -> Iterator[bytes]:
    """Yield the lines of all files, the oldest first; the follower reads the last file."""
    for number in range(KEPT, 0, -1):
        try:
            with open(f"{path}.{number}", "rb") as file:
                yield from file
        except FileNotFoundError:
            continue
    yield from followed.more()


def _parsed(line: bytes) -> Mapping[str, object]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _told(line: bytes) -> str:
    found = _parsed(line)
    if not found:
        return line.decode("utf-8", "replace").rstrip("\n")
    said = (*_HEAD, "method", "route") if found.get("logger") == "access" else _HEAD  # its message has them
    about = " ".join(f"{name}={value}" for name, value in found.items() if name not in said)
    told = f"{found.get('ts', '')} {found.get('level', '')!s:<7} {found.get('logger', '')}: {found.get('msg', '')}"
    told = (told + (f"  ({about})" if about else "")).replace("\n", "⏎")  # a message is no other line
    return "\n    ".join([told, *str(found.get("traceback", "")).splitlines()])
