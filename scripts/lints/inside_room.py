"""`node/inside` runs in the user's own environment: standard library and itself, nothing else.

Zygote, stem and rank start from a folder on the path of an interpreter that has never heard of us. An import of
msgspec, or of a module one folder up, works on every developer's machine and fails on the first user's.
`import-linter` forbids the rest of our package; this lint also refuses third-party packages and relative imports that
climb out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from scripts.lints.inner_imports import optional_packages
from scripts.lints.source import INSIDE, Finding, Source

AREAS = ("src",)


def check(source: Source) -> Iterator[Finding]:
    """Yield imports of `node/inside` that reach outside it."""
    if not source.path.startswith(INSIDE):
        return
    depth = source.path.removeprefix(INSIDE).count("/")
    for node in _run_nodes(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level > depth + 1:
            yield source.finding(
                node.lineno, "inside-room", "a relative import leaves node/inside; copy the few lines needed"
            )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(source, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from _absolute(source, node.lineno, node.module or "")


def _run_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what can run: not what stands under `if TYPE_CHECKING:`, which only mypy reads."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        types_only = isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        waiting.extend(node.orelse if isinstance(node, ast.If) and types_only else ast.iter_child_nodes(node))


def _absolute(source: Source, line: int, name: str) -> Iterator[Finding]:
    root = name.partition(".")[0]
    if root not in sys.stdlib_module_names and root not in optional_packages():
        message = f"{name} is not in the standard library, and the user's environment need not have it"
        yield source.finding(line, "inside-room", message)
