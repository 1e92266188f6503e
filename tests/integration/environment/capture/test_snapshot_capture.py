"""What cannot be captured is named before anything counts, and reports and memory have bounds (F40, F41)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.documents import FileRow
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.counting import TINY
from tests.support.environment.scanned import scan_of
from tests.support.paths import REPOSITORY


@pytest.mark.parametrize("length", [40, 40_000])
@pytest.mark.parametrize("growing", [False, True])
def test_a_file_that_changes_while_it_is_read_is_read_again_and_then_named(
    tmp_path: Path, length: int, growing: bool
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    changing = before / "log"
    changing.write_bytes(bytes(length))
    program = textwrap.dedent(_GROWING if growing else _REWRITING)
    writer = subprocess.Popen([sys.executable, "-c", program, str(changing)])
    deadline = time.monotonic() + 60
    try:
        # A busy machine may give the writer no time during a capture: then it is right, and the next is tried.
        while True:
            source = LocalUnit(rows=(FileRow(path="site/log", size=length, sha256=bytes(32)),), files=(str(changing),))
            blobs = StoreBlobs(MemoryStore())
            try:
                captured = capture(scan_of({"thing": source}), blobs, settings=TINY)
            except EnvironmentUnsupported as error:
                assert str(error).startswith(f"the capture failed because {changing} changes during every read")
                return
            assert captured.moved
            assert time.monotonic() < deadline
    finally:
        writer.kill()
        writer.wait(30)


_GROWING = """
    import os, sys
    fd = os.open(sys.argv[1], os.O_WRONLY)
    length = os.fstat(fd).st_size
    while True:
        for more in range(1000):
            os.ftruncate(fd, length + more)
"""

_REWRITING = """
    import os, sys
    fd = os.open(sys.argv[1], os.O_WRONLY)
    while True:
        os.pwrite(fd, os.urandom(8), 3)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one file of 1 GB", "30,000 files"])
def test_memory_stays_below_256_mb(tmp_path: Path, shape: str) -> None:
    before = tmp_path / "before"
    before.mkdir()
    program = _MEASURED_LARGE if shape.startswith("one") else _MEASURED_MANY
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(before), str(tmp_path / "store")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert 30 * 1024 < int(done.stdout) < 256 * 1024


_MEASURED = """
    import os, sys
    from pathlib import Path
    from serverless_gpu.environment.stores.blobs import StoreBlobs
    from serverless_gpu.environment.documents import FileRow
    from serverless_gpu.environment.scan.scan import LocalUnit
    from serverless_gpu.environment.stores.directory_store import DirectoryStore
    from serverless_gpu.environment.capture.snapshot_capture import capture
    from tests.support.environment.scanned import scan_of, source_of

    before = Path(sys.argv[1])
    {make}
    capture(scan_of({{"thing": source}}), StoreBlobs(DirectoryStore(Path(sys.argv[2]))))
    # Not ru_maxrss: that begins with what the process had which started this one.
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""

# Noise over sparse zeros: 1 GB to read, a quarter of it to store, and quick to make.
_MEASURED_LARGE = _MEASURED.format(
    make="""
    noise = os.urandom(1024 * 1024)
    with open(before / "large", "wb") as large:
        for _ in range(240):
            large.write(noise)
            large.seek(3 * 1024 * 1024, os.SEEK_CUR)
        large.truncate(1_000_000_000)
    row = FileRow(path="site/large", size=1_000_000_000, sha256=bytes(32))
    source = LocalUnit(rows=(row,), files=(str(before / "large"),))
"""
)

_MEASURED_MANY = _MEASURED.format(
    make="""
    (before.parent / "one").write_bytes(os.urandom(2000) * 2)
    for number in range(30_000):
        if number % 1000 == 0:
            (before / str(number // 1000)).mkdir()
        # Links are quick to make, and read as files of their own.
        os.link(before.parent / "one", before / str(number // 1000) / f"f{number}.py")
    source = source_of(before)
"""
)
