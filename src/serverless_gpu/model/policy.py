"""Usage policies: what an organisation has decided for the runs of somebody, and which of them a run is under.

    attached to the user, service or their teams ─▶ one: it applies by itself
                                                    several: `policy=` (or SGPU_POLICY) says which; else refused
                                                    none: any policy that is attached to nobody may be named
    the policy ─▶ is the run within it?  ── no ──▶ refused: the policy, what is not accepted, what would be
              └─▶ what it adds: default tags, pool, limits ─▶ the spec that is written down

What is decided here depends on values only. A policy fills in what the user left open and never loosens what they said.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.model.spec import Priority

MAX_RUN_S = 7 * 86_400.0
"""The longest an attempt runs where no policy says otherwise; with `resume` the run goes on as another attempt."""
HolderKind = Literal["user", "service", "team"]


class UsagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. None, or an empty tuple, means that it says nothing about that.

    Attributes:
        pool: where runs go that name no pool; "" for any on-demand pool.
        pools: pools that runs may name; `pool` is always one of them.
        required_tags: keys that a run has to have; a key with values may have only those.
        default_tags: what is added where a run has no such key.
        gpu_types: that runs may ask for; one that asks for none gets the first that there is of these.
        gpus_per_run: the most devices of one run.
        gpus_at_once: the most devices that the runs of one user have at the same time.
        max_run_s: the longest an attempt runs, in seconds.
        idle_s: seconds of devices that do nothing until a run is stopped; users may say less, and not more or never.
        priorities: classes that runs may ask for; one that asks for another is refused, one that says nothing gets the
            first.
        environments: addresses of captured environments whose installed packages are accepted; the project's own code
            may differ. With any, a run that imports the caller's own files is refused.
    """

    pool: str = ""
    pools: tuple[str, ...] = ()
    required_tags: dict[str, tuple[str, ...]] = {}
    default_tags: dict[str, str] = {}
    gpu_types: tuple[str, ...] = ()
    gpus_per_run: int | None = None
    gpus_at_once: int | None = None
    max_run_s: float | None = None
    idle_s: float | None = None
    priorities: tuple[Priority, ...] = ()
    environments: tuple[str, ...] = ()


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a policy is attached to.

    Attributes:
        kind: what they are.
        name: of the principal, or the team.
    """

    kind: HolderKind
    name: str
