"""Recordings, and `sgpu` as this process has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.e2e.stable import commands, recording

DATES = sorted(path.name for path in (recording.HERE / "recorded").iterdir())


@pytest.fixture(params=DATES)
def date(request: pytest.FixtureRequest) -> str:
    """Return the folder of a recording; a test runs with each."""
    return str(request.param)


@pytest.fixture
def expected(date: str) -> Any:
    """Return what the recording version said: identifiers of runs, the environment's address."""
    return json.loads((recording.HERE / "recorded" / date / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def recorded_home(date: str, home: Path) -> Path:
    """Return this process's home, with all that was recorded of a machine."""
    return recording.unpacked(date, "home", home)


@pytest.fixture
def sgpu() -> Callable[..., str]:
    """Return what runs a command and returns what it printed."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(commands.root(), list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run
