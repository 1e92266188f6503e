"""A process that knows the runtime as ranks do: by its path, named `_sgpu_inside`, with nothing of ours importable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import serverless_gpu

INSIDE = Path(next(iter(serverless_gpu.__path__))) / "node" / "inside"

PREAMBLE = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "_sgpu_inside", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
sys.modules["_sgpu_inside"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["_sgpu_inside"])
from _sgpu_inside import payload, call, failure
"""

_CLOSING = """
assert not [name for name in sys.modules if name.startswith("serverless_gpu")], "the rank loaded our package"
"""


def run_rank(code: str, *arguments: object, path: Path | None = None, options: tuple[str, ...] = ()) -> str:
    """Run `code` in a fresh rank-like process and return what it printed.

    Args:
        code: sees `payload`, `call`, `failure`, and `arguments` as strings from `sys.argv[2]` on.
        arguments: made into strings.
        path: a directory to import from, as the caller's `sys.path` would give.
        options: of the interpreter.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *options, "-c", PREAMBLE + code + _CLOSING, str(INSIDE), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(code: str, *arguments: object) -> str:
    """Run `code` as the `__main__` of a fresh caller, with our package importable, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(INSIDE.parent.parent.parent)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout
