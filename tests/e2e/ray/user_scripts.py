"""Users' scripts, run where Ray is installed, as their users would run them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

PYTHON = Path(sys.prefix) / "ray" / "bin" / "python"
LIMIT_S = 240.0  # each takes a tenth of that on two idle cores

# A notebook without a browser: each cell is run, and the first that fails ends it.
_NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells!r}:
    if not shell.run_cell(cell, store_history=True).success:
        sys.exit(1)
"""


def run_script(path: Path, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a script; return stdout and stderr, and require that it ended well."""
    done = subprocess.run(
        [str(PYTHON), str(path)],
        capture_output=True,
        text=True,
        env={**_without_ray(), **(environ or {})},
        cwd=path.parent,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def run_code(directory: Path, code: str, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Write a script into a directory and run it there."""
    script = directory / "driver.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    return run_script(script, environ)


def run_cells(directory: Path, cells: list[str], environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run the cells of a notebook in a directory."""
    return run_code(directory, _NOTEBOOK.format(cells=[textwrap.dedent(cell) for cell in cells]), environ)


def _without_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
