"""Rounds of an environment that goes to many cold nodes: a bucket, `sgpu up` in front of it, a line, node processes.

    bucket, 200 MB/s ──▶ server ──▶ line for all nodes, 1 Gbit/s or none ──▶ 1 or 8 nodes that have nothing

A node is a process that does what a restoring process of a node does, with a cache of its own. All of them have
imported what they need and wait; the round is from the word until the last one has the environment laid out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from benchmarks.environment_sets import now_ns
from serverless_gpu.environment.compression import LEVEL_LOCAL, compress
from serverless_gpu.environment.documents import (
    BLOCK_BYTES,
    ContentPlace,
    FileRow,
    Interpreter,
    PackBlock,
    Root,
    SnapshotMember,
    SnapshotOrigin,
    Unit,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.interpreters import ask
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import open_store
from tests.support.network.shared_bandwidth import Bandwidth, FakeBucket, SharedLine

BUCKET_BYTES_S = 200e6
LINE_BYTES_S = 125e6
UNITS = 8
"""Each is one pack."""
UNIT_BYTES = 4 * BLOCK_BYTES
NODES = 8
_STORE = "s3://bench/environments"
_STOP_S = 30.0


def one_direct(directory: str) -> dict[str, object]:
    """One cold node, nothing but the bucket limits."""
    return _round(1, nearby=True, line_bytes_s=0.0)


def many_direct(directory: str) -> dict[str, object]:
    """Eight at once."""
    return _round(NODES, nearby=True, line_bytes_s=0.0)


def many_direct_without(directory: str) -> dict[str, object]:
    """Eight at once, and the server keeps no copies."""
    return _round(NODES, nearby=False, line_bytes_s=0.0)


def one_line(directory: str) -> dict[str, object]:
    """One cold node, the server's line has 1 Gbit/s."""
    return _round(1, nearby=True, line_bytes_s=LINE_BYTES_S)


def many_line(directory: str) -> dict[str, object]:
    """Eight at once on that line."""
    return _round(NODES, nearby=True, line_bytes_s=LINE_BYTES_S)


def many_line_without(directory: str) -> dict[str, object]:
    """Eight at once on that line, and the server keeps no copies."""
    return _round(NODES, nearby=False, line_bytes_s=LINE_BYTES_S)


def _round(nodes: int, *, nearby: bool, line_bytes_s: float) -> dict[str, object]:
    bucket, snapshot = _stored()
    with tempfile.TemporaryDirectory(prefix="sgpu-units-") as scratch, contextlib.ExitStack() as stack:
        home = Path(scratch) / "home"
        home.mkdir(mode=0o700)
        url = stack.enter_context(_server(home, bucket, nearby=nearby))
        if line_bytes_s:
            url = stack.enter_context(SharedLine(url, Bandwidth(line_bytes_s))).url
        token = (home / "server" / "node.token").read_text(encoding="ascii").strip()
        waiting = [
            stack.enter_context(_node(url, token, snapshot, Path(scratch) / f"node{number}")) for number in range(nodes)
        ]
        for node in waiting:
            _line_of(node)
        bucket.gets.clear()
        bucket.sent_bytes = 0
        began_ns = now_ns()
        for node in waiting:
            _say(node, "go")
        ended_ns = max(int(_line_of(node)) for node in waiting)
        packs = bucket.reads("packs")
        return {
            "ms": (ended_ns - began_ns) / 1e6,
            "reads": sum(packs.values()) / UNITS,
            "most": max(max(bucket.reads(kind).values()) for kind in ("packs", "units", "snapshots")),
            "mb": bucket.sent_bytes / 1e6,
        }


# --- what is stored ---------------------------------------------------------------------------------------------------


@functools.cache
def _stored() -> tuple[FakeBucket, str]:
    """Return a bucket with an environment of 128 MiB that cannot be compressed, and the snapshot's address."""
    bucket = FakeBucket(Bandwidth(BUCKET_BYTES_S))
    bucket.__enter__()
    blobs = StoreBlobs(open_store(_STORE, bucket.variables()))
    units = [_unit(blobs, number) for number in range(UNITS)]
    members = tuple(
        SnapshotMember(
            address=unit.address, kind="distribution", name=f"d{number}", version="1", size=UNIT_BYTES, files=4
        )
        for number, unit in enumerate(units)
    )
    python = ask(str(getattr(sys, "_base_executable", sys.executable)))
    if python is None:
        raise RuntimeError("this interpreter does not say what it is")
    interpreter = Interpreter(
        implementation=python.implementation, version=python.version, abi=python.abi, platform=python.platform
    )
    snapshot = make_snapshot(interpreter, (Root(kind="own", members=members),), SnapshotOrigin())
    blobs.write_snapshot(snapshot)
    return bucket, snapshot.address


def _unit(blobs: StoreBlobs, number: int) -> Unit:
    """Put a unit of four files of a block each, in one pack."""
    contents = [random.Random(4 * number + file).randbytes(BLOCK_BYTES) for file in range(4)]
    frames = [compress(content, LEVEL_LOCAL) for content in contents]
    starts = [sum(map(len, frames[:index])) for index in range(4)]
    pack = b"".join(frames)
    rows = tuple(
        FileRow(f"site/d{number}_{file}.bin", "f", BLOCK_BYTES, hashlib.sha256(contents[file]).digest())
        for file in range(4)
    )
    unit = Unit(
        address=unit_address(rows),
        rows=rows,
        packs=(blake3(pack).hexdigest(),),
        blocks=tuple(PackBlock(0, starts[index], len(frames[index]), BLOCK_BYTES) for index in range(4)),
        places=tuple(ContentPlace(index, 0) for index in range(4)),
    )
    blobs.write_pack(pack)
    blobs.write_unit(unit)
    return unit


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(command: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(_STOP_S)


@contextlib.contextmanager
def _server(home: Path, bucket: FakeBucket, *, nearby: bool) -> Iterator[str]:
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", "--no-node", "--port", "0", "--store", _STORE]
    command += [] if nearby else ["--nearby-gib", "0"]
    with _process(command, SERVERLESS_GPU_HOME=str(home), **bucket.variables()) as process:
        yield _line_of(process).rpartition(" ")[2].strip()


def _node(url: str, token: str, snapshot: str, home: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return _process([sys.executable, "-m", "benchmarks.units", url, token, snapshot, str(home)])


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended: {process.args!r}")
    return line


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def main(url: str, token: str, snapshot: str, home: str) -> None:
    """Restore once the word comes; print when that was done."""
    store = ServedStore(f"sgpu+{url}", token)
    print("ready")
    sys.stdin.readline()
    restore(snapshot, StoreBlobs(store), UnitCache(Path(home)), way=RestoreMethod(mode="links", why="asked"))
    print(now_ns())
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
