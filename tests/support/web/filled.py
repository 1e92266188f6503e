"""Fills a server's database with people, nodes, runs in every state, and their charges.

    with filled(home, runs=3_000, nodes=125) as server: …      a real server that begins with these rows

The rows are written in bulk, so that 100,000 runs take seconds. Everything is derived from a seed: two fillings are
alike. Nobody renews the leases of the active runs, so that the server shows them as unreachable after a minute.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.lifecycle.attempt import ACTIVE, TERMINAL, Reason, State
from serverless_gpu.model.spec import Command, Resources, RunSpec
from serverless_gpu.server.core.server_key import Sealer, read_keys
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records.runs import searchable
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.runs import Target
from tests.support.server.served import Served, served

S = 1_000_000_000
DAY = 86_400 * S
PEOPLE = ("ada", "ben", "chloe", "dev", "emil", "fatima")
TEAMS = {"vision": ("ada", "ben", "chloe"), "language": ("dev", "emil"), "robots": ("fatima", "ada")}
NAMES = ("train-resnet50", "finetune-llama", "eval-suite", "preprocess", "sweep-lr", "export-onnx", "align-dpo")
TYPES = ("H100", "A100", "L4")
TAGS: tuple[dict[str, str], ...] = (
    {"project": "atlas"},
    {"project": "borealis", "stage": "dev"},
    {"project": "atlas", "stage": "prod"},
    {},
)
_ENDED = (
    (State.SUCCEEDED, Reason.COMPLETED, 70),
    (State.FAILED, Reason.RANK_RAISED, 14),
    (State.CANCELLED, Reason.CANCELLED, 8),
    (State.TIMED_OUT, Reason.TIMEOUT, 3),
    (State.LOST, Reason.NODE_LOST, 2),
)
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TARGET = msgspec.json.encode(Target(python="3.11", platform="linux-x86_64")).decode()


Seal = Callable[[str], bytes]


class Filling(NamedTuple):
    """How much there is. A run is active if its number is below `active`, and waits if below `active + queued`."""

    runs: int = 200
    nodes: int = 4
    gpus: int = 8
    active: int = 6
    queued: int = 5
    days: int = 30


SOME = Filling()


def fill(
    database: Database,
    filling: Filling = SOME,
    *,
    administrator: str = "",
    seal: Seal = lambda _run: b"",
    seed: int = 1,
) -> None:
    """Write the rows.

    Args:
        database: migrated; `administrator` may be in it.
        filling: how much.
        administrator: owner of every fifth run, if it is there; people otherwise.
        seal: returns the sealed context of a run that has not ended; a server refuses to start with others'.
        seed: of what is random.
    """
    chance, now_ns = random.Random(seed), SystemClock().wall_ns()
    owners = (*PEOPLE, administrator) if administrator else PEOPLE
    database.write(lambda connection: _write_people(connection, now_ns))
    database.write(lambda connection: _write_nodes(connection, filling, now_ns))
    runs = [_run(chance, number, filling, owners, now_ns) for number in range(filling.runs)]
    for run in runs:
        if not run["ended_ns"]:
            run["context_sealed"] = seal(run["id"])
    for at in range(0, len(runs), 5_000):
        part = runs[at : at + 5_000]
        database.write(functools.partial(_write_runs, runs=part, now_ns=now_ns))


@contextlib.contextmanager
def filled(home: Path, filling: Filling = SOME, **options: Any) -> Iterator[Served]:
    """Serve a home whose database is filled. `options` are those of `served`."""
    with served(home, **options):
        pass
    database = Database(f"sqlite:///{home / 'server' / 'server.db'}", clock=SystemClock())
    database.migrate()
    query = sa.select(tables.principals.c.name).where(tables.principals.c.role == "admin")
    administrator = str(database.read(lambda connection: connection.scalar(query)))
    sealer = Sealer(read_keys(home / "server").sealing)
    fill(database, filling, administrator=administrator, seal=lambda run: sealer.seal(b"{}", about=run))
    database.close()
    with served(home, **options) as running:
        yield running


def run_id(created_ns: int, number: int) -> str:
    """Return the identifier of a run, which sorts by its creation as real ones do."""
    value = (created_ns // 1_000_000) << 80 | number
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def _run(chance: random.Random, number: int, filling: Filling, owners: tuple[str, ...], now_ns: int) -> dict[str, Any]:
    is_active, is_queued = number < filling.active, filling.active <= number < filling.active + filling.queued
    age_ns = chance.randrange(60 * S, 4 * 3600 * S) if is_active or is_queued else chance.randrange(filling.days * DAY)
    created_ns = now_ns - age_ns
    owner = owners[number % len(owners)]
    teams = [team for team, members in TEAMS.items() if owner in members]
    state, reason = State.QUEUED, None
    if is_active:
        state = ACTIVE[number % len(ACTIVE)] if number % 4 == 0 else State.RUNNING
    elif not is_queued:
        state, reason = chance.choices([(s, r) for s, r, _ in _ENDED], [weight for *_, weight in _ENDED])[0]
    gpus, wait_ns = chance.choice((1, 1, 2, 4, 8)), chance.randrange(S, 600 * S)
    length_ns = min(chance.randrange(20 * S, 6 * 3600 * S), max(S, age_ns - wait_ns - S))
    started_ns = None if is_queued else min(created_ns + wait_ns, now_ns - S)
    ended_ns = None if started_ns is None or is_active else min(started_ns + length_ns, now_ns)
    name, kind, tags = chance.choice(NAMES), chance.choice(TYPES), chance.choice(TAGS)
    spec = RunSpec(
        payload=Command(argv=("python", f"{name}.py", "--lr", f"{chance.random():.4f}")),
        resources=Resources(gpus=gpus, gpu_type=kind),
        name=name,
        tags=tags,
        remote=True,
    )
    return {
        "id": run_id(created_ns, number),
        "owner": owner,
        "team": teams[0] if teams else "",
        "name": name,
        "pool": "default",
        "priority": 1,
        "state": state.value,
        "reason": None if reason is None else reason.value,
        "detail": "ValueError: the loss is not a number" if state is State.FAILED else "",
        "fence": 0 if is_queued else 1,
        "created_ns": created_ns,
        "queued_ns": created_ns,
        "started_ns": started_ns,
        "ended_ns": ended_ns,
        "settled_ns": ended_ns,
        "events": 1 if is_queued else 3 if ended_ns else 2,
        "request_sha256": "0" * 64,
        "spec_json": msgspec.json.encode(spec).decode(),
        "target_json": _TARGET,
        "tags_json": json.dumps(tags),
        "said": searchable("ValueError: the loss is not a number" if state is State.FAILED else ""),
        "context_sealed": b"sealed",
        "call": b"",
        "node": number % max(1, filling.nodes),
        "gpus": gpus,
        "gpu_type": kind,
        "tags": tags,
    }


def _write_people(connection: sa.Connection, now_ns: int) -> None:
    people = [{"name": name, "kind": "user", "role": "member", "created_ns": now_ns - 90 * DAY} for name in PEOPLE]
    connection.execute(tables.principals.insert(), people)
    connection.execute(tables.teams.insert(), [{"name": name, "created_ns": now_ns - 90 * DAY} for name in TEAMS])
    members = [{"team": team, "principal": name} for team, names in TEAMS.items() for name in names]
    connection.execute(tables.members.insert(), members)
    service = {"name": "agents", "kind": "service", "role": "agent", "created_ns": now_ns - 90 * DAY}
    connection.execute(tables.principals.insert(), service)
    if connection.scalar(sa.select(tables.pools.c.name).where(tables.pools.c.name == "default")) is None:
        connection.execute(tables.pools.insert(), {"name": "default", "kind": "on-demand", "created_ns": now_ns})
    connection.execute(sa.update(tables.pools).values(isolation="none"))  # Several people may run there.


def _write_nodes(connection: sa.Connection, filling: Filling, now_ns: int) -> None:
    def node(number: int) -> dict[str, Any]:
        kind = TYPES[number % len(TYPES)]
        devices = tuple(
            msgspec.structs.replace(device, uuid=f"GPU-{number:04d}-{device.index}")
            for device in parse_fake(f"{kind}:{filling.gpus}")
        )
        hello = AgentHello(
            name=f"gpu-{number:03d}",
            machine=f"m{number}",
            boot_id=f"b{number}",
            version="1.0",
            protocol=PROTOCOL,
            python="3.11",
            platform="linux-x86_64",
            devices=devices,
        )
        return {
            "id": f"node-{number}",
            "name": hello.name,
            "machine": hello.machine,
            "boot_id": hello.boot_id,
            "principal": "agents",
            "pool": "default",
            "hello_json": msgspec.json.encode(hello).decode(),
            "seen_ns": now_ns,
        }

    if filling.nodes:
        connection.execute(tables.nodes.insert(), [node(number) for number in range(filling.nodes)])


def _write_runs(connection: sa.Connection, runs: list[dict[str, Any]], now_ns: int) -> None:
    own = ("node", "gpus", "tags")
    connection.execute(tables.runs.insert(), [{k: v for k, v in run.items() if k not in own} for run in runs])
    tags = [{"key": key, "value": value, "run_id": run["id"]} for run in runs for key, value in run["tags"].items()]
    if tags:
        connection.execute(tables.run_tags.insert(), tags)
    placed = [run for run in runs if run["fence"]]
    attempt_rows, crew_rows, charge_rows = [], [], []
    accounts = _accounts(connection, placed)
    for run in placed:
        common = {
            "run_id": run["id"],
            "fence": 1,
            "state": run["state"],
            "reason": run["reason"],
            "began": True,
            "started_ns": run["started_ns"],
            "ended_ns": run["ended_ns"],
            "settled_ns": run["ended_ns"],
        }
        account = accounts[_account_key(run)]
        attempt_rows.append(
            common
            | {
                "gpu_type": run["gpu_type"],
                "world_size": run["gpus"],
                "created_ns": run["started_ns"],
                "account_id": account,
            }
        )
        crew_rows.append(
            common
            | {
                "crew": 0,
                "node_id": f"node-{run['node']}",
                "boot_id": f"b{run['node']}",
                "gpus": run["gpus"],
                "token_sha256": f"token of {run['id']}",
                "lease_ns": now_ns,
                "grace_s": 900.0,
                "returned": run["state"] in TERMINAL,
            }
        )
        if run["ended_ns"]:
            charge_rows.append(_charge(run, account))
    if placed:
        connection.execute(tables.attempts.insert(), attempt_rows)
        connection.execute(tables.crews.insert(), crew_rows)
    if charge_rows:
        connection.execute(tables.charges.insert(), charge_rows)
    events = []
    for run in runs:
        said = [(run["created_ns"], State.QUEUED.value, None)]
        said += [(run["started_ns"], State.RUNNING.value, None)] if run["fence"] else []
        said += [(run["ended_ns"], run["state"], run["reason"])] if run["ended_ns"] else []
        events += [
            {
                "run_id": run["id"],
                "seq": seq,
                "fence": 1 if seq > 1 else 0,
                "at_ns": at_ns,
                "state": state,
                "reason": reason,
                "sentence": run["detail"] if seq == 3 else "",
                "node": f"gpu-{run['node']:03d}" if seq > 1 else "",
            }
            for seq, (at_ns, state, reason) in enumerate(said, 1)
        ]
    connection.execute(tables.events.insert(), events)


def _account_key(run: dict[str, Any]) -> str:
    return "|".join((run["owner"], run["team"], run["gpu_type"], run["name"], run["tags_json"]))


def _accounts(connection: sa.Connection, runs: list[dict[str, Any]]) -> dict[str, int]:
    """Write the accounts that are not there; return the identifier of each."""
    query = sa.select(tables.accounts.c.id, tables.accounts.c.sha256)
    there = {row.sha256: row.id for row in connection.execute(query)}
    found: dict[str, int] = {}
    for run in runs:
        key = _account_key(run)
        if key in found:
            continue
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in there:
            found[key] = there[digest]
            continue
        row = {
            "sha256": digest,
            "owner": run["owner"],
            "team": run["team"],
            "pool": run["pool"],
            "reserved": False,
            "policy": "",
            "gpu_type": run["gpu_type"],
            "name": run["name"],
            "workload": "command",
            "environment": "",
            "currency": "USD",
            "tags_json": run["tags_json"],
        }
        made = connection.execute(tables.accounts.insert(), row).inserted_primary_key
        assert made is not None
        found[key] = made[0]
        plain = sa.update(tables.accounts).where(tables.accounts.c.id == made[0]).values(plain_id=made[0])
        connection.execute(plain)
        tags = [{"key": key_, "account_id": made[0], "value": value} for key_, value in run["tags"].items()]
        if tags:
            connection.execute(tables.account_tags.insert(), tags)
    return found


def _charge(run: dict[str, Any], account: int) -> dict[str, Any]:
    ms = (run["ended_ns"] - run["started_ns"]) // 1_000_000
    gpu_ms = ms * run["gpus"]
    return {
        "run_id": run["id"],
        "fence": 1,
        "crew": 0,
        "number": 1,
        "kind": "original",
        "provisional": False,
        "account_id": account,
        "posted_ns": run["ended_ns"],
        "day": run["ended_ns"] // DAY,
        "start_ns": run["started_ns"],
        "end_ns": run["ended_ns"],
        "gpus": run["gpus"],
        "queued_ms": (run["started_ns"] - run["created_ns"]) // 1_000_000,
        "environment_ms": 0,
        "start_ms": 0,
        "run_ms": gpu_ms,
        "stop_ms": 0,
        "gate_ms": 0,
        "idle_ms": 0,
        "gpu_ms": gpu_ms,
        "billed_ms": gpu_ms,
        "core_ms": 0,
        "memory_mib_ms": 0,
        "micros": gpu_ms * 2,
        "dbu_micros": 0,
    }
