"""A package `mlflow` that starts in a moment and does what a test says, where the real one takes seconds.

It is started as the real one is: its command starts a second process, the server, through `mlflow.server._exec_cmd`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from serverless_gpu.node.mlflow_server.server import ServerFiles
from tests.support.local.observe import Process

_SERVER = """
import os, subprocess
def _exec_cmd(command, *, extra_env=None, capture_output=True, synchronous=True):
    return subprocess.Popen(command, env={**os.environ, **(extra_env or {})})
"""

_CLI = """
import os, sys
from pathlib import Path
def cli(arguments, prog_name):
    trouble = Path(__file__).with_name("trouble")
    if trouble.exists():
        print(trouble.read_text(), flush=True)
        sys.exit(1)
    from mlflow import server
    start = getattr(server, "_exec_cmd", None) or server.started
    port = arguments[arguments.index("--port") + 1]
    command = [sys.executable, "-m", "mlflow.app", port]
    process = start(command, extra_env={"GIVEN_BY_MLFLOW": "yes"}, capture_output=False, synchronous=False)
    sys.exit(process.wait())
"""

_APP = """
import http.server, json, os, sys
from pathlib import Path
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if Path(__file__).with_name("silent").exists():
            self.rfile.read()  # until the client gives up
        answer = {"/health": "OK", "/version": "3.99.0", "/environ": json.dumps(dict(os.environ))}[self.path].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class PretendedMlflow:
    """The package, in a directory that is put on a server's path.

    Args:
        directory: for the package.
    """

    python = sys.executable

    def __init__(self, directory: Path) -> None:
        self._package = directory / "mlflow"
        self._package.mkdir(parents=True)
        for name, text in (("__init__", ""), ("server", _SERVER), ("cli", _CLI), ("app", _APP)):
            (self._package / f"{name}.py").write_text(text)
        self.environ = {"PYTHONPATH": str(directory)}

    def has_trouble(self, words: str) -> None:
        """Let it write this and end, from now on; "" for no more."""
        path = self._package / "trouble"
        if words:
            path.write_text(words)
        else:
            path.unlink()

    def is_silent(self, silent: bool) -> None:
        """Let it take requests and not answer, or answer again."""
        path = self._package / "silent"
        if silent:
            path.touch()
        else:
            path.unlink()

    def starts_otherwise(self) -> None:
        """Let it be a version whose command starts its server by another function."""
        (self._package / "server.py").write_text(_SERVER.replace("_exec_cmd", "started"))


def asked(uri: str, path: str) -> str:
    """Return what a server answers."""
    with urllib.request.urlopen(f"{uri}{path}", timeout=10) as answer:
        return bytes(answer.read()).decode()


def environ_of(uri: str) -> dict[str, str]:
    """Return the variables of a pretended server."""
    found: dict[str, str] = json.loads(asked(uri, "/environ"))
    return found


def server_of(place: ServerFiles) -> Process:
    """Return the server's process."""
    return Process(place.noted().server)


def keeper_of(place: ServerFiles) -> Process:
    """Return the keeper's process."""
    return Process(place.noted().keeper)


def keeping(place: ServerFiles, mlflow: PretendedMlflow, *, owner: int = -1, **limits: Any) -> subprocess.Popen[bytes]:
    """Start a keeper with limits of its own, as a child of the test."""
    program = (
        "import os; from pathlib import Path\n"
        "from serverless_gpu.node.mlflow_server import keeper, server\n"
        f"starting = keeper.ServerStart({mlflow.python!r}, {{**os.environ, **{mlflow.environ!r}}})\n"
        f"place = server.open_place(Path({str(place.directory)!r}))\n"
        f"keeper.keep(place, starting, owner={owner}, limits=keeper.KeeperLimits(**{limits!r}))"
    )
    place.make()
    place.touch()
    return subprocess.Popen(
        [sys.executable, "-c", program], pass_fds=() if owner < 0 else (owner,), env=dict(os.environ)
    )
