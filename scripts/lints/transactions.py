"""Transactions begin and end in the database's own room; work on rows is a function of a connection.

A commit in the middle of a verb splits one decision in two, and a crash between them leaves half of it. On SQLite it
would also commit what other threads have in the same transaction (`server/db/group_commit.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.lints.source import Finding, Source

AREAS = ("src",)
PLACE = "src/serverless_gpu/server/"
OWNERS = (f"{PLACE}db/database.py", f"{PLACE}db/group_commit.py")
CALLS = frozenset({"begin", "begin_nested", "commit", "rollback"})


def check(source: Source) -> Iterator[Finding]:
    """Yield every call of the server that begins or ends a transaction outside of the database's modules."""
    if not source.path.startswith(PLACE) or source.path in OWNERS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            message = (
                f".{node.func.attr}() is for server/db/database.py; pass a work to `Database.write`, which commits it"
            )
            yield source.finding(node.lineno, "transaction", message)
