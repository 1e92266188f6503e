"""A node whose agent, uplink and supervisors use an account without rights, beside a spawner of root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from serverless_gpu.node.inside import own_uid
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation import SPAWNER
from serverless_gpu.node.processes.process_tree import end_cgroup, mount_point, own_place, remove_cgroup
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.server.operations.systemd_units import CAPABILITIES
from tests.support.local.observe import Process, processes_of, wait_for
from tests.support.remote.machines import Machine

ACCOUNT = pwd.getpwnam("nobody")
REPOSITORY = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def running_spawner(place: Path) -> Iterator[Path]:
    """Run `sgpu node spawner` with the capabilities of its unit, and yield the path of its socket."""
    path = place / "spawner.sock"
    kept = [f"+{name.removeprefix('CAP_').lower()}" for name in CAPABILITIES]
    command = [
        "setpriv",
        "--bounding-set",
        ",".join(["-all", *kept]),
        "--no-new-privs",
        sys.executable,
        "-m",
        "serverless_gpu.cli",
    ]
    words = ["node", "spawner", "--account", ACCOUNT.pw_name, "--socket", str(path)]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serves nobody" in process.stdout.readline()
            yield path
        finally:
            process.terminate()
            process.wait()


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

    def end(self) -> None:
        end_cgroup(self.cgroup)
        wait_for(lambda: remove_cgroup(self.cgroup), "the cgroup of the account is removed")
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(f"/tmp/serverless_gpu-{self.uid}", ignore_errors=True)

    def _process(self, module: str) -> Process:
        """Return a process of the node. Only the account may use the sockets by which `Machine` finds it."""
        lines = wait_for(lambda: [line for line in processes_of(self.root) if module in line], f"{module} runs")
        return Process(int(lines[0].partition(":")[0]))
