"""Small units and snapshots that keep all rules, for tests of stores."""

from __future__ import annotations

import hashlib

from blake3 import blake3

from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.documents import (
    ContentPlace,
    FileRow,
    Interpreter,
    PackBlock,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    Unit,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.stores.blobs import StoreBlobs

PYTHON = Interpreter(
    implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux-x86_64"
)


def make_pack(content: bytes) -> bytes:
    """Return a pack of one block."""
    return compress(content)


def make_unit(content: bytes, digest: str, *, name: str = "thing") -> Unit:
    """Return a unit of one file, whose bytes are the one block of a pack."""
    rows = (FileRow(f"site/{name}.py", "f", len(content), hashlib.sha256(content).digest()),)
    block = PackBlock(0, 0, len(make_pack(content)), len(content))
    return Unit(address=unit_address(rows), rows=rows, packs=(digest,), blocks=(block,), places=(ContentPlace(0, 0),))


def snapshot_of(*units: Unit, facts: SnapshotOrigin | None = None) -> Snapshot:
    """Return a snapshot of one root."""
    members = tuple(
        SnapshotMember(
            address=unit.address,
            kind="distribution",
            name=f"thing-{unit.address[:8]}",
            version="1",
            size=sum(row.size for row in unit.rows),
            files=len(unit.rows),
        )
        for unit in sorted(units, key=lambda unit: f"thing-{unit.address[:8]}")
    )
    return make_snapshot(PYTHON, (Root(kind="own", members=members),), facts or SnapshotOrigin())


def capture(blobs: StoreBlobs, *contents: bytes) -> Snapshot:
    """Put a snapshot of a unit per content into a store, as a capture does: only what is missing."""
    units = []
    for content in contents:
        pack = make_pack(content)
        unit = make_unit(content, digest_of(pack), name=f"m{hashlib.sha256(content).hexdigest()[:8]}")
        if blobs.missing_units([unit.address]):
            if blobs.missing_packs(unit.packs):
                blobs.write_pack(pack)
            blobs.write_unit(unit)
        units.append(unit)
    snapshot = snapshot_of(*units)
    blobs.write_snapshot(snapshot)
    return snapshot


def digest_of(pack: bytes) -> str:
    """Return the name of a pack."""
    return blake3(pack).hexdigest()
