"""Nothing of a Ray outlives these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leftovers import nothing_left


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Require that no process, port or directory of these tests is left at the end of the session."""
    with nothing_left():
        yield
