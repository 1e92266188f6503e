"""Helpers of the tests of linking that other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.environment.restore.tree_plan import TreePart


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o444)
        os.utime(path, ns=(10**18, 10**18))
    return directory


def part(**fields: object) -> TreePart:
    return TreePart(**{"at": "", "area": "site", "root": 0, "units": (), **fields})  # type: ignore[arg-type]  # of a Part
