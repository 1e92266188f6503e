"""Programs in a restored environment: its interpreter, in a process that mounts first what has to be mounted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from serverless_gpu.environment.restore.restore import RestoredTree
from serverless_gpu.node.inside import namespaces

NOBODY = 65534
CANNOT_MOUNT = namespaces.probe_mounts()
MODES = ("links",) if CANNOT_MOUNT else ("links", "overlay")

# Run by an interpreter outside of the environment: mounts, then becomes the program.
_ENTER = """
import json, os, sys
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[1])))
from inside import namespaces
namespaces.enter_mounts(json.loads(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def command(restored: RestoredTree, *arguments: str, outside: str = sys.executable) -> list[str]:
    """Return the command that runs a program of a restored environment: the first argument, below its `bin`."""
    program = [f"{restored.tree}/bin/{arguments[0]}", *arguments[1:]]
    if not restored.mounts:
        return program
    wanted = json.dumps(msgspec.to_builtins(restored.mounts))
    return [outside, "-I", "-c", _ENTER, str(namespaces.__file__), wanted, *program]


def run(restored: RestoredTree, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a program of a restored environment and return what it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command(restored, *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd="/",
        env={**variables, **(environ or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask(restored: RestoredTree, code: str, **environ: str) -> Any:
    """Run code in a restored environment and return the value of its `answer`."""
    return json.loads(run(restored, "python", "-c", f"{code}\nimport json; print(json.dumps(answer))", environ=environ))


@contextmanager
def public_directory() -> Iterator[Path]:
    """Make a directory that every user of the machine can look into, for as long as the block runs."""
    directory = Path(tempfile.mkdtemp(prefix="sg-public-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
