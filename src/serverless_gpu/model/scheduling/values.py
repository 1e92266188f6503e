"""Values of the scheduler, in and out; and `Shape`, which runs that want the same share.

All times are nanoseconds of one clock that only goes forward. On the server, it is the wall clock as
`server/core/loops.py` believes it; a replayed trace begins at 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
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
    """The operator's settings of the queue."""

    half_life_s: float = 7 * 86_400.0  # after so long, use counts half
    # Seconds of its devices that a run is charged in advance while it has them: of two who ask for a thousand runs at
    # once, each gets its turn. Given back when the run ends: what it really used is charged.
    entry_penalty_s: float = 60.0
    team_weights: Mapping[str, float] = {}  # shares of teams, by name; one that is not named has 1
    user_weights: Mapping[str, float] = {}  # shares of users within their team, by name; one that is not named has 1
    reservations: int = 32  # so many blocked gangs of the queue have devices reserved ahead
    # Part of a gang's devices that has to be free for the rest to be waited for when the wait is unknown.
    nearly: float = 0.9
    # A blocked gang whose team, or user within their team, is behind another that waits, by so many seconds of the
    # gang's devices, has them kept as they get free: small runs of others do not starve it.
    patience_s: float = 3600.0
    # A gang of a whole node for which devices would be kept by `patience_s` waits for so long before they are; until
    # then its node is reserved by a guess.
    node_patience_s: float = 3 * 86_400.0
    gang_lead: float = 10 / 3  # waiting counts so many times for a gang that takes a whole node or more
    whole_node: int = 0  # how many devices make a whole node; 0 for those of the largest node that a gang could use
    # A run that has waited for so long is next of all: who comes later starts only what is over, by what is known or
    # guessed, before there is room for it. After twice as long devices are kept for it as they get free.
    guard_s: float = 14 * 86_400.0
    # An attempt has its devices for so long, counted from its placement, before a run of a higher class may preempt it.
    # Who has a right to the devices (a pool that lends, a node's owner) does not wait.
    preempt_after_s: float = 600.0
    preemptions_max: int = 3  # a run is preempted no more often than that


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes under one policy."""

    name: str
    reserved: bool = False  # whether only runs that name it may use it
    # Whether a reserved pool's idle devices are lent to runs of `BEST_EFFORT` that name no pool and can give them back:
    # they may be preempted, or declared a time limit that is no longer than that.
    lends: bool = False
    # Seconds within which who can be preempted has left when the pool's own runs want the devices.
    return_s: float = 300.0
    # Whether its nodes run the code of one principal only, since they cannot keep several apart.
    single_principal: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it can be used now."""

    id: str
    name: str
    pool: str = ""
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()  # versions of Python that it has; none when that is not known
    total: Mapping[str, int]
    outside: Mapping[str, int] = {}  # those of `total` that others than this server use, or that are in quarantine
    left_out: str = ""  # which of those people have left out, and why, in words; "" for none
    own: tuple[GpuType, ...] = ()  # GPU types that the node declares itself
    away: str = ""  # why it cannot be used now, in words that follow its name, or ""
    owner: str = ""  # "" for none: their runs come first here, those of others have to be able to leave
    shared: bool = True  # whether others than its owner may use it now
    # When `shared` is the other way round by its calendar; None for never. Others start here only what ends before
    # that, or can be preempted.
    turns_ns: int | None = None
    # Whether a waiting run of the owner's pushes out those of others, also while it is shared.
    owner_first: bool = False
    crews: bool = True  # whether it can have a part of a gang on several nodes


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that waits."""

    run_id: str
    title: str  # shown to others: `"alice/bert-ft"`
    owner: str = ""  # the principal that pays for it in the fair share; `team` the same, "" for none
    team: str = ""
    priority: int = NORMAL  # `CRITICAL`, `NORMAL` or `BEST_EFFORT`
    queued_ns: int  # since when it waits
    gpus: int | None = None  # how many devices; None for all of a node's
    gpu_type: str | None = None  # canonical name, or None for the only GPU type there is
    # Whether it may have devices of several nodes, if none that it may ever use has as many: as many whole nodes as it
    # takes, and one part, of one type in one pool.
    several_nodes: bool = False
    alone: str = ""  # what would let it have several, as its owner would write it, or "": `"without same_node=True"`
    pool: str = ""  # "" for any on-demand pool
    machine: str = ""  # the only machine that will do, or ""
    platform: str = ""  # the only platform that will do, or ""
    python: str = ""  # the version of Python that it needs, as `"3.11"`, or ""
    caller: str = ""  # the machine that has this version in any case, or ""
    avoid: frozenset[str] = frozenset()  # identifiers of nodes that failed to start it; used when no other is free
    # Pairs of nodes that did not reach each other in an attempt of it: not both, where it can be otherwise.
    apart: frozenset[tuple[str, str]] = frozenset()
    not_before_ns: int = 0  # it is left alone until then; 0 for at once
    held: str = ""  # the reason until then
    limit_s: float | None = None  # the longest that it has devices once it has them, as declared; None for no limit
    # How long that is likely to be, as learned from earlier runs; None where nothing is known.
    expected_s: float | None = None
    preemptible: bool = False  # whether it may be stopped to make room and goes on later: it asked for `resume`
    preemptions: int = 0  # how often that was done to it
    grace_s: float = 30.0  # how long it may take to leave once it is asked to
    beyond_s: float = 0.0  # what `limit_s` has, or would have, beyond what its owner declares: to start, and to leave
    # Whether its owner is another principal than the one that a `single_principal` pool serves.
    second_principal: bool = False
    # Whether `limit_s` is what its server or usage policy sets, and its owner declared none that is shorter.
    capped: bool = False


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Devices of one type on one node that a gang has, or is to have."""

    node_id: str
    gpu_type: str
    count: int


class RunningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has devices."""

    wanted: QueuedRun  # what it asked for; it waits with that again when it is given back
    shares: tuple[DeviceShare, ...]
    since_ns: int
    is_leaving: bool = False  # whether it was asked to stop already
    leaving_ns: int | None = None  # when it was; None where that is not known


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that are kept for a run that is blocked."""

    run_id: str
    shares: tuple[DeviceShare, ...]  # which, as far as it is known
    at_ns: int | None  # when they are free; None where unknown
    is_bound: bool  # the latest time: all who have them declared how long they run at most
    # When they are likely free, where earlier runs of those names say so and it is before `at_ns`.
    likely_ns: int | None = None


# --- changes ----------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """A run waits, or wants something else than before; one that was placed and could not start waits again."""

    wanted: QueuedRun


class DevicesTaken(msgspec.Struct, frozen=True):
    """A run has devices: what is found at the start, or was placed by another planner, or is leaving now."""

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
    """A pool is there, as it is now; an unknown pool is an on-demand one."""

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
    """The decayed use of a team."""

    used_gpu_s: float  # GPU-seconds that its runs had devices, those that go on among them
    counted_gpu_s: float  # what decides whose turn it is: the same, and the advance of each run that has devices now


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
    """A run that is to leave so that another one finds room: it is stopped in order and goes on later."""

    run_id: str
    for_run: str
    sentence: str  # the message to its owner


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Placements and preemptions to carry out now."""

    # In the order of the queue; the scheduler counts them as started until it is told otherwise.
    placements: tuple[Placement, ...]
    preemptions: tuple[Preemption, ...]  # who is to leave; the scheduler counts them as leaving
    wake_ns: int | None  # when to decide again though nothing has changed; None for never


class WaitReason(StrEnum):
    """The thing that a run waits for."""

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
    """A run or person with devices that another run waits for."""

    title: str
    count: int
    until_ns: int | None = None  # when they give them back; None where unknown
    is_bound: bool = False  # whether that is the latest time, as declared
    is_leaving: bool = False  # whether it was asked to stop
    # When it is asked to make room, if it is still there; None for never, and where it is asked already.
    asked_ns: int | None = None
    node: str = ""  # where, of what is waited for on several nodes; else ""
    # When they likely give them back, where earlier runs of that name say so and it is before `until_ns`.
    likely_ns: int | None = None


class GangPart(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a gang on several nodes awaits on one of them."""

    node: str
    count: int  # devices that it would have there
    free: int  # those that are free there


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a run waits. `model/scheduling/wait_messages.py` renders it."""

    run_id: str
    reason: WaitReason
    count: int = 0  # devices that it needs; 0 where that depends on the node
    whole: bool = False  # whether it asks for all devices of a node, however many these are
    gpu_type: str = ""  # their type; "" where that depends on the node
    one_node: bool = True  # whether they have to be on one node
    nodes: tuple[GangPart, ...] = ()  # those where it fits soonest, of a gang on several
    node: str = ""  # name of the node where it fits soonest, or ""
    free: int = 0  # devices of its kind that are free there
    outside: int = 0  # those that others than this server use there, or that are in quarantine
    holders: tuple[DeviceHolder, ...] = ()  # who has the others, those who leave first first
    ahead: str = ""  # title of the run for which what is free is kept, or ""
    kept_ns: int | None = None  # from when on that run has it, where what ends before may start; None for now
    spare_s: float = 0.0  # a run that declares no more than that would start now, in what is kept; 0 for none
    # Its place among those that want the same kind of devices; 1 is the next, 0 is none: it is not in line.
    place: int = 0
    # When it starts, where it has a reservation or everything is known; `is_bound`: at the latest.
    at_ns: int | None = None
    is_bound: bool = False
    owner: str = ""  # whose `node` it is, where a calendar is the reason
    # When that node changes hands by its calendar: it is shared from then on where nothing counts as free now, and its
    # owner's from then on where something does.
    turns_ns: int | None = None
    words: str = ""  # added to the sentence, or in place of it
    # When it likely starts, where earlier runs of those names say so and it is before `at_ns`.
    likely_ns: int | None = None
    ends_ns: int | None = None  # when it ends without a start if nothing that could serve it joins; None for never


class StartEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a run if it were submitted now."""

    at_ns: int | None  # the expected time; None where it is unknown
    is_bound: bool = False  # whether that is the latest time
    node: str = ""  # where, by name, or ""
    nodes: tuple[str, ...] = ()  # where, by name, of a gang on several nodes
    basis: str  # what that rests on, or why it is unknown, in words
    place: int = 0  # how many runs are ahead of it for the same kind of devices, plus one; 0 when it starts at once
    impossible: bool = False  # whether nothing that has joined can ever serve it
    wait: Wait | None = None  # what it would wait for, part by part; None where it would not, or is never looked at


