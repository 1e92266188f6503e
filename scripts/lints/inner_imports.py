"""Forbids imports inside functions, except of optional or heavy packages.

An inner import can hide a cycle between two packages. If a dependency is missing, a user finds out instead of a test.
Only pyproject.toml lists the packages that may be imported late (`banned-module-level-imports`). Ruff forbids these
packages at module level. Ruff's PLC0415 is the same rule, but a comment can silence it; no comment silences this lint.
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
    """Yield imports inside functions, except of optional packages."""
    for function in source.nodes:
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
    """Return the packages that may be imported late, from pyproject.toml."""
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        settings = tomllib.load(file)
    return frozenset(settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"])


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without nested functions, which `check` visits separately."""
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
