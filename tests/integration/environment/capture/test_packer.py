"""A capture sends what is missing, once, with true digests, in bounded memory, or names what stands in its way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.restore.cache.unpack import unpack
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from tests.support.environment.counting import WHOLE_PACKS
from tests.support.environment.scanned import contents, scan_of, source_of
from tests.support.paths import REPOSITORY


def test_a_capture_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    before, store = tmp_path / "before", DirectoryStore(tmp_path / "store")
    before.mkdir()
    for number in range(6):
        (before / f"f{number}").write_bytes(os.urandom(5 * 1024 * 1024))
    # The child stores two groups of packs, about half of all, so the kill comes in the middle.
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), str(before), str(tmp_path / "store")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"second\n"
        finally:
            child.kill()
    packs = {stored.key: stored.put_ns for stored in store.list("packs")}
    assert 2 <= len(packs) <= 6
    assert not list(store.list("snapshots"))
    captured = capture(scan_of({"thing": source_of(before)}), StoreBlobs(store), settings=WHOLE_PACKS)
    assert captured.packs_known == len(packs)
    assert {stored.key: stored.put_ns for stored in store.list("packs")}.items() >= packs.items()
    unpack(StoreBlobs(store).read_unit(captured.units_new[0]), StoreBlobs(store), tmp_path / "after")
    assert contents(tmp_path / "after/site") == contents(before)


_KILLED = """
    import itertools, sys, threading
    from pathlib import Path
    from serverless_gpu.environment.stores.blobs import StoreBlobs
    from serverless_gpu.environment.stores.directory_store import DirectoryStore
    from serverless_gpu.environment.capture.snapshot_capture import capture
    from tests.support.environment.scanned import scan_of, source_of
    from tests.support.environment.counting import WHOLE_PACKS

    class Stuck(DirectoryStore):
        begun, stored = itertools.count(1), []
        def put(self, objects):
            if next(self.begun) > 2:
                threading.Event().wait()
            super().put(objects)
            self.stored.append(1)
            if len(self.stored) == 2:
                print("second", flush=True)

    blobs = StoreBlobs(Stuck(Path(sys.argv[2])))
    capture(scan_of({"thing": source_of(Path(sys.argv[1]))}), blobs, settings=WHOLE_PACKS)
"""
