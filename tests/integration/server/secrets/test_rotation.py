"""Key and tokens of a server are replaced, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash.rotation import made


def test_22A1_rotate_works_on_both_databases_also_in_small_portions(
    home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serverless_gpu.server.operations.rotation._AT_ONCE", 1)
    server = made(home, monkeypatch, database_url)
    assert server.rotate().contexts == 2
    server.check()
    assert server.rotate().contexts == 2  # once more, from the beginning
