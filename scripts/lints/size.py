"""Bounds the size of functions (80 lines, docstring not counted) and files (800 lines).

Size follows cohesion: these bounds catch what no reader can follow, and are no targets. Split a function where its
parts have names of their own, and a file where it holds two responsibilities.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.lints.source import AREAS_ALL, Finding, Source

AREAS = AREAS_ALL
FUNCTION_LINES_MAX = 80
FILE_LINES_MAX = 800


def check(source: Source) -> Iterator[Finding]:
    """Yield files and functions that are over their limit."""
    if source.line_count > FILE_LINES_MAX:
        message = (
            f"{source.line_count} lines, the limit is {FILE_LINES_MAX}; split it, or make it a folder of the same name"
        )
        yield source.finding(1, "file-size", message)
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (lines := _lines(node)) > FUNCTION_LINES_MAX:
            message = f"{node.name} has {lines} lines, the limit is {FUNCTION_LINES_MAX}; move straight-line parts out"
            yield source.finding(node.lineno, "function-size", message)


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return total
    return total - ((first.end_lineno or first.lineno) - first.lineno + 1)
