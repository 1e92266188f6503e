"""`sgpu up` with its own node, a second node, four clients, and ways to kill each of their processes.

    server home ── sgpu up ─ engine keeps ─▶ uplink ─ agent ─ supervisors …     node of the server's machine, 2 GPUs
    second home ── what an engine does    ─▶ uplink ─ agent ─ supervisors …     node n2, 2 GPUs
    server home ── caller.py × 4          in an environment of their own

Whatever ends is started again at once: the server and clients here, the uplink of n2 here, too, as its engine would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.testing import agent_status, stop_agent
from serverless_gpu.wire.connection import Connection
from tests.e2e.chaos import plan
from tests.e2e.chaos.verdict import Strike
from tests.support.invited import node_token
from tests.support.local.observe import Process, nothing_of_a_run, processes_of, wait_for
from tests.support.local.small_environment import SmallEnvironment, with_requirements
from tests.support.ports import own_port
from tests.support.remote.machines import Machine

NODE_GPUS = 2
ENDED_S = 240.0
"""How long runs and clients may take to end after the last fault: `partition_grace` and a minute, twice."""
VICTIM_S = 20.0
"""How long a fault waits for a process of its kind."""
_SETTINGS = """
partition_grace = "1m"
mlflow = false

[queue]
preempt_after = "1s"
"""


class Cluster:
    """A server, two nodes and four clients.

    Args:
        home: of the server; a short path.
        database: url, or "" for SQLite in the home.
        seed: of the clients' calls.

    Attributes:
        where: what clients and ranks leave behind.
        strikes: what was done to whom, in order.
    """

    def __init__(self, home: Path, database: str, seed: int) -> None:
        self.home = home
        self.where = home / "chaos"
        self.strikes: list[Strike] = []
        self.url = ""
        self._seed = seed
        self._words = ["--port", str(own_port()), *(("--database", database) if database else ())]
        self._environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_FAKE": f"H100:{NODE_GPUS}"}
        self._server: subprocess.Popen[str] | None = None
        self._second: Machine | None = None
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        self._environment: SmallEnvironment | None = None

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, and wait until both nodes are there."""
        (self.where / "signs").mkdir(parents=True)
        (self.home / "server").mkdir(mode=0o700, exist_ok=True)
        (self.home / "server.toml").write_text(_SETTINGS)
        self._start_server()
        self._second = Machine(UplinkProfile(url=self.url, token="", name="n2"), gpus=NODE_GPUS)
        token = (self.home / "server" / "token").read_text(encoding="ascii").strip()
        with contextlib.closing(Connection(self.url, token, patience_s=60)) as administrator:
            node = node_token(administrator, "n2", self._second.home)
        self._second.write(UplinkProfile(url=self.url, token=node, name="n2"))
        self._second.start()
        wait_for(lambda: self._second is not None and "joined" in self._second.log(), "n2 has joined")
        self._environment = SmallEnvironment(self.home / "callers", *with_requirements("httpx2"))
        package = self._environment.project / "tests" / "e2e" / "chaos"
        package.mkdir(parents=True)
        for module in ("plan.py", "work.py", "caller.py"):
            (package / module).write_text(Path(__file__).with_name(module).read_text())
        for client in range(plan.CLIENTS):
            self._start_client(client)

    def enough(self) -> list[str]:
        """Have clients begin nothing more; wait until they have ended and say what they complained about."""
        (self.where / "enough").touch()
        complaints = []
        limit = time.monotonic() + ENDED_S
        for client, process in self._clients.items():
            try:
                status = process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                complaints.append(f"client {client} still waits for its runs after {ENDED_S:g} s")
                continue
            if status:
                text = (self.where / f"client{client}.stderr").read_text()[-2000:]
                complaints.append(f"client {client} ended with status {status}: {text}")
        return complaints

    def end(self) -> None:
        """End every process of the cluster."""
        for process in self._clients.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._second is not None:
            self._second.end()
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)
            self._server.send_signal(signal.SIGTERM)
            self._server.wait(60)
        self._close_server()
        start_stop.stop_all(Home(self.home))
        stop_agent(self.home)
        wait_for(lambda: not processes_of(self.home), "no process of the server's node is left")

    # --- faults -------------------------------------------------------------------------------------------------------

    def strike(self, fault: plan.Fault) -> None:
        """Do to its victim what a fault says, as soon as there is such a victim; clients see to that."""
        limit = time.monotonic() + VICTIM_S
        while True:
            at_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            target = getattr(self, f"_strike_{fault.victim.replace('-', '_')}")(fault)
            if target is not None:
                self.strikes.append(Strike(at_ns=at_ns, victim=fault.victim, run=target))
            if target is not None or time.monotonic() > limit:
                return
            _pause(0.02)

    def _strike_server(self, fault: plan.Fault) -> str:
        assert self._server is not None
        self._server.kill()
        self._server.wait()
        self._close_server()
        _pause(fault.lasts_s)
        self._start_server()
        return ""

    def _strike_server_stopped(self, fault: plan.Fault) -> str:
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        _pause(fault.lasts_s)
        self._server.send_signal(signal.SIGCONT)
        return ""

    def _strike_uplink(self, fault: plan.Fault) -> str | None:
        assert self._second is not None
        if fault.pick < 0.5:
            self._second.uplink().kill()
            self._second.start()
            return ""
        found = start_stop.running(Home(self.home), self.home / "server" / "node.json")
        if found is None:
            return None
        Process(found.pid).kill()  # the server's engine starts another
        return ""

    def _strike_agent(self, fault: plan.Fault) -> str | None:
        status = agent_status(self._homes()[fault.pick < 0.5])
        if status is None:
            return None
        Process(status.pid).kill()
        return ""

    def _strike_supervisor(self, fault: plan.Fault) -> str | None:
        attempts = [
            attempt
            for home in self._homes()
            if (status := agent_status(home)) is not None
            for attempt in status.attempts
            if attempt.pid
        ]
        if not attempts:
            return None
        attempt = attempts[int(fault.pick * len(attempts))]
        Process(attempt.pid).kill()
        return attempt.run_id

    def _strike_stem(self, fault: plan.Fault) -> str | None:
        return self._strike_rank(fault, "stem")

    def _strike_rank(self, fault: plan.Fault, which: str = "pid") -> str | None:
        ranks = [(run, place) for run, place, has_ended in self._ranks() if not has_ended and _has_stem(place)]
        if not ranks:
            return None
        run, place = ranks[int(fault.pick * len(ranks))]
        Process(place[which]).kill()
        return run

    def _strike_client(self, fault: plan.Fault) -> str:
        client = int(fault.pick * plan.CLIENTS)
        self._clients[client].kill()
        self._clients[client].wait()
        self._start_client(client)
        return ""

    # --- what there is ------------------------------------------------------------------------------------------------

    def orphans(self) -> list[str]:
        """Wait until nothing of any run is left on the nodes; return what is."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: all(map(nothing_of_a_run, self._homes())), "nothing of a run is left", limit_s=ENDED_S)
        left = [f"something of a run is left in {home}" for home in self._homes() if not nothing_of_a_run(home)]
        return left + [f"rank {place['pid']} of {run} is still there" for run, place, _ in self._ranks()]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `sgpu` as the administrator of the server."""
        program = [sys.executable, "-m", "serverless_gpu.cli", *words]
        database = {"SGPU_DATABASE": self._words[-1]} if "--database" in self._words else {}
        return subprocess.run(
            program, env={**self._environ, **database}, capture_output=True, text=True, timeout=120, check=False
        )

    def _homes(self) -> list[Path]:
        assert self._second is not None
        return [self.home, self._second.root]

    def _ranks(self) -> list[tuple[str, dict[str, int], bool]]:
        """Return ranks that live, and of each whether it has reached the end of user code."""
        found = []
        for path in sorted((self.where / "signs").iterdir()):
            lines = path.read_text().split("\n")
            if len(lines) < 2:
                continue
            place = json.loads(lines[0])
            if _is_there(place):
                found.append((path.name.split(".")[1], place, lines[-2] == "end"))
        return found

    def _start_server(self) -> None:
        errors = (self.home / "server.stderr").open("ab")
        program = [sys.executable, "-m", "serverless_gpu.cli", "up", *self._words]
        self._server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environ)
        errors.close()
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert " at http://" in line, f"{line!r}: {(self.home / 'server.stderr').read_text()[-2000:]}"
        self.url = "http" + line.split(" at http")[1].split()[0].rstrip(",;.")

    def _close_server(self) -> None:
        if self._server is not None and self._server.stdout is not None:
            self._server.stdout.close()

    def _start_client(self, client: int) -> None:
        assert self._environment is not None
        variables = {name: value for name, value in self._environ.items() if not name.startswith("PYTHON")}
        with (self.where / f"client{client}.stderr").open("ab") as errors:
            self._clients[client] = subprocess.Popen(
                [
                    str(self._environment.python),
                    "-m",
                    "tests.e2e.chaos.caller",
                    str(self._seed),
                    str(client),
                    str(self.where),
                ],
                cwd=self._environment.project,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _fields(pid: int) -> list[str]:
    """Return what the kernel says of a process after its name, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _is_there(place: Mapping[str, int]) -> bool:
    """Return whether the process that left a sign is there: it began at that tick, and is no zombie."""
    fields = _fields(place["pid"])
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == place["started"]


def _has_stem(place: Mapping[str, int]) -> bool:
    """Return whether a rank's stem is its parent still."""
    fields = _fields(place["pid"])
    return bool(fields) and int(fields[1]) == place["stem"]
