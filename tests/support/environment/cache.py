"""Helpers of the tests of cache that other tests use as well."""

from __future__ import annotations

from serverless_gpu.environment.restore.cache import Cache
from serverless_gpu.environment.restore.restoring import Way, restore
from serverless_gpu.testing import FakeClock
from tests.support.environment.made_environments import Made, Piece


def used(made: Made, cache: Cache, clock: FakeClock, *pieces: Piece) -> str:
    """Restore an environment of these units and return its address; a second passes."""
    clock.advance(1)
    snapshot = made.snapshot([made.root(pieces)])
    restore(snapshot.address, made.blobs, cache, way=Way(mode="links"))
    return snapshot.address
