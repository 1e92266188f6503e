"""Golden files and the tests that name their sentences agree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.golden import FOLDER, golden, texts
from tests.support.paths import REPOSITORY


def _used() -> Iterator[str]:
    """Yield the named keys. A key that a test completes, such as f"node.levels.{name}", names all keys of its start."""
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "golden":
                continue
            key = node.args[0] if node.args else None
            if isinstance(key, ast.Constant):
                yield str(key.value)
            elif isinstance(key, ast.JoinedStr) and isinstance(start := key.values[0], ast.Constant):
                yield from (name for name in _there() if name.startswith(str(start.value)))


def _there() -> set[str]:
    areas = [path.stem for path in FOLDER.glob("*.toml")]
    return {f"{area}.{module}.{name}" for area in areas for module, names in texts(area).items() for name in names}


def test_every_sentence_that_a_test_names_is_there_and_every_sentence_is_named() -> None:
    used = set(_used())
    assert (used - _there(), _there() - used) == (set(), set())


def test_fields_are_filled_in_only_where_values_are_given() -> None:
    key = next(key for key in sorted(_there()) if "{" in golden(key))
    assert "{" in golden(key)
