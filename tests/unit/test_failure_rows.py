"""Each row of the failure matrix has tests, one of which carries the row's name, or says what is not built yet."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from typing import Any

import pytest

from tests.support.paths import REPOSITORY

ROWS: dict[str, dict[str, Any]] = tomllib.loads((REPOSITORY / "tests" / "failure_rows.toml").read_text("utf-8"))


@functools.cache
def functions_of(file: str) -> set[str]:
    """Return the test functions and methods of a file."""
    tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_24_3_no_row_is_lost() -> None:
    assert list(ROWS) == [f"F{number:02}" for number in range(1, 83)]


@pytest.mark.parametrize("row", ROWS)
def test_24_3_a_row_has_tests_that_exist_and_carry_its_name(row: str) -> None:
    if "missing" in ROWS[row]:
        assert ROWS[row].keys() == {"failure", "missing"}
        return
    shown = [test.split("::") for test in ROWS[row]["tests"]]
    assert not [names for file, *names in shown if names[-1] not in functions_of(file)]
    assert any(re.search(rf"_{row}(_|$)", names[-1]) for _, *names in shown)
