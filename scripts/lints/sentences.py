"""Limits literal sentences in assertions: tests take user-facing sentences from golden files by key.

The lint counts literals of four or more words that an assertion compares (`==`, `!=`, `in`, `not in`) or matches
(`match=`). Tests may have a few, such as fragments of code or of foreign programs' output.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from scripts.lints.source import Source

SENTENCES_MAX = 60
WORDS_MIN = 4
_COMPARED = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def literals(sources: Sequence[Source]) -> list[tuple[str, int]]:
    """Return path and line of each literal sentence in an assertion of the tests."""
    tests = [source for source in sources if source.area == "tests"]
    return [(source.path, node.lineno) for source in tests for node in _sentences(source.nodes)]


def _sentences(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(operator, _COMPARED) for operator in node.ops):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            operands = [node.value]
        yield from (text for operand in operands for text in _strings(operand) if _words(text) >= WORDS_MIN)


def _strings(operand: ast.expr) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the strings of an operand: itself or the items of a display, but not arguments of a call."""
    if isinstance(operand, ast.JoinedStr) or (isinstance(operand, ast.Constant) and isinstance(operand.value, str)):
        yield operand
    elif isinstance(operand, (ast.List, ast.Tuple, ast.Set)):
        for item in operand.elts:
            yield from _strings(item)
    elif isinstance(operand, ast.Dict):
        for item in operand.values:
            yield from _strings(item)
    elif isinstance(operand, ast.IfExp):
        yield from _strings(operand.body)
        yield from _strings(operand.orelse)
    elif isinstance(operand, ast.BinOp):
        yield from _strings(operand.left)
        yield from _strings(operand.right)


def _words(node: ast.Constant | ast.JoinedStr) -> int:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = (str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
    return sum(bool(re.search("[A-Za-z]", word)) for word in "".join(texts).split())