_LEARNED, _DECLARED = 1.5, 1.1
_MINUTES_MAX = 60
"""Runs share a line whose durations differ by less: a line has the exact ones of its head."""
_WALLS_MAX = 128


class Shape:
    """A request apart from its duration and its owner."""

    __slots__ = (
        "__weakref__",
        "blocked",
        "caller",
        "gpu_type",
        "gpus",
        "machine",
        "number",
        "platform",
        "pool",
        "python",
        "second_principal",
        "several",
        "tries",
        "unreserved",
        "walls",
        "walls_of",
    )

    def __init__(self, wanted: QueuedRun, number: int = -1) -> None:
        self.number = number  # its own; the capacity remembers by it what is in reach
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.second_principal = wanted.second_principal
        # `unreserved`: number of the last pass in which it was found that nothing more is reserved for it.
        # `blocked`: number of the last pass in which it was found that nothing more of it fits, for any user.
        self.blocked = self.unreserved = self.walls_of = self.tries = 0
        # What was found not to fit in the pass `walls_of`: how long it would likely take, and at most; of two of which
        # one takes longer by both only the other is there, so one rises while the other falls.
        self.walls: list[tuple[float, float]] = []

    def needs(self, node: Node, gpu_type: str) -> int:
        """Return how many devices of a type it would take of a node: those it asks for, or all."""
        return node.total.get(gpu_type, 0) if self.gpus is None else self.gpus

    def is_walled(self, number: int, spans: tuple[float, float]) -> bool:
        """Return whether something that takes no longer was found not to fit in a pass."""
        if self.walls_of != number:
            return False
        at = bisect_right(self.walls, (spans[0], math.inf))
        return at > 0 and self.walls[at - 1][1] <= spans[1]

    def wall(self, number: int, spans: tuple[float, float]) -> None:
        """Note that something does not fit in a pass; when there are very many such, nothing more of the shape does."""
        if self.walls_of != number:
            self.walls_of, self.tries = number, 0
            self.walls.clear()
        at = bisect_right(self.walls, (spans[0], math.inf))
        last = at
        while last < len(self.walls) and self.walls[last][1] >= spans[1]:
            last += 1
        self.walls[at:last] = [spans]
        self.tries += 1
        if self.tries > _WALLS_MAX:
            self.blocked = number

    @staticmethod
    def key(wanted: QueuedRun) -> tuple[object, ...]:
        """Return what two runs of one shape have in common."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where, wanted.second_principal)


class TimedShape:
    """A shape, and how long it is wanted: all that decides where a run may start, but for its owner."""

    __slots__ = ("__weakref__", "blocked", "expected_ns", "number", "shape")

    def __init__(self, wanted: QueuedRun, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        # How long its devices are needed, as learned; infinite where nothing is known.
        self.expected_ns = math.inf if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED) * 1e9
        self.blocked = 0  # as that of its shape, for those who can be told apart by how long they run

    @staticmethod
    def key(wanted: QueuedRun, shape: Shape) -> tuple[object, ...]:
        """Return what two runs of one ask have in common."""
        expected_s = None if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED)
        limit_s = None if wanted.limit_s is None else rounded(wanted.limit_s, _DECLARED)
        is_lowest = wanted.priority == BEST_EFFORT
        minutes = 0  # decides whether a run may borrow, told apart as finely as pools' times of return usually are
        if is_lowest and not wanted.preemptible and wanted.limit_s is not None:
            minutes = min(_MINUTES_MAX, math.ceil((wanted.limit_s - wanted.beyond_s) / 60))
        return (shape.number, limit_s, expected_s, wanted.preemptible, wanted.grace_s, is_lowest, minutes)

    def spans(self, wanted: QueuedRun) -> tuple[float, float]:
        """Return how long one of its runs needs devices: likely, and at most; infinite where unknown."""
        limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        return min(self.expected_ns, limit_ns), limit_ns


def rounded(seconds: float, step: float) -> float:
    """Return a duration rounded up to one of few, so that runs of about the same length share a line."""
    if seconds <= 1:
        return 1.0
    return float(step ** math.ceil(math.log(seconds, step) - 1e-9))
