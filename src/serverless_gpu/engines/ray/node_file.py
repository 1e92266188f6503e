"""How the agent of a machine is started where Ray says "here": one file, 0600, that lies on that machine.

    sgpu up, sgpu join ─ write ─▶ $SERVERLESS_GPU_HOME/ray/node.json ◀─ reads ─ whatever Ray runs there for us

The raylet, and so its workers, know the file by `ray_start.NODE_FILE`. What is in it stays on the machine: the agent's
token lies in the profile that it names, and neither of them goes through Ray.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the agent of this machine."""

    python: str
    paths: tuple[str, ...]
    home: str
    profile: str
    environ: dict[str, str] = {}


def read_node_file(path: Path) -> NodeFile:
    """Return what a machine's file says.

    Raises:
        InvalidValue: it cannot be read.
    """
    try:
        return from_json(path.read_bytes(), NodeFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} does not say how the agent of this machine is started: {error}") from None


def write_node_file(path: Path, file: NodeFile) -> None:
    """Write a machine's file, readable by this user alone.

    Raises:
        OSError: it could not be written.
    """
    write_private(path, msgspec.json.encode(file))
