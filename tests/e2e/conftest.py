"""Homes for tests with real processes.

`warm`: one home and one agent for all tests that leave it as it was; after each of them nothing may run there.
`own`:  a fresh home with an agent of its own, for tests that kill, fill or change it.

Both declare eight fakes, so that nothing depends on this machine's cores or GPUs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.testing import stop_agent
from tests.support.homes import use_home
from tests.support.local.observe import cancel_all, nothing_of_a_run, processes_of, wait_for

FAKES = "H100:8"


@pytest.fixture(scope="session")
def session_home() -> Iterator[Path]:
    """Yield the home of all `warm` tests; at the end its agent ends and takes everything with it."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    yield directory
    stop_agent(directory)
    wait_for(lambda: not processes_of(directory), "agent and supervisors of the session are gone")
    shutil.rmtree(directory)


@pytest.fixture
def warm(session_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the shared home, and require that no run outlives the test."""
    use_home(monkeypatch, session_home, FAKES, preload="")
    yield session_home
    try:
        wait_for(lambda: nothing_of_a_run(session_home), "every run of the test has ended")
    finally:
        cancel_all(session_home)


@pytest.fixture
def own(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a fresh home with declared fakes."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", FAKES)
    yield home
    cancel_all(home)


@pytest.fixture
def where(tmp_path: Path) -> str:
    """Return a directory in which ranks announce themselves and look for what they wait for."""
    return str(tmp_path)
