"""Which home a test's processes have: one of its own, and nothing of what the shell around the tests says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def use_home(patch: pytest.MonkeyPatch, home: Path, fakes: str = "") -> None:
    """Have this process and its children use a home, with none of our variables but those given here.

    Args:
        patch: takes it back.
        home: the directory.
        fakes: devices to declare, as ``H100:8``.
    """
    for name in list(os.environ):
        if name.startswith(("SERVERLESS_GPU_", "SGPU_")):
            patch.delenv(name)
    patch.setenv("SERVERLESS_GPU_HOME", str(home))
    patch.setenv("SERVERLESS_GPU_PREWARM", "0")
    if fakes:
        patch.setenv("SERVERLESS_GPU_FAKE", fakes)
