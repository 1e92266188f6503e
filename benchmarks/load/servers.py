"""A server in a process of its own, in a fresh home: what it holds, what its ticks took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contestants import ContestantFailed, environment
from benchmarks.load.asking import Asker
from serverless_gpu.wire.nodes import InviteAnswer, InviteRequest, JoinAnswer, JoinRequest

_STOP_S = 30.0


class MeasuredServer:
    """A server that answers.

    Attributes:
        url: its address.
        token: the administrator's.
        pid: of its process.
    """

    def __init__(self, home: Path, url: str, pid: int) -> None:
        self.home, self.url, self.pid = home, url, pid
        self.token = (home / "server" / "token").read_text(encoding="ascii").strip()
        self._read = 0
        self._askers: list[Asker] = []

    def asker(self, token: str = "") -> Asker:
        """Return a connection, of the administrator unless another token is given; closed with the server."""
        self._askers.append(Asker(self.url, token or self.token))
        return self._askers[-1]

    def close(self) -> None:
        """Close what was opened here."""
        for asker in self._askers:
            asker.close()

    def node_token(self, name: str) -> str:
        """Return a token for a node of that name, on a machine of its own."""
        invited = self.asker().get("POST", "/nodes/invite", InviteRequest(name=name), answer=InviteAnswer)
        request = JoinRequest(name=name, machine=f"machine-{name}", instance="", ray=False)
        return self.asker(invited.token).get("POST", "/agents/join", request, answer=JoinAnswer).token

    def memory_mb(self, which: str = "VmRSS") -> float:
        """Return what it holds now, or with `VmHWM` the most it ever held."""
        return memory_mb(self.pid, which)

    def ticks(self) -> dict[str, list[float]]:
        """Return what the ticks since the last call took, milliseconds by loop."""
        found: dict[str, list[float]] = defaultdict(list)
        text = (self.home / "ticks").read_text(encoding="ascii")
        lines, self._read = text[self._read :].splitlines(), len(text)
        for line in lines:
            name, _, took = line.partition(" ")
            found[name].append(float(took))
        return found


@contextlib.contextmanager
def measured_server(home: Path, *options: str, node: bool = False, **variables: str) -> Iterator[MeasuredServer]:
    """Start a server; it ends with the block.

    Args:
        home: its home; made when it is not there.
        options: of `sgpu up`.
        node: whether this machine is a node of it.
        variables: of its environment.

    Raises:
        ContestantFailed: it did not start.
    """
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.load.measured", str(home / "ticks"), "up", "--port", "0", *options]
    command += () if node else ("--no-node",)
    environ = {**environment(), **variables, "SERVERLESS_GPU_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            url = line.rpartition(" ")[2].strip()
            if not url.startswith("http"):
                raise ContestantFailed(f"the server did not start: {line.strip()}")
            with contextlib.closing(MeasuredServer(home, url, process.pid)) as server:
                yield server
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def memory_mb(pid: int, which: str = "VmRSS") -> float:
    """Return what a process holds, MB; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(which):
                return int(line.split()[1]) / 1000
    return 0.0


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, seconds; 0 when it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
