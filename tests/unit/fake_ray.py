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
for name in ["raylet"] + ["gcs_server"] * ("--head" in options):
    program = os.path.join(temporary, name)
    os.symlink(SLEEP, program)
    children.append(subprocess.Popen([program, "600"]))
for name in ("sockets/raylet", "dashboard_agent_listen_port_1", "runtime_env_agent_port_1"):
    open(os.path.join(session, name), "w").close()
print("Ray runtime started.", *sys.argv, flush=True)
os.wait()
"""


def install(directory: Path, version: str = "2.60.0") -> None:
    """Make the package.

    Args:
        directory: what is to be on the module search path.
        version: which Ray it is.
    """
    scripts = directory / "ray" / "scripts"
    scripts.mkdir(parents=True)
    (directory / "ray" / "__init__.py").write_text("def init() -> None: pass\n")
    (scripts / "__init__.py").touch()
    (scripts / "scripts.py").write_text(f"SLEEP = {shutil.which('sleep')!r}\n{_START}")
    information = directory / f"ray-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")
