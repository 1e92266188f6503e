"""Homes with a server: a scripted one for what the line may do, the real one for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.client.remote.profile import Profile, write_profile
from tests.remote.fake_server import TOKEN, FakeServer


@pytest.fixture
def fake(home: Path) -> Iterator[FakeServer]:
    """Yield a scripted server that this home's remote calls go to, as on a machine with `sgpu up`."""
    with FakeServer() as server:
        write_profile(home, Profile(url=server.url, token=TOKEN, principal="alice", embedded=True))
        yield server
