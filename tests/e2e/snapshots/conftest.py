"""An environment of each test's own, and a caller in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local.small_environment import Dialogue, SmallEnvironment


@pytest.fixture
def small(own: Path, tmp_path: Path, request: pytest.FixtureRequest) -> SmallEnvironment:
    """Return an environment with a package `toy`, and a project whose `work.py` is the test module's `WORK`."""
    environment = SmallEnvironment(tmp_path / "here")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    environment.write("work.py", request.module.WORK)
    return environment


@pytest.fixture
def dialogue(small: SmallEnvironment) -> Iterator[Dialogue]:
    """Yield a caller in that environment."""
    started = Dialogue(small, "work")
    try:
        yield started
    finally:
        started.close()
