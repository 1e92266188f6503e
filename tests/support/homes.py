"""Which home a test's processes have: one of its own, and nothing of what the shell around the tests says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PRELOAD = "numpy"
"""What zygotes of tests import: torch, which users get, takes each agent 1.5 s of a core."""


def use_home(patch: pytest.MonkeyPatch, home: Path, fakes: str = "", *, preload: str = PRELOAD) -> None:
    """Have this process and its children use a home, with none of our variables but those given here.

    Args:
        patch: takes it back.
        home: the directory.
        fakes: devices to declare, as ``H100:8``.
        preload: what its zygotes import; "" for what users get.
    """
    for name in list(os.environ):
        if name.startswith(("SERVERLESS_GPU_", "SGPU_")):
            patch.delenv(name)
    patch.setenv("SERVERLESS_GPU_HOME", str(home))
    patch.setenv("SERVERLESS_GPU_PREWARM", "0")
    if preload:
        patch.setenv("SERVERLESS_GPU_PRELOAD", preload)
    if fakes:
        patch.setenv("SERVERLESS_GPU_FAKE", fakes)
