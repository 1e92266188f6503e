"""A build with the index proxy as its only way out: uv under a principal's uid, nftables, and a server with a proxy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.node.isolation.egress import NodeEgress
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.node.spawner.verbs import RootSpawner
from serverless_gpu.wire.indexes import IndexLog, IndexRequest, IndexToken, IndexTokenRequest, IndexView
from tests.support.network.connecting import Connector
from tests.support.network.namespaces import inside, ip, need_root
from tests.support.ports import own_port
from tests.support.server.package_index import PackageIndex, wheel
from tests.support.server.served import served

BUILDER, ROOT = 1_900_000_003, 0


@pytest.fixture
def namespace() -> Iterator[str]:
    """Yield a network namespace with loopback only."""
    need_root()
    name = f"sgpu-build-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory that the uid of the build can read."""
    with tempfile.TemporaryDirectory(prefix="sg-build-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


@pytest.mark.spot
def test_27_uv_resolves_and_installs_as_a_confined_build(namespace: str, place: Path, tmp_path: Path) -> None:
    uv = Path(shutil.copy(Path(sys.executable).with_name("uv"), place / "uv"))
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("this machine has no python3 that other users can run")
    work = place / "work"
    work.mkdir(mode=0o700)
    os.chown(work, BUILDER, BUILDER)
    proxy = f"127.0.0.1:{own_port()}"
    clock, environ = SystemClock(), {**os.environ, PLACE: str(place / "principals")}
    with (
        inside(namespace),
        PackageIndex() as index,
        Connector(namespace) as connector,
        served(tmp_path, index_proxy=proxy) as server,
    ):
        connection = server.connection()
        request = IndexRequest(url=index.url, private=True)
        connection.ask("PUT", "/indexes/main", request, answer=IndexView)
        made = connection.ask("POST", "/index-token", IndexTokenRequest(), answer=IndexToken)
        for project, requires in (("sgdemo", "sgdep"), ("sgdep", "")):
            name, body, metadata = wheel(project, requires=requires)
            index.add(project, {name: body}, metadata=metadata)
        command = [
            str(uv),
            "pip",
            "install",
            "--reinstall",
            "--target",
            str(work / "target"),
            "--python",
            python,
            "sgdemo",
        ]
        variables = {
            "HOME": str(work),
            "UV_CACHE_DIR": str(work / "cache"),
            "UV_NO_CONFIG": "1",
            "PATH": "/usr/bin",
        }

        def install(url: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, "--default-index", url],
                env={**variables, "UV_HTTP_RETRIES": "0"},
                cwd=work,
                user=BUILDER,
                group=BUILDER,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
            )

        egress = NodeEgress(place, environ, clock, RootSpawner(environ), server_url=lambda: server.url, say=print)
        policy = EgressPolicy(mode="open", index_proxy=(proxy,))
        egress.require(policy)
        try:
            with egress.confined_build(BUILDER):
                done = install(f"http://build:{made.token}@{proxy}/main/simple/")
                assert done.returncode == 0, done.stdout + done.stderr
                assert (work / "target" / "sgdep.py").exists()
                assert made.token not in done.stdout + done.stderr
                shutil.rmtree(work / "cache")
                assert install(index.url).returncode != 0, "the index itself is not reachable"
                api = int(server.url.rpartition(":")[2])
                assert connector.connect(BUILDER, "127.0.0.1", api) == "ECONNREFUSED"
        finally:
            egress.leave()
        log = connection.ask("GET", "/index-log", answer=IndexLog, query={"limit": "50"}).requests
    assert {each.status for each in log} == {200}
    assert {each.client for each in log} == {"user:root"}
