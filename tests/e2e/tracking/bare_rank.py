"""One rank without a node: the hook, then a function of `user_code`, then what a rank does at its end.

`python -m tests.e2e.tracking.bare_rank <attempt> <function> <working directory>` prints what the function returned.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from serverless_gpu.node.inside.mlflow import hook
from tests.e2e.tracking.bare import VALUE

WITHOUT_MLFLOW = "nothing"


def main(directory: str, name: str, work: str) -> int:
    """Be one rank."""
    os.chdir(work)
    hook.install(directory, int(os.environ["RANK"]))
    try:
        if name == WITHOUT_MLFLOW:
            value = sorted(module for module in sys.modules if module.startswith("mlflow"))
        else:
            value = getattr(importlib.import_module("tests.e2e.tracking.user_code"), name)()
    except Exception:  # noqa: BLE001 - the boundary to user code
        traceback.print_exc()
        hook.settle(2.0)
        return 1
    hook.settle()
    sys.stdout.write(f"{VALUE}{json.dumps(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
