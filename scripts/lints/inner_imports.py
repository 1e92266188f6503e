"""No import inside a function, except of an optional or heavy package.

An inner import is how a cycle between two rooms is hidden, and how a missing dependency is found by a user at night
instead of by a test. The packages that may be imported late are listed once, in pyproject.toml
(`banned-module-level-imports`, which ruff also keeps out of module level). Ruff's PLC0415 says the same, but can be
silenced in a comment; this lint cannot.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.lints.source import Finding, Source

AREAS = ("src",)


def check(source: Source) -> Iterator[Finding]:
    """Yield imports inside functions that name anything but an optional package."""
    for function in ast.walk(source.tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _own_nodes(function):
                for name in _imported(node):
                    if name.partition(".")[0] not in optional_packages():
                        message = (
                            f"{name} is imported inside {function.name}; import it at the top of the file, or "
                            "list an optional package in pyproject.toml (banned-module-level-imports)"
                        )
                        yield source.finding(getattr(node, "lineno", function.lineno), "inner-import", message)


@cache
def optional_packages() -> frozenset[str]:
    """Return the packages that are imported late, from pyproject.toml."""
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        settings = tomllib.load(file)
    return frozenset(settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"])


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield what stands in this function but not in a function nested in it, which reports for itself."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting.extend(ast.iter_child_nodes(node))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []
