"""Rounds of the row about a small change: calls with `env="snapshot"`, a package edited before each, or none.

Each contestant has a directory of packages of its own in front of its `sys.path`, so that what one edits is not in the
environment of the other. The package is one the warm interpreter never imports.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks import environment_sets as sets
from benchmarks import ranks
from benchmarks.ranks import now_ns, stamps
from serverless_gpu import distributed

_PACKAGE = "sgpu_bench_small"

_packages = Path(tempfile.mkdtemp(prefix="packages-", dir=os.environ["SERVERLESS_GPU_HOME"]))
sys.path.insert(0, str(_packages))
sets.write_distribution(_packages, _PACKAGE, 1, files=40)
_first_line = distributed(gpus=1, gpu_type="CPU", quiet=True, env="snapshot")(ranks.first_line)


def changed(directory: str) -> dict[str, object]:
    """Install another version of a small package, then call."""
    sets.write_distribution(_packages, _PACKAGE, now_ns(), files=40)
    return unchanged(directory)


def unchanged(directory: str) -> dict[str, object]:
    """Call; until user code runs."""
    called_ns = now_ns()
    run = _first_line.submit(directory)
    run.results()
    (entered_ns,) = stamps(directory, "enter", 1)
    receipt = run.receipt()
    times: dict[str, object] = {"ms": (entered_ns - called_ns) / 1e6}
    return times if receipt.warm else {**times, "note": f"started cold: {receipt.warm_reason}"}
