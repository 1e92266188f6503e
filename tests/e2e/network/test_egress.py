"""Network policies through a server: sandboxes on two nodes, each in a network namespace of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from tests.e2e.network.cluster import PORT, Cluster
from tests.support.local.observe import wait_for
from tests.support.network.connecting import Connector
from tests.support.network.namespaces import Network, ip, need_root
from tests.support.remote.egress_work import reach, reach_as_gang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

METADATA, INDEX_PORT, DATABASE_PORT = "169.254.169.254", 8000, 5432
REACHED, REFUSED = "reached", "ECONNREFUSED"


class Site(NamedTuple):
    """A server, its nodes, and the address at which each node finds the server's machine."""

    cluster: Cluster
    server: dict[str, str]
    principals: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with two nodes that offer sandboxes; services listen on the server's machine."""
    need_root()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SERVERLESS_GPU_PREWARM", "0")
        principals = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sg-principals-", dir="/var/tmp")))
        os.chmod(principals, 0o711)
        network = stack.enter_context(Network())
        cluster = stack.enter_context(
            Cluster(network, tmp_path_factory.mktemp("server"), {"heartbeat_s": 0.5}, wires=2)
        )
        nodes = [cluster.invite(name, gpus=1, url="", **{PLACE: str(principals / name)}) for name in ("n1", "n2")]
        for node in nodes:
            ip("-n", node.wire.namespace, "addr", "add", f"{METADATA}/32", "dev", "lo")
            cluster.joined(node)
            beside = stack.enter_context(Connector(node.wire.namespace))
            for port in (80, DATABASE_PORT):
                beside.listen(0, "0.0.0.0", port)
        far = stack.enter_context(Connector(network.server))
        for port in (INDEX_PORT, DATABASE_PORT):
            far.listen(0, "0.0.0.0", port)
        yield Site(cluster, {node.name: node.wire.address for node in nodes}, principals)


def change(site: Site, **asked: Any) -> PoolView:
    """Change the pool's policies."""
    view: PoolView = site.cluster.ask("PUT", "/pools/default", PoolRequest(**asked), answer=PoolView)
    return view


def said(site: Site, function: Callable[..., int], *places: str, gpus: int = 1) -> list[dict[str, str]]:
    """Return what each rank printed of the places."""
    cluster = site.cluster
    run_id = cluster.submit_gang(function, *places, gpus=gpus)
    wait_for(lambda: cluster.run(run_id).finished, "the run is finished", 120)
    assert cluster.run(run_id).reason is Reason.COMPLETED, cluster.run(run_id).sentence
    lines = [cluster.read(f"/runs/{run_id}/logs/{rank}/stdout", fence="1").decode() for rank in range(gpus)]
    return [dict(line.split(" ", 1) for line in each.splitlines()) for each in lines]


@pytest.mark.spot
def test_27_a_gang_on_two_nodes_trains_while_its_pool_lets_nothing_out(site: Site) -> None:
    change(site, isolation="sandbox", egress="none")
    one, other = (node.wire for node in site.cluster.nodes.values())
    places = [
        f"{METADATA}:80",
        *(f"{address}:{port}" for address in site.server.values() for port in (PORT, INDEX_PORT)),
    ]
    places += [f"{wire.peer_address}:{DATABASE_PORT}" for wire in (one, other)] + [f"127.0.0.1:{DATABASE_PORT}"]
    found = said(site, reach_as_gang, *places, gpus=2)
    assert [each.pop("sum") for each in found] == ["1", "1"]
    for number, each in enumerate(found):
        peer = f"{(other, one)[number].peer_address}:{DATABASE_PORT}"
        assert {place for place, how in each.items() if how == REACHED} <= {peer}, "a gang reaches its own nodes"
        assert set(each.values()) <= {REACHED, REFUSED, "ENETUNREACH"}, each


def test_27_a_pool_lets_runs_out_to_its_allow_list_only(site: Site) -> None:
    index = [f"{address}:{INDEX_PORT}" for address in site.server.values()]
    view = change(site, isolation="sandbox", egress="pool", allow=tuple(index))
    assert (view.egress, view.allow) == ("pool", tuple(index))
    refused = [f"{METADATA}:80", "127.0.0.1:80", f"127.0.0.1:{DATABASE_PORT}"]
    refused += [f"{address}:{port}" for address in site.server.values() for port in (PORT, DATABASE_PORT)]
    (found,) = said(site, reach, *index, *refused)
    assert {place for place, how in found.items() if how == REACHED} < set(index), "one of them is not routed"
    assert any(how == REACHED for how in found.values()), found


def test_27_an_open_pool_closes_metadata_server_and_nodes(site: Site) -> None:
    change(site, isolation="sandbox", egress="open", allow=())
    closed = [f"{METADATA}:80", "127.0.0.1:80"]
    closed += [f"{address}:{PORT}" for address in site.server.values()]
    opened = [f"{address}:{INDEX_PORT}" for address in site.server.values()]
    (found,) = said(site, reach, *closed, *opened)
    assert {found[place] for place in closed} <= {REFUSED, "ENETUNREACH"}, found
    assert REACHED in {found[place] for place in opened}, found
    addresses = {f'"{node.wire.peer_address}"'.encode() for node in site.cluster.nodes.values()}
    policies = b"".join(path.read_bytes() for path in site.principals.glob("*/egress.json"))
    assert all(address in policies for address in addresses), "the addresses of all nodes are closed"


def test_27_nodes_report_that_they_enforce_network_policies(site: Site) -> None:
    nodes = site.cluster.ask("GET", "/nodes", answer=NodeList).nodes
    assert [node.egress_problem for node in nodes] == ["", ""]
