"""The servers, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environment.servers import moto, rclone

BUCKET = "environments"


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """Yield the url of a moto server that has the bucket."""
    with moto(BUCKET) as url:
        yield url


@pytest.fixture(scope="session")
def rclone_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the url of an rclone server that has the bucket."""
    with rclone(tmp_path_factory.mktemp("rclone"), BUCKET) as url:
        yield url


@pytest.fixture(params=["moto", "rclone"])
def server(request: pytest.FixtureRequest) -> str:
    """Return the url of each server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Return a prefix that no other test has."""
    return "".join(letter if letter.isalnum() else "-" for letter in tmp_path.name) + "/environments"
