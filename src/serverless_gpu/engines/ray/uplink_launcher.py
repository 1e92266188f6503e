"""Starts the agent's uplink on a Ray node if the uplink does not run.

A Ray actor runs this program on the node.

    Ray's worker ─ actor ─▶ launcher ─ fork, setsid, fork, exec ─▶ here ─ start_stop.ensure ─▶ detached uplink
                            `LAUNCHER`: no child of Ray, own session, the kernel's default score for out-of-memory
                                                                    ▲
    sgpu up, sgpu join ─ write ─▶ $SERVERLESS_GPU_HOME/ray/node.json ┘ how to start the agent of this machine, 0600

The raylet and its workers find the node file through the environment variable `start_arguments.NODE_FILE`. The node
file stays on the machine and names the profile that contains the agent's token. Ray transfers neither the node file nor
the profile.

The program prints one line of JSON: the process id of the uplink, or the problem.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.uplink import start_stop


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for starting the agent of a machine."""

    python: str
    paths: tuple[str, ...]
    home: str
    profile: str
    environ: dict[str, str] = {}


def read_node_file(path: Path) -> NodeFile:
    """Return the content of a machine's node file. Raises InvalidValue."""
    try:
        return from_json(path.read_bytes(), NodeFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"the node file {path} does not contain valid settings for the agent: {error}") from None


def write_node_file(path: Path, file: NodeFile) -> None:
    """Write a machine's node file as a private file. Raises OSError."""
    write_private(path, msgspec.json.encode(file))


MODULE = __name__
_APPEARS_S = 20.0
_LOOK_S = 0.02

LAUNCHER = """
import json, os, signal, sys
argv = json.loads(sys.argv[1])
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")
except OSError:
    pass
os.execv(argv[0], argv)
"""
"""Program that detaches itself from the calling process and executes another program.

The program runs in the node's interpreter and uses only the standard library.
"""


def main(path: str) -> None:
    """Start the uplink of a node if it does not run. Print the process id of the uplink, or the problem."""
    try:
        node = read_node_file(Path(path))
        home, profile = find_home({"SERVERLESS_GPU_HOME": node.home}), Path(node.profile)
        os.environ.update({name: value for name, value in node.environ.items() if name == "SERVERLESS_GPU_SOCKETS"})
        started = start_stop.ensure(home, profile, node.environ)
        said: dict[str, object] = {"pid": _pid(home, profile), "started": started}
    except ServerlessGpuError as error:
        said = {"problem": error.message}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _pid(home: Home, profile: Path) -> int:
    """Return the process id of the uplink, which acquires its lock shortly after its start.

    Raises ServerlessGpuError if the uplink does not acquire the lock in time.
    """
    clock = SystemClock()
    until_ns = clock.boottime_ns() + round(_APPEARS_S * 1e9)
    while clock.boottime_ns() < until_ns:
        if (found := start_stop.running(home, profile)) is not None:
            return found.pid
        select.select([], [], [], _LOOK_S)
    raise ServerlessGpuError(f"the node's uplink does not start: see {home.root / 'uplink.log'}")
