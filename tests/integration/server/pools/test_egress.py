"""Network policies of pools: who decides, what their nodes are told, and which nodes may run what needs them."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.egress import EgressPolicy, digest_of
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.settings import RaySettings, Settings
from serverless_gpu.server.nodes.egress_policies import control_endpoints
from serverless_gpu.server.records import audit
from serverless_gpu.wire.agents import AgentWelcome, Heartbeat, Start
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.golden import golden
from tests.support.server.agents import ADMIN, H100, NODE, hello, placed
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

SANDBOX = PoolRequest(isolation="sandbox", egress="pool", allow=("PyPI.org:443", "10.1.0.0/16"))
TAKES = ("renewal", "secrets", "without", "max_run", "crews", "egress")


@pytest.fixture
def node(services: Services) -> AgentWelcome:
    """Let a node join that enforces network policies."""
    add_people(services.database, "node", "other", "alice")  # type: ignore[arg-type] # a Database
    return services.agents.hello(NODE, hello(isolation="sandbox", takes=TAKES, addresses=("10.9.0.1", "fd00::9")))


def beat(services: Services, node: AgentWelcome, egress: str | None) -> EgressPolicy | None:
    """Return the policy in the answer to a heartbeat of a node that has applied a policy."""
    return services.agents.heartbeat(NODE, node.node, Heartbeat(devices=H100, egress=egress)).egress


def test_27_a_policy_is_an_administrators_decision_in_the_audit_and_what_is_not_said_stays(services: Services) -> None:
    view = services.pools.put(ADMIN, "default", SANDBOX)
    assert (view.egress, view.allow) == ("pool", ("pypi.org:443", "10.1.0.0/16"))
    view = services.pools.put(ADMIN, "default", PoolRequest(egress="none"))
    assert (view.isolation, view.egress, view.allow) == ("sandbox", "none", ("pypi.org:443", "10.1.0.0/16"))
    assert services.pools.put(ADMIN, "default", PoolRequest(allow=())).allow == ()
    details = [entry.detail for entry in services.database.read(audit.entries)]
    allow = ["pypi.org:443", "10.1.0.0/16"]
    assert [(each["egress"], each["allow"]) for each in details] == [("pool", allow), ("none", allow), ("none", [])]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (PoolRequest(egress="pool"), "without isolation"),
        (PoolRequest(isolation="none", egress="none"), "without isolation"),
        (PoolRequest(isolation="sandbox", egress="closed"), "'closed'"),
        (PoolRequest(isolation="sandbox", allow=("10.0.0.1/8",)), "host bits"),
        (PoolRequest(isolation="sandbox", allow=("169.254.169.254:80",)), "metadata"),
    ],
)
def test_27_what_no_node_can_enforce_is_refused(services: Services, asked: PoolRequest, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        services.pools.put(ADMIN, "default", asked)
    with pytest.raises(InvalidValue, match="without isolation"):
        services.pools.put(ADMIN, "default", SANDBOX)
        services.pools.put(ADMIN, "default", PoolRequest(isolation="none"))


def test_27_a_node_is_told_of_a_policy_until_it_has_applied_it(services: Services, node: AgentWelcome) -> None:
    assert beat(services, node, "") is None, "a pool without isolation has no policy"
    services.pools.put(ADMIN, "default", SANDBOX)
    told = beat(services, node, "")
    assert told is not None and (told.mode, told.allow) == ("pool", ("pypi.org:443", "10.1.0.0/16"))
    assert {"10.9.0.1", "fd00::9"} <= set(told.closed), "the addresses of all nodes"
    assert beat(services, node, digest_of(told)) is None
    assert beat(services, node, None) is None, "an older node understands no policy"
    services.pools.put(ADMIN, "default", PoolRequest(egress="none"))
    changed = beat(services, node, digest_of(told))
    assert changed is not None and changed.mode == "none"


def test_27_an_order_carries_the_policy_of_the_nodes_pool(services: Services, node: AgentWelcome) -> None:
    placed(services)
    (order,) = services.agents.waiting(NODE, node.node)
    assert isinstance(order, Start) and order.egress is None
    services.pools.put(ADMIN, "default", SANDBOX)
    (order,) = services.agents.waiting(NODE, node.node)
    assert isinstance(order, Start) and order.egress is not None and order.egress.mode == "pool"


def test_27_a_node_that_enforces_no_policy_runs_nothing_of_a_pool_that_needs_one(
    services: Services, node: AgentWelcome
) -> None:
    services.pools.put(ADMIN, "default", PoolRequest(isolation="sandbox"))
    services.agents.hello(NODE, hello(isolation="sandbox", takes=TAKES, egress_problem="nft is missing"))
    (view,) = services.nodes.view_nodes()
    assert (view.egress_problem, view.sentence) == ("nft is missing", ""), "an open pool starts runs without rules"
    services.pools.put(ADMIN, "default", SANDBOX)
    (view,) = services.nodes.view_nodes()
    assert view.sentence == golden("server.egress.cannot-enforce")
    services.agents.hello(NODE, hello(isolation="sandbox"))
    (view,) = services.nodes.view_nodes()
    assert view.sentence.endswith("the node has an older version")


def test_27_a_node_with_runs_moves_to_no_pool_with_another_policy(services: Services, node: AgentWelcome) -> None:
    services.pools.put(ADMIN, "default", SANDBOX)
    placed(services)
    same = msgspec.structs.replace(SANDBOX, nodes=("n1",))
    with pytest.raises(InvalidValue, match=golden("server.egress.node-has-runs")):
        services.pools.put(ADMIN, "looser", PoolRequest(isolation="sandbox", nodes=("n1",)))
    assert [pool.nodes for pool in services.nodes.view_pools() if pool.name == "looser"] == [], "nothing has changed"
    assert services.pools.put(ADMIN, "same", same).nodes == ("n1",)


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("169.254.1.1",), ("x",), ("10.0.0.1",) * 17])
def test_27_addresses_that_cannot_be_are_refused(
    services: Services, node: AgentWelcome, addresses: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidValue, match="addresses"):
        services.agents.hello(NODE, hello(addresses=addresses))


def test_27_the_servers_own_endpoints_are_closed(services: Services) -> None:
    settings = Settings(home=services.settings.home, database="postgresql://sgpu@DB.internal/sgpu", host="10.0.0.5")
    ray = RaySettings(port=7900, address="10.0.0.6:6379")
    found = [each.text for each in control_endpoints(msgspec.structs.replace(settings, ray=ray))]
    assert {"10.0.0.5:7878", "db.internal:5432", "0.0.0.0/0:7900-7999", "[::/0]:7900-7999", "10.0.0.6:6379"} == set(
        found
    )
    named = msgspec.structs.replace(settings, hosts=("GPU.example", "203.0.113.7"), database="sqlite:///x")
    assert [each.text for each in control_endpoints(named)][1:] == ["gpu.example:7878", "203.0.113.7:7878"]
    several = msgspec.structs.replace(settings, database="postgresql://sgpu:p@a.internal,b.internal:6432/sgpu")
    assert [each.text for each in control_endpoints(several)][1:] == ["a.internal:5432", "b.internal:6432"]
    local = msgspec.structs.replace(settings, host="127.0.0.1", database="postgresql://%2Frun/sgpu")
    assert control_endpoints(local) == [], "rules for services of other users close what listens on loopback"
