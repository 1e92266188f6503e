"""A node's uplink, started by a command, so that it may be in other surroundings: another network, other mounts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import ensure


def join_command(home: Path, profile: Path) -> list[str]:
    """Return the command that has an uplink of a home running, with the variables that it gets."""
    return [sys.executable, "-m", "tests.support.node.joining", str(home), str(profile)]


if __name__ == "__main__":
    ensure(Home(Path(sys.argv[1])), Path(sys.argv[2]), os.environ)
