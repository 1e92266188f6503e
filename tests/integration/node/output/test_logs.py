"""What ranks write: byte-exact in files, as text to whoever watches, bounded everywhere."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node.logs import Rank


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_F49_one_turn_takes_only_so_much(rank: Rank) -> None:
    """A flood must not starve the other ranks: the pipe is left to the next turn."""
    fd = rank.log.write_ends()[0]
    turn_bytes = 16 * (1 << 16)
    written = 0
    pid = os.fork()
    if pid == 0:
        try:
            os.close(rank.log.readers()[0][0])  # so that it ends if the test fails
            os.write(fd, b"x" * (3 * turn_bytes))  # blocks until it is read
        finally:
            os._exit(0)
    while written < 3 * turn_bytes:
        select.select([rank.log.readers()[0][0]], [], [], 10)
        assert rank.log.readers()[0][1]()
        assert len(rank.stored()) - written <= turn_bytes
        written = len(rank.stored())
    os.waitpid(pid, 0)
    assert rank.stored() == b"x" * (3 * turn_bytes)
