"""macOS as a client: commands that ask a server work there, by a recorded description of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.client.remote.profile import find_profile
from tests.support.paths import REPOSITORY
from tests.support.remote.commands import start


@pytest.mark.slow
def test_23B13_commands_on_macos_ask_a_server(served: Path, tmp_path: Path) -> None:
    run = start("sh", "-c", "echo one; echo two >&2")
    run.receipt(60)
    profile = find_profile(served, {})
    variables = {
        "SERVERLESS_GPU_SERVER": profile.url,
        "SERVERLESS_GPU_TOKEN": profile.token,
        "SERVERLESS_GPU_HOME": str(tmp_path),
    }

    def sgpu(*arguments: str) -> str:
        program = (
            "from tests.support.systems import pretend\npretend('macOS')\nfrom serverless_gpu.cli import main\nmain()"
        )
        done = subprocess.run(
            [sys.executable, "-c", f"import sys\nsys.argv = ['sgpu', *{list(arguments)!r}]\n{program}"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "two\n" if arguments[0] in ("logs", "attach") else ""), done.stderr
        return done.stdout

    assert profile.url in sgpu("whoami")
    assert run.id[-8:] in sgpu("runs")
    assert sgpu("logs", run.id) == "one\n"
    assert run.id in sgpu("show", run.id)
    for command in ("node list", "queue", "pool list", "usage", "token list", "budget list"):
        sgpu(*command.split())
