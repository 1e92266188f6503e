"""Limits the imports of `node/inside`, which runs in user environments, to the standard library.

Zygote, stem and rank start in a user's interpreter that does not have this package installed. An import of msgspec, or
of a module one folder up, works for every developer and fails for the first user. `import-linter` forbids imports of
the rest of the package. This lint also forbids third-party packages and relative imports that leave the folder.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from scripts.lints.inner_imports import optional_packages
from scripts.lints.source import INSIDE, Finding, Source

AREAS = ("src",)


def check(source: Source) -> Iterator[Finding]:
    """Yield imports of `node/inside` from outside of it."""
    if not source.path.startswith(INSIDE):
        return
    depth = source.path.removeprefix(INSIDE).count("/")
    for node in _run_nodes(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level > depth + 1:
            yield source.finding(
                node.lineno, "inside-room", "a relative import leaves node/inside; copy the few lines that it needs"
            )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(source, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from _absolute(source, node.lineno, node.module or "")


def _run_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that can run. Only mypy reads the code under `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        types_only = isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        waiting.extend(node.orelse if isinstance(node, ast.If) and types_only else ast.iter_child_nodes(node))


def _absolute(source: Source, line: int, name: str) -> Iterator[Finding]:
    root = name.partition(".")[0]
    if root not in sys.stdlib_module_names and root not in optional_packages():
        message = f"{name} is not in the standard library, and the user's environment may not have it"
        yield source.finding(line, "inside-room", message)
