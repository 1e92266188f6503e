"""Defines the input and output of every lint: a parsed file and a finding.

This module reads and parses files and resolves imported names. It contains no rule.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

AREAS_ALL = ("src", "tests", "scripts", "examples", "benchmarks")
# Vendored code keeps the conventions of its authors.
VENDOR = "/node/inside/vendor/"
INSIDE = "src/serverless_gpu/node/inside/"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A place in a file that breaks a rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One parsed Python file of the repository. `path` is relative to the root, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def area(self) -> str:
        return PurePosixPath(self.path).parts[0]

    @property
    def line_count(self) -> int:
        return len(self.text.splitlines())

    def finding(self, line: int, rule: str, message: str) -> Finding:
        return Finding(path=self.path, line=line, rule=rule, message=message)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return every node of the tree. Several lints visit all nodes, and the walk takes most of their time."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def comments(self) -> tuple[tuple[int, str], ...]:
        """Return the line number and text of every comment, but not strings that look like comments."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return tuple((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)

    def references(self) -> Iterator[tuple[int, str]]:
        """Yield the line number and full dotted name of every use of an imported name. Resolve aliases."""
        meanings = _meanings(self.nodes)
        for node in self.nodes:
            if isinstance(node, (ast.Attribute, ast.Name)):
                root, _, rest = _dotted(node).partition(".")
                if root in meanings:
                    yield node.lineno, f"{meanings[root]}.{rest}" if rest else meanings[root]


def parse(path: str, text: str) -> Source:
    """Return the parsed source.

    Raises:
        SyntaxError: the file does not parse.
    """
    return Source(path=path, text=text, tree=ast.parse(text, filename=path))


def collect(root: Path) -> list[Source]:
    """Return every Python file of the project under `root`, parsed, in a stable order."""
    found = []
    for area in AREAS_ALL:
        for file in sorted((root / area).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if VENDOR not in path:
                found.append(parse(path, file.read_text(encoding="utf-8")))
    return found


def _meanings(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return the full name of each imported name: `import time as t` gives {"t": "time"}."""
    meanings: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                meanings[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return meanings


def _dotted(node: ast.expr) -> str:
    """Return "a.b.c" for an attribute chain that starts with a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
