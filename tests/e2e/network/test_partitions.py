"""F18, F19: networks that break, with real processes in network namespaces.

One server, and nodes that are cut off in different ways at the same time, each with a run that asked for a retry; then
a node with room for all of them joins. Every run is looked at by what its ranks left on the disk, by the facts of the
nodes, and by what the server says: no two attempts of a run ever overlap.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import FactKind, Reason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.wire.agents import clock_text, is_off
from serverless_gpu.wire.nodes import NodeList
from serverless_gpu.wire.runs import AttemptList, AttemptView
from tests.e2e.network.cluster import Cluster
from tests.support.local.observe import wait_for
from tests.support.network.beats import beat, beats
from tests.support.network.namespaces import Network, need_root

pytestmark = pytest.mark.slow

GRACE_S, MARGIN_S = 8.0, 2.0
SETTINGS = {"partition_grace_s": GRACE_S, "partition_margin_s": MARGIN_S, "soft_expiry_s": 2.0, "heartbeat_s": 1.0}
LIMIT_S = 60.0
S = 1_000_000_000
AHEAD_S = {"cut": 3_600, "killed": -3_600, "short": 600}
"""Nodes whose wall clocks are wrong, by so many seconds: nothing of all this depends on them."""
UNHURT = ("RUNNING", "STOPPING", "SUCCEEDED")
LONG = ("cut", "killed", "frozen", "late", "deaf", "mute")
"""Away for longer than the grace: both directions; agent and uplink killed, too; every process of the node stopped;
user code returns meanwhile; nothing from the server; nothing to it."""
SHORT = "short"


class Broken:
    """What happened.

    Args:
        cluster: server and nodes.
        where: what ranks leave behind, by the node their run began on.
    """

    def __init__(self, cluster: Cluster, where: Path) -> None:
        self.cluster, self.where = cluster, where
        self.runs: dict[str, str] = {}

    def begin(self, name: str) -> None:
        """Have a run begin on a node of its own."""
        (self.where / name).mkdir()
        self.cluster.join(name, SGPU_FAULT_CLOCK=str(AHEAD_S.get(name, 0)))
        self.runs[name] = self.cluster.submit(beat, str(self.where / name), retries=1)
        self.beats(name, 1)

    def beats(self, name: str, fence: int) -> list[int]:
        """Return when an attempt ran, once it has."""
        return wait_for(lambda: beats(self.where / name, fence), f"attempt {fence} on {name} began", LIMIT_S)

    def attempts(self, name: str) -> tuple[AttemptView, ...]:
        """Return the attempts of a run."""
        found = self.cluster.ask("GET", f"/runs/{self.runs[name]}/attempts", answer=AttemptList)
        return tuple(found.attempts)

    def output(self, name: str, fence: int) -> bytes:
        """Return what the server has of an attempt's output."""
        path = f"/runs/{self.runs[name]}/logs/0/stdout"
        return self.cluster.read(path, fence=str(fence))

    def ended(self, name: str) -> None:
        """Wait until a run has ended."""
        wait_for(lambda: self.cluster.run(self.runs[name]).ended_ns, f"the run of {name} has ended", LIMIT_S)

    def told(self, name: str) -> None:
        """Wait until a node has been told that its attempt is over."""
        node, run_id = self.cluster.nodes[name], self.runs[name]
        wait_for(lambda: node.standing(run_id) in ("stale", "settled"), f"{name} has been told", LIMIT_S)

    def break_all(self) -> None:
        """Cut every node off in its own way, and let the grace pass."""
        nodes = self.cluster.nodes
        for name in ("cut", "killed", "late", SHORT):
            nodes[name].wire.cut()
        nodes["deaf"].wire.cut(to_server=False)
        nodes["mute"].wire.cut(from_server=False)
        nodes["frozen"].wire.signal_all(signal.SIGSTOP)
        agent, uplink = nodes["killed"].agent(), nodes["killed"].uplink()
        uplink.kill()
        agent.kill()
        (self.where / "late" / "go1").touch()
        run_id = self.runs[SHORT]
        wait_for(lambda: self.cluster.run(run_id).state == "UNREACHABLE", "the silence is seen", LIMIT_S)
        nodes[SHORT].wire.heal()
        self.cluster.join("spare", gpus=len(LONG))
        for name in LONG:
            self.beats(name, 2)

    def mend_all(self) -> None:
        """Connect them again, and wait until each has been told that its attempt is over."""
        nodes = self.cluster.nodes
        nodes["frozen"].wire.signal_all(signal.SIGCONT)
        for name in LONG:
            nodes[name].wire.heal()
        nodes["killed"].start()
        for name in LONG:
            self.told(name)
            (self.where / name / "go2").touch()
        (self.where / SHORT / "go1").touch()
        for name in (*LONG, SHORT):
            self.ended(name)
        self.told(SHORT)  # that the server has everything: the last facts, and the receipt


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Yield what has become of all runs."""
    need_root()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVERLESS_GPU_PREWARM", "0")
        where = tmp_path_factory.mktemp("beats")
        home = tmp_path_factory.mktemp("server")
        with Network() as network, Cluster(network, home, SETTINGS, wires=len(LONG) + 2) as cluster:
            happened = Broken(cluster, where)
            for name in (*LONG, SHORT):
                happened.begin(name)
            happened.break_all()
            happened.mend_all()
            yield happened


def test_F18_F19_user_code_of_two_attempts_never_runs_at_once(broken: Broken) -> None:
    for name in LONG:
        first, second = broken.beats(name, 1), broken.beats(name, 2)
        if name != "frozen":
            assert first[-1] < second[0], f"{name}: user code of two attempts ran at once"


def test_F18_devices_are_never_in_two_accounts_by_the_facts_of_the_nodes(broken: Broken) -> None:
    for name in LONG:
        first, second = (broken.cluster.facts(broken.runs[name], fence) for fence in (1, 2))
        assert first[0].kind is FactKind.RESERVED and first[-1].kind is FactKind.FREED, f"{name}: facts came late"
        began_ns = next(fact.boottime_ns for fact in second if fact.kind is FactKind.RESERVED)
        assert name == "frozen" or first[-1].boottime_ns <= began_ns, name


def test_F18_a_node_that_was_stopped_whole_ends_its_ranks_as_soon_as_it_goes_on(broken: Broken) -> None:
    node, run_id = broken.cluster.nodes["frozen"], broken.runs["frozen"]
    stopped = read_ending(node.home.attempt(run_id, 1))
    assert stopped is not None and stopped.reason in (Reason.NODE_PARTITIONED, Reason.CANCELLED)
    assert b"returns" not in broken.output("frozen", 1)


@pytest.mark.parametrize("name", LONG)
def test_F18_F19_the_run_is_given_up_once_and_succeeds_elsewhere(broken: Broken, name: str) -> None:
    states = broken.cluster.states(broken.runs[name])
    assert states.count("SUCCEEDED") == 1 and states[-1] == "SUCCEEDED" and "UNREACHABLE" in states
    found = broken.attempts(name)
    assert [(one.fence, one.node) for one in found] == [(1, name), (2, "spare")]
    assert found[0].reason is Reason.NODE_GONE


@pytest.mark.parametrize("name", ["cut", "killed", "deaf", "mute"])
def test_F18_F19_the_node_has_ended_the_ranks_by_its_own_clock(broken: Broken, name: str) -> None:
    stopped = read_ending(broken.cluster.nodes[name].home.attempt(broken.runs[name], 1))
    assert stopped is not None and stopped.reason is Reason.NODE_PARTITIONED


def test_F18_a_result_that_comes_too_late_is_discarded_and_noted(broken: Broken) -> None:
    run_id = broken.runs["late"]
    node = broken.cluster.nodes["late"]
    assert (node.home.attempt(run_id, 1) / "results" / "0.pkl").exists(), "its user code returned, unheard"
    files = broken.cluster.rows("SELECT fence, name FROM files WHERE run_id = ? AND name LIKE 'results/%'", run_id)
    assert files == [(2, "results/0.pkl")]
    late = broken.cluster.rows("SELECT late_reason FROM crews WHERE run_id = ? AND fence = 1", run_id)
    assert late == [(Reason.COMPLETED.value,)]
    audited = broken.cluster.rows("SELECT count(*) FROM audit WHERE action = 'run.stale' AND subject = ?", run_id)
    assert audited == [(1,)]


def test_F18_what_was_printed_while_nobody_listened_comes_late_and_is_kept(broken: Broken) -> None:
    assert broken.output("late", 1) == b"attempt 1 begins\nattempt 1 returns\n"
    assert broken.output("late", 2) == b"attempt 2 begins\nattempt 2 returns\n"


def test_F17_a_node_away_for_less_than_the_grace_costs_the_run_nothing(broken: Broken) -> None:
    run_id = broken.runs[SHORT]
    states = broken.cluster.states(run_id)
    heard = [state for state in states if state != "UNREACHABLE"]  # and once more on a machine that is busy
    assert [state for state, _ in itertools.groupby(heard)] == ["QUEUED", "STARTING", *UNHURT]
    assert "UNREACHABLE" in states and len(broken.attempts(SHORT)) == 1
    assert broken.output(SHORT, 1) == b"attempt 1 begins\nattempt 1 returns\n"


def test_F30_nodes_with_wrong_clocks_are_named_and_what_they_say_is_told_in_the_servers_time(broken: Broken) -> None:
    nodes = {view.name: view for view in broken.cluster.ask("GET", "/nodes", answer=NodeList).nodes}
    for name in (*LONG, SHORT):
        clock = nodes[name].clock
        assert clock is not None and is_off(clock) == (name in AHEAD_S), name
        assert abs(clock.ahead_ns - AHEAD_S.get(name, 0) * S) <= clock.error_ns + S, name
    text = clock_text(nodes["cut"].clock)
    assert text.startswith("has a clock that is ") and text.endswith(" ahead of the server's")


def test_F30_neither_times_nor_charges_of_a_run_depend_on_the_clock_of_its_node(broken: Broken) -> None:
    run = broken.cluster.run(broken.runs[SHORT])
    facts = broken.cluster.facts(run.id, 1)
    began = next(fact for fact in facts if fact.kind is FactKind.EXEC)
    assert run.started_ns is not None and run.ended_ns is not None
    assert run.created_ns < run.started_ns < run.ended_ns, "in the server's time"
    assert abs(began.wall_ns - run.started_ns - AHEAD_S[SHORT] * S) < 60 * S, "the node believed something else"
    receipt = broken.cluster.ask("GET", f"/runs/{run.id}/receipt", answer=Receipt)
    assert receipt.segments.queued_ms is not None and receipt.segments.queued_ms < 60_000
    used_ms = (facts[-1].boottime_ns - began.boottime_ns) // 1_000_000
    assert abs(receipt.gpu_ms - used_ms) <= 1_000 and facts[-1].kind is FactKind.FREED
