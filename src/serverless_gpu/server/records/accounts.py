"""Accounts: the query room of who used something, and as what. Charges that are alike in all of it share a row.

An attempt's account is written with the attempt, when it is placed: what is said later of its node's pool, or of the
pool's kind, changes nothing about where its use is counted, and what is taken back is taken back where it was counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.budget import Subject
from serverless_gpu.model.hardware import CPU
from serverless_gpu.server.db.database import portions
from serverless_gpu.server.db.tables import account_tags, accounts
from serverless_gpu.server.records import pools
from serverless_gpu.server.records.runs.runs import StoredRun

_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode_tags = msgspec.json.Decoder(dict[str, str]).decode
_decode_member_of = msgspec.json.Decoder(tuple[str, ...]).decode


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Who used something, and as what.

    Attributes:
        owner: the user or service.
        team: of the run, or "".
        pool: of the node that it was placed on.
        reserved: whether that pool was reserved then.
        policy: usage policy of the run, or "".
        gpu_type: of its devices.
        name: of the run.
        workload: what it does: "function", "command" or "kernel".
        environment: address of the captured environment, or "".
        currency: of its money.
        tags: of the run.
        member_of: of a run without a team, the teams that it counts for.
    """

    owner: str
    gpu_type: str
    team: str = ""
    pool: str = ""
    reserved: bool = False
    policy: str = ""
    name: str = ""
    workload: str = "function"
    environment: str = ""
    currency: str = "USD"
    tags: dict[str, str] = {}
    member_of: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """Return what decides which budgets count it."""
        return Subject(
            owner=self.owner,
            team=self.team,
            member_of=self.member_of,
            pool=self.pool,
            policy=self.policy,
            tags=self.tags,
            is_cpu=self.gpu_type == CPU,
        )


def of_run(connection: sa.Connection, run: StoredRun, *, gpu_type: str, pool: str, currency: str) -> Account:
    """Return as what a run is counted that is placed on devices of a type in a pool."""
    found = pools.find(connection, pool)
    return Account(
        owner=run.owner,
        team=run.team,
        pool=pool,
        reserved=found is not None and found.kind == pools.RESERVED,
        policy=run.spec.policy or "",
        gpu_type=gpu_type,
        name=run.name,
        workload=str(run.spec.payload.__struct_config__.tag),
        environment=run.snapshot,
        currency=currency,
        tags=run.spec.tags,
        member_of=run.member_of,
    )


def ensure(connection: sa.Connection, account: Account) -> int:
    """Return the number of an account, which is made when it is not there.

    With it comes its plain account, which has no tags and no environment: reports that ask for neither add those up.
    """
    said = _encoded(account)
    digest = hashlib.sha256(said).hexdigest()
    found: int | None = connection.scalar(sa.select(accounts.c.id).where(accounts.c.sha256 == digest))
    if found is not None:
        return found
    plain = msgspec.structs.replace(account, tags={}, environment="")
    row = msgspec.structs.asdict(account)
    row |= {"sha256": digest, "tags_json": _encode_sorted(row.pop("tags")).decode()}
    row["member_of_json"] = _encode_sorted(row.pop("member_of")).decode()
    row["plain_id"] = 0 if plain == account else ensure(connection, plain)
    made = int(connection.execute(accounts.insert().returning(accounts.c.id), row).scalar_one())
    if plain == account:
        connection.execute(accounts.update().where(accounts.c.id == made).values(plain_id=made))
    # Reports group by these rows. They count an empty value as no tag, and PostgreSQL holds no NUL.
    tags = [(key, value) for key, value in account.tags.items() if value and "\0" not in key + value]
    if tags:
        rows = [{"key": key, "account_id": made, "value": value} for key, value in tags]
        connection.execute(account_tags.insert(), rows)
    return made


def plain_ids(connection: sa.Connection, numbers: Collection[int]) -> dict[int, int]:
    """Return the number of the plain account of each of some accounts."""
    found: dict[int, int] = {}
    for some in portions(sorted(set(numbers))):
        query = sa.select(accounts.c.id, accounts.c.plain_id).where(accounts.c.id.in_(some))
        found |= {row.id: row.plain_id for row in connection.execute(query)}
    return found


def find_many(connection: sa.Connection, numbers: Collection[int]) -> dict[int, Account]:
    """Return accounts by their numbers."""
    found: dict[int, Account] = {}
    for some in portions(sorted(set(numbers))):
        for row in connection.execute(sa.select(accounts).where(accounts.c.id.in_(some))):
            found[row.id] = from_row(row)
    return found


def from_row(row: sa.Row[Any]) -> Account:
    """Return the account of a row that has all columns of the table."""
    names = [name for name in Account.__struct_fields__ if name not in ("tags", "member_of")]
    return Account(
        **{name: row._mapping[name] for name in names},
        tags=_decode_tags(row.tags_json),
        member_of=_decode_member_of(row.member_of_json or "[]"),
    )


def _encoded(account: Account) -> bytes:
    """Return an account as its digest is made of; one that counts for no team's members as before there were any."""
    fields = msgspec.structs.asdict(account)
    if not account.member_of:
        del fields["member_of"]
    return _encode_sorted(fields)
