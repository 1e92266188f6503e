"""Sentences that the product prints, by key. The texts stand in tests/golden, one TOML file per folder of tests.

A test that checks what a person reads names the sentence: `assert golden("common.golden.ranks-did-stop") in notes`.
So a changed sentence changes one line of one golden file, and a reviewer reads all of them as one text.

A text may have fields in braces; the test gives their values. Without values, braces stand for themselves.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


@functools.cache
def texts(area: str) -> dict[str, dict[str, str]]:
    """Return the texts of one golden file, by module and name."""
    tables: dict[str, dict[str, str]] = tomllib.loads((FOLDER / f"{area}.toml").read_text(encoding="utf-8"))
    return tables


def golden(key: str, /, **values: object) -> str:
    """Return the sentence `area.module.name`, with its fields filled in."""
    area, module, name = key.split(".")
    text = texts(area)[module][name]
    return text.format(**values) if values else text
