"""A package that looks like Ray to a node task: `ray start` makes the files and processes it waits for, and blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

_START = """
import os, subprocess, sys

options = dict(argument.partition("=")[::2] for argument in sys.argv[2:])
if options["--object-store-memory"] == "1":
    print("the object store is too small")
    sys.exit(1)
temporary = options["--temp-dir"]
session = os.path.join(temporary, "session_latest")
for name in ("sockets", "logs"):
    os.makedirs(os.path.join(session, name))
children = []
for name in ["gcs_server"] * ("--head" in options) + ["raylet"]:
    program = os.path.join(temporary, name)
    os.symlink(SLEEP, program)
    children.append(subprocess.Popen([program, "600"]))
for name in ("sockets/raylet", "dashboard_agent_listen_port_1", "runtime_env_agent_port_1"):
    open(os.path.join(session, name), "w").close()
print("Ray runtime started.", *sys.argv, flush=True)
os.wait()
"""

# As Ray does in a driver's main thread.
_INIT = """
import sys
import ray._private.utils

def init() -> None:
    ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
"""
_UTILS = """
import signal

def set_sigterm_handler(handler):
    signal.signal(signal.SIGTERM, handler)
"""


def install(directory: Path, version: str = "2.60.0") -> None:
    """Make the package.

    Args:
        directory: what is to be on the module search path.
        version: which Ray it is.
    """
    scripts = directory / "ray" / "scripts"
    scripts.mkdir(parents=True)
    (directory / "ray" / "__init__.py").write_text(_INIT)
    private = directory / "ray" / "_private"
    private.mkdir()
    (private / "__init__.py").touch()
    (private / "utils.py").write_text(_UTILS)
    (scripts / "__init__.py").touch()
    (scripts / "scripts.py").write_text(f"SLEEP = {shutil.which('sleep')!r}\n{_START}")
    information = directory / f"ray-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")
