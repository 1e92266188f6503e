"""The process in which the agent sweeps its node. Agents without the rights of root ask the spawner."""

from __future__ import annotations

import os
import sys

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.inside import linux
from serverless_gpu.node.isolation.principals import PrincipalMap
from serverless_gpu.node.spawner.client import find_spawner


def main() -> None:
    """Run one sweep, print the findings, and end the process."""
    linux.be_ordinary()
    linux.die_with_parent(os.getppid())
    if not PrincipalMap(os.environ).place.is_dir():  # This machine has had no principal.
        return
    try:
        findings = find_spawner(os.environ).sweep()
    except (OSError, IsolationUnavailable) as error:
        print(f"sweeper: {error}", flush=True)
        sys.exit(1)
    for sentence in (*findings.removed, *findings.sentences()):
        print(f"sweeper: {sentence}", flush=True)
