"""What a scheduler is told and what it answers. All times are nanoseconds of one clock that only goes forward.

The server's clock for this is its wall clock as `server/core/jump_tolerant_clock.py` believes it; a replayed trace's
begins at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from serverless_gpu.model.hardware import GpuType
from serverless_gpu.model.spec import Priority

CLASSES = tuple(Priority)
"""Priority classes, the first to be served first; a run has the place of its own among them."""
CRITICAL, NORMAL, BEST_EFFORT = range(3)
"""Priority classes as numbers: their places in `CLASSES`."""


# --- what goes in -----------------------------------------------------------------------------------------------------


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator decides about the queue.

    Attributes:
        half_life_s: after so long, use counts half.
        entry_penalty_s: seconds of its devices that a run is charged in advance while it has them: of two who ask for a
            thousand runs at once, each gets its turn. Given back when the run ends: what it really used is charged.
        team_weights: shares of teams, by name; one that is not named has 1.
        user_weights: shares of users within their team, by name; one that is not named has 1.
        reservations: so many blocked gangs of the queue have devices reserved ahead.
        nearly: part of a gang's devices that has to be free for the rest to be waited for when nobody knows how long.
        patience_s: a blocked gang whose team, or user within their team, is behind another that waits, by so many
            seconds of the gang's devices, has them kept as they get free: small runs of others do not starve it.
        gang_lead: waiting counts so many times for a gang that takes a whole node or more.
        whole_node: how many devices make a whole node; 0 for those of the largest node that a gang could use.
        node_patience_s: a gang of a whole node for which devices would be kept by `patience_s` waits for so long before
            they are; until then its node is reserved by a guess.
        guard_s: a run that has waited for so long is next of all: who comes later starts only what is over, by what is
            known or guessed, before there is room for it. After twice as long devices are kept for it as they get free.
        preempt_after_s: an attempt has its devices for so long, counted from its placement, before a run of a higher
            class may preempt it. Who has a right to the devices (a pool that lends, a node's owner) does not wait.
        preemptions_max: a run is preempted no more often than that.
    """

    half_life_s: float = 7 * 86_400.0
    entry_penalty_s: float = 60.0
    team_weights: Mapping[str, float] = {}
    user_weights: Mapping[str, float] = {}
    reservations: int = 32
    nearly: float = 0.9
    patience_s: float = 3600.0
    node_patience_s: float = 3 * 86_400.0
    gang_lead: float = 10 / 3
    whole_node: int = 0
    guard_s: float = 14 * 86_400.0
    preempt_after_s: float = 600.0
    preemptions_max: int = 3


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes under one policy.

    Attributes:
        reserved: whether only runs that name it may use it.
        lends: whether a reserved pool's idle devices are lent to runs of `BEST_EFFORT` that name no pool and can give
            them back: they may be preempted, or declared a time limit that is no longer than that.
        return_s: seconds within which who can be preempted has left when the pool's own runs want the devices.
        single_principal: whether its nodes run the code of one principal only, since they cannot keep several apart.
    """

    name: str
    reserved: bool = False
    lends: bool = False
    return_s: float = 300.0
    single_principal: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it can be used now.

    Attributes:
        pythons: versions of Python that it has; none when that is not known.
        total: devices by type.
        outside: those of `total` that others than this server use, or that are in quarantine.
        left_out: which of those people have left out, and why, in words; "" for none.
        own: GPU types that the node declares itself.
        away: why it cannot be used now, in words that follow its name, or "".
        owner: whose node it is, or "": their runs come first here, those of others have to be able to leave.
        shared: whether others than its owner may use it now.
        turns_ns: when `shared` is the other way round by its calendar; None for never. Others start here only what
            ends before that, or can be preempted.
        owner_first: whether a waiting run of the owner's pushes out those of others, also while it is shared.
        crews: whether it can have a part of a gang on several nodes.
    """

    id: str
    name: str
    pool: str = ""
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()
    total: Mapping[str, int]
    outside: Mapping[str, int] = {}
    left_out: str = ""
    own: tuple[GpuType, ...] = ()
    away: str = ""
    owner: str = ""
    shared: bool = True
    turns_ns: int | None = None
    owner_first: bool = False
    crews: bool = True


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that waits.

    Attributes:
        title: what others read: ``"alice/bert-ft"``.
        owner: the principal that pays for it in the fair share; `team` likewise, "" for none.
        priority: `CRITICAL`, `NORMAL` or `BEST_EFFORT`.
        queued_ns: since when it waits.
        gpus: how many devices; None for all of a node's.
        gpu_type: canonical name, or None for the only GPU type there is.
        several_nodes: whether it may have devices of several nodes, if none that it may ever use has as many: as many
            whole nodes as it takes, and one part, of one type in one pool.
        alone: what would let it have several, as its owner would write it, or "": ``"without same_node=True"``.
        apart: pairs of nodes that did not reach each other in an attempt of it: not both, where it can be otherwise.
        pool: "" for any on-demand pool.
        machine: the only machine that will do, or "".
        platform: the only platform that will do, or "".
        python: the version of Python that it needs, as ``"3.11"``, or "".
        caller: the machine that has this version in any case, or "".
        avoid: identifiers of nodes that failed to start it; used when no other is free.
        not_before_ns: it is left alone until then; 0 for at once.
        held: what it is told until then.
        limit_s: the longest that it has devices once it has them, as declared; None for no limit.
        expected_s: how long that is likely to be, as learned from earlier runs; None where nothing is known.
        preemptible: whether it may be stopped to make room and goes on later: it asked for `resume`.
        preemptions: how often that was done to it.
        beyond_s: what `limit_s` has, or would have, beyond what its owner declares: to start, and to leave.
        grace_s: how long it may take to leave once it is asked to.
        second_principal: whether its owner is another principal than the one that a `single_principal` pool serves.
        capped: whether `limit_s` is what its server or usage policy sets, and its owner declared none that is shorter.
    """

    run_id: str
    title: str
    owner: str = ""
    team: str = ""
    priority: int = NORMAL
    queued_ns: int
    gpus: int | None = None
    gpu_type: str | None = None
    several_nodes: bool = False
    alone: str = ""
    pool: str = ""
    machine: str = ""
    platform: str = ""
    python: str = ""
    caller: str = ""
    avoid: frozenset[str] = frozenset()
    apart: frozenset[tuple[str, str]] = frozenset()
    not_before_ns: int = 0
    held: str = ""
    limit_s: float | None = None
    expected_s: float | None = None
    preemptible: bool = False
    preemptions: int = 0
    grace_s: float = 30.0
    beyond_s: float = 0.0
    second_principal: bool = False
    capped: bool = False


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Devices of one type on one node that a gang has, or is to have."""

    node_id: str
    gpu_type: str
    count: int


class RunningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has devices.

    Attributes:
        wanted: what it asked for; it waits with that again when it is given back.
        shares: what it has.
        since_ns: when it got them.
        is_leaving: whether it was asked to stop already.
        leaving_ns: when it was; None where that is not known.
    """

    wanted: QueuedRun
    shares: tuple[DeviceShare, ...]
    since_ns: int
    is_leaving: bool = False
    leaving_ns: int | None = None


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that are kept for a run that is blocked.

    Attributes:
        shares: which, as far as it is known.
        at_ns: when they are free; None where nobody can say.
        is_bound: whether that is the latest time: everybody who has them has declared how long they run at most.
        likely_ns: when they are likely free, where earlier runs of those names say so and it is before `at_ns`.
    """

    run_id: str
    shares: tuple[DeviceShare, ...]
    at_ns: int | None
    is_bound: bool
    likely_ns: int | None = None


# --- changes ----------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """A run waits, or wants something else than before; one that was placed and could not start waits again."""

    wanted: QueuedRun


class DevicesTaken(msgspec.Struct, frozen=True):
    """A run has devices: what is found at the start, or was placed by somebody else, or is leaving now."""

    running: RunningRun


class Gone(msgspec.Struct, frozen=True):
    """A run waits no more, or has given its devices back."""

    run_id: str


class NodeSeen(msgspec.Struct, frozen=True):
    """A node is there, as it is now."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    """A node is not there any more; what runs there keeps its devices until it is gone, too."""

    node_id: str


class PoolSeen(msgspec.Struct, frozen=True):
    """A pool is there, as it is now; a pool that nobody spoke of is an on-demand one."""

    pool: Pool


class QueuePolicySet(msgspec.Struct, frozen=True):
    """The operator decided otherwise."""

    policy: QueuePolicy


class Used(msgspec.Struct, frozen=True):
    """Use of those that have ended, decayed until `at_ns`: GPU-seconds by team and by team and user.

    What runs at that time is not in it: it counts from when it got its devices (`Running.since_ns`).
    """

    at_ns: int
    teams: Mapping[str, float]
    users: Mapping[tuple[str, str], float]


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """The decayed use of a team.

    Attributes:
        used_gpu_s: GPU-seconds that its runs had devices, those that go on among them.
        counted_gpu_s: what decides whose turn it is: the same, and the advance of each run that has devices now.
    """

    used_gpu_s: float
    counted_gpu_s: float


class Promised(msgspec.Struct, frozen=True):
    """A latest time that was told by another planner, before this one was made: it holds here, too."""

    reservation: Reservation


Change = Arrived | DevicesTaken | Gone | NodeSeen | NodeGone | PoolSeen | QueuePolicySet | Used | Promised


# --- what comes out ---------------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that is to start with these devices, now."""

    run_id: str
    shares: tuple[DeviceShare, ...]


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is to leave so that another one finds room: it is stopped in order and goes on later.

    Attributes:
        run_id: who leaves.
        for_run: who gets the room.
        sentence: what its owner is told.
    """

    run_id: str
    for_run: str
    sentence: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done now.

    Attributes:
        placements: in the order of the queue; the scheduler counts them as started until it is told otherwise.
        preemptions: who is to leave; the scheduler counts them as leaving.
        wake_ns: when to decide again though nothing has changed; None for never.
    """

    placements: tuple[Placement, ...]
    preemptions: tuple[Preemption, ...]
    wake_ns: int | None


