"""Runs `_air.py` of a run directory under torchrun, as its own text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(run_directory: Path, ranks: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `_air.py` as its own text says, with nothing of ours in the environment.

    (`--standalone` beside it, for a port of its own: somebody else on this machine may use torchrun's usual one.)
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SERVERLESS", "SGPU"))}
    command = [
        "timeout",
        "80",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return subprocess.run(
        [*command, str(run_directory / "_air.py")],
        capture_output=True,
        text=True,
        env=environ,
        cwd=cwd,
        check=False,
    )
