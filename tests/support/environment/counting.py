"""A store that counts, and small environments for it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.environment.capture.packer import PackSettings
from serverless_gpu.environment.scan.scan import Scan
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import StoreUnavailable
from tests.support.environment.scanned import scan_of, source_of

TINY = PackSettings(block_bytes=64, pack_bytes=160, threads=2)
WHOLE_PACKS = PackSettings(pack_bytes=4 * 1024 * 1024, threads=2)


class CountingStore(MemoryStore):
    """A store that remembers what was put, and can refuse."""

    def __init__(self, *, fail_at: int = -1, free: int | None = None) -> None:
        super().__init__()
        self.puts: list[str] = []
        self.threads: set[int] = set()
        self.fail_at = fail_at
        self.free = free

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        for key, data in objects.items():
            if len(self.puts) == self.fail_at:
                raise StoreUnavailable("the store does not answer")
            super().put({key: data})
            self.puts.append(key)
            self.threads.add(threading.get_ident())
            if self.free is not None:
                self.free -= len(data)

    def kinds(self) -> list[str]:
        return [key.partition("/")[0] for key in self.puts]

    def free_bytes(self) -> int | None:
        return self.free


def two_units(tmp_path: Path) -> Scan:
    """Return a scan of two units with files of all sizes, as TINY sees them."""
    sources = {}
    for name in ("one", "two"):
        directory = tmp_path / name
        (directory / "sub").mkdir(parents=True)
        for number in range(9):
            (directory / "sub" / f"f{number}").write_bytes(hashlib.sha512(f"{name} {number}".encode()).digest()[:40])
        (directory / "flarge").write_bytes(hashlib.shake_128(name.encode()).digest(700))
        (directory / "fempty").write_bytes(b"")
        (directory / "link").symlink_to("sub/f1")
        sources[name] = source_of(directory)
    return scan_of(sources)


def claiming(scan: Scan, path: str, **changes: object) -> Scan:
    """Return a scan of one unit that says something else of one file than is true."""
    (source,) = scan.sources.values()
    rows = tuple(msgspec.structs.replace(row, **changes) if row.path == path else row for row in source.rows)
    return scan_of({"thing": msgspec.structs.replace(source, rows=rows)})
