"""A node's key with real processes: what passes the wire and lies on the node's disk, rotation, theft, revocation."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from serverless_gpu import Run, distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.node.uplink.server import UplinkProfile, read_profile
from serverless_gpu.wire.access import SecretRequest, SecretView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeView, RayPool
from tests.support.cli.cli import sgpu
from tests.support.invited import node_token
from tests.support.local.observe import wait_for
from tests.support.local.ranks import announce, wait_for_file
from tests.support.network.recording_proxy import RecordingProxy
from tests.support.remote.machines import Machine, Machines

pytestmark = pytest.mark.slow
SECRET = f"hunter2-{secrets.token_hex(8)}"
VARIABLE = f"correct-horse-{secrets.token_hex(8)}"


def look(where: str) -> list[str]:
    """Return digests of a secret and a variable, after the file `go` is there."""
    announce(where, "rank0")
    wait_for_file(where, "go")
    return [hashlib.sha256(text.encode()).hexdigest() for text in (rt.secret("TOKEN"), os.environ["CALLERS"])]


@pytest.fixture
def pool(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Yield a server without nodes, for whose administrator this process submits."""
    monkeypatch.setenv("CALLERS", VARIABLE)
    with Machines(home) as machines:
        request = SecretRequest(value=SECRET.encode())
        machines.ask("PUT", "/secrets/TOKEN", request, answer=SecretView)
        yield machines


def joined(pool: Machines, url: str, name: str = "n1") -> Machine:
    """Start a node that reaches the server under a url, and wait until it has joined."""
    node = Machine(UplinkProfile(url=url, token="", name=name), gpus=1)
    pool.nodes[name] = node
    token = node_token(pool.administrator(), name, node.home)
    node.write(UplinkProfile(url=url, token=token, name=name))
    node.start()
    wait_for(lambda: "joined" in node.log(), f"{name} has joined")
    return node


def submit(where: Path) -> Run[list[str]]:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, secrets=["TOKEN"])(look).submit(str(where))
    wait_for(lambda: (where / "rank0").exists(), "user code runs")
    return run


def view(pool: Machines, name: str = "n1") -> NodeView:
    """Return a node as the administrator sees it."""
    found = pool.ask("GET", "/nodes", answer=dict)["nodes"]
    return msgspec.convert(next(one for one in found if one["name"] == name), NodeView)


def forms(text: str) -> list[bytes]:
    """Return a value as it is, and as JSON, URLs and dumps have it."""
    data = text.encode()
    return [data, data.hex().encode(), *(base64.b64encode(data[start:])[:-4] for start in range(3))]


def test_27_7_secrets_and_variables_are_nowhere_in_clear_while_keys_change_under_a_run(
    pool: Machines, tmp_path: Path
) -> None:
    with RecordingProxy(urlsplit(pool.server.url).port or 0) as wire:
        node = joined(pool, wire.url)
        run = submit(tmp_path)
        first = view(pool).key
        assert first and f"the key {first}" in node.log()
        said = sgpu("node", "rotate", "n1").stdout
        second = view(pool).key
        assert second != first and said == f"n1 has the new key {second}\n"
        node.uplink().kill()  # the next uplink finds the new key, and the run
        node.start()
        wait_for(lambda: "continues attempt" in node.log(), "the next uplink has found the run")
        files = [path for path in node.root.rglob("*") if path.is_file() and not path.is_symlink()]
        assert {path.name for path in files} >= {"node.key", "remote.json", "uplink.log", "profile.json"}
        for text in (SECRET, VARIABLE):
            for form in forms(text):
                assert form not in bytes(wire.seen)
                assert [path for path in files if form in path.read_bytes()] == []
        assert b"sealed" in wire.seen and b"sgpn_" in wire.seen
        assert not [path for path in files if b"sgpn_" in path.read_bytes()]  # sessions are in memory only
        (tmp_path / "go").touch()
        assert run.results(60) == [[hashlib.sha256(text.encode()).hexdigest() for text in (SECRET, VARIABLE)]]
        assert run.receipt(60).state == "SUCCEEDED"


def test_27_7_a_stolen_token_is_refused_and_a_revoked_node_loses_its_connection(pool: Machines, tmp_path: Path) -> None:
    node = joined(pool, pool.server.url)
    profile = read_profile(node.root / "profile.json")
    with contextlib.closing(Connection(profile.url, profile.token)) as stolen:
        for path in ("/agents/ray", f"/agents/{view(pool).id}/orders"):
            with pytest.raises(NotAuthenticated, match="without the key"):
                stolen.ask("GET", path, answer=RayPool)
    thief = Machine(profile, gpus=1)
    pool.nodes["thief"] = thief
    shutil.copy(node.root / "instance", thief.root / "instance")  # all that a home has, except the key
    thief.start()
    wait_for(lambda: "with another key" in thief.log(), "the thief is refused")
    thief.end()
    del pool.nodes["thief"]
    pool.server.kill(signal.SIGKILL)
    pool.server.start(f"port={urlsplit(profile.url).port}")
    wait_for(lambda: view(pool).state == "UP", "the session is valid at the next server process")
    run = submit(tmp_path)
    said = sgpu("node", "revoke", "n1", "--yes").stdout
    assert said.startswith("n1 was revoked") and view(pool).state == "REVOKED"
    wait_for(lambda: "NotAuthenticated: the token" in node.log(), "the node has lost its connection", limit_s=10)
    assert run.status() != "SUCCEEDED"
    assert view(pool).runs == (run.id,)
    (tmp_path / "go").touch()  # nobody else ends the run before the partition grace has passed
    wait_for(node.is_free, "the run has ended on the node")
    assert run.status() != "SUCCEEDED"  # the server believes no report of a revoked node
