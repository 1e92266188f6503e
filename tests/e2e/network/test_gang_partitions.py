"""F17, F18, F19 for gangs: two nodes run one attempt, and one of them is cut off, with real processes in namespaces.

The ranks talk to each other across the network of the nodes, which the server has no part in: a node may be cut off
from the server, from the other node, or from both. Each gang asked for a retry; a node with room for all joins later.
What ranks left on the disk says when user code ran: never of two attempts at once.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import FactKind, Reason
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.wire.runs import AttemptList, AttemptView
from tests.e2e.network.cluster import Cluster, ClusterNode
from tests.support.local.observe import wait_for
from tests.support.network.beats import beat, beats, talk
from tests.support.network.namespaces import Network, need_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

GRACE_S, MARGIN_S = 8.0, 2.0
SETTINGS = {"partition_grace_s": GRACE_S, "partition_margin_s": MARGIN_S, "soft_expiry_s": 4.0, "heartbeat_s": 0.5}
"""A gang meets when none of its nodes was silent for half of the soft limit: that is several heartbeats, as always."""
LIMIT_S = 180.0
UNHURT = ("RUNNING", "STOPPING", "SUCCEEDED")
SHORT = "short"
USUAL = {SHORT: 1, "dead": 0}
"""By name the crew whose node it happens to: away for less than the grace; cut off from server and other node, its
agent and uplink killed, while the rank on the other node notices."""
RARE = {"cut": 1, "alone": 1, "deaf": 0, "mute": 1, "frozen": 0, "both": 0}
"""Cut off from the server, and not from the other node; from both, and no rank minds; nothing from the server; nothing
to it; every process stopped; both nodes cut off from the server, and not from each other."""


class Gangs:
    """What happened.

    Args:
        cluster: server and nodes.
        where: what ranks leave behind, by the name of their gang.
        victims: by the name of a gang the crew whose node it happens to.
    """

    def __init__(self, cluster: Cluster, where: Path, victims: Mapping[str, int]) -> None:
        self.cluster, self.where, self.victims = cluster, where, victims
        self.runs: dict[str, str] = {}
        self.pairs: dict[str, list[str]] = {}
        self.guest = ""

    @property
    def given_up(self) -> list[str]:
        """Return the gangs whose first attempt is over."""
        return [name for name in self.victims if name != SHORT]

    def begin(self) -> None:
        """Have all gangs run, each on two nodes."""
        cluster = self.cluster
        for node in [cluster.invite(f"n{number}") for number in range(2 * len(self.victims))]:
            cluster.joined(node)
        for name in self.victims:
            (self.where / name).mkdir()
            impatient = ("1",) if name == "dead" else ()
            self.runs[name] = cluster.submit_gang(talk, str(self.where / name), *impatient, retries=1)
        for name in self.victims:
            self.began(name, 1)
            query = "SELECT nodes.name FROM crews JOIN nodes ON nodes.id = node_id WHERE run_id = ? ORDER BY crew"
            self.pairs[name] = [node for (node,) in cluster.rows(query, self.runs[name])]

    def began(self, name: str, fence: int) -> None:
        """Wait until both ranks of an attempt talk to each other."""
        met = [self.where / name / f"{fence}.{rank}.met" for rank in (0, 1)]
        wait_for(lambda: all(path.exists() for path in met), f"attempt {fence} of {name} goes on", LIMIT_S)

    def beats(self, name: str, fence: int) -> list[int]:
        """Return when user code of an attempt ran, on whichever node."""
        return sorted(itertools.chain.from_iterable(beats(self.where / name, fence, rank) for rank in (0, 1)))

    def node(self, name: str, *, victim: bool) -> ClusterNode:
        """Return one of the two nodes of a gang."""
        crew = self.victims[name] if victim else 1 - self.victims[name]
        return self.cluster.nodes[self.pairs[name][crew]]

    def attempts(self, name: str) -> tuple[AttemptView, ...]:
        """Return the attempts of a run."""
        found = self.cluster.ask("GET", f"/runs/{self.runs[name]}/attempts", answer=AttemptList)
        return tuple(found.attempts)

    def crew_ended_ns(self, name: str, crew: int) -> int:
        """Return when the server wrote that a crew of the first attempt is over."""
        query = "SELECT ended_ns FROM crews WHERE run_id = ? AND fence = 1 AND crew = ?"
        ((ended_ns,),) = self.cluster.rows(query, self.runs[name], crew)
        return int(ended_ns)

    def break_all(self) -> None:
        """Cut one node of each gang off, and let the grace pass."""
        for name in self.victims:
            self._break(name)
        if "dead" in self.victims:
            (self.where / "guest").mkdir()
            self.guest = self.cluster.submit(beat, str(self.where / "guest"))
        if SHORT in self.victims:
            run_id = self.runs[SHORT]
            wait_for(lambda: self.cluster.run(run_id).state == "UNREACHABLE", "the silence is seen", LIMIT_S)
            self.node(SHORT, victim=True).wire.heal()
        if self.guest:
            wait_for(lambda: beats(self.where / "guest", 1), "the guest began", LIMIT_S)
        self.cluster.join("spare", gpus=2 * len(self.given_up))
        for name in self.given_up:
            self.began(name, 2)

    def _break(self, name: str) -> None:
        node, other = self.node(name, victim=True), self.node(name, victim=False)
        if name in ("dead", "alone"):
            node.wire.part(other.wire)
            other.wire.part(node.wire)
        if name == "frozen":
            node.wire.signal_all(signal.SIGSTOP)
        else:
            node.wire.cut(to_server=name != "deaf", from_server=name != "mute")
        if name == "both":
            other.wire.cut()
        if name == "dead":
            agent, uplink = node.agent(), node.uplink()
            uplink.kill()
            agent.kill()

    def mend_all(self) -> None:
        """Connect them again, and wait until each has been told that its attempt is over."""
        for name in self.given_up:
            node, other = self.node(name, victim=True), self.node(name, victim=False)
            node.wire.signal_all(signal.SIGCONT)
            for one, peer in ((node, other), (other, node)):
                one.wire.heal()
                one.wire.join(peer.wire)
        if "dead" in self.victims:
            self.node("dead", victim=True).start()
            (self.where / "guest" / "go1").touch()
        for name in self.given_up:
            self._told(name)
            (self.where / name / "go2").touch()
        if SHORT in self.victims:
            (self.where / SHORT / "go1").touch()
            self._told(SHORT)
        for name, run_id in self.runs.items():
            wait_for(lambda run_id=run_id: self.cluster.run(run_id).finished, f"{name} is finished", LIMIT_S)  # type: ignore[misc]  # mypy does not type a lambda's defaults

    def _told(self, name: str) -> None:
        run_id, nodes = self.runs[name], [self.node(name, victim=victim) for victim in (True, False)]

        def told() -> bool:
            return all(node.standing(run_id) in ("stale", "settled") for node in nodes)

        wait_for(told, f"both nodes of {name} have been told", LIMIT_S)


def _happened(tmp_path_factory: pytest.TempPathFactory, victims: Mapping[str, int]) -> Iterator[Gangs]:
    need_root()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVERLESS_GPU_PREWARM", "0")
        where, home = tmp_path_factory.mktemp("beats"), tmp_path_factory.mktemp("server")
        with Network() as network, Cluster(network, home, SETTINGS, wires=2 * len(victims) + 1) as cluster:
            gangs = Gangs(cluster, where, victims)
            gangs.begin()
            gangs.break_all()
            gangs.mend_all()
            yield gangs


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Yield what has become of the gangs that are tried each time."""
    yield from _happened(tmp_path_factory, USUAL)


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Yield what has become of the others."""
    yield from _happened(tmp_path_factory, RARE)


@pytest.fixture(params=["usual", "rare"])
def gangs(request: pytest.FixtureRequest) -> Gangs:
    """Return what has become of some gangs."""
    found: Gangs = request.getfixturevalue(request.param)
    return found


def test_F18_F19_user_code_of_two_attempts_of_a_gang_never_runs_at_once(gangs: Gangs) -> None:
    for name in gangs.given_up:
        first, second = gangs.beats(name, 1), gangs.beats(name, 2)
        if name == "frozen":  # what goes on after it ends within a second, and its other node before that
            first = beats(gangs.where / name, 1, 1)
        assert first[-1] < second[0], f"{name}: user code of two attempts ran at once"


def test_F18_devices_of_a_gang_are_never_in_two_accounts_by_the_facts_of_its_nodes(gangs: Gangs) -> None:
    for name in gangs.given_up:
        run_id = gangs.runs[name]
        began_ns = next(fact.boottime_ns for fact in gangs.cluster.facts(run_id, 2) if fact.kind is FactKind.RESERVED)
        for crew in (0, 1):
            facts = gangs.cluster.facts(run_id, 1, crew)
            assert facts[0].kind is FactKind.RESERVED and facts[-1].kind is FactKind.FREED, f"{name}: facts came late"
            is_frozen = name == "frozen" and crew == gangs.victims[name]
            assert is_frozen or facts[-1].boottime_ns <= began_ns, name


def test_F18_F19_a_gang_is_given_up_once_and_succeeds_elsewhere(gangs: Gangs) -> None:
    for name in gangs.given_up:
        states = gangs.cluster.states(gangs.runs[name])
        assert states.count("SUCCEEDED") == 1 and states[-1] == "SUCCEEDED" and "UNREACHABLE" in states, name
        found = gangs.attempts(name)
        assert [(one.fence, one.node) for one in found] == [(1, ", ".join(gangs.pairs[name])), (2, "spare")]
        assert found[0].reason is (Reason.RANK_RAISED if name == "dead" else Reason.NODE_GONE), name


def test_F18_F19_the_node_of_a_gang_that_is_cut_off_has_ended_its_ranks_by_its_own_clock(gangs: Gangs) -> None:
    for name in gangs.given_up:
        ending = read_ending(gangs.node(name, victim=True).home.attempt(gangs.runs[name], 1))
        if name == "both":
            # The node whose grace ends first ends its rank, and the other rank may see that before its own grace ends.
            other = read_ending(gangs.node(name, victim=False).home.attempt(gangs.runs[name], 1))
            reasons = {each.reason for each in (ending, other) if each is not None}
            assert Reason.NODE_PARTITIONED in reasons
            assert reasons <= {Reason.NODE_PARTITIONED, Reason.RANK_RAISED}
            continue
        assert ending is not None and ending.reason in (Reason.NODE_PARTITIONED, Reason.CANCELLED), (name, ending)
        assert name == "frozen" or ending.reason is Reason.NODE_PARTITIONED


def test_F18_devices_of_the_other_node_are_free_before_the_cut_off_one_is_given_up(usual: Gangs) -> None:
    assert usual.cluster.run(usual.guest).node == usual.node("dead", victim=False).name
    assert beats(usual.where / "guest", 1)[0] < usual.beats("dead", 2)[0]
    began_ns = usual.cluster.run(usual.guest).started_ns
    assert began_ns is not None and began_ns < usual.crew_ended_ns("dead", 0)


def test_F17_a_node_of_a_gang_away_for_less_than_the_grace_costs_the_run_nothing(usual: Gangs) -> None:
    run_id = usual.runs[SHORT]
    states = usual.cluster.states(run_id)
    heard = [state for state in states if state != "UNREACHABLE"]  # and once more on a machine that is busy
    assert [state for state, _ in itertools.groupby(heard)] == ["QUEUED", "STARTING", *UNHURT]
    assert "UNREACHABLE" in states and len(usual.attempts(SHORT)) == 1
    for rank in (0, 1):
        output = usual.cluster.read(f"/runs/{run_id}/logs/{rank}/stdout", fence="1")
        assert output == b"attempt 1 begins\nattempt 1 returns\n"


def test_F17_both_nodes_of_a_gang_are_charged_for_just_what_they_used(usual: Gangs) -> None:
    run_id = usual.runs[SHORT]
    query = "SELECT crew, gpu_ms FROM charges WHERE run_id = ? ORDER BY crew"
    wait_for(lambda: len(usual.cluster.rows(query, run_id)) == 2, "both are charged", LIMIT_S)
    for crew, gpu_ms in usual.cluster.rows(query, run_id):
        facts = usual.cluster.facts(run_id, 1, crew)
        began = next(fact for fact in facts if fact.kind is FactKind.EXEC)
        assert facts[-1].kind is FactKind.FREED
        used_ms = (facts[-1].boottime_ns - began.boottime_ns) / 1e6
        assert abs(gpu_ms - used_ms) <= 1, "to the millisecond, nothing left out and nothing twice"