class WaitReason(StrEnum):
    """What a run waits for."""

    CAPACITY = "capacity"  # its devices are in use
    RESERVED = "reserved"  # devices are free, and kept for others who are ahead
    TURN = "turn"  # it was not looked at yet, or others are ahead of it in the queue
    MAKING_ROOM = "making_room"  # others were asked to leave, for it
    CALENDAR = "calendar"  # the node is its owner's now
    AWAY = "away"  # nodes that would do are silent, drained or have a problem
    HELD = "held"  # it may not start yet: it failed to start, its owner or the server starts nothing
    ISOLATION = "isolation"  # the nodes that would do cannot keep its owner's code apart from that of others
    UNSATISFIABLE = "unsatisfiable"  # nothing that has joined can ever serve it


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who has devices that are waited for.

    Attributes:
        until_ns: when they give them back; None where nobody can say.
        is_bound: whether that is the latest time, as declared.
        is_leaving: whether it was asked to stop.
        asked_ns: when it is asked to make room, if it is still there; None for never, and where it is asked already.
        node: where, of what is waited for on several nodes; else "".
        likely_ns: when they likely give them back, where earlier runs of that name say so and it is before `until_ns`.
    """

    title: str
    count: int
    until_ns: int | None = None
    is_bound: bool = False
    is_leaving: bool = False
    asked_ns: int | None = None
    node: str = ""
    likely_ns: int | None = None


class GangPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a gang on several nodes waits for on one of them.

    Attributes:
        node: its name.
        count: devices that it would have there.
        free: those that are free there.
    """

    node: str
    count: int
    free: int


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run is not placed, as it is now. `model/scheduling/wait_messages.py` makes a sentence of it.

    Attributes:
        count: devices that it needs; 0 where that depends on the node.
        whole: whether it asks for all devices of a node, however many these are.
        gpu_type: their type; "" where that depends on the node.
        one_node: whether they have to be on one node.
        nodes: those where it fits soonest, of a gang on several.
        node: name of the node where it fits soonest, or "".
        free: devices of its kind that are free there.
        outside: those that others than this server use there, or that are in quarantine.
        holders: who has the others, those who leave first first.
        ahead: title of the run for which what is free is kept, or "".
        kept_ns: from when on that run has it, where what ends before may start; None for now.
        spare_s: a run that declares no more than that would start now, in what is kept; 0 for none.
        place: its place among those that want the same kind of devices; 1 is the next, 0 is none: it is not in line.
        at_ns: when it starts, where it has a reservation or everything is known; `is_bound`: at the latest.
        owner: whose `node` it is, where a calendar is the reason.
        turns_ns: when that node changes hands by its calendar: it is shared from then on where nothing counts as free
            now, and its owner's from then on where something does.
        words: what is to be said beyond that, or in place of it.
        likely_ns: when it likely starts, where earlier runs of those names say so and it is before `at_ns`.
        ends_ns: when it ends without a start if nothing that could serve it joins; None for never.
    """

    run_id: str
    reason: WaitReason
    count: int = 0
    whole: bool = False
    gpu_type: str = ""
    one_node: bool = True
    nodes: tuple[GangPart, ...] = ()
    node: str = ""
    free: int = 0
    outside: int = 0
    holders: tuple[DeviceHolder, ...] = ()
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


class StartEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """When a run would start if it were submitted now.

    Attributes:
        at_ns: the expected time; None where it is unknown.
        is_bound: whether that is the latest time.
        node: where, by name, or "".
        nodes: where, by name, of a gang on several nodes.
        basis: what that rests on, or why it is unknown, in words.
        place: how many runs are ahead of it for the same kind of devices, plus one; 0 when it starts at once.
        impossible: whether nothing that has joined can ever serve it.
        wait: what it would wait for, part by part; None where it would not, or is never looked at.
    """

    at_ns: int | None
    is_bound: bool = False
    node: str = ""
    nodes: tuple[str, ...] = ()
    basis: str
    place: int = 0
    impossible: bool = False
    wait: Wait | None = None
