"""When the agent starts a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.node.isolation.principals import PLACE, PrincipalMap
from serverless_gpu.node.isolation.sweeper import EVERY_S, FIRST_S, SweepSchedule
from serverless_gpu.testing import FakeClock


class Sweep:
    """A sweep that ends when the test says so."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


def test_sweeps_start_after_the_agent_and_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "uids.json").write_text("{}")
    started: list[Sweep] = []

    def start() -> Sweep:
        started.append(Sweep())
        return started[-1]

    clock = FakeClock()
    schedule = SweepSchedule(clock, PrincipalMap({PLACE: str(tmp_path)}), start)
    counts = []
    for advance_s, is_ended in ((0, False), (FIRST_S, False), (EVERY_S, False), (1, True), (EVERY_S, True)):
        clock.advance(advance_s)
        for sweep in started:
            sweep.code = 0 if is_ended else None
        schedule.tend()
        counts.append(len(started))
    assert counts == [0, 1, 1, 2, 3]


def test_a_node_without_principals_is_not_swept(tmp_path: Path) -> None:
    clock = FakeClock()
    schedule = SweepSchedule(clock, PrincipalMap({PLACE: str(tmp_path)}), lambda: pytest.fail("a sweep started"))
    clock.advance(FIRST_S + 1)
    schedule.tend()
