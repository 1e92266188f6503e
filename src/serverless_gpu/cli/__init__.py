"""The command `sgpu`; its commands are in `program.py`.

Only what Python has anyway is imported here: loading the commands takes 0.1 s, and Ctrl-C may come in that time.
"""

from __future__ import annotations

import importlib
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command; Ctrl-C before it has begun is a line and an exit code, not a traceback."""
    try:
        importlib.import_module("serverless_gpu.cli.program").main()
    except KeyboardInterrupt:
        print("sgpu: interrupted", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)  # what is half loaded has nothing to finish
