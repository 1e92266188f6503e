"""The queue, why each run in it waits, and shares: use by team and user, and their weights.

    GET    /queue?limit                                    → QueueView    as far as the caller may see it
    GET    /shares                                         → ShareList
    PUT    /shares/{kind}/{name}    ShareRequest           → ShareView    kind: "team", "user"
    DELETE /shares/{kind}/{name}                           → ShareView    it has 1 again, as all that were not named

`WaitView` is `Wait` of `model/scheduling/values.py` as it travels. The reader makes the sentence from its parts, with
its own clock; times are nanoseconds since 1970 by the server's clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.scheduling.values import DeviceHolder, GangPart, Wait, WaitReason
from serverless_gpu.model.spec import Priority
from serverless_gpu.wire.base import Answer, Request

HOLDERS_MAX = 16
"""So many of those who have devices are named; `others` counts the devices of the rest."""
_REASONS = frozenset(reason.value for reason in WaitReason)


class HolderView(DeviceHolder, frozen=True, kw_only=True):
    """Somebody who has devices that are waited for.

    Attributes:
        title: owner and name of their run.
        until_ns: when they give them back; None where nobody can say.
        is_bound: whether that is the latest time, as declared.
        is_leaving: whether it was asked to stop.
        asked_ns: when it is asked to make room, if it is still there; None for never, and where it is asked already.
        node: where, of what is waited for on several nodes; else "".
        likely_ns: when they likely do, where earlier runs of that name say so and it is before `until_ns`.
    """


class PartView(GangPart, frozen=True, kw_only=True):
    """What a gang on several nodes waits for on one of them: devices that it would have there, and that are free."""


class WaitView(Answer, frozen=True, kw_only=True):
    """Why a run is not placed.

    Attributes:
        reason: of `WaitReason`; a newer server may have others.
        count: devices that it needs; 0 where that depends on the node.
        gpu_type: their type; "" where that depends on the node.
        one_node: whether they have to be on one node.
        whole: whether it asks for all devices of a node, however many these are.
        nodes: those where it fits soonest, of a gang on several.
        node: name of the node where it fits soonest, or "".
        free: devices of its kind that are free there.
        outside: those that others than this server use there, or that are in quarantine.
        holders: who has the others, those who leave first first; `HOLDERS_MAX` of them.
        others: devices of those who are not named.
        ahead: title of the run for which what is free is kept, or "".
        kept_ns: from when on that run has it; None for now.
        spare_s: a run that declares no more than that would start now; 0 for none.
        place: its place among those that want the same kind of devices; 1 is the next, 0 is none: it is not in line.
        at_ns: when it starts, where that is known; `is_bound`: at the latest.
        owner: whose `node` it is, where a calendar is the reason.
        turns_ns: when that node changes hands by its calendar.
        words: what is to be said beyond that, or in place of it.
        likely_ns: when it likely starts, where earlier runs of those names say so and it is before `at_ns`.
        ends_ns: when it ends without a start if nothing that could serve it joins; None for never.
    """

    reason: str
    count: int = 0
    gpu_type: str = ""
    one_node: bool = True
    whole: bool = False
    nodes: tuple[PartView, ...] = ()
    node: str = ""
    free: int = 0
    outside: int = 0
    holders: tuple[HolderView, ...] = ()
    others: int = 0
    ahead: str = ""
    kept_ns: int | None = None
    spare_s: float = 0.0
    place: int = 0
    at_ns: int | None = None
    is_bound: bool = False
    owner: str = ""
    turns_ns: int | None = None
    words: str = ""
    likely_ns: int | None = None
    ends_ns: int | None = None


def wait_view(wait: Wait) -> WaitView:
    """Return why a run waits, as it travels."""
    view = from_builtins(wait, WaitView, from_attributes=True)
    rest = wait.holders[HOLDERS_MAX:]
    return msgspec.structs.replace(view, holders=view.holders[:HOLDERS_MAX], others=sum(each.count for each in rest))


def wait_of(view: WaitView, run_id: str) -> Wait | None:
    """Return a view as the scheduler's wait; None for a reason that this version does not know."""
    if view.reason not in _REASONS:
        return None
    wait = from_builtins(msgspec.to_builtins(view) | {"run_id": run_id}, Wait)
    others = (DeviceHolder(title="others", count=view.others),) if view.others else ()
    return msgspec.structs.replace(wait, run_id=run_id, holders=(*wait.holders, *others))


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
