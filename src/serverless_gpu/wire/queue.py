"""Defines bodies for the queue, wait reasons, and fair shares.

    GET    /queue?limit                                    → QueueView    runs that the caller may see
    GET    /shares                                         → ShareList
    PUT    /shares/{kind}/{name}    ShareRequest           → ShareView    kind: "team", "user"
    DELETE /shares/{kind}/{name}                           → ShareView    restores the default weight of 1

`WaitView` is the wire form of `Wait` in `model/scheduling/values.py`. The client composes a wait sentence from the
fields of `WaitView`, with times in the client's time zone. All times are in nanoseconds since 1970 by the server's
clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.scheduling.values import DeviceHolder, GangPart, Wait, WaitReason
from serverless_gpu.model.spec import Priority
from serverless_gpu.wire.base import Answer, Request

HOLDERS_MAX = 16
"""Maximum number of holders in a `WaitView`. `others` counts the devices of all further holders."""
_REASONS = frozenset(reason.value for reason in WaitReason)


class HolderView(DeviceHolder, frozen=True, kw_only=True):
    """A run that holds devices for which another run waits.

    Attributes:
        title: owner and name of the holding run.
        until_ns: time at which the run releases the devices, or None if unknown.
        is_bound: True if `until_ns` is the latest possible time, because the run has a time limit.
        is_leaving: True if the server has asked the run to stop.
        asked_ns: time of the planned preemption request. None if no request is planned, or if the server has already
            sent the request.
        node: node of the held devices, if the waiting gang needs several nodes. Otherwise "".
        likely_ns: likely release time, estimated from earlier runs of the same name, if before `until_ns`.
    """


class PartView(GangPart, frozen=True, kw_only=True):
    """A node that a waiting gang needs, with the number of required and of free devices."""


class WaitView(Answer, frozen=True, kw_only=True):
    """The reason why a run waits in the queue.

    Attributes:
        reason: value of `WaitReason`. A newer server may send other values.
        count: number of devices that the run requires, or 0 if the number depends on the node.
        gpu_type: required device type, or "" if the type depends on the node.
        one_node: True if all devices must be on one node.
        whole: True if the run requests all devices of a node, regardless of their number.
        nodes: nodes on which a gang on several nodes can start earliest.
        node: name of the node on which the run can start earliest, or "".
        free: number of free devices of the required type on `node`.
        outside: number of devices in quarantine or in use by programs outside this server.
        holders: runs that hold the required devices, sorted by their expected end, at most `HOLDERS_MAX`.
        others: number of devices that belong to holders without an entry in `holders`.
        ahead: title of the run for which the scheduler reserves the free devices, or "".
        kept_ns: start of the reservation for the run `ahead`. None means now.
        spare_s: maximum time limit in seconds with which the run would start now, or 0 for no such limit.
        place: position among runs that need the same type of devices. 1 means the next run, and 0 means no position.
        at_ns: expected start time, if known. `is_bound` means that `at_ns` is the latest possible time.
        owner: owner of `node` if a calendar is the reason.
        turns_ns: time at which the calendar of `node` admits other users.
        words: additional sentence, or a sentence that replaces all other fields.
        likely_ns: likely start time, estimated from earlier runs of the same names, if before `at_ns`.
        ends_ns: time at which the run ends without a start if no suitable node joins. None for never.
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
    """Convert the scheduler's wait reason to a `WaitView`."""
    view = from_builtins(wait, WaitView, from_attributes=True)
    rest = wait.holders[HOLDERS_MAX:]
    return msgspec.structs.replace(view, holders=view.holders[:HOLDERS_MAX], others=sum(each.count for each in rest))


def wait_of(view: WaitView, run_id: str) -> Wait | None:
    """Convert a `WaitView` to the scheduler's wait reason, or return None for an unknown reason."""
    if view.reason not in _REASONS:
        return None
    wait = from_builtins(msgspec.to_builtins(view) | {"run_id": run_id}, Wait)
    others = (DeviceHolder(title="others", count=view.others),) if view.others else ()
    return msgspec.structs.replace(wait, run_id=run_id, holders=(*wait.holders, *others))


LIMIT_MAX = 50
"""Maximum number of queue entries in one answer. Each wait reason requires a scan of the queue."""
ShareKind = Literal["team", "user"]


class QueueEntry(Answer, frozen=True, kw_only=True):
    """A waiting run in the queue.

    Attributes:
        run: identifier of the run, or "" if the caller may not see the run. `name` and `sentence` are then also "", and
            `place` is 0.
        waiting: the structured form of `sentence`. None before the first scheduling pass, or if the caller may not see
            the run.
        place: position among runs that need the same type of devices. 1 means the next run, and 0 means no position.
        gpus: number of requested devices, or None for all devices of a node.
        gpu_type: requested type, or "" for any type.
        pool: requested pool, or "" for any on-demand pool.
        since_ns: start of the wait, in nanoseconds since 1970.
        sentence: the awaited devices, their holders, and the expected time.
        reserved_ns: time at which the reserved devices are free, or None if unknown or without a reservation.
        is_bound: True if `reserved_ns` is the latest possible time.
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
    """The waiting runs in scheduling order. Runs that no node can ever execute come last.

    Attributes:
        waiting: total number of waiting runs.
    """

    entries: tuple[QueueEntry, ...]
    waiting: int


class ShareView(Answer, frozen=True, kw_only=True):
    """The fair share of a team or a user.

    Attributes:
        kind: "team" or "user". The users of a team divide the team's share. A user without a team competes with the
            teams.
        weight: weight relative to other teams or users. The default is 1.
        due: fair share of all devices while all teams and users in this list request devices. None for a user in a
            team.
        used_gpu_s: device-seconds of past usage, with less weight for older usage. A CPU slot counts as 1/32 of a GPU.
            None for a user in a team.
        counted_gpu_s: usage that the scheduler counts: `used_gpu_s`, and one additional minute (`queue_entry_penalty`)
            for each device of each running run. None for a user in a team.
        part: fraction of the total usage. None for a user in a team.
    """

    kind: ShareKind
    name: str
    weight: float
    due: float | None = None
    used_gpu_s: float | None = None
    part: float | None = None
    counted_gpu_s: float | None = None


class ShareList(Answer, frozen=True, kw_only=True):
    """The list of all fair shares.

    Attributes:
        half_life_s: time in seconds after which past usage has half of its weight.
    """

    shares: tuple[ShareView, ...]
    half_life_s: float


class ShareRequest(Request, frozen=True, kw_only=True):
    """Set the weight of a fair share."""

    weight: float
