"""The command line program `sgpu`. `program.py` lists the commands of `sgpu`.

`cli/__init__.py` imports only modules that Python loads at startup. Loading the `sgpu` commands takes 0.1 s, in
which the user may press Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run `sgpu`. On Ctrl-C during command loading, print one line and exit with 130."""
    try:
        importlib.import_module("serverless_gpu.cli.program").main()
    except KeyboardInterrupt:
        print("sgpu: interrupted", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)  # Partly imported modules need no cleanup at exit.
