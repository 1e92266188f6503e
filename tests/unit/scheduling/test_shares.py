"""Teams get their share over time, and who submits a thousand runs at once does not stand in anybody's way."""

from __future__ import annotations

import random
from statistics import median

import pytest

from serverless_gpu.model.scheduling.values import Node, QueuePolicy, Wanted
from tests.unit.scheduling.driving import S, World

_HOUR = 3600.0
_WEEK_S = 7 * 24 * _HOUR


def nodes(count: int, devices: int = 8) -> list[Node]:
    """Return nodes that are all alike."""
    return [Node(id=f"n{number}", name=f"n{number}", total={"H100": devices}) for number in range(count)]


def wanted(run_id: str, gpus: int, owner: str, team: str = "") -> Wanted:
    """Return a run that waits."""
    return Wanted(
        run_id=run_id, title=f"{owner}/{run_id}", owner=owner, team=team, queued_ns=0, gpus=gpus, gpu_type="H100"
    )


def overload(world: World, weights: dict[str, list[str]], chance: random.Random, ahead: int = 12) -> None:
    """Let each user of each team always have runs that wait: a new one comes when one ends."""
    numbers = iter(range(10**9))

    def submit(owner: str, team: str) -> None:
        length_s = chance.lognormvariate(8.6, 1.0)
        world.submit(wanted(f"r{next(numbers)}", chance.choice([1, 1, 1, 2, 4, 8]), owner, team), length_s)

    world.on_end = lambda ended: submit(ended.owner, ended.team)
    for team, owners in weights.items():
        for owner in owners:
            for _ in range(ahead):
                submit(owner, team)


@pytest.mark.parametrize("seed", [1, 2])
def test_two_teams_with_shares_of_70_and_30_get_them_in_a_week_of_overload(seed: int) -> None:
    world = World(nodes(4), QueuePolicy(team_weights={"search": 70.0, "speech": 30.0}))
    # The smaller share has more users, who ask for as much each: it is the team that counts.
    overload(world, {"search": ["ann", "bob"], "speech": ["cat", "dan", "eve"]}, random.Random(seed))
    world.run(_WEEK_S)
    used = world.used()
    share = sum(gpu_s for (team, _), gpu_s in used.items() if team == "search") / sum(used.values())
    assert sum(used.values()) > 0.8 * 32 * _WEEK_S  # whole nodes have to get free for gangs of 8
    assert 0.68 <= share <= 0.72


def test_users_of_a_team_share_alike_whatever_each_asks_for() -> None:
    world = World(nodes(1, 16))
    overload(world, {"search": ["ann"]}, random.Random(3), ahead=60)
    chance = random.Random(4)
    for number in range(3000):
        world.submit(wanted(f"b{number}", 1, "bob", "search"), chance.lognormvariate(8.6, 1.0))
    world.run(_WEEK_S / 2)
    used = world.used()
    assert 0.48 <= used["search", "ann"] / sum(used.values()) <= 0.52


def late_behind_a_burst(seed: int, gpus: int) -> list[float]:
    """Return how late the first runs of twelve users start, in median runs of a burst of 1,000 that is under way."""
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(7.0, 1.0) for _ in range(1000)]
    world = World(nodes(4, 16))
    for number, length_s in enumerate(lengths):
        world.submit(wanted(f"burst{number}", 1, "greedy"), length_s)
    others = {f"first{number}": chance.uniform(0.0, 6 * median(lengths)) for number in range(12)}
    for number, (run_id, at_s) in enumerate(others.items()):
        for name in (run_id, f"{run_id}-second", f"{run_id}-third"):
            world.submit(wanted(name, gpus, f"user{number}"), chance.choice(lengths), at_s=at_s)
    world.run(40 * _HOUR)
    assert len(world.started_ns) == 1000 + 3 * 12
    return [(world.started_ns[run_id] / S - at_s) / median(lengths) for run_id, at_s in others.items()]


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_burst_of_1000_runs_delays_nobodys_first_run_by_more_than_a_median_run(seed: int) -> None:
    assert max(late_behind_a_burst(seed, 1)) <= 1.0


@pytest.mark.parametrize(("gpus", "medians"), [(2, 1.0), (4, 4.0), (8, 10.0)])
def test_a_burst_of_small_runs_does_not_starve_a_newcomers_gang(gpus: int, medians: float) -> None:
    late = late_behind_a_burst(8, gpus)
    assert max(late) <= medians, sorted(late)
