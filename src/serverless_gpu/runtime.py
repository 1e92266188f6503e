"""Where this process stands in its gang: `from serverless_gpu import runtime as rt`.

The variables torch and torchrun use come first, so that the answers are right under `torchrun` and `accelerate`, too.
Outside of any gang a process is rank 0 of 1.
"""

from __future__ import annotations

import os

__all__ = ["get_global_rank", "get_local_rank", "get_local_world_size", "get_node_rank", "get_world_size"]


def get_global_rank() -> int:
    """Return this process's rank among all, from 0."""
    return _number("RANK", default=0)


def get_local_rank() -> int:
    """Return this process's rank on its node, from 0; the index of its GPU."""
    return _number("LOCAL_RANK", default=0)


def get_world_size() -> int:
    """Return the number of ranks on all nodes."""
    return _number("WORLD_SIZE", default=1)


def get_node_rank() -> int:
    """Return the number of this node in the gang, from 0."""
    return _number("NODE_RANK", "GROUP_RANK", default=0)


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return _number("LOCAL_WORLD_SIZE", default=1)


def _number(*names: str, default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return default
