"""Usage policies: what an organisation has decided for the runs that name one of them."""

from __future__ import annotations

import msgspec


class UsagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy; a run names it with `policy=`.

    Attributes:
        pool: where runs go that name this policy and no pool; "" for any on-demand pool.
    """

    pool: str = ""
