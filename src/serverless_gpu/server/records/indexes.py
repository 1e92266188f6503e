"""Repository of package indexes that the index proxy serves."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.server.db.tables import indexes
from serverless_gpu.server.records.stored_secrets import SecretOwner

_hosts_decoder = msgspec.json.Decoder(tuple[str, ...])


class StoredIndex(msgspec.Struct, frozen=True, kw_only=True):
    """A package index.

    Attributes:
        url: URL of the simple repository, without credentials.
        file_hosts: hosts of files beside the URL's own host.
        private: True if the hosts may have private addresses.
        secret: name of the secret with the credentials, or "".
        secret_kind: kind of the secret's owner, "user" or "team", or "".
        secret_owner: owner of the secret, or "".
        by: principal who defined the index.
    """

    name: str
    url: str
    file_hosts: tuple[str, ...]
    private: bool
    secret: str
    secret_kind: str
    secret_owner: str
    created_ns: int
    by: str

    @property
    def owner(self) -> SecretOwner:
        """Return the owner of the secret."""
        return SecretOwner(self.secret_kind, self.secret_owner)


def every(connection: sa.Connection) -> list[StoredIndex]:
    """Return all indexes by name."""
    return [_from_row(row) for row in connection.execute(sa.select(indexes).order_by(indexes.c.name))]


def find(connection: sa.Connection, name: str) -> StoredIndex | None:
    """Return an index by name, or None."""
    row = connection.execute(sa.select(indexes).where(indexes.c.name == name)).first()
    return None if row is None else _from_row(row)


def put(connection: sa.Connection, index: StoredIndex) -> None:
    """Insert or replace an index."""
    values = msgspec.structs.asdict(index)
    values["hosts_json"] = msgspec.json.encode(values.pop("file_hosts")).decode()
    delete(connection, index.name)
    connection.execute(indexes.insert(), values)


def delete(connection: sa.Connection, name: str) -> bool:
    """Delete an index, and return True if it existed."""
    return connection.execute(indexes.delete().where(indexes.c.name == name)).rowcount == 1


def _from_row(row: sa.Row[tuple[object, ...]]) -> StoredIndex:
    fields = dict(row._mapping)
    hosts = _hosts_decoder.decode(fields.pop("hosts_json"))
    return StoredIndex(file_hosts=hosts, **fields)
