"""Helpers of the tests of server process that other tests use as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from serverless_gpu.wire.connection import Connection

_PROGRAM = """
import sys
import time
from pathlib import Path
from serverless_gpu.server.process import serve
from serverless_gpu.server.core.settings import read_settings
settings = read_settings(Path(sys.argv[1]), {"node": False})
serve(settings, ready=lambda url, running: print(url, time.process_time(), flush=True))
"""


class Process:
    """A server in a process of its own.

    Attributes:
        url: its address.
        ready_s: processor time until it answered; what a clock says depends on what else runs here.
    """

    def __init__(self, home: Path) -> None:
        program = [sys.executable, "-c", _PROGRAM, str(home)]
        self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url, ready_s = self._process.stdout.readline().split()
        self.ready_s = float(ready_s)
        self.token = (home / "server" / "token").read_text().strip()
        self.connection = Connection(self.url, self.token, patience_s=60)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, wait, and return the exit status."""
        self.connection.close()
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        status = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status
