"""What an engine of Ray knows without asking: the gangs it has reserved, and the nodes it has had, as files.

    <directory>/gangs/<run>:<fence>     its shares
    <directory>/nodes.json              rows of Ray's table, of lost nodes too

A server that starts while the head is away knows both. Files that cannot be read are as if they were not there: Ray is
asked anyway.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.engines.base import Gang
from serverless_gpu.engines.ray.ray_tables import KnownNode
from serverless_gpu.json_codec import from_json


class ReservationFiles:
    """Files of one engine.

    Args:
        directory: where they lie; made if needed.
    """

    def __init__(self, directory: Path) -> None:
        self._gangs, self._nodes = directory / "gangs", directory / "nodes.json"
        self._gangs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._noted: dict[str, KnownNode] = {}

    def gangs(self) -> dict[str, Gang]:
        """Return the gangs that are kept, by identifier."""
        found = {}
        for name in os.listdir(self._gangs):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                gang = from_json((self._gangs / name).read_bytes(), Gang)
                found[gang.id] = gang
        return found

    def keep(self, gang: Gang) -> None:
        """Keep a gang; a full disk costs what a server knows that starts without a head."""
        with contextlib.suppress(OSError):
            _write(self._gangs / gang.id, msgspec.json.encode(gang))

    def forget(self, gang: str) -> None:
        """Keep a gang no longer."""
        with contextlib.suppress(OSError):
            (self._gangs / gang).unlink(missing_ok=True)

    def nodes(self) -> dict[str, KnownNode]:
        """Return the nodes that there were, by name; how long one had been missing is counted again."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._noted = from_json(self._nodes.read_bytes(), dict[str, KnownNode])
        return {name: msgspec.structs.replace(one, missing_ns=None) for name, one in self._noted.items()}

    def note(self, nodes: Mapping[str, KnownNode]) -> None:
        """Note the nodes that there are, when they are others than before."""
        if dict(nodes) != self._noted:
            self._noted = dict(nodes)
            with contextlib.suppress(OSError):
                _write(self._nodes, msgspec.json.encode(self._noted))


def _write(path: Path, data: bytes) -> None:
    temporary = path.parent.parent / f".{path.name}.tmp" if path.parent.name == "gangs" else path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.replace(path)
