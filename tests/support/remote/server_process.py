"""The real server as a process of its own, for tests that kill it or need settings that no option reaches.

python -m tests.support.remote.server_process HOME WORD…      prints "ready URL" once it answers

WORD   option=value            as on the command line of `sgpu up`, or as `server.toml` has it: port=7878, node=false
       Settings.field=value    a field of `Settings`
       module.CONSTANT=value   a number of a module of the server, such as `claim.TTL_S`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from serverless_gpu.ambient import machine
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.lazy_import import load
from serverless_gpu.server.core.settings import Settings, read_settings
from serverless_gpu.server.process import UvicornServer, serve

_ENDED_S = 60.0


class ServerProcess:
    """A server of a home, started, killed and started again.

    Args:
        home: the home.
        words: what it is told at each start.
        around: a command in whose surroundings it runs, such as `ip netns exec NAME`.

    Attributes:
        url: where it was the last time it answered.
    """

    def __init__(self, home: Path, *words: str, around: Sequence[str] = ()) -> None:
        self.url = ""
        self._home = home
        self._words = words
        self._around = around
        self._process: subprocess.Popen[str] | None = None

    def start(self, *words: str, environ: Mapping[str, str] | None = None, errors: IO[bytes] | None = None) -> None:
        """Start it and wait until it answers; see `spawn`."""
        self.spawn(*words, environ=environ, errors=errors)
        said = self.line()
        assert said.startswith("ready "), f"the server did not start; see {self._home / 'server' / 'server.log'}"
        self.url = said.split()[1]

    def spawn(self, *words: str, environ: Mapping[str, str] | None = None, errors: IO[bytes] | None = None) -> None:
        """Start it and do not wait.

        Args:
            words: what it is told this time, after what it always is.
            environ: variables beside ours.
            errors: where what it says to `stderr` goes.
        """
        program = [sys.executable, "-m", "tests.support.remote.server_process", str(self._home)]
        self._process = subprocess.Popen(
            [*self._around, *program, *self._words, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "SERVERLESS_GPU_HOME": str(self._home), **(environ or {})},
        )

    def line(self) -> str:
        """Return the next line it prints; "" when it has ended."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait until it has ended; return its exit status."""
        assert self._process is not None and self._process.stdout is not None
        status = self._process.wait(_ENDED_S)
        self._process.stdout.close()
        self._process = None
        return status

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it, if it runs, and wait until it is gone."""
        if self._process is not None:
            self.send(number)
            self.ended()


def main(home: Path, words: Sequence[str]) -> None:
    """Serve until a signal."""
    said = {name: _value(text) for name, _, text in (word.partition("=") for word in words)}
    settings = read_settings(home, {name: value for name, value in said.items() if "." not in name})
    for name, value in said.items():
        module, _, constant = name.rpartition(".")
        if module == Settings.__name__:
            settings = msgspec.structs.replace(settings, **{constant: value})
        elif module:
            there = load(f"serverless_gpu.server.{module}")
            assert isinstance(getattr(there, constant), int | float), f"{name} is no number of the server's"
            setattr(there, constant, value)

    def ready(url: str, _running: UvicornServer) -> None:
        token = (settings.directory / "token").read_text(encoding="ascii").strip()
        write_profile(home, ServerProfile(url=url, token=token, embedded=True, machine=machine()))
        print(f"ready {url}", flush=True)

    serve(settings, ready=ready)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
