"""Who stands where in a gang on several nodes: golden tables and properties of `model/placement.py`."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serverless_gpu.model.placement import NODES_MAX, laid_out, numbered, rank_places, world_size
from tests.support.golden import golden

_SHARES = st.dictionaries(st.text("nm0123", min_size=1, max_size=4), st.integers(1, 8), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("shares", "stands"),
    [
        ([("n1", 8), ("n2", 8)], [("n1", 0, 8), ("n2", 8, 8)]),  # gpus=16: two nodes of eight
        ([("n3", 1), ("n1", 1), ("n2", 1)], [("n1", 0, 1), ("n2", 1, 1), ("n3", 2, 1)]),  # nodes of one
        ([("a", 4), ("b", 8)], [("b", 0, 8), ("a", 8, 4)]),  # an uneven fleet: a part comes last
        ([("only", 2)], [("only", 0, 2)]),
    ],
)
def test_crews_of_the_shapes_people_ask_for(shares: list[tuple[str, int]], stands: list[tuple[str, int, int]]) -> None:
    """Largest first, then by name; ranks go on from node to node."""
    crews = laid_out(shares)
    assert [(crew.node, crew.first_rank, crew.gpus) for crew in crews] == stands
    assert [crew.number for crew in crews] == list(range(len(stands)))


@given(_SHARES)
def test_every_rank_stands_in_one_place_whatever_order_nodes_were_found_in(shares: dict[str, int]) -> None:
    """All ranks once, in order of node; local numbers start anew on each."""
    crews = laid_out(list(shares.items()))
    assert crews == laid_out(list(reversed(shares.items())))
    places = [place for crew in crews for place in rank_places(crews, crew.number)]
    assert [place.rank for place in places] == list(range(world_size(crews)))
    assert all(place.world_size == sum(shares.values()) for place in places)
    assert all(place.num_nodes == len(shares) for place in places)
    for crew in crews:
        mine = rank_places(crews, crew.number)
        assert [place.local_rank for place in mine] == list(range(crew.gpus))
        assert {(place.node_rank, place.local_world_size) for place in mine} == {(crew.number, shares[crew.node])}
        assert list(numbered(crew, per_node=False)) == [place.rank for place in mine]


@given(_SHARES)
def test_processes_of_two_nodes_never_have_the_same_number(shares: dict[str, int]) -> None:
    """Logs and results are named by it: one process for each node, or one for each device."""
    crews = laid_out(list(shares.items()))
    for per_node in (False, True):
        numbers = [number for crew in crews for number in numbered(crew, per_node=per_node)]
        assert numbers == list(range(len(crews) if per_node else world_size(crews)))


@pytest.mark.parametrize("shares", [[], [("n", 0)], [("n", 1), ("n", 1)], [(f"n{i}", 1) for i in range(NODES_MAX + 1)]])
def test_what_is_no_gang_is_refused(shares: list[tuple[str, int]]) -> None:
    """None, a node twice, one without devices, too many."""
    with pytest.raises(ValueError, match=re.escape(golden("model.crews.gang-devices"))):
        laid_out(shares)
