"""Network policies with real uids and nftables, in namespaces of the test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.node.isolation import egress_rules, machine_egress, nft
from serverless_gpu.node.isolation.egress import EgressState, NodeEgress
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.node.processes.spawn import CallerInterpreter
from serverless_gpu.node.spawner.client import SpawnerClient
from serverless_gpu.node.spawner.verbs import RootSpawner, ZygoteOrder
from tests.support.golden import golden
from tests.support.network.connecting import Connector
from tests.support.network.namespaces import inside, ip, need_root
from tests.support.node.served_spawner import ACCOUNT, served

ALICE, BOB, ROOT, NOBODY = 1_900_000_001, 1_900_000_002, 0, 65_534
HERE, GANG, ALLOWED, OTHER, METADATA = "10.78.0.1", "10.78.0.2", "10.78.0.3", "10.78.0.4", "169.254.170.2"
RESOLVER = "10.78.0.53"
REACHED, REFUSED = "reached", "ECONNREFUSED"
PORT, OTHER_PORT, SERVER_PORT, NODE = 443, 444, 7878, "10.78.0.9"


class Nets(NamedTuple):
    """The namespace of a node, with processes there, and the listening ports of the node."""

    node: str
    here: Connector
    ports: dict[int, int]  # Port of each uid's listener on each address.


@pytest.fixture(scope="module")
def nets() -> Iterator[Nets]:
    """Yield a node's namespace, and listeners on the node and beyond its wire."""
    need_root()
    node, far = f"sgpu-egress-{os.getpid()}", f"sgpu-egress-{os.getpid()}-far"
    with contextlib.ExitStack() as stack:
        for namespace in (node, far):
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("link", "add", "sge0", "netns", node, "type", "veth", "peer", "sge1", "netns", far)
        ip("-n", node, "addr", "add", f"{HERE}/24", "dev", "sge0")
        for address in (GANG, ALLOWED, OTHER, RESOLVER, NODE):
            ip("-n", far, "addr", "add", f"{address}/24", "dev", "sge1")
        ip("-n", far, "addr", "add", f"{METADATA}/32", "dev", "lo")
        ip("-n", node, "addr", "add", "169.254.169.254/32", "dev", "lo")
        for namespace, device in ((node, "sge0"), (far, "sge1")):
            ip("-n", namespace, "link", "set", device, "up")
        ip("-n", node, "route", "add", METADATA, "via", GANG)
        here, there = stack.enter_context(Connector(node)), stack.enter_context(Connector(far))
        for port in (PORT, OTHER_PORT, SERVER_PORT, 53):
            there.listen(ROOT, "0.0.0.0", port)
        ports = {uid: here.listen(uid, "0.0.0.0") for uid in (ROOT, ALICE, BOB)}
        yield Nets(node, here, ports)


