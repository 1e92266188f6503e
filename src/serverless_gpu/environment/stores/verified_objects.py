"""From the bytes of an object to what its name says they are, or not at all; pure.

    bytes ─▶ decoded strictly, bounded ─▶ its own rules ─▶ its address ─▶ Snapshot, Unit, pack

Whoever reads from a store looks through here, and so does a server that stores what others send.

Failure cases: `Altered` when the bytes are not what their name says, so another copy of them may be;
EnvironmentRejected when they are, and break a rule or are of a version that is not known here: then every copy is so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from blake3 import blake3

from serverless_gpu.environment.documents import Snapshot, Unit, snapshot_address, unit_address
from serverless_gpu.environment.rules import check_snapshot, check_unit
from serverless_gpu.environment.stores.codec import decode
from serverless_gpu.errors import EnvironmentRejected

_ANOTHER = "it is not what its address says"

_Document = TypeVar("_Document", bound=msgspec.Struct)


class Altered(Exception):
    """Bytes are not what their address says."""


def snapshot_of(data: bytes, address: str) -> Snapshot:
    """Return the snapshot of an address.

    Raises:
        Altered: these bytes are another one, or none.
        EnvironmentRejected: it breaks the rules of what a snapshot may be.
    """
    snapshot = document_of(data, Snapshot, f"snapshot {address[:12]}")
    _obey(lambda: check_snapshot(snapshot), lambda: snapshot_address(snapshot) == address)
    if snapshot.address != address:
        raise Altered(_ANOTHER)
    return snapshot


def unit_of(data: bytes, address: str) -> Unit:
    """Return the unit of an address.

    Raises:
        Altered: these bytes are another one, or none.
        EnvironmentRejected: it breaks the rules of what a unit may be.
    """
    unit = document_of(data, Unit, f"unit {address[:12]}")
    _obey(lambda: check_unit(unit), lambda: unit_address(unit.rows) == address)
    if unit.address != address:
        raise Altered(_ANOTHER)
    return unit


def pack_of(data: bytes | memoryview, digest: str) -> None:
    """Do nothing when these bytes are the pack of a name.

    Raises:
        Altered: they are others.
    """
    if blake3(data).hexdigest() != digest:
        raise Altered(_ANOTHER)


def document_of(data: bytes, kind: type[_Document], what: str) -> _Document:
    """Return a document whose rules and address are still to be checked.

    Raises:
        Altered: these bytes are none.
        EnvironmentRejected: another version wrote them.
    """
    try:
        return decode(data, kind, what)
    except EnvironmentRejected as error:
        # A hint says that another version wrote it; what cannot be read for another reason, nobody wrote.
        raise (error if error.hint else Altered(error.message)) from None


def _obey(check: Callable[[], None], is_itself: Callable[[], bool]) -> None:
    try:
        check()
    except EnvironmentRejected:
        if is_itself():
            raise  # it was written like that
        raise Altered(_ANOTHER) from None
