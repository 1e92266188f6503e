"""A user's environment with Ray, small enough to be captured in seconds: `python -m … DIRECTORY DISTRIBUTION…`.

It is made by the interpreter that has them, in a process of its own: what is copied is what that one finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.ray.plain_ray import PYTHON
from tests.support.local.small_environment import SmallEnvironment, with_requirements
from tests.support.paths import REPOSITORY

_ROOT = REPOSITORY
_MAKE_S = 120.0


class UserEnvironment:
    """Somebody's environment and project, at a machine of a pool.

    Args:
        directory: where; made.
        environ: variables of that machine.
        names: distributions that it has, and what they need.

    Attributes:
        python: its interpreter.
        project: where its scripts lie.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str], *names: str) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [str(PYTHON), "-m", __name__, str(directory), *names],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=_MAKE_S,
        )
        self.python, self.project = directory / "venv" / "bin" / "python", directory / "project"
        self._environ = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}

    def run(self, script: str, *arguments: str, limit_s: float) -> tuple[str, str]:
        """Run a script of the project; return what it wrote to stdout and stderr."""
        done = subprocess.run(
            [str(self.python), str(self.project / script), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.project,
            env=self._environ,
            check=False,
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir()
    SmallEnvironment(Path(sys.argv[1]), *with_requirements("httpx2", *sys.argv[2:]))
