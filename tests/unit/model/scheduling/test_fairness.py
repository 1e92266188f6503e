"""Teams get their share over time, and who submits a thousand runs at once does not stand in anybody's way."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serverless_gpu.model.scheduling.fairness import Fairness
from serverless_gpu.model.scheduling.values import Node, QueuedRun, QueuePolicy, TeamUse, Used
from tests.support.model.driving import S, World

_HOUR = 3600.0
_WEEK_S = 7 * 24 * _HOUR
_DAY_NS = 86_400 * 1_000_000_000


def nodes(count: int, devices: int = 8) -> list[Node]:
    """Return nodes that are all alike."""
    return [Node(id=f"n{number}", name=f"n{number}", total={"H100": devices}) for number in range(count)]


def wanted(run_id: str, gpus: int, owner: str, team: str = "") -> QueuedRun:
    """Return a run that waits."""
    return QueuedRun(
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


@pytest.mark.parametrize(("short_s", "long_s"), [(2.0, 10.0), (1.0, 12.0), (1.0, 300.0)])
def test_22D1_teams_of_equal_weight_get_the_same_gpu_seconds_however_short_their_runs_are(
    short_s: float, long_s: float
) -> None:
    world = World(nodes(1))
    lengths, numbers = {"brief": short_s, "lengthy": long_s}, itertools.count()

    def submit(team: str) -> None:
        world.submit(wanted(f"r{next(numbers)}", 1, f"{team}-user", team), lengths[team])

    world.on_end = lambda ended: submit(ended.team)
    for team in lengths:
        for _ in range(24):
            submit(team)
    world.run(max(400.0, 20 * long_s))
    used = {team: gpu_s for (team, _), gpu_s in world.used().items()}
    assert 0.47 <= used["brief"] / sum(used.values()) <= 0.53
    told = world.planner.usage(world.now_ns)
    for team, gpu_s in used.items():
        assert told[team].used_gpu_s == pytest.approx(gpu_s, rel=0.01)
        assert told[team].counted_gpu_s > told[team].used_gpu_s  # a minute for each run that goes on


@st.composite
def _mixes(draw: st.DrawFn) -> list[list[float]]:
    """Return lengths of runs by team, from a second to an hour; the shortest is up to 60 times as short."""
    longest_s = 3600.0 ** draw(st.floats(0, 1))
    length_s = st.floats(0, 1).map(lambda part: max(1.0, longest_s / 60.0**part))
    return draw(st.lists(st.lists(length_s, min_size=1, max_size=3), min_size=2, max_size=4))


@settings(deadline=None, max_examples=30)
@given(
    mixes=_mixes(),
    weights=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    devices=st.integers(1, 4),
    penalty_s=st.sampled_from([0.0, 60.0]),
)
@example(mixes=[[1.0], [3600.0]], weights=[1, 1, 1, 1], devices=1, penalty_s=60.0)
@example(mixes=[[2.0], [10.0]], weights=[1, 1, 1, 1], devices=4, penalty_s=60.0)
@example(mixes=[[3.372, 1.0], [3.372, 1.0], [3.372]], weights=[1, 1, 4, 1], devices=1, penalty_s=0.0)
def test_22D1_any_mix_of_lengths_ends_within_three_per_cent_of_the_weights(
    mixes: list[list[float]], weights: list[int], devices: int, penalty_s: float
) -> None:
    names = {f"t{number}": mix for number, mix in enumerate(mixes)}
    shares = {name: float(weight) for name, weight in zip(names, weights, strict=False)}
    # Each other team may be ahead by a run on each device and its advance: after 40 times as long, by less than 3 %.
    until_s = 40 * (len(mixes) - 1) * (max(itertools.chain(*mixes)) + penalty_s)
    used = take_turns(names, QueuePolicy(team_weights=shares, entry_penalty_s=penalty_s), devices, until_s)
    for name, weight in shares.items():
        assert used[name] / sum(used.values()) == pytest.approx(weight / sum(shares.values()), abs=0.03)


def take_turns(mixes: dict[str, list[float]], policy: QueuePolicy, devices: int, until_s: float) -> dict[str, float]:
    """Return GPU-seconds by team, of which each always has runs that wait: the devices go to whose turn it is."""
    accounts, numbers = Fairness(policy), itertools.count()
    used: dict[str, float] = defaultdict(float)
    lengths = {name: itertools.cycle(mix) for name, mix in mixes.items()}
    running: list[tuple[float, str, str, float]] = []
    now_s = 0.0
    while now_s < until_s:
        accounts.settle(round(now_s * S))
        while len(running) < devices:
            name = min(mixes, key=lambda each: (accounts.team(each), each))
            run_id, length_s = f"r{next(numbers)}", next(lengths[name])
            accounts.place(run_id, wanted(run_id, 1, "u", name), 1.0)
            heapq.heappush(running, (now_s + length_s, run_id, name, length_s))
        now_s, run_id, name, length_s = heapq.heappop(running)
        accounts.end(run_id)
        used[name] += length_s
    for ends_s, _, name, length_s in running:
        used[name] += length_s - (ends_s - now_s)
    return used


def test_22D1_the_advance_is_given_back_whole_when_a_run_ends_and_shows_until_then() -> None:
    accounts = Fairness(QueuePolicy(half_life_s=600.0))
    accounts.settle(0)
    accounts.place("r", wanted("r", 2, "ann", "search"), 2.0)
    assert accounts.usage(0) == {"search": TeamUse(used_gpu_s=0.0, counted_gpu_s=120.0)}
    during = accounts.usage(5 * S)["search"]
    assert during.used_gpu_s == pytest.approx(10.0, rel=0.01)
    assert during.counted_gpu_s == pytest.approx(130.0, rel=0.01)
    accounts.end("r")
    after = accounts.usage(5 * S)["search"]
    assert after.used_gpu_s == after.counted_gpu_s == pytest.approx(10.0, rel=0.01)


def test_an_account_whose_use_has_decayed_to_nothing_is_forgotten_and_one_in_use_is_not() -> None:
    accounts = Fairness(QueuePolicy(half_life_s=86_400.0))
    used = {f"t{number}": 1000.0 for number in range(50)}
    accounts.tell(Used(at_ns=0, teams=used, users={(team, "u"): use for team, use in used.items()}))
    accounts.begin("r", QueuedRun(run_id="r", title="u/r", owner="u", team="t7", queued_ns=0), 0.0, 0)
    accounts.settle(_DAY_NS)
    assert set(accounts.usage(_DAY_NS)) == set(used)
    assert accounts.usage(40 * _DAY_NS).keys() == {"t7"}
    accounts.end("r")
    assert accounts.usage(80 * _DAY_NS) == {}
