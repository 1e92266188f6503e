"""The real server as a process of its own, as `sgpu up` runs it, for tests that kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from serverless_gpu.ambient import machine
from serverless_gpu.client.remote.profile import Profile, write_profile
from serverless_gpu.server.serving import Running, serve
from serverless_gpu.server.settings import read_settings

_READY_S = 60.0


class ServerProcess:
    """A server of a home, started, killed and started again.

    Args:
        home: the home.
        options: as on the command line of `sgpu up`.
    """

    def __init__(self, home: Path, **options: str) -> None:
        self._home = home
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        words = [f"{name}={value}" for name, value in self._options.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.server_process", str(self._home), *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SERVERLESS_GPU_HOME": str(self._home)},
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "ready\n", f"the server did not start; see {self._home / 'server' / 'server.log'}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_READY_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def main(home: str, *words: str) -> None:
    """Serve until a signal."""
    options = dict(word.split("=", 1) for word in words)
    settings = read_settings(Path(home), dict(options))

    def ready(url: str, _running: Running) -> None:
        token = (settings.directory / "token").read_text(encoding="ascii").strip()
        write_profile(Path(home), Profile(url=url, token=token, embedded=True, machine=machine()))
        print("ready", flush=True)

    serve(settings, ready=ready)


if __name__ == "__main__":
    main(*sys.argv[1:])
