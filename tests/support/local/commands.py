"""Helpers of the tests of commands that other tests use as well."""

from __future__ import annotations

import os
import subprocess
import sys

COMMAND = (sys.executable, "-m", "serverless_gpu.cli")


def sgpu(*arguments: str, code: int = 0, environ: dict[str, str] | None = None) -> str:
    """Run a command; return its stdout, or its stderr when it was to fail."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(environ or {})},
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr
