"""What goes from a full cache: what was not used for longest, and never what somebody uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from serverless_gpu.environment.restore.cache.eviction import CachedEnvironment, CachedUnit, EvictionStep, plan_eviction


def unit(name: str, used_ns: int, size: int = 10) -> CachedUnit:
    return CachedUnit(address=name, size=size, used_ns=used_ns)


def environment(name: str, used_ns: int, *units: str, held: bool = False) -> CachedEnvironment:
    return CachedEnvironment(address=name, units=frozenset(units), used_ns=used_ns, held=held)


def test_a_unit_was_last_used_when_an_environment_of_it_was() -> None:
    units = [unit("old", 1), unit("older", 2), unit("never", 3)]
    environments = [environment("A", 9, "old"), environment("B", 5, "older")]
    assert plan_eviction(environments, units, excess=21) == (
        EvictionStep(unit="never", environments=(), size=10),
        EvictionStep(unit="older", environments=("B",), size=10),
        EvictionStep(unit="old", environments=("A",), size=10),
    )


def test_no_more_goes_than_has_to() -> None:
    units = [unit("a", 1), unit("b", 2), unit("c", 3)]
    assert [step.unit for step in plan_eviction([], units, excess=10)] == ["a"]
    assert [step.unit for step in plan_eviction([], units, excess=11)] == ["a", "b"]
    assert plan_eviction([], units, excess=0) == ()


def test_what_is_held_or_kept_stays() -> None:
    units = [unit("a", 1), unit("b", 2), unit("c", 3)]
    held = [environment("A", 1, "a", held=True)]
    assert [step.unit for step in plan_eviction(held, units, excess=100, keep={"b"})] == ["c"]


def test_every_environment_of_a_unit_goes_before_it() -> None:
    environments = [environment("A", 1, "a", "b"), environment("B", 2, "a")]
    assert plan_eviction(environments, [unit("a", 1), unit("b", 0)], excess=100) == (
        EvictionStep(unit="b", environments=("A",), size=10),
        EvictionStep(unit="a", environments=("A", "B"), size=10),
    )


names = some.sampled_from("abcdefgh")


@given(
    some.dictionaries(names, some.tuples(some.integers(0, 9), some.integers(1, 50)), max_size=8),
    some.dictionaries(some.sampled_from("ABCD"), some.tuples(some.integers(0, 9), some.sets(names), some.booleans())),
    some.integers(0, 300),
)
def test_whatever_there_is_pinned_units_stay_and_enough_goes_if_it_can(
    there: dict[str, tuple[int, int]], made: dict[str, tuple[int, set[str], bool]], excess: int
) -> None:
    units = [unit(name, used, size) for name, (used, size) in there.items()]
    environments = [environment(name, used, *of, held=held) for name, (used, of, held) in made.items()]
    steps = plan_eviction(environments, units, excess=excess)
    gone = {step.unit for step in steps}
    pinned = {name for seen in environments if seen.held for name in seen.units}
    assert not gone & pinned
    freed = sum(there[name][1] for name in gone)
    assert freed >= excess or gone == set(there) - pinned
    if steps:
        assert freed - steps[-1].size < excess  # the last one was needed, too
