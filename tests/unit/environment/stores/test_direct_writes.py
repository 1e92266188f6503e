"""Large objects reach the disk past the page cache, and are the same bytes as ever."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from serverless_gpu.environment.stores.directory_store import SIZE_MIN, DirectoryStore, write_direct
from serverless_gpu.errors import StorageError

KEY = "packs/" + "ab" * 32


@pytest.mark.parametrize(
    "size", [0, 1, SIZE_MIN - 1, SIZE_MIN, SIZE_MIN + 1, 2 * SIZE_MIN + 4095, 4 * SIZE_MIN, 9 * SIZE_MIN + 4097]
)
def test_an_object_of_any_size_comes_back(tmp_path: Path, size: int) -> None:
    data, store = os.urandom(size), DirectoryStore(tmp_path)
    store.put({KEY: data})
    assert store.get(KEY) == data
    store.put({KEY: b"another"})
    assert store.get(KEY) == b"another"


def test_whole_blocks_go_past_the_cache_and_the_file_is_as_before_afterwards(tmp_path: Path) -> None:
    data = memoryview(os.urandom(SIZE_MIN + 5))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        done = write_direct(fd, data)
        assert done in (0, SIZE_MIN)  # 0 where the file system knows no direct writing
        os.write(fd, data[done:])
        assert os.pread(fd, 2 * SIZE_MIN, 0) == data
    finally:
        os.close(fd)


def test_a_file_system_without_direct_writing_is_no_error() -> None:
    data = memoryview(os.urandom(SIZE_MIN))
    fd = os.memfd_create("store")
    try:
        done = write_direct(fd, data)
        os.write(fd, data[done:])
        assert os.pread(fd, SIZE_MIN, 0) == data
    finally:
        os.close(fd)


def test_F40_a_limit_reached_half_way_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put({KEY: b"before"})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SIZE_MIN + 100, old[1]))
    try:
        with pytest.raises(StorageError):
            store.put({KEY: os.urandom(9 * SIZE_MIN)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.get(KEY) == b"before"
    assert not list((tmp_path / "incoming").iterdir())
