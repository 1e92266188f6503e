"""Crews: what one attempt has on one node, its supervisor, its devices and their ranks.

    gang   run:fence, all ranks        ┌ crew 0   n2   ranks 0 … 7     rank 0's node: MASTER_ADDR, MASTER_PORT
                                       ├ crew 1   n3   ranks 8 … 15
                                       └ crew 2   n1   ranks 16 … 19   a part of a node comes last

A crew's number is its NODE_RANK; each has a lease, a token, facts, a receipt and an end of its own, the attempt has
what is the same for all of them. An attempt on one node is a gang of one crew.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serverless_gpu.model.placement import RankPlace

NODES_MAX = 256
"""A gang is not spread over more: every crew meets every other one before user code begins."""


class CrewPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one crew within its gang.

    Attributes:
        number: from 0 on; NODE_RANK.
        node: the node's name.
        first_rank: its lowest global rank, where each device has a rank.
        gpus: how many devices it has, CPU slots among them.
    """

    number: int
    node: str
    first_rank: int
    gpus: int


def laid_out(shares: Sequence[tuple[str, int]]) -> tuple[CrewPlace, ...]:
    """Return the crews of a gang: those with the most devices first, of those alike by the names of their nodes.

    The same gang has the same ranks on the same nodes whatever order the nodes were found in, and rank 0 is where most
    of its peers need no network.
    """
    names = [name for name, _ in shares]
    if not 0 < len(names) <= NODES_MAX or len(set(names)) != len(names) or any(gpus < 1 for _, gpus in shares):
        raise ValueError(f"a gang has devices on 1 to {NODES_MAX} nodes, each named once: {list(shares)[:8]}")
    crews: list[CrewPlace] = []
    first = 0
    for number, (node, gpus) in enumerate(sorted(shares, key=lambda share: (-share[1], share[0]))):
        crews.append(CrewPlace(number=number, node=node, first_rank=first, gpus=gpus))
        first += gpus
    return tuple(crews)


def world_size(crews: Sequence[CrewPlace]) -> int:
    """Return how many devices a gang has."""
    return sum(crew.gpus for crew in crews)


def rank_places(crews: Sequence[CrewPlace], number: int) -> tuple[RankPlace, ...]:
    """Return where the ranks of one crew stand, in the order of LOCAL_RANK."""
    crew = crews[number]
    return tuple(
        RankPlace(
            rank=crew.first_rank + local,
            local_rank=local,
            node_rank=number,
            world_size=world_size(crews),
            local_world_size=crew.gpus,
            num_nodes=len(crews),
        )
        for local in range(crew.gpus)
    )


def numbered(crew: CrewPlace, *, per_node: bool) -> range:
    """Return the numbers of a crew's processes, by which logs, results and failures are named.

    Global ranks; where a node has one process for all of its devices (a command that runs once per node, a driver of
    Ray), the node's number.
    """
    first, count = (crew.number, 1) if per_node else (crew.first_rank, crew.gpus)
    return range(first, first + count)
