"""The program in the caller's interpreter: `mlflow server`, one process that ends with its keeper.

MLflow's command imports everything, then starts a second process that does so again, and waits for it: 260 MB each.
Ours becomes the second one, where MLflow still starts it as we know. The kernel ends it when the keeper is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.node.mlflow_server.files import HOST, Backing
from serverless_gpu.node.processes.spawn import clean_variables, startup_variables

_PROGRAM = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != {parent}:
    os._exit(1)
try:
    import mlflow.server
    apart = mlflow.server._exec_cmd

    def become(command, *args, **options):
        if isinstance(command, list) and command[:2] == [sys.executable, "-m"]:
            sys.stdout.flush()
            os.execve(command[0], command, {{**os.environ, **(options.get("extra_env") or {{}})}})
        return apart(command, *args, **options)

    mlflow.server._exec_cmd = become
except Exception as error:
    print(f"started as it comes: {{error!r}}", flush=True)
from mlflow.cli import cli
cli(["server", "--host", {host!r}, "--port", "{port}", "--workers", "1"], prog_name="mlflow")
"""

_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def server_program(parent: int, port: int) -> str:
    """Return the program for `python -c`; `parent` is the pid of the keeper."""
    return _PROGRAM.format(parent=parent, host=HOST, port=port)


class Starting(NamedTuple):
    """Start of a server: interpreter, the caller's variables, and further host names."""

    python: str
    environ: Mapping[str, str]
    hosts: tuple[str, ...] = ()


def server_variables(backing: Backing, starting: Starting) -> dict[str, str]:
    """Return the server's variables, without those of the caller's own MLflow, which configure a client.

    By variables, not options: an older MLflow ignores unknown ones, and no list of processes shows a password.
    """
    environ = starting.environ
    names = [name for host in (*_HOSTS, *starting.hosts) for name in (host, f"{host}:*")]
    variables = {
        **clean_variables(environ),
        **startup_variables(environ),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "MLFLOW_BACKEND_STORE_URI": backing.uri,
        "MLFLOW_ARTIFACTS_DESTINATION": backing.artifacts,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names),
    }
    if not backing.is_own:  # as without a server: later users of the store find files where they expect them
        variables["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = backing.artifacts
    if backing.is_files:
        variables["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return variables


def exists(python: str) -> bool:
    """Return whether an interpreter can be started at all."""
    return Path(python).is_file() and os.access(python, os.X_OK)
