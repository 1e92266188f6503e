"""Every store does what a store does: the shipped suite, on stores of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.testing.stores import StoreConformance


class TestDirectory(StoreConformance):
    """A directory that does not exist yet."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Return the store of a test."""
        return DirectoryStore(tmp_path / "a directory" / "store")


class TestMemory(StoreConformance):
    """A dictionary."""

    @pytest.fixture
    def store(self) -> Store:
        """Return the store of a test."""
        return MemoryStore("test")
