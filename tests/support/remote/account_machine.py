"""A node whose agent, uplink and supervisors use an account without rights, beside a spawner of root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from serverless_gpu.client.agent import agent_status
from serverless_gpu.node.base.protocol import Status
from serverless_gpu.node.inside import own_uid
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation import SPAWNER
from serverless_gpu.node.processes.process_tree import end_cgroup, mount_point, own_place, remove_cgroup
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile
from tests.support.local.observe import Process, processes_of, wait_for
from tests.support.node.served_spawner import with_capabilities
from tests.support.remote.machines import Machine

ACCOUNT = pwd.getpwnam("nobody")
REPOSITORY = Path(__file__).resolve().parents[3]


class RunningSpawner:
    """`sgpu node spawner` with the capabilities of its unit, for `ACCOUNT`.

    Args:
        place: directory of the socket.
        words: further options of the command.
    """

    def __init__(self, place: Path, *words: str) -> None:
        self.path = place / "spawner.sock"
        self._words = words
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RunningSpawner:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> None:
        """Start the spawner, and wait until it serves."""
        words = ["node", "spawner", "--account", ACCOUNT.pw_name, "--socket", str(self.path), *self._words]
        command = [*with_capabilities(), sys.executable, "-m", "serverless_gpu.cli", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert "serves nobody" in self._process.stdout.readline()

    def end(self, number: signal.Signals) -> None:
        """End the spawner's process, but not its workers."""
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class AccountMachine(Machine):
    """A node of an account, in a cgroup that belongs to the account, as with Delegate=yes of systemd."""

    def __init__(self, profile: UplinkProfile, *, gpus: int, spawner: Path | None, uid: int = ACCOUNT.pw_uid) -> None:
        super().__init__(profile, gpus=gpus)
        self.uid = uid
        self._environ |= (
            {"HOME": str(self.root)} if spawner is None else {SPAWNER: str(spawner), "HOME": str(self.root)}
        )
        root, place = mount_point("cgroup2", ""), own_place("")
        assert root is not None
        assert place is not None
        self.cgroup = root / place.lstrip("/") / f"sgpu-account-{self.root.name}"
        self.cgroup.mkdir()
        for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(self.cgroup / name, uid, uid)

    def start(self) -> None:
        """Start the uplink as the account. Only this account sees the interpreter below a closed home."""
        for path in (self.root, *self.root.rglob("*")):
            os.chown(path, self.uid, self.uid, follow_symlinks=False)
        self.execute(lambda: start_stop.ensure(self.home, self._profile, self._environ))

    def execute(self, work: Callable[[], object]) -> None:
        """Call a function in a process of the account."""
        with tempfile.TemporaryDirectory() as at:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    (self.cgroup / "cgroup.procs").write_text("0")
                    self.become(View(self.uid, at, str(self.root), sys.executable, [str(REPOSITORY)], []))
                    os.environ.update(self._environ)
                    work()
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0

    def become(self, view: View) -> None:
        """Make this process a process of the account, with the files that `view` shows."""
        own_uid.enter(view, ())

    def uplink(self) -> Process:
        return self._process("serverless_gpu.node.uplink.process")

    def agent(self) -> Process:
        return self._process("serverless_gpu.node.agent.agent")

    def status(self) -> Status:
        """Return the status of the agent, which only the account may ask."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(ACCOUNT.pw_gid, ACCOUNT.pw_gid, ACCOUNT.pw_gid)
                os.setresuid(ACCOUNT.pw_uid, ACCOUNT.pw_uid, ACCOUNT.pw_uid)
                os.write(writing, msgspec.json.encode(agent_status(self.root)))
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as answer:
            found = msgspec.json.decode(answer.read(), type=Status)
        os.waitpid(pid, 0)
        return found

    def end(self) -> None:
        end_cgroup(self.cgroup)
        wait_for(lambda: remove_cgroup(self.cgroup), "the cgroup of the account is removed")
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(f"/tmp/serverless_gpu-{self.uid}", ignore_errors=True)

    def _process(self, module: str) -> Process:
        """Return a process of the node. Only the account may use the sockets by which `Machine` finds it."""
        lines = wait_for(lambda: [line for line in processes_of(self.root) if module in line], f"{module} runs")
        return Process(int(lines[0].partition(":")[0]))
