"""A spawner that serves an account from a process of the test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from serverless_gpu.node.spawner import process
from serverless_gpu.node.spawner.client import SpawnerClient
from serverless_gpu.server.operations.systemd_units import CAPABILITIES

ACCOUNT = process.find_account("nobody")


def with_capabilities(missing: str = "") -> list[str]:
    """Return the words before a command that give it the capabilities of a spawner's unit without one."""
    names = [f"+{name.removeprefix('CAP_').lower()}" for name in CAPABILITIES if name != missing]
    return ["setpriv", "--bounding-set", ",".join(["-all", *names]), "--no-new-privs"]


@contextlib.contextmanager
def served(path: Path, environ: Mapping[str, str], opened: Sequence[str] = ()) -> Iterator[SpawnerClient]:
    """Yield a client of a spawner that serves `ACCOUNT` at a socket, in the network namespace of the caller."""
    listener = process.listen(path, ACCOUNT)
    pid = os.fork()
    if pid == 0:
        try:
            process.serve(listener, ACCOUNT, environ, process.opened_services(opened))
        finally:
            os._exit(0)
    listener.close()
    try:
        with contextlib.closing(SpawnerClient(path)) as made:
            yield made
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
