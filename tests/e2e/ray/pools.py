"""Machines of a pool as a person makes one: `sgpu up --engine ray` on the first, `sgpu join` on each other, a real Ray.

Each is a home and an address of the loopback interface.

    with Pool("A10:1") as pool:
        pool.join("two", "H100:2")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from serverless_gpu.engines.ray import ray_keeper, ray_machine, start_arguments
from serverless_gpu.engines.ray.ray_keeper import end_processes, marked_pids
from serverless_gpu.node.inside.linux import descendants
from tests.e2e.ray.plain_ray import PYTHON
from tests.support.local.observe import wait_for
from tests.support.ports import own_port

START_S = 180.0
_blocks = iter(range(12_000 + os.getpid() % 100 * 200, 32_000, start_arguments.PORTS))


class Machine:
    """A machine: a home, and commands of it.

    Args:
        name: its name.
        fake: what it offers.
        around: a command in whose surroundings its commands run, such as `ip netns exec NAME`.

    Attributes:
        home: `$SERVERLESS_GPU_HOME`.
        port: the first of its ports.
    """

    def __init__(self, name: str, fake: str, around: Sequence[str] = ()) -> None:
        self.name = name
        self._around = tuple(around)
        self.home = Path(tempfile.mkdtemp(prefix=f"sg-{name}-", dir="/tmp"))
        self.port = next(base for base in _blocks if ray_machine.taken_port(base, "127.0.0.2") is None)
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SGPU_", "SERVERLESS_GPU_"))
        }
        self.environ = {
            **kept,
            "SERVERLESS_GPU_HOME": str(self.home),
            "SERVERLESS_GPU_SOCKETS": str(self.home / "s"),
            "SERVERLESS_GPU_FAKE": fake,
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self._programs: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, python: Path | str = PYTHON) -> subprocess.Popen[bytes]:
        """Start a command of ours; what it says is in `said`."""
        with open(self.home / "said", "wb") as said:
            process = subprocess.Popen(
                [*self._around, str(python), "-m", "serverless_gpu.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=self.environ,
                cwd=self.home,
            )
        self._started.append(process)
        return process

    def wait_said(self, text: str, process: subprocess.Popen[bytes]) -> None:
        """Wait until the last command has said something."""

        def has() -> bool:
            there = text in self.said
            assert there or process.poll() is None, self.said
            return there

        wait_for(has, f"it says {text!r}", limit_s=START_S)

    @property
    def said(self) -> str:
        return (self.home / "said").read_text(encoding="utf-8", errors="replace")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours."""
        argv = [*self._around, str(PYTHON), "-m", "serverless_gpu.cli", *arguments]
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=START_S, check=False)

    def program(self, text: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program of a user."""
        path = self.home / "program.py"
        path.write_text(textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            env=self.environ,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._programs.append(process)
        return process

    def rays(self) -> list[int]:
        """Return the processes of its Ray."""
        return [
            pid for place in ("server/ray", "ray") for pid in marked_pids(ray_machine.directory_of(self.home / place))
        ]

    def lose(self) -> None:
        """Kill all that there is of it: Ray, agent, supervisors, ranks, as when a machine loses its power."""

        end_of_machine(self.home, self.rays)
        for process in self._started:
            process.poll()

    def end(self) -> None:
        """End everything of it, and remove it."""
        self.lose()
        for process in self._started:
            process.wait(60)
        for program in self._programs:
            program.communicate(timeout=60)
        for place in ("server/ray", "ray"):
            remove_directory_of_ray(self.home / place)
        shutil.rmtree(self.home, ignore_errors=True)


class Pool:
    """A first machine at 127.0.0.2, where the server and Ray's head are, and others that join it.

    Args:
        fake: what the first one offers.
        variables: of all machines.

    Attributes:
        first: the first machine.
        nodes: all machines by name, the first one too.
    """

    def __init__(self, fake: str, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self.first = Machine("one", fake)
        self.first.environ.update(self._variables)
        self.nodes = {"one": self.first}
        self._joins: dict[str, subprocess.Popen[bytes]] = {}
        self._words = ("--port", str(own_port()), "--ray-port", str(self.first.port))
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Pool:
        try:
            self.up()
        except BaseException:
            self.first.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, machine in self.nodes.items():
            if name != "one":
                machine.end()
        self.first.run("stop")
        self.first.end()

    def up(self) -> subprocess.Popen[bytes]:
        """Start the server, and the head if there is none, and wait until both are there."""
        words = ("up", "--engine", "ray", "--node-address", "127.0.0.2", *self._words)
        self._server = self.first.start(*words)
        self.first.wait_said("Ray at 127.0.0.2:", self._server)
        return self._server

    def down(self) -> None:
        """End the server, as Ctrl-C does; Ray goes on."""
        assert self._server is not None
        self._server.send_signal(signal.SIGTERM)
        assert self._server.wait(START_S) == 0

    @contextlib.contextmanager
    def head_held_down(self) -> Iterator[None]:
        """Have no head of Ray's for a while: it is killed, and what would start it again is held."""
        directory = self.first.home / "server" / "ray"
        kept = ray_keeper.running(directory)
        assert kept is not None
        os.kill(kept.pid, signal.SIGSTOP)
        try:
            end_processes(ray_machine.directory_of(directory))
            yield
        finally:
            os.kill(kept.pid, signal.SIGCONT)

    def join(self, name: str, fake: str) -> Machine:
        """Have a machine join, and wait until its agent is there."""
        machine = self.nodes[name] = Machine(name, fake)
        machine.environ.update(self._variables)
        self.join_again(name)
        return machine

    def join_again(self, name: str) -> None:
        """Run `sgpu join` on a machine, and wait until the server counts on it."""
        machine = self.nodes[name]
        path = machine.home / "join.json"
        if not path.exists():  # one that has joined before joins with a token of its own
            self.first.run("node", "invite", name, "--out", str(path))
        number = list(self.nodes).index(name) + 2
        place = ("--name", name, "--node-address", f"127.0.0.{number}", "--ray-port", str(machine.port))
        self._joins[name] = machine.start("join", "127.0.0.2", "--token-file", str(path), *place)
        machine.wait_said(" to the pool of ", self._joins[name])
        wait_for(
            lambda: name in self.first.run("node", "list").stdout, f"the agent of {name} is there", limit_s=START_S
        )


def end_of_machine(home: Path, rays: Callable[[], list[int]] = list) -> None:
    """Kill all that names a home, in its words or in its variables, and what is below, until nothing is left.

    Args:
        home: the machine's.
        rays: what its Ray is.
    """
    name = os.fsencode(home)

    def gone() -> bool:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
        found = {pid for pid in pids if name in _read(pid, "cmdline") or name in _read(pid, "environ")} | {*rays()}
        found |= {below for pid in found for below in descendants(pid)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_for(gone, f"nothing of {home} is left", limit_s=60)


def remove_directory_of_ray(place: Path) -> None:
    """Remove what Ray had in /tmp, whose files of ours are in a place."""
    shutil.rmtree(Path(ray_machine.directory_of(place)).parent, ignore_errors=True)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
