"""The command line program `sgpu`. `program.py` lists its commands.

`cli/__init__.py` imports only modules that Python loads at its start. Loading the commands takes 0.1 s, in which the
user may press Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run `sgpu`. Ctrl-C while the commands load prints one line and exits with 130, without a traceback."""
    try:
        importlib.import_module("serverless_gpu.cli.program").main()
    except KeyboardInterrupt:
        print("sgpu: interrupted", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)  # Partly imported modules need no cleanup at exit.
