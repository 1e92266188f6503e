"""`env="snapshot"` for a user without rights: user namespaces, the stem's own, links. Root becomes nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.local.observe import processes_of, wait_for
from tests.support.local.small_environment import SOURCE, SmallEnvironment

NOBODY = 65534
SYSTEM_PYTHON = Path("/usr/bin/python3.11")  # root's own may lie where nobody else can look
PROGRAM = """
import os, sys
from serverless_gpu import distributed

def work():
    import toy
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return [toy.VALUE, os.getuid(), os.getgid(), int(status["CapEff"], 16), "view" in toy.__file__]

run = distributed(gpus=1, gpu_type="CPU", env="snapshot", quiet=True)(work).submit()
receipt = run.receipt(60)
print([*run.results(60)[0], receipt.warm, receipt.environment])
"""

STOP = """
import os
from pathlib import Path
from serverless_gpu.testing import stop_agent
stop_agent(Path(os.environ["SERVERLESS_GPU_HOME"]))
"""


class User:
    """Somebody without rights, with an environment and a project."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.environment = SmallEnvironment(directory, python=str(base_python()))
        self.environment.write("go.py", PROGRAM)
        self._source(directory)
        self.home.mkdir()
        self.install("one")
        self._give()

    def install(self, value: str) -> None:
        """Install a version of a package that no interpreter imports by itself."""
        self.environment.install("toy", "1.0", {"toy/__init__.py": f"VALUE = {value!r}\n"})
        self._give()

    def run(self, **environ: str) -> list[object]:
        """Run the program; return what the rank saw, whether it was warm, and what the receipt says."""
        return list(eval(self.execute("go.py", **environ)))

    def execute(self, *arguments: str, **environ: str) -> str:
        """Run the user's Python; return what it writes."""
        variables = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "SERVERLESS_GPU_HOME": str(self.home / "sg"),
            "SERVERLESS_GPU_FAKE": "H100:8",
            **environ,
        }
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*drop, str(self.environment.python), *arguments],
            cwd=self.environment.project,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _source(self, directory: Path) -> None:
        """Copy this package to where everybody can read it."""
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE / "serverless_gpu", directory / "source" / "serverless_gpu", ignore=ignore)
        (self.environment.site / "source.pth").write_text(f"{directory / 'source'}\n")

    def _give(self) -> None:
        if os.geteuid() == 0:
            for directory, _, files in os.walk(self.home.parent):
                for path in (directory, *(os.path.join(directory, name) for name in files)):
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def base_python() -> Path:
    """Return an interpreter that the user can execute, of the version whose extensions the test copies."""
    return SYSTEM_PYTHON if os.geteuid() == 0 else Path(sys.executable)


@pytest.fixture
def user() -> Iterator[User]:
    if os.geteuid() == 0 and not (SYSTEM_PYTHON.exists() and shutil.which("setpriv")):
        pytest.skip(f"root needs {SYSTEM_PYTHON} and setpriv to become somebody who can execute Python")
    directory = Path(tempfile.mkdtemp(prefix="sg-user-", dir="/tmp"))
    directory.chmod(0o755)
    someone = User(directory)
    yield someone
    someone.execute("-c", STOP)
    wait_for(lambda: not processes_of(someone.home / "sg"), "everything of the user has ended")
    shutil.rmtree(directory)


def test_a_user_without_rights_gets_mounts_and_keeps_the_interpreter_when_a_package_changes(user: User) -> None:
    uid, gid = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    assert user.run()[:6] == ["one", uid, gid, 0, True, False]
    assert user.run()[:6] == ["one", uid, gid, 0, True, True]
    user.install("two")
    said = user.run()
    # Mounted over the zygote's by a stem, one user namespace deeper.
    assert said[:6] == ["two", uid, gid, 0, True, True], said


@pytest.mark.long
def test_a_user_without_rights_gets_links(user: User) -> None:
    for warm in (False, True):
        said = user.run(SERVERLESS_GPU_RESTORE="links")
        assert (said[0], said[4], said[5]) == ("one", False, warm)
        assert golden("snapshots.snapshot_changes.changed-run") not in str(said[6])
