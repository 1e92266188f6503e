"""Events that come between a decision and the transaction that writes it down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from serverless_gpu.server.db.database import Transactions


def before_next_write(patch: pytest.MonkeyPatch, database: Transactions, happen: Callable[[], object]) -> None:
    """Have something happen once, right before the next transaction of a database begins.

    Args:
        patch: of the test.
        database: whose transaction is waited for.
        happen: what happens; its own transactions are not waited for.
    """
    write = database.write

    def late(work: Callable[[sa.Connection], object]) -> object:
        patch.setattr(database, "write", write)
        happen()
        return write(work)

    patch.setattr(database, "write", late)
