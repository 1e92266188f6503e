"""A command on a terminal of its own: what it says there, and what is typed.

with on_terminal("login", server.url, home=home) as terminal:
    code = terminal.wait_for(r"[A-Z]{4}-[A-Z]{4}")
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 60


class Terminal:
    """A running command.

    Attributes:
        text: everything it has said.
    """

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.text = ""
        self._master = master

    def wait_for(self, pattern: str) -> str:
        """Return the first match in what the command says."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = re.search(pattern, self.text)
            if found is not None:
                return found[0]
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.text!r}"
            ready, _, _ = select.select([self._master], [], [], 1.0)
            if ready:
                try:
                    self.text += os.read(self._master, 65536).decode("utf-8", "replace")
                except OSError:  # The command has ended.
                    assert re.search(pattern, self.text), f"{pattern!r} is not in {self.text!r}"

    def type(self, text: str) -> None:
        """Type text, with its line end."""
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        """Return the exit status; read what is said until then."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the command goes on: {self.text!r}"
            self._read()
        self._read()
        return self.process.returncode

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while select.select([self._master], [], [], 0.1)[0]:
                data = os.read(self._master, 65536)
                if not data:
                    return
                self.text += data.decode("utf-8", "replace")


@contextlib.contextmanager
def on_terminal(*arguments: str, home: Path, **environ: str) -> Iterator[Terminal]:
    """Run `sgpu` with a terminal and without a screen."""
    master, slave = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    process = subprocess.Popen(
        [sys.executable, "-m", "serverless_gpu.cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**kept, "SERVERLESS_GPU_HOME": str(home), **environ},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
