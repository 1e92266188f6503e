"""Helpers of the tests of pythons that other tests use as well."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.environment.made_environments import interpreter


def wrapper(path: Path, *, version: str = "", abi: str = "", log: Path | None = None) -> Path:
    """Make a program that says of itself what we want it to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = interpreter()
    answer = [here.implementation, version or here.version, abi or here.abi, here.platform, "cpython-311", str(path)]
    lines = ["#!/bin/sh", f"echo asked >> {log}" if log else "", f"echo '{msgspec.json.encode(answer).decode()}'", ""]
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return path