@pytest.fixture
def place(nets: Nets, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for the principals; the namespace has no rules before and after."""
    with tempfile.TemporaryDirectory(prefix="sg-egress-", dir="/var/tmp") as directory:
        resolver = Path(directory, "resolv.conf")
        resolver.write_text(f"nameserver {RESOLVER}\n")
        monkeypatch.setattr(machine_egress, "_RESOLVERS", resolver)
        yield Path(directory)
    with inside(nets.node):
        nft_of("flush", "ruleset")


def nft_of(*words: str) -> str:
    """Return what `nft` says."""
    return subprocess.run(["nft", *words], capture_output=True, text=True, check=True).stdout


class Untried(RootSpawner):
    """The verbs of root, whose trial has the result `problem` and the number of `trials`."""

    problem, trials = "", 0

    def measure_egress(self) -> EgressState:
        self.trials += 1
        return EgressState(self.problem, is_loaded=False)


def rules(nets: Nets, place: Path, name: str = "home", **policy: Any) -> NodeEgress:
    """Return the rules of a node with a policy, which is applied."""
    home = place / name
    home.mkdir(exist_ok=True)
    environ = {**os.environ, PLACE: str(place)}
    url = f"http://{OTHER}:{SERVER_PORT}"
    kept = NodeEgress(home, environ, SystemClock(), Untried(environ), server_url=lambda: url, say=print)
    with inside(nets.node):
        assert kept.require(EgressPolicy(**policy)) == ""
    return kept


@contextlib.contextmanager
def behind_spawner(nets: Nets, place: Path, *opened: str) -> Iterator[SpawnerClient]:
    """Yield the verbs of a spawner for the account of the home directory `home`."""
    (place / "home").mkdir()
    os.chown(place / "home", ACCOUNT.uid, ACCOUNT.gid)
    environ = {**os.environ, PLACE: str(place)}
    with inside(nets.node), served(place / "spawner.sock", environ, opened) as client:
        yield client


def reached(nets: Nets, uid: int = ALICE) -> dict[str, str]:
    """Return what a uid reaches, by name."""
    targets = {
        "own": ("127.0.0.1", nets.ports[ALICE]),
        "own, other address": (HERE, nets.ports[ALICE]),
        "of root": ("127.0.0.1", nets.ports[ROOT]),
        "of root, other address": (HERE, nets.ports[ROOT]),
        "of another principal": ("127.0.0.1", nets.ports[BOB]),
        "metadata here": ("169.254.169.254", nets.ports[ROOT]),
        "metadata": (METADATA, PORT),
        "gang": (GANG, PORT),
        "allowed": (ALLOWED, PORT),
        "allowed, other port": (ALLOWED, OTHER_PORT),
        "other": (OTHER, PORT),
        "server": (OTHER, SERVER_PORT),
        "node": (NODE, PORT),
        "name server": (RESOLVER, 53),
    }
    return {name: nets.here.connect(uid, *target) for name, target in targets.items()}


OWN = {"own", "own, other address"}
POLICIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "open": ({"mode": "open"}, {"gang", "allowed", "allowed, other port", "other", "name server"}),
    "pool": ({"mode": "pool"}, {"name server"}),
    "pool, port": ({"mode": "pool", "allow": (f"{ALLOWED}:{PORT}",)}, {"name server", "allowed"}),
    "pool, network": (
        {"mode": "pool", "allow": ("10.78.0.0/29",)},
        {"name server", "gang", "allowed", "allowed, other port", "other"},
    ),
    "pool, name": ({"mode": "pool", "allow": (f"packages.example:{PORT}",)}, {"name server", "allowed"}),
    "none": ({"mode": "none", "allow": ("10.78.0.0/29",)}, set()),
}


@pytest.mark.parametrize("name", POLICIES)
def test_27_a_principal_reaches_what_the_policy_opens_and_nothing_else(
    nets: Nets, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(machine_egress, "addresses_of", {"packages.example": [ALLOWED]}.__getitem__)
    policy, opened = POLICIES[name]
    rules(nets, place, closed=(NODE,), **policy)
    found = reached(nets)
    assert {target for target, said in found.items() if said == REACHED} == OWN | opened, found
    assert {said for said in found.values() if said != REACHED} == {REFUSED}, "at once, without a timeout"


def test_27_the_rules_are_for_principals_only(nets: Nets, place: Path) -> None:
    rules(nets, place, mode="none")
    for uid in (ROOT, NOBODY):
        assert [each for each, said in reached(nets, uid).items() if said != REACHED] == []


def test_27_an_address_with_a_port_opens_a_service_of_the_node_and_a_control_endpoint(nets: Nets, place: Path) -> None:
    root = f"127.0.0.1:{nets.ports[ROOT]}"
    rules(nets, place, mode="none", allow=(root, f"{OTHER}:{SERVER_PORT}"))
    found = reached(nets)
    assert {target for target, said in found.items() if said == REACHED} == OWN | {"of root", "server"}, found


def test_27_a_gang_reaches_its_nodes_until_its_time_is_over_also_while_rules_change(nets: Nets, place: Path) -> None:
    kept = rules(nets, place, mode="none", closed=(GANG,))
    with inside(nets.node):
        for _ in range(2):
            nft.admit(ALICE, (GANG, "127.0.0.1"), {**os.environ, PLACE: str(place)})
        assert kept.require(EgressPolicy(mode="none", closed=(GANG, NODE))) == ""
        assert (nets.here.connect(ALICE, GANG, PORT), nets.here.connect(BOB, GANG, PORT)) == (REACHED, REFUSED)
        listed = nft_of("list", "set", "inet", nft.table_of({PLACE: str(place)}), "gang4")
    assert golden("node.egress.gang-timed", uid=ALICE, address=GANG) in listed


def test_27_an_account_outside_the_range_of_uids_gets_the_rules_before_its_first_run(nets: Nets, place: Path) -> None:
    kept = rules(nets, place, mode="none")
    environ = {**os.environ, PLACE: str(place)}
    assert nets.here.connect(NOBODY, OTHER, PORT) == REACHED
    with inside(nets.node):
        for uid in (NOBODY, NOBODY, ALICE):
            nft.cover(uid, environ)
        assert nets.here.connect(NOBODY, OTHER, PORT) == REFUSED
        (place / "uids.json").write_text(f'{{"nobody of a server": {NOBODY}}}')
        kept.require(EgressPolicy(mode="pool"))
    assert nets.here.connect(NOBODY, OTHER, PORT) == REFUSED, "rules that are replaced know the map of principals"


def test_27_the_record_of_one_principals_connection_opens_no_listener_for_another(nets: Nets, place: Path) -> None:
    rules(nets, place, mode="open")
    port, source = nets.ports[ALICE], 40_123
    assert nets.here.connect_from(source, ALICE, "127.0.0.1", port) == REACHED
    assert nets.here.connect_from(source, BOB, "127.0.0.1", port) == REFUSED, "the rules know the connection as Alice's"
    assert nets.here.connect_from(source, ALICE, "127.0.0.1", port) == REACHED


def test_27_both_versions_of_ip_have_rules(nets: Nets, place: Path) -> None:
    rules(nets, place, mode="open")
    own, other = (nets.here.listen(uid, "::1") for uid in (ALICE, ROOT))
    assert (nets.here.connect(ALICE, "::1", own), nets.here.connect(ALICE, "::1", other)) == (REACHED, REFUSED)
    assert nets.here.connect(ROOT, "::1", other) == REACHED


def test_27_data_in_the_first_packet_reaches_no_listener(nets: Nets, place: Path) -> None:
    assert nets.here.send_at_once(ALICE, "127.0.0.1", nets.ports[ROOT]) == REACHED, "without rules"
    rules(nets, place, mode="open")
    assert nets.here.send_at_once(ALICE, "127.0.0.1", nets.ports[ROOT]) == REFUSED
    assert nets.here.connect(ALICE, "127.0.0.1", nets.ports[ALICE]) == REACHED


def test_27_datagrams_follow_the_policy_beyond_the_node(nets: Nets, place: Path) -> None:
    rules(nets, place, mode="pool")
    assert nets.here.send(ALICE, OTHER, 9) != "sent"
    assert nets.here.send(ALICE, RESOLVER, 53) == "sent"
    rules(nets, place, mode="none")
    assert nets.here.send(ALICE, RESOLVER, 53) != "sent"


def test_27_removed_rules_come_back_with_the_next_refresh_and_the_next_attempt(nets: Nets, place: Path) -> None:
    kept = rules(nets, place, mode="none")
    for restore in (kept.refresh, lambda: kept.require(EgressPolicy(mode="none"))):
        with inside(nets.node):
            nft_of("flush", "ruleset")
            assert nets.here.connect(ALICE, OTHER, PORT) == REACHED
            restore()
        assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED


def test_27_nodes_of_one_machine_share_the_strictest_policy_until_they_leave(nets: Nets, place: Path) -> None:
    one, other = rules(nets, place, "one", mode="none"), rules(nets, place, "other", mode="open")
    assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED
    with inside(nets.node):
        one.leave()
        other.refresh()
        assert nets.here.connect(ALICE, OTHER, PORT) == REACHED
        assert nets.here.connect(ALICE, OTHER, SERVER_PORT) == REFUSED
        other.leave()
        assert nft_of("list", "tables") == ""


def test_27_other_tables_of_the_machine_stay(nets: Nets, place: Path) -> None:
    with inside(nets.node):
        nft_of("add", "table", "inet", "other")
        kept = rules(nets, place, mode="none")
        kept.leave()
        listed = nft_of("list", "tables")
    assert listed.split() == ["table", "inet", "other"]


def test_27_sets_of_another_version_are_replaced(nets: Nets, place: Path) -> None:
    with inside(nets.node):
        older = f"table inet {nft.table_of({PLACE: str(place)})} {{\n set gang4 {{ type ipv4_addr; }}\n}}\n"
        nft.run(older, os.environ)
    rules(nets, place, mode="none")
    assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED


def test_27_without_nft_only_an_open_pool_starts_runs_and_says_so(
    nets: Nets, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = rules(nets, place, mode="open")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert "nft" in machine_egress.measure({})
    assert "nft" in kept.require(EgressPolicy(mode="open"))
    for mode in ("pool", "none", "none"):  # also again, after a failure
        with pytest.raises(IsolationUnavailable, match="nft"):
            kept.require(EgressPolicy(mode=mode))


def test_27_a_node_that_fails_the_trial_enforces_no_policy(nets: Nets, place: Path) -> None:
    verbs = Untried(os.environ)
    verbs.problem = golden("node.egress.no-nftables")
    kept = NodeEgress(place, os.environ, SystemClock(), verbs, server_url=lambda: "", say=lambda line: None)
    assert kept.problem == "", "a node without policies spends no time on a trial"
    for _ in range(2):
        with pytest.raises(IsolationUnavailable, match=golden("node.egress.no-nftables")):
            kept.require(EgressPolicy(mode="none"))
        assert kept.require(EgressPolicy(mode="open")).endswith(golden("node.egress.no-nftables"))
    assert (verbs.trials, kept.problem) == (1, golden("node.egress.no-nftables"))


def test_27_this_machine_passes_the_trial_of_the_rules(nets: Nets, place: Path) -> None:
    assert machine_egress.measure({**os.environ, PLACE: str(place)}) == ""


def test_27_the_trial_finds_rules_that_close_nothing(nets: Nets, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_rules, "_output", lambda: [])
    assert golden("node.egress.reaches-root") in machine_egress.measure({**os.environ, PLACE: str(place)})


def test_27_a_build_reaches_the_index_proxy_and_nothing_else(nets: Nets, place: Path) -> None:
    local, beyond = f"127.0.0.1:{nets.ports[ROOT]}", f"{OTHER}:{SERVER_PORT}"
    for mode in ("open", "pool", "none"):
        kept = rules(nets, place, mode=mode, closed=(NODE,), index_proxy=(local, beyond), allow=(f"{ALLOWED}:{PORT}",))
        before = reached(nets)
        with inside(nets.node), kept.confined_build(ALICE):
            found = reached(nets)
            assert {target for target, said in found.items() if said == REACHED} == {"of root", "server"}, found
            assert {said for said in found.values() if said != REACHED} == {REFUSED}
            assert nets.here.send(ALICE, RESOLVER, 53) != "sent", "names are a way out"
            assert nets.here.connect(BOB, ALLOWED, PORT) == REACHED, "another principal keeps its rules"
            kept.require(EgressPolicy(mode="open", index_proxy=(beyond,)))
            assert nets.here.connect(ALICE, OTHER, SERVER_PORT) == REACHED
            assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED, "also under another policy of the pool"
            kept.require(EgressPolicy(mode=mode, closed=(NODE,), index_proxy=(local,), allow=(f"{ALLOWED}:{PORT}",)))
        assert reached(nets) == before


def test_27_a_build_stays_confined_after_its_nodes_end_and_lost_rules(nets: Nets, place: Path) -> None:
    policy: dict[str, Any] = {"mode": "open", "index_proxy": (f"{OTHER}:{SERVER_PORT}",)}
    kept = rules(nets, place, **policy)
    with inside(nets.node):
        with kept.confined_build(ALICE):
            nft_of("flush", "ruleset")
            kept.refresh()
            assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED
            again = rules(nets, place, **policy)
            assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED, "the next process of the node knows the build"
        with again.confined_build(ALICE):
            pass
        assert nets.here.connect(ALICE, OTHER, PORT) == REACHED


def test_27_a_build_needs_a_proxy_and_a_uid_of_the_range(nets: Nets, place: Path) -> None:
    without, kept = rules(nets, place, mode="none"), rules(nets, place, mode="none", index_proxy=(f"{OTHER}:1",))
    with inside(nets.node):
        for each, uid in ((without, ALICE), (kept, ROOT), (kept, NOBODY)):
            with pytest.raises(IsolationUnavailable), each.confined_build(uid):
                pass


@pytest.mark.parametrize("name", POLICIES)
def test_27_a_spawner_enforces_policies_like_an_agent_of_root(
    nets: Nets, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(machine_egress, "addresses_of", {"packages.example": [ALLOWED]}.__getitem__)
    policy, opened = POLICIES[name]
    with behind_spawner(nets, place) as client:
        kept = NodeEgress(
            place / "home",
            os.environ,
            SystemClock(),
            client,
            server_url=lambda: f"http://{OTHER}:{SERVER_PORT}",
            say=print,
        )
        assert kept.require(EgressPolicy(closed=(NODE,), **policy)) == ""
        assert client.measure_egress() == EgressState("", is_loaded=True)
        found = reached(nets)
        assert {target for target, said in found.items() if said == REACHED} == OWN | opened, found
        nft_of("flush", "ruleset")
        kept.refresh()
        assert nets.here.connect(ALICE, METADATA, PORT) == REFUSED


def test_27_a_spawner_confines_builds(nets: Nets, place: Path) -> None:
    with behind_spawner(nets, place) as client:
        client.enforce(place / "home", EgressPolicy(index_proxy=(f"{OTHER}:{SERVER_PORT}",)))
        client.confine(place / "home", ALICE, confined=True)
        reached_by = [nets.here.connect(ALICE, OTHER, port) for port in (SERVER_PORT, PORT)]
        assert reached_by == [REACHED, REFUSED]
        client.confine(place / "home", ALICE, confined=False)
        assert nets.here.connect(ALICE, OTHER, PORT) == REACHED
        for home, uid in ((place / "home", ROOT), (place / "other", ALICE)):
            with pytest.raises((IsolationUnavailable, OSError)):
                client.confine(home, uid, confined=True)


def test_27_behind_a_spawner_only_root_opens_services_of_the_node(nets: Nets, place: Path) -> None:
    closed, opened = (f"{address}:{nets.ports[ROOT]}" for address in (HERE, "127.0.0.1"))
    policy = EgressPolicy(mode="none", allow=(closed, opened, f"{OTHER}:{SERVER_PORT}"))
    with behind_spawner(nets, place, opened) as client:
        note = client.enforce(place / "home", policy)
        found = reached(nets)
        assert {target for target, said in found.items() if said == REACHED} == OWN | {"of root", "server"}, found
    assert f"--open {closed}" in note
    assert opened not in note


def test_27_a_spawner_opens_gangs_for_principals_and_no_metadata_service(nets: Nets, place: Path) -> None:
    with behind_spawner(nets, place) as client:
        client.enforce(place / "home", EgressPolicy(mode="none", closed=(GANG,)))
        client.admit(ALICE, (GANG, "127.0.0.1"))
        assert (nets.here.connect(ALICE, GANG, PORT), nets.here.connect(BOB, GANG, PORT)) == (REACHED, REFUSED)
        for uid, address in ((ALICE, METADATA), (ALICE, f"{OTHER} }}; flush ruleset"), (NOBODY, OTHER)):
            with pytest.raises(IsolationUnavailable):
                client.admit(uid, (GANG, address))
        assert nets.here.connect(ALICE, METADATA, PORT) == REFUSED


def test_27_a_spawner_changes_only_the_policy_of_its_account(nets: Nets, place: Path) -> None:
    other = rules(nets, place, "other", mode="none")
    with behind_spawner(nets, place) as client:
        client.enforce(place / "home", EgressPolicy())
        for policy in (None, EgressPolicy()):
            with pytest.raises(IsolationUnavailable, match="of the node's"):
                client.enforce(place / "other", policy)
        with pytest.raises(IsolationUnavailable, match="not valid"):
            client.enforce(place / "home", EgressPolicy(allow=("10.0.0.0/8 } accept",)))
        client.enforce(place / "home", None)
        assert nets.here.connect(ALICE, OTHER, PORT) == REFUSED, "the policy of the other node applies"
        other.leave()


def test_27_an_account_removes_no_rules(nets: Nets, place: Path) -> None:
    with behind_spawner(nets, place) as client:
        client.enforce(place / "home", EgressPolicy(mode="none"))
        client.enforce(place / "home", None)
        found = reached(nets)
    assert {target for target, said in found.items() if said == REFUSED} == {
        *("of root", "of root, other address", "of another principal", "metadata here", "metadata"),
    }


def test_27_no_interpreter_of_a_principal_starts_without_rules(nets: Nets, place: Path) -> None:
    with behind_spawner(nets, place) as client, open(os.devnull, "r+b") as null:
        interpreter = CallerInterpreter("/bin/true", (), {})
        order = ZygoteOrder("ana of s", "user", interpreter, [], [])
        client.start_zygote(order, channel_fd=null.fileno(), log=null.fileno())
        assert nets.here.connect(ALICE, METADATA, PORT) == REFUSED
