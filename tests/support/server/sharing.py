"""The decision that nearly all tests of servers take as made: several principals may share a uid in every pool.

Tests are about many users on one machine, and this machine cannot keep them apart. Tests of isolation itself override
the fixture in their own module and decide for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from serverless_gpu.model.isolation import NONE
from serverless_gpu.server.db.tables import pools


@pytest.fixture(autouse=True)
def shared_pools() -> Iterator[None]:
    """Have every pool made in this process as if `sgpu pool set --isolation none` had been said of it."""
    column = pools.c.isolation
    sa.ColumnDefault(NONE)._set_parent(column)
    yield
    column.default = None
