"""When a run would start, and what is said where nobody can say."""

from __future__ import annotations

from serverless_gpu.model.scheduling.values import Estimate, Wanted
from tests.unit.scheduling.asking import busy, decide, node, wanted

N1 = node("n1", H100=8)


def estimate(asked: Wanted, queue: list[Wanted], *held: tuple[str, int, float | None]) -> Estimate:
    """Return when a run would start on one node of 8, some of which are in use: by whom, how many, for how long."""
    runs = [busy(N1, count, title, limit_s=limit_s) for title, count, limit_s in held]
    return decide(queue, runs).planner.estimate(asked, 1000)


def test_who_is_behind_somebody_without_a_known_time_reads_whose_timeout_is_missing() -> None:
    found = estimate(wanted("r2", 8), [wanted("r1", 8, title="root/big")], ("root/one", 4, 60.0), ("root/two", 4, None))
    assert found.at_ns is None and found.basis == (
        "nobody can say when root/big starts, which is ahead: no timeout was declared for root/two, "
        "and too few like them have ended to learn from"
    )


def test_who_is_behind_somebody_who_is_behind_another_reads_the_first_cause() -> None:
    queue = [wanted("r1", 8, title="root/a"), wanted("r2", 8, title="root/b", limit_s=60.0)]
    found = estimate(wanted("r3", 8), queue, ("root/one", 4, 60.0))
    assert "nobody can say when root/b starts, which is ahead: no timeout was declared for root/a," in found.basis
