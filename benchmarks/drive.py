"""What runs in a contestant's process: load one function, then call it once for every line that comes in."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable


def main(name: str, requests: int, replies: int) -> None:
    """Serve rounds until the other end closes.

    Args:
        name: `module.function` below `benchmarks`; the function takes the round's directory and returns milliseconds.
        requests: descriptor to read lines from.
        replies: descriptor to write lines to.
    """
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    module, _, function_name = name.partition(".")
    function: Callable[..., dict[str, object]] = getattr(importlib.import_module(f"benchmarks.{module}"), function_name)
    with os.fdopen(requests, encoding="utf-8") as lines:
        for line in lines:
            directory = tempfile.mkdtemp(prefix="round-", dir=os.environ["SERVERLESS_GPU_HOME"])
            try:
                reply: dict[str, object] = dict(function(directory, **json.loads(line)))
            except Exception as error:  # noqa: BLE001 - whatever a contestant raises is its row's problem
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            shutil.rmtree(directory, ignore_errors=True)
            os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
