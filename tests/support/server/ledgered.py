"""Ledgers that tests of reports start from: rows as the server writes them, of accounts that are made up."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.server.db import tables
from serverless_gpu.server.records import charges

HOUR_MS = 3_600_000
NOTHING = dict.fromkeys(
    ("queued_ms", *SEGMENTS, "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "micros", "dbu_micros"), 0
)


def account(connection: sa.Connection, **fields: Any) -> int:
    """Return the number of an account, which is made when it is not there."""
    row: dict[str, Any] = {
        "owner": "alice",
        "team": "",
        "pool": "default",
        "reserved": False,
        "policy": "",
        "gpu_type": "H100",
        "name": "train",
        "workload": "function",
        "environment": "",
        "currency": "USD",
    } | fields
    return charges.ensure_account(connection, charges.Account(**row))


def charge(
    connection: sa.Connection, run_id: str, account_id: int, *, day: int, fence: int = 1, number: int = 1, **fields: Any
) -> None:
    """Write an entry: an hour of one device for 3 USD unless said."""
    used = {"gpu_ms": HOUR_MS, "billed_ms": HOUR_MS, "run_ms": HOUR_MS, "micros": 3_000_000}
    row: dict[str, Any] = NOTHING | used | {"kind": "original", "provisional": False, "gpus": 1} | fields
    row |= {"run_id": run_id, "fence": fence, "number": number, "account_id": account_id, "day": day}
    row.setdefault("start_ns", day * DAY_NS)
    row.setdefault("end_ns", row["start_ns"] + row["gpu_ms"] * 1_000_000)
    row.setdefault("posted_ns", row["end_ns"])
    connection.execute(tables.charges.insert(), row)


def seen(connection: sa.Connection, run_id: str, account_id: int, *, day: int, observed_ms: int, busy_ms: int) -> None:
    """Write what telemetry saw of an attempt."""
    row = {"run_id": run_id, "fence": 1, "account_id": account_id, "day": day, "gpus": 1, "gpu_ms": observed_ms}
    row |= {"observed_ms": observed_ms, "busy_ms": busy_ms, "peak_memory_bytes": None}
    row["plain_id"] = charges.plain_ids(connection, [account_id])[account_id]
    connection.execute(tables.utilisations.insert(), row)
