"""An environment to many nodes, with real processes: the bucket is read once, whoever is killed."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.store_urls import open_store
from tests.e2e.remote import restoring_node
from tests.support.environment.made_environments import Made
from tests.support.golden import golden
from tests.support.network.shared_bandwidth import FakeBucket
from tests.support.ports import own_port
from tests.support.remote.server_process import ServerProcess

UNITS = 12
FILE_BYTES = 400_000


class Scene(NamedTuple):
    """A bucket with an environment, and a server in front of it."""

    bucket: FakeBucket
    server: ServerProcess
    home: Path
    snapshot: str
    root: Path

    def node(self, name: str) -> subprocess.Popen[str]:
        """Start a node that has nothing yet and restores the environment."""
        token = (self.home / "server" / "node.token").read_text(encoding="ascii").strip()
        return restoring_node.start(self.server.url, token, self.snapshot, self.root / name)

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of the environment on a node."""
        tree = next((self.root / name / "trees" / self.snapshot).glob("tree*/lib/python3*/site-packages"))
        return {path.name: path.read_bytes() for path in tree.glob("*.bin")}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with FakeBucket() as bucket:
        made = Made(StoreBlobs(open_store("s3://b/p", bucket.variables())))
        pieces = [
            made.piece({f"site/m{number}.bin": random.Random(number).randbytes(FILE_BYTES)}) for number in range(UNITS)
        ]
        snapshot = made.snapshot([made.root(pieces)]).address
        bucket.gets.clear()
        server = ServerProcess(home, "node=false", f"port={own_port()}", "store=s3://b/p")
        server.start(environ=bucket.variables())
        try:
            yield Scene(bucket, server, home, snapshot, tmp_path)
        finally:
            bucket.open.set()
            server.kill()


def right() -> dict[str, bytes]:
    return {f"m{number}.bin": random.Random(number).randbytes(FILE_BYTES) for number in range(UNITS)}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.long
def test_eight_cold_nodes_read_the_bucket_as_often_as_one(scene: Scene) -> None:
    nodes = [scene.node(f"node{number}") for number in range(8)]
    fetched = [restoring_node.finish(node) for node in nodes]
    assert len(set(fetched)) == 1
    assert fetched[0] >= UNITS * FILE_BYTES
    for kind, count in (("packs", UNITS), ("units", UNITS), ("snapshots", 1)):
        reads = scene.bucket.reads(kind)
        assert len(reads) == count
        assert set(reads.values()) == {1}, kind
    for number in range(8):
        assert scene.files(f"node{number}") == right()


@pytest.mark.long
def test_a_node_that_is_killed_while_it_fetches_costs_the_others_nothing(scene: Scene) -> None:
    scene.bucket.open.clear()
    first = scene.node("first")
    until(lambda: bool(scene.bucket.reads("packs")))  # it is the one for whom the server reads
    others = [scene.node(f"node{number}") for number in range(2)]
    first.kill()
    first.communicate()
    scene.bucket.open.set()
    assert len({restoring_node.finish(node) for node in others}) == 1
    assert set(scene.bucket.reads("packs").values()) == {1}
    assert scene.files("node0") == scene.files("node1") == right()


def test_a_server_that_is_killed_in_the_middle_is_waited_for_and_nothing_half_is_used(scene: Scene) -> None:
    scene.bucket.open.clear()
    nodes = [scene.node(f"node{number}") for number in range(2)]
    until(lambda: bool(scene.bucket.reads("packs")))
    scene.server.kill()
    scene.bucket.open.set()
    (scene.home / "server" / "nearby" / "packs").mkdir(parents=True, exist_ok=True)
    (scene.home / "server" / "nearby" / "packs" / ".new-half").write_bytes(b"half of a pack")
    scene.server.start(environ=scene.bucket.variables())
    for node in nodes:
        restoring_node.finish(node)
    assert max(scene.bucket.reads("packs").values()) <= 2, "once for each server"
    assert scene.files("node0") == scene.files("node1") == right()
    assert not list((scene.home / "server" / "nearby" / "packs").glob(".*"))


def test_F42_a_pack_that_is_altered_in_the_bucket_is_read_again_and_named(scene: Scene) -> None:
    digest, path = next((path.rsplit("/", 1)[1], path) for path in scene.bucket.objects if "/packs/" in path)
    whole, good = dict(scene.bucket.objects), scene.bucket.objects[path]
    scene.bucket.objects[path] = good[:-1] + bytes([good[-1] ^ 1])
    nodes = [scene.node(f"node{number}") for number in range(2)]
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert {node.returncode for node in nodes} == {1}
    corrupt = [err for err in said if "EnvironmentCorrupt" in err]
    assert corrupt and all(
        golden("remote.environment_to_nodes.pack-store-s3", digest=digest[:12]) in err for err in corrupt
    )
    # A node that asks after the server has removed the pack finds no such snapshot.
    assert all("EnvironmentMissing" in err for err in said if err not in corrupt)
    others = {name: reads for name, reads in scene.bucket.reads("packs").items() if name != digest}
    # A node reads each once; the server looks at all packs of the unit when a node asks for repair, and again once.
    assert max(others.values()) <= 6
    scene.bucket.objects.update(whole)  # what the server removed as bad is captured again
    restoring_node.finish(scene.node("node0"))
    assert scene.files("node0") == right()
