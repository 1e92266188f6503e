"""The queue and shares: waiting runs, use by team and user, and their weights.

GET    /queue?limit                                    → QueueView    as far as the caller may see it
GET    /shares                                         → ShareList
PUT    /shares/{kind}/{name}    ShareRequest           → ShareView    kind: "team", "user"
DELETE /shares/{kind}/{name}                           → ShareView    it has 1 again, as everybody who was not named
"""

from __future__ import annotations

from typing import Literal

from serverless_gpu.model.spec import Priority
from serverless_gpu.wire.base import Answer, Request
from serverless_gpu.wire.waits import WaitView

LIMIT_MAX = 50
"""Entries of one answer: why somebody waits costs a look at the queue, for anybody who may ask."""
ShareKind = Literal["team", "user"]


class QueueEntry(Answer, frozen=True, kw_only=True):
    """A run that waits.

    Attributes:
        run: its identifier; "" for one that whoever asks may not see. So are `name` and `sentence`, and `place` is 0.
        waiting: `sentence`, part by part; None while nobody has looked, and for one that is not to be seen.
        place: its place among those that want the same kind of devices; 1 is the next, 0 is none: it is not in line.
        gpus: how many devices it wants; None for all of a node's.
        gpu_type: of what type; "" for whatever there is.
        pool: "" for any on-demand one.
        since_ns: since when it waits, nanoseconds since 1970.
        sentence: what for, for whom, and until when.
        reserved_ns: when the devices that are reserved for it are free; None where none are, or nobody can say.
        is_bound: whether that is the latest time.
    """

    run: str
    name: str
    owner: str
    team: str
    priority: Priority
    place: int
    gpus: int | None
    gpu_type: str
    pool: str
    since_ns: int
    sentence: str
    reserved_ns: int | None = None
    is_bound: bool = False
    waiting: WaitView | None = None


class QueueView(Answer, frozen=True, kw_only=True):
    """Those that wait, in the order in which they are looked at; those that nothing can ever serve come last.

    Attributes:
        waiting: how many there are altogether.
    """

    entries: tuple[QueueEntry, ...]
    waiting: int


class ShareView(Answer, frozen=True, kw_only=True):
    """How much of the devices somebody gets while others want them, too.

    Attributes:
        kind: "team", or "user": one among the users of their team, or, without a team, among the teams.
        weight: against those of the others; who was not named has 1.
        due: part of all devices that is theirs while everybody in this list wants some; None for a user in a team.
        used_gpu_s: device-seconds they have used, older use counting less, and a CPU slot as 1/32 of a GPU; None for a
            user in a team.
        counted_gpu_s: what the scheduler counts against them: `used_gpu_s`, and a minute in advance
            (`queue_entry_penalty`) of the devices of each run that has any now; None for a user in a team.
        part: part of all use; None for a user in a team.
    """

    kind: ShareKind
    name: str
    weight: float
    due: float | None = None
    used_gpu_s: float | None = None
    part: float | None = None
    counted_gpu_s: float | None = None


class ShareList(Answer, frozen=True, kw_only=True):
    """Shares.

    Attributes:
        half_life_s: after so long, use counts half.
    """

    shares: tuple[ShareView, ...]
    half_life_s: float


class ShareRequest(Request, frozen=True, kw_only=True):
    """Set a share."""

    weight: float
