"""Fills a server with what the pages about money, secrets, environments and the audit show."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.documents import Root, SnapshotMember, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, digest
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Sealer, read_keys
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import Action
from tests.support.environment.environments_in_stores import PYTHON
from tests.support.server import ledgered
from tests.support.server.served import Served, served
from tests.support.web.filled import DAY, NAMES, PEOPLE, TEAMS, Filling, fill

S = 1_000_000_000


@contextlib.contextmanager
def filled_with_money(home: Path, count: int, filling: Filling, **options: Any) -> Iterator[Served]:
    """Serve a home with runs, and with `count` budgets, policies, prices, secrets, environments and audit entries."""
    with served(home, **options):
        pass
    with contextlib.closing(Database(f"sqlite:///{home / 'server' / 'server.db'}", clock=SystemClock())) as database:
        query = sa.select(tables.principals.c.name).where(tables.principals.c.role == "admin")
        administrator = str(database.read(lambda connection: connection.scalar(query)))
        sealer = Sealer(read_keys(home / "server").sealing)
        fill(database, filling, administrator=administrator, seal=lambda run: sealer.seal(b"{}", about=run))
        database.write(lambda connection: write_money(connection, count, administrator, sealer))
        environments = write_environments(home / "server" / "store", min(count, 100))
        database.write(lambda connection: _use_environments(connection, environments, count))
    with served(home, **options) as running:
        yield running


@contextlib.contextmanager
def filled_with_hostile_names(home: Path, texts: Sequence[str]) -> Iterator[Served]:
    """Serve a home in which each text is the name, type, policy and tag of a run, and the subject of an audit entry."""
    with served(home):
        pass
    with contextlib.closing(Database(f"sqlite:///{home / 'server' / 'server.db'}", clock=SystemClock())) as database:
        database.write(lambda connection: _write_hostile(connection, texts))
    with served(home) as running:
        yield running


def _write_hostile(connection: sa.Connection, texts: Sequence[str]) -> None:
    now_ns = SystemClock().wall_ns()
    for number, text in enumerate(texts):
        tags = {"stage": text, text.replace("=", ""): "x"}
        account = ledgered.account(connection, name=text, gpu_type=text, policy=text, team=text, tags=tags)
        ledgered.charge(connection, f"run-{number}", account, day=now_ns // DAY)
        who = Caller(name=text[:64], token_id="t")
        detail = {"name": text}
        audit.record(connection, who=who, action=Action.RUN_CREATE, subject=text, now_ns=now_ns, detail=detail)
        price = {"pool": "", "micros_per_hour": 1, "dbu_micros_per_hour": 0, "from_ns": 0, "set_ns": now_ns}
        connection.execute(tables.prices.insert(), price | {"resource": text})


def write_money(connection: sa.Connection, count: int, administrator: str, sealer: Sealer) -> None:
    """Write budgets, policies, prices, secrets and audit entries."""
    now_ns = SystemClock().wall_ns()
    teams = list(TEAMS)
    budgets = [
        {
            "scope": {"kind": "team", "name": teams[number % 3]}
            if number % 2
            else {"kind": "user", "name": PEOPLE[number % len(PEOPLE)]},
            "period": ("month", "week", "day")[number % 3],
            "limit_micros": 500_000_000 * (number + 1),
            "hard": number % 4 == 0,
        }
        for number in range(min(count, 1_000))
    ]
    if budgets:
        rows = [
            {"name": f"budget-{number:04d}", "document_json": msgspec.json.encode(one).decode(), "set_ns": now_ns}
            for number, one in enumerate(budgets)
        ]
        connection.execute(tables.budgets.insert(), rows)
        # Also on the first day of a month, a budget has reached its limit.
        used = ledgered.account(connection, owner=PEOPLE[0], team=teams[0])
        micros = budgets[0]["limit_micros"]
        ledgered.charge(connection, "run-of-today", used, day=now_ns // DAY, micros=micros)
    secrets = []
    for number in range(count):
        name = f"TOKEN_{number}" if number else "HF_TOKEN"
        kind, owner = ("team", teams[number % 3]) if number % 2 else ("user", administrator)
        sealed = sealer.seal(b"hunter2", about=f"secret:{kind}:{owner}:{name}:1")
        secrets.append(
            {
                "kind": kind,
                "owner": owner,
                "name": name,
                "version": 1,
                "sealed": sealed,
                "created_ns": now_ns - number * DAY,
                "by": administrator,
                "used_ns": now_ns - number * 3600 * S if number % 3 else None,
            }
        )
    if secrets:
        connection.execute(tables.secrets.insert(), secrets)
    prices = [
        {
            "resource": f"GPU {number}" if number else "H100",
            "pool": "",
            "micros_per_hour": 2_990_000 + 10_000 * number,
            "dbu_micros_per_hour": 0,
            "from_ns": now_ns - 60 * DAY,
            "until_ns": now_ns + 10 * DAY,
            "set_ns": now_ns - 60 * DAY,
        }
        for number in range(min(count, 2_000))
    ]
    prices += [
        row | {"from_ns": now_ns + 10 * DAY, "until_ns": None, "micros_per_hour": 1_990_000} for row in prices[:20]
    ]
    if prices:
        connection.execute(tables.prices.insert(), prices)
    write_audit(connection, count, now_ns)


def write_audit(connection: sa.Connection, count: int, now_ns: int) -> None:
    """Write audit entries with their places in the chain, after the entries that are there."""
    first = (connection.scalar(sa.select(sa.func.max(tables.audit.c.seq))) or 0) + 1
    last = connection.execute(
        sa.select(tables.audit_links.c.number, tables.audit_links.c.sha256)
        .order_by(tables.audit_links.c.number.desc())
        .limit(1)
    ).first()
    head = ChainHead() if last is None else ChainHead(last.number, last.sha256)
    rows, links = [], []
    for number in range(count):
        link = ChainedEntry(
            number=head.number + 1,
            seq=first + number,
            at_ns=now_ns - (count - number) * 60 * S,
            principal=PEOPLE[number % len(PEOPLE)],
            action=("run.create", "run.stop", "token.create")[number % 3],
            subject=f"{NAMES[number % len(NAMES)]}-{number}",
            detail={"name": NAMES[number % len(NAMES)], "gpus": number % 8},
            token="",
        )
        head = ChainHead(link.number, digest(head.sha256, link))
        rows.append(
            {name: getattr(link, name) for name in ("seq", "at_ns", "principal", "action", "subject", "token")}
            | {"detail_json": msgspec.json.encode(link.detail).decode()}
        )
        links.append({"number": link.number, "seq": link.seq, "sha256": head.sha256})
    if rows:
        connection.execute(tables.audit.insert(), rows)
        connection.execute(tables.audit_links.insert(), links)


def write_environments(store: Path, count: int, *, units: int = 80) -> list[str]:
    """Write snapshots whose units are not in the store, and return their addresses."""
    blobs = StoreBlobs(DirectoryStore(store))
    addresses = []
    for number in range(count):
        members = tuple(
            SnapshotMember(
                address=hashlib.sha256(f"{unit}-{number if unit < 3 else 0}".encode()).hexdigest(),
                kind="distribution",
                name=f"package-{unit:03d}",
                version=f"1.{number if unit < 3 else 0}",
                size=50_000 * (unit + 1) ** 2,
                files=10 * (unit + 1),
                modules=(f"package_{unit}",),
            )
            for unit in range(units)
        )
        facts = SnapshotOrigin(captured_ns=SystemClock().wall_ns() - number * DAY, python="/usr/bin/python3.11")
        snapshot = make_snapshot(PYTHON, (Root(kind="own", members=members),), facts)
        blobs.store.put({f"snapshots/{snapshot.address}": encode(snapshot)})
        addresses.append(snapshot.address)
    return addresses


def _use_environments(connection: sa.Connection, addresses: list[str], count: int) -> None:
    """Let runs use the environments in turn, and further ones that the store does not have."""
    if not addresses:
        return
    others = [hashlib.sha256(f"gone {number}".encode()).hexdigest() for number in range(max(0, count - len(addresses)))]
    every = [*addresses, *others]
    runs = list(connection.scalars(sa.select(tables.runs.c.id).order_by(tables.runs.c.id.desc())))
    rows = [{"r": run, "s": every[number % len(every)]} for number, run in enumerate(runs)]
    statement = tables.runs.update().where(tables.runs.c.id == sa.bindparam("r")).values(snapshot=sa.bindparam("s"))
    if rows:
        connection.execute(statement, rows)
