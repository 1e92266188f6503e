"""Allows only the database's modules to begin and end transactions; other code works on a connection.

A commit in the middle of an operation splits one decision in two. A crash between them leaves half of the decision. On
SQLite the commit would also commit the work of other threads in the same transaction (`server/db/group_commit.py`).
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
    """Yield each call in the server that begins or ends a transaction outside of the database's modules."""
    if not source.path.startswith(PLACE) or source.path in OWNERS:
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            message = (
                f".{node.func.attr}() belongs in server/db/database.py; pass a function to `Database.write`, "
                "which commits"
            )
            yield source.finding(node.lineno, "transaction", message)
