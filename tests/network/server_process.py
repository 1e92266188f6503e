"""The real server as a process of its own, with settings that no option reaches, such as grace periods of seconds.

python -m tests.network.server_process HOME '{"options": {…}, "changes": {…}}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from serverless_gpu.server import liveness
from serverless_gpu.server.serving import Running, serve
from serverless_gpu.server.settings import read_settings

PRESENT_S = 3.0
"""Seconds, like the grace periods here: a node that is silent gets no attempt of those that were given up."""


def main(home: str, words: str) -> None:
    """Serve until a signal."""
    said = json.loads(words)
    liveness.PRESENT_S = PRESENT_S
    settings = msgspec.structs.replace(read_settings(Path(home), said["options"]), **said["changes"])

    def ready(_url: str, _running: Running) -> None:
        print("ready", flush=True)

    serve(settings, ready=ready)


if __name__ == "__main__":
    main(*sys.argv[1:])
