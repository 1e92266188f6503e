"""The rows that the drivers write beside ours have every column that the tables ask for."""

from __future__ import annotations

import pytest

from benchmarks import databases
from serverless_gpu.server.db import tables

ROWS = {
    "runs": (tables.runs, {"id": "r", **databases.RUN}),
    "events": (tables.events, {"run_id": "r", **databases.EVENT}),
    "audit": (tables.audit, {"subject": "r", **databases.AUDIT}),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_a_driver_has_every_column_that_may_not_be_empty(name: str) -> None:
    table, row = ROWS[name]
    needed = {
        column.name
        for column in table.c
        if not column.nullable and column.server_default is None and column is not table.autoincrement_column
    }
    assert needed <= row.keys() <= {column.name for column in table.c}
