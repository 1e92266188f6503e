"""The bounds of units and snapshots, as numbers, and the one form of saying that something breaks a rule.

Why the ratio is as it is: zstd makes 150 bytes of 4 MiB of zeros, so no ratio per block tells a bomb from weights that
were initialised with zeros. A whole unit may hold 200 bytes for each compressed one, and 256 MiB for nothing: a file of
256 MiB of zeros passes, 1 GB of zeros in 1 MB does not. Real distributions are at 2 to 20.
"""

from __future__ import annotations

from typing import NoReturn

from serverless_gpu.environment.documents import PACK_BYTES
from serverless_gpu.errors import EnvironmentRejected

ROWS_MAX = 1_000_000
"""Rows of a unit, and files of a snapshot."""
CONTENT_BYTES_MAX = 15 * 10**9
"""Content bytes of an environment, and so of a unit."""
PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
DEPTH_MAX = 64
"""Names in a path, its area included."""
LINK_HOPS_MAX = 8
"""Links that may point to one another in a row."""

PACK_BYTES_MAX = 2 * PACK_BYTES
"""A pack is closed when it is full, so it is longer than `PACK_BYTES` by the block that filled it."""
PACKS_MAX = 100_000
BLOCKS_MAX = 1_000_000
RATIO_MAX = 200
"""Content bytes of a unit for each compressed byte …"""
FREE_RATIO_BYTES = 256 * 1024 * 1024
"""… after these."""

ROOTS_MAX = 64
MEMBERS_MAX = 10_000
TEXT_BYTES_MAX = 64 * 1024
"""A generated file; they are scripts and `.pth` files."""
TEXTS_MAX = 10_000
NOTE_NAMES = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})
NOTE_BYTES_MAX = 64 * 1024
FACTS_MAX = 200_000
"""Entries of any list of facts."""
FACT_BYTES_MAX = 8 * 1024
"""One sentence or path among the facts."""


def refuse(what: str, path: str, rule: str) -> NoReturn:
    """Raise that something breaks a rule.

    Args:
        what: the unit or snapshot.
        path: the row, name or number in it, or "".
        rule: what it breaks, or should have been.
    """
    shown = path if len(path) <= 200 else f"{path[:100]}…{path[-60:]}"
    raise EnvironmentRejected(f"{what}: {shown!r}: {rule}" if path else f"{what}: {rule}")
