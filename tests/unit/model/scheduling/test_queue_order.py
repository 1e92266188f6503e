"""The order of the queue as it is told: the one in which those who wait are served."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.model.scheduling import wait_explanation
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.values import Arrived, Change, Gone, Node, NodeSeen, QueuedRun, QueuePolicy, Used

HOUR_S = 3_600
NOW_NS = 30 * 24 * HOUR_S * 10**9
RUN = st.builds(
    QueuedRun,
    run_id=st.integers(0, 10**6).map(str),
    title=st.just("t"),
    owner=st.sampled_from("abc"),
    team=st.sampled_from(["", "x", "y"]),
    priority=st.integers(0, 2),
    gpus=st.sampled_from([1, 2, 8]),
    gpu_type=st.just("H100"),
    queued_ns=st.integers(0, 20).map(lambda days: NOW_NS - days * 24 * HOUR_S * 10**9),
    limit_s=st.sampled_from([None, 60.0]),
)
TEAMS = ["x", "y", "~a", "~b", "~c"]
RUNS = st.lists(RUN, max_size=24, unique_by=lambda run: run.run_id)


@settings(max_examples=60, deadline=None)
@given(RUNS, st.permutations(TEAMS), st.permutations("abc"), st.integers(0, 30))
def test_who_is_ahead_is_who_is_served_before(
    runs: list[QueuedRun], teams: list[str], users: list[str], limit: int
) -> None:
    policy = QueuePolicy(guard_s=7 * 24 * HOUR_S, entry_penalty_s=0)  # who starts has no less right to the next turn
    used = Used(  # of nobody the same: those that are level take turns by name, one run each
        at_ns=NOW_NS,
        teams={team: 100.0 * place for place, team in enumerate(teams)},
        users={(team, user): 9.0 * place for place, user in enumerate(users) for team in "xy"},
    )
    told: list[Change] = [used, *map(Arrived, runs)]
    planner, rich = Planner(policy), Planner(policy)
    planner.apply([NodeSeen(Node(id="n", name="n", total={"H100": 8})), *told])
    rich.apply(NodeSeen(Node(id=f"n{place}", name=f"n{place}", total={"H100": 8})) for place in range(24))
    rich.apply(told)
    order = [placement.run_id for placement in rich.decide(NOW_NS).placements]
    assert len(order) == len(runs)
    assert planner.queue(NOW_NS, limit) == tuple(order[:limit])
    for place, run_id in enumerate(order, 1):
        wait = planner.why(run_id, NOW_NS)
        assert wait is not None and wait.place == place


def test_asking_changes_nothing() -> None:
    asked, silent = Planner(QueuePolicy(half_life_s=977.0)), Planner(QueuePolicy(half_life_s=977.0))
    run = QueuedRun(run_id="r0", title="t", owner="a", gpus=3, gpu_type="H100", queued_ns=0)
    later = QueuedRun(run_id="r1", title="t", owner="b", gpus=8, gpu_type="H100", queued_ns=1)
    for planner in (asked, silent):
        planner.apply([NodeSeen(Node(id="n", name="n", total={"H100": 8})), Arrived(run), Arrived(later)])
        planner.decide(2)
        planner.apply([Gone("r0")])
    for second in range(1, 50):
        at_ns = second * 1_234_567_891
        assert asked.usage(at_ns)["~a"].used_gpu_s > 0
        assert asked.why("r1", at_ns) is not None and asked.queue(at_ns, 9) == ("r1",)
        asked.estimate(later, at_ns)
    assert asked.decide(100 * 10**9) == silent.decide(100 * 10**9)
    assert asked.usage(200 * 10**9) == silent.usage(200 * 10**9)


def test_F82_what_can_never_be_is_listed_after_all_that_wait() -> None:
    state = PlannerState(QueuePolicy())
    state.capacity.see(Node(id="n", name="n", total={"H100": 8}))
    for number, (gpus, gpu_type) in enumerate([(1, "A10"), (16, "H100"), (8, "H100"), (1, "H100")]):
        state.queue.put(QueuedRun(run_id=f"r{number}", title="t", gpus=gpus, gpu_type=gpu_type, queued_ns=number))
    late = QueuedRun(
        run_id="r4", title="t", gpus=1, gpu_type="H100", queued_ns=0, not_before_ns=2 * NOW_NS, held="later"
    )
    state.queue.put(late)
    found = wait_explanation.queue(state, NOW_NS, 9)
    assert found[:2] in (("r2", "r3"), ("r3", "r2")) and set(found[2:4]) == {"r0", "r1"} and found[4:] == ("r4",)
