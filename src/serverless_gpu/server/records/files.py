"""Repository of the files of attempts: results, failures, hang reports, receipts.

A small file's row contains the file's bytes. A larger file's row lists the parts of the file's blob. The stored files
of an ended attempt do not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import files
from serverless_gpu.wire.base import INLINE_BYTES_MAX

NAME_CHARACTERS_MAX = 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_decode_parts = msgspec.json.Decoder(tuple[str, ...]).decode


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Stored file of an attempt, named by its path in the attempt directory on the node.

    Attributes:
        name: path relative to the attempt's directory.
        inline: bytes of the file, or None for a blob.
        parts: the parts of the blob.
    """

    name: str
    size: int
    inline: bytes | None = None
    parts: tuple[str, ...] = ()


def check_name(name: str) -> None:
    """Refuse a file name that points outside the directory of an attempt."""
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise InvalidValue(f"{name[:80]!r} is not a valid name of an attempt's file", hint="for example results/0.pkl")


def put(
    connection: sa.Connection, run_id: str, fence: int, new: Sequence[StoredFile], *, replace: bool = True
) -> list[str]:
    """Insert files of an attempt.

    Args:
        replace: True to replace existing files of the same name; False to leave existing files unchanged.

    Returns:
        The names of the files that the function wrote.
    """
    latest = {file.name: file for file in new}
    if replace:
        for names in in_chunks(list(latest)):
            connection.execute(files.delete().where(_of(run_id, fence), files.c.name.in_(names)))
    else:
        for names in in_chunks(list(latest)):
            there = sa.select(files.c.name).where(_of(run_id, fence), files.c.name.in_(names))
            for name in connection.scalars(there).all():
                del latest[name]
    rows = [
        {
            "run_id": run_id,
            "fence": fence,
            "name": file.name,
            "size": file.size,
            "inline": file.inline,
            "parts_json": msgspec.json.encode(file.parts).decode() if file.inline is None else None,
        }
        for file in latest.values()
    ]
    if rows:
        connection.execute(files.insert(), rows)
    return list(latest)


def of_attempt(
    connection: sa.Connection, run_id: str, fence: int, *, prefix: str = "", inline_max: int = INLINE_BYTES_MAX
) -> list[StoredFile]:
    """Return the files of an attempt by name, with the bytes of the first files up to a limit.

    Args:
        prefix: beginning of the names to return.
        inline_max: maximum bytes of all returned contents. Above this limit, and for all blobs, `inline` is None.
    """
    query = sa.select(files.c.name, files.c.size, files.c.inline.is_not(None), files.c.parts_json)
    query = query.where(_of(run_id, fence)).order_by(files.c.name)
    if prefix:
        query = query.where(files.c.name.startswith(prefix, autoescape=True))
    found, with_bytes, left = connection.execute(query).all(), list[str](), inline_max
    for name, size, is_inline, _ in found:
        if is_inline and size <= left:
            with_bytes.append(name)
            left -= size
    inline: dict[str, bytes] = {}
    for names in in_chunks(with_bytes):
        pairs = sa.select(files.c.name, files.c.inline).where(_of(run_id, fence), files.c.name.in_(names))
        inline |= {name: data for name, data in connection.execute(pairs)}
    return [_from_row((name, size, inline.get(name), parts)) for name, size, _, parts in found]


def names(connection: sa.Connection, run_id: str, fence: int, *, prefix: str) -> list[str]:
    """Return the names of an attempt's files with a prefix. The returned names lack the prefix."""
    query = sa.select(files.c.name).where(_of(run_id, fence), files.c.name.startswith(prefix, autoescape=True))
    return [name.removeprefix(prefix) for name in connection.scalars(query)]


def find(connection: sa.Connection, run_id: str, fence: int, name: str) -> StoredFile | None:
    """Return one file of an attempt by name, or None."""
    query = sa.select(files.c.name, files.c.size, files.c.inline, files.c.parts_json)
    row = connection.execute(query.where(_of(run_id, fence), files.c.name == name)).first()
    return None if row is None else _from_row(row)


def parts_in_use(connection: sa.Connection) -> Iterator[str]:
    """Yield the digests of all blob parts that files use."""
    for text in connection.execute(sa.select(files.c.parts_json).where(files.c.parts_json.is_not(None))).scalars():
        yield from _decode_parts(text)


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the files of a run's attempts. Garbage collection later removes unreferenced blob parts."""
    connection.execute(files.delete().where(files.c.run_id == run_id))


def _from_row(row: Sequence[Any]) -> StoredFile:
    name, size, inline, parts = row
    return StoredFile(name=name, size=size, inline=inline, parts=_decode_parts(parts) if parts else ())


def _of(run_id: str, fence: int) -> sa.ColumnElement[bool]:
    return sa.and_(files.c.run_id == run_id, files.c.fence == fence)
