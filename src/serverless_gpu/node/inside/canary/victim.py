"""The run of another principal, the target of attempts: a process with a port, a file and output.

The node finds the process by the mark in its arguments. The process ends with its run, or after a fixed time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import types

from .. import linux

NAME = "sgpu-victim"
_HELD_S = 300


def main(mark: str) -> None:
    """Leave a file in the home directory, listen on a port, print both, and wait for SIGTERM."""
    linux.set_name(NAME)
    path = os.path.join(os.path.expanduser("~"), mark)
    with open(path, "w", encoding="ascii") as file:
        os.chmod(path, 0o600)
        file.write("a file of the other principal")

    def end(_number: int, _frame: types.FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    signal.alarm(_HELD_S)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = {"port": listener.getsockname()[1], "secrets": os.environ.get("SGPU_SECRETS_DIR", "")}
        print(json.dumps(found), flush=True)
        while True:
            signal.pause()
