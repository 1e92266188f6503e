"""Helpers of the tests of directory store that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.testing.stores import pack_key

DATA = bytes(range(256)) * 4096
KEY = pack_key(DATA)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
