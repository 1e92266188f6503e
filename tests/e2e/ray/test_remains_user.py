"""`ray_launch` of a user without rights: a pid namespace in a user namespace, nothing left. Root becomes nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import serverless_gpu
from tests.e2e.ray.launched import Launched
from tests.e2e.ray.plain_ray import PYTHON
from tests.support.golden import golden
from tests.support.local.observe import processes_of, wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(400)]

NOBODY = 65534
SYSTEM_PYTHON = Path(f"/usr/bin/python{sysconfig.get_python_version()}")  # root's own may lie where nobody can look
STOP = """
import os
from pathlib import Path
from serverless_gpu.testing import stop_agent
stop_agent(Path(os.environ["SERVERLESS_GPU_HOME"]))
"""


class User:
    """Somebody without rights, with a home.

    Attributes:
        home: of their runs.
        where: a directory they may write to.
        command: runs Python as them.
        environ: what their Python finds the packages by.
    """

    def __init__(self, directory: Path) -> None:
        self.home, self.where = directory / "home", directory / "where"
        for path in (self.home, self.where):
            path.mkdir(mode=0o700)
        self.command: tuple[str, ...] = (str(PYTHON),)
        packages = [str(Path(serverless_gpu.__file__).parents[1])]
        if os.geteuid() == 0:
            drop = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
            self.command = (*drop, str(SYSTEM_PYTHON))
            within = f"lib/python{sysconfig.get_python_version()}/site-packages"
            packages += [str(PYTHON.parents[1] / within), sysconfig.get_path("purelib")]
            for path in (self.home, self.where):
                os.chown(path, NOBODY, NOBODY)
        self.environ = {
            "PYTHONPATH": os.pathsep.join(packages),
            "HOME": str(self.home),
            "SERVERLESS_GPU_HOME": str(self.home / "sg"),
            "SERVERLESS_GPU_FAKE": "H100:2",
            "SERVERLESS_GPU_PREWARM": "0",
        }

    def execute(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program of Python's as them."""
        return subprocess.run(
            [*self.command, "-c", program],
            cwd=self.where,
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def user() -> Iterator[User]:
    if os.geteuid() == 0 and not (SYSTEM_PYTHON.exists() and shutil.which("setpriv")):
        pytest.skip(f"root needs {SYSTEM_PYTHON} and setpriv to become somebody who can execute Python")
    directory = Path(tempfile.mkdtemp(prefix="sg-user-", dir="/tmp"))
    directory.chmod(0o755)
    someone = User(directory)
    able = someone.execute("import ray, serverless_gpu")
    if able.returncode:
        pytest.skip(f"another user cannot import what is installed here: {able.stderr.splitlines()[-1:]}")
    yield someone
    someone.execute(STOP)
    wait_for(lambda: not processes_of(someone.home / "sg"), "everything of the user has ended")
    shutil.rmtree(directory)


def test_nothing_is_left_of_a_run_of_a_user_without_rights(user: User) -> None:
    call = Launched(user.home / "sg", user.where, "stay", environ=user.environ, command=user.command)
    try:
        told = call.ready()
        assert told["environ"]["HOME"] == str(user.home)
        owners = {os.stat(f"/proc/{who.pid}").st_uid for who in call.footprint.processes}
        assert owners == {NOBODY if os.geteuid() == 0 else os.getuid()}
        assert call.footprint.namespaces or golden("ray.remains_user.pid-namespace-own") in call.output()
        assert all(listener.private for listener in call.footprint.listeners.values())
        call.go()
        assert call.ended() == {"results": ["done"]}
        call.nothing_left()
    finally:
        call.close()
