"""Budgets: how much money or GPU time somebody may use in a day, week or month, and what follows when it is used up.

    charges of the period ─┐
    what goes on now ──────┼─▶ standing: used, held, limit ─┬─▶ 80 %, 95 %: said, once
    60 s ahead for each ───┘                                ├─▶ 100 %, soft: nothing new starts, the others finish
                                                            └─▶ 100 %, hard: those are stopped, through a checkpoint

A run holds what its next minute costs, or its grace when that is longer. What cannot be held any more is the sign to
stop, so that the checkpoint is written with money that is there. That bounds what is used beyond a hard limit: nothing
while server and node talk, and `partition_grace` of its devices for each run while they do not.

Periods are of UTC; a week begins on Monday. Values only: no clock, no database.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

AHEAD_S = 60.0
"""How much of its time a run holds ahead, in seconds, where its grace is not longer."""
STOPPING_S = 15.0
"""What is held beyond a long grace: the next look and the way to the node take that."""
WARN_AT = (80, 95)
"""Per cent of a limit at which that is said, once in a period."""
ScopeKind = Literal["everything", "user", "team", "pool", "policy", "tag"]


class Period(StrEnum):
    """What a limit is for."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose use counts.

    Attributes:
        kind: by what.
        name: of the user, service, team, pool or policy; of a tag ``key=value``, or ``key`` for each run that has it.
    """

    kind: ScopeKind
    name: str = ""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One budget; exactly one of the two limits is set.

    Attributes:
        scope: whose use counts.
        period: in which.
        limit_micros: millionths of the currency unit; time without a price counts nothing there.
        limit_gpu_ms: GPU-milliseconds.
        hard: whether runs are stopped at 100 %; else they finish, and nothing new starts.
    """

    scope: Scope
    period: Period
    limit_micros: int | None = None
    limit_gpu_ms: int | None = None
    hard: bool = False


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run decides which budgets it counts for."""

    owner: str
    team: str = ""
    pool: str = ""
    policy: str = ""
    tags: dict[str, str] = {}
