"""The order of the queue as it is told: the same as ranking everybody who waits, one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.model.scheduling import explaining
from serverless_gpu.model.scheduling.state import State
from serverless_gpu.model.scheduling.values import Node, Policy, Used, Wanted

HOUR_S = 3_600
NOW_NS = 30 * 24 * HOUR_S * 10**9
RUN = st.builds(
    Wanted,
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
RUNS = st.lists(RUN, max_size=24, unique_by=lambda run: run.run_id)


@settings(max_examples=60, deadline=None)
@given(RUNS, st.dictionaries(st.sampled_from(["x", "y", "~a", "~b"]), st.floats(0, 1e6)), st.integers(0, 30))
def test_who_is_ahead_is_who_ranks_before(runs: list[Wanted], used: dict[str, float], limit: int) -> None:
    state = State(Policy(guard_s=7 * 24 * HOUR_S))
    state.floor.see(Node(id="n", name="n", total={"H100": 8}))
    state.fairness.tell(Used(at_ns=NOW_NS, teams=used, users={("x", "a"): 9.0}))
    for run in runs:
        state.queue.put(run)
    lines = {run: line for line in state.queue.lines() for *_, run in line.rows}
    order = [run.run_id for run in sorted(runs, key=lambda run: state.rank(run, lines[run].ask, NOW_NS))]
    assert explaining.queue(state, NOW_NS, limit) == tuple(order[:limit])
    for place, run_id in enumerate(order, 1):
        wait = explaining.why(state, run_id, NOW_NS)
        assert wait is not None and wait.place == place


def test_F82_what_can_never_be_is_listed_after_all_that_wait() -> None:
    state = State(Policy())
    state.floor.see(Node(id="n", name="n", total={"H100": 8}))
    for number, (gpus, gpu_type) in enumerate([(1, "A10"), (16, "H100"), (8, "H100"), (1, "H100")]):
        state.queue.put(Wanted(run_id=f"r{number}", title="t", gpus=gpus, gpu_type=gpu_type, queued_ns=number))
    late = Wanted(run_id="r4", title="t", gpus=1, gpu_type="H100", queued_ns=0, not_before_ns=2 * NOW_NS, held="later")
    state.queue.put(late)
    found = explaining.queue(state, NOW_NS, 9)
    assert found[:2] in (("r2", "r3"), ("r3", "r2")) and set(found[2:4]) == {"r0", "r1"} and found[4:] == ("r4",)
