"""What a store holds altered is removed from it: then it counts as missing, and the next capture sends it again.

    a snapshot, unit or pack is not what its name says, also when it was read again: deleted
    a unit points at a pack that is not there, or not right: the unit is deleted, before the pack

Only what no restore could ever use is deleted: the name of an object is the digest of its content, so whoever has the
content can put it there again. The snapshot that lists such a unit stays: it is whole again once the unit is.

Failure case: the store does not let itself be changed (said in the hint, the objects are named).
"""

from __future__ import annotations

from collections.abc import Iterable

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.stores.blobs import Blobs
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, EnvironmentProblem, ServerlessGpuError

NAMED_MAX = 3

_AGAIN = "where it is installed, `sgpu env capture` sends that again"


def read_snapshot(blobs: Blobs, address: str) -> Snapshot:
    """Return a snapshot; what is not what its address says is removed from the store.

    Raises:
        EnvironmentMissing, EnvironmentCorrupt, EnvironmentRejected: as `Blobs.read_snapshot`.
    """
    try:
        return blobs.read_snapshot(address)
    except EnvironmentCorrupt as error:
        raise _explained(error, blobs, [f"snapshots/{address}"]) from None


def mended(error: EnvironmentProblem, blobs: Blobs, addresses: Iterable[str]) -> EnvironmentProblem:
    """Look at all that units need in a store, remove what is altered, and return the error to raise.

    Args:
        error: what was raised when they were fetched: something is altered, or missing.
        blobs: the store.
        addresses: of the units.
    """
    try:
        bad = damaged(blobs, addresses)
    except EnvironmentProblem:
        return error  # it stopped to answer
    return _explained(error, blobs, bad) if bad else error


def damaged(blobs: Blobs, addresses: Iterable[str]) -> list[str]:
    """Return the keys of what no restore can use, in the order in which it may be deleted: units, then packs.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    units: list[str] = []
    packs: dict[str, str] = {}  # digest → "", "altered" or "missing"
    for address in addresses:
        try:
            unit = blobs.read_unit(address)
        except EnvironmentCorrupt:
            units.append(f"units/{address}")
            continue
        except EnvironmentMissing:
            continue
        for digest in unit.packs:
            if digest not in packs:
                packs[digest] = _state(blobs, digest)
        if any(packs[digest] for digest in unit.packs):
            units.append(f"units/{address}")
    return [*units, *(f"packs/{digest}" for digest, state in packs.items() if state == "altered")]


def _state(blobs: Blobs, digest: str) -> str:
    try:
        blobs.read_pack(digest)
    except EnvironmentCorrupt:
        return "altered"
    except EnvironmentMissing:
        return "missing"
    return ""


def _explained(error: EnvironmentProblem, blobs: Blobs, bad: list[str]) -> EnvironmentProblem:
    few = ", ".join(key[: key.index("/") + 13] for key in bad[:NAMED_MAX])
    more = f" and {len(bad) - NAMED_MAX} more" if len(bad) > NAMED_MAX else ""
    try:
        blobs.remove(bad)
    except ServerlessGpuError as problem:
        hint = f"remove {few}{more} from the store, which this user cannot ({problem.message}); {_AGAIN}"
    else:
        hint = f"removed from the store: {few}{more}; {_AGAIN}. If it comes back, look at the disk of the store"
    return type(error)(error.message, hint=hint)
