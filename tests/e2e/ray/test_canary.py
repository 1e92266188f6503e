"""`sgpu node canary` on a pool of two Ray nodes, each in a network namespace of its own.

one    server, database, Ray's head, node         10.214.0.1 ── bridge ── 10.214.0.2    two    Ray, node
169.254.169.254 on `one`: a metadata service, which `two` reaches through `one`
port 22 on both: a service of the machine
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from serverless_gpu.model.canary import ATTEMPTS, CanaryReport, count
from serverless_gpu.node.isolation.principals import PLACE
from tests.e2e.ray.pools import START_S, Machine
from tests.support.local.observe import wait_for
from tests.support.network.connecting import Connector
from tests.support.network.namespaces import Network, entering, ip, need_root
from tests.support.server.certificates import Authority

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(420)]

METADATA, SSH, HTTP = "169.254.169.254", 22, 80
PORT, RAY_PORT = 7878, 7900
OF_A_POOL = {
    *("server-port", "ray-port", "other-ray-port", "other-node-port", "metadata-address"),
    *("node-token", "node-key", "join-token", "ray-token", "ray-socket", "end-ray"),
}
"""Attempts on the other node, on Ray, and on what a node needs to be in a pool.

Without isolation, all of them succeed but one: on nodes of a Ray pool, Landlock refuses signals at each level.
"""
REFUSED_MIN = 100


class Site(NamedTuple):
    """The two machines, and the address of each."""

    one: Machine
    two: Machine
    addresses: tuple[str, str]

    def set_pool(self, *words: str) -> None:
        """Change the policies of the pool."""
        done = self.one.run("pool", "set", "default", *words)
        assert done.returncode == 0, done.stderr

    def canary(self, *words: str) -> tuple[int, dict[str, CanaryReport]]:
        """Run the canary on all nodes; return the exit code, and the reports by node."""
        done = self.one.run("node", "canary", "--pool", "default", "--json")
        assert done.stdout, done.stderr
        return done.returncode, {
            report.node: report for report in msgspec.json.decode(done.stdout, type=tuple[CanaryReport, ...])
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a pool with two nodes, and services that runs must not reach."""
    need_root()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        wires = [network.wire(), network.wire()]
        addresses = (wires[0].peer_address, wires[1].peer_address)
        ip("-n", wires[0].namespace, "addr", "add", f"{METADATA}/32", "dev", "lo")
        ip("-n", wires[1].namespace, "route", "add", METADATA, "via", addresses[0])
        for wire in wires:
            service = stack.enter_context(Connector(wire.namespace))
            service.listen(0, "0.0.0.0", SSH)
            service.listen(0, "0.0.0.0", HTTP)
        machines = []
        for name, fake, wire in zip(("one", "two"), ("A10:1", "H100:1"), wires, strict=True):
            machine = Machine(name, fake, entering(wire.namespace))
            stack.callback(machine.end)
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="sg-principals-", dir="/var/tmp"))
            os.chmod(place, 0o711)
            machine.environ |= {PLACE: place, "SERVERLESS_GPU_PREWARM": "0"}
            machines.append(machine)
        one, two = machines
        stack.callback(one.run, "stop")
        start(one, two, addresses, tmp_path_factory.mktemp("certificates"))
        yield Site(one, two, addresses)


def start(one: Machine, two: Machine, addresses: tuple[str, str], place: Path) -> None:
    """Start the server with Ray's head on one machine, and let the other machine join."""
    authority = Authority(place)
    cert, key = authority.sign(addresses[0])
    up = one.start(
        *("up", "--engine", "ray", "--host", addresses[0], "--port", str(PORT), "--ray-port", str(RAY_PORT)),
        *("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(authority.ca)),
    )
    one.wait_said(f"sgpu join {addresses[0]} --token-file join.json", up)
    file = two.home / "join.json"
    file.touch(mode=0o600)
    file.write_bytes((one.home / "server" / "join.json").read_bytes())
    words = ("--name", "two", "--node-address", addresses[1], "--ray-port", str(RAY_PORT))
    two.start("join", addresses[0], "--token-file", str(file), *words)
    wait_for(lambda: joined(one) == 2, "both nodes have joined", limit_s=START_S)


def joined(one: Machine) -> int:
    """Return the number of nodes that are there."""
    return one.run("node", "list").stdout.count(" UP ")


@pytest.mark.parametrize("level", ["none", "user", pytest.param("sandbox", marks=pytest.mark.spot)])
def test_27_on_each_of_two_ray_nodes_no_attempt_succeeds_that_the_level_refuses(site: Site, level: str) -> None:
    site.set_pool("--isolation", level)
    code, reports = site.canary()
    assert (code, len(reports)) == (0, 2), {name: report.problem for name, report in reports.items()}
    for name, report in reports.items():
        found = {row.attempt: row.verdict for row in report.rows}
        assert (report.problem, report.level, len(report.rows)) == ("", level, len(ATTEMPTS)), name
        refused = {each for each in OF_A_POOL if found[each] == "refused"}
        assert refused == ({"end-ray"} if level == "none" else OF_A_POOL), (name, found)
        if level == "sandbox":
            assert count(report.rows, "refused") >= REFUSED_MIN, (name, found)


def test_27_without_the_rule_for_an_address_the_canary_of_the_other_node_fails(site: Site) -> None:
    site.set_pool("--isolation", "sandbox", "--allow", f"{site.addresses[0]}:{SSH}")
    try:
        code, reports = site.canary()
    finally:
        site.set_pool("--allow-nothing")
    possible = {
        name: {row.attempt for row in report.rows if row.verdict == "possible" and row.required}
        for name, report in reports.items()
    }
    assert (code, possible["two"]) == (1, {"other-node-port"}), reports
