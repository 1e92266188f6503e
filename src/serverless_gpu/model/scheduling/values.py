"""Inputs and outputs of the scheduler, and `Shape`, which runs with equal requests share.

All times are nanoseconds of one clock that never goes back. On the server, this clock is the jump-tolerant wall clock
of `server/core/loops.py`. A replayed trace begins at 0.
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
"""Priority classes in the order of service. The class of a run is its position in this tuple."""
CRITICAL, NORMAL, BEST_EFFORT = range(3)
"""Priority classes as numbers: their positions in `CLASSES`."""


# --- inputs -----------------------------------------------------------------------------------------------------------


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings of the queue."""

    half_life_s: float = 7 * 86_400.0  # Seconds after which past use counts half.
    # Seconds of its devices that a run is charged in advance. Two users who submit a thousand runs each at once then
    # take turns. The scheduler refunds the advance at the end of the run.
    entry_penalty_s: float = 60.0
    team_weights: Mapping[str, float] = {}  # Shares of teams by name; the default is 1.
    user_weights: Mapping[str, float] = {}  # Shares of users within their team by name; the default is 1.
    reservations: int = 32  # Maximum number of blocked gangs with reservations.
    # Part of a gang's devices that must be free before the scheduler holds these devices for a wait of unknown length.
    nearly: float = 0.9
    # The scheduler holds devices for a blocked gang as they become free if its team or user is behind by this much. The
    # unit is seconds of the gang's devices. Small runs of other users then do not starve the gang.
    patience_s: float = 3600.0
    # Waiting time of a whole-node gang before the scheduler holds devices by `patience_s`. Until then the scheduler
    # reserves its node by a guess.
    node_patience_s: float = 3 * 86_400.0
    gang_lead: float = 10 / 3  # Factor on the waiting time of a gang that takes a whole node or more.
    whole_node: int = 0  # Devices of a whole node; 0 for the size of the largest node that a gang could use.
    # A run that has waited this long comes next. Later runs start only if they end, by estimate or guess, before the
    # waiting run can start. After twice this time the scheduler holds devices for the waiting run as they become free.
    guard_s: float = 14 * 86_400.0
    # Time after its placement during which no run of a higher class may preempt an attempt. Runs with a right to the
    # devices (of a lending pool, or of a node's owner) do not wait.
    preempt_after_s: float = 600.0
    preemptions_max: int = 3  # Maximum number of preemptions of one run.


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: nodes under one policy."""

    name: str
    reserved: bool = False  # True if only runs that name the pool may use it.
    # True if a reserved pool lends idle devices to runs of `BEST_EFFORT` that name no pool. A borrower must be
    # preemptible, or its declared time limit must be at most `return_s`.
    lends: bool = False
    # Seconds within which a preempted borrower must release its devices when the pool's own runs want them.
    return_s: float = 300.0
    # True if the nodes run the code of one principal only, because the nodes cannot isolate several principals.
    single_principal: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node in its current state."""

    id: str
    name: str
    pool: str = ""
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()  # Available versions of Python; empty if unknown.
    total: Mapping[str, int]
    outside: Mapping[str, int] = {}  # Devices of `total` that are in quarantine, or in use outside of this server.
    left_out: str = ""  # Text about the devices that an operator has excluded, and why; "" for none.
    own: tuple[GpuType, ...] = ()  # GPU types that the node declares itself.
    away: str = ""  # Reason why the node is unavailable now, as text that follows its name, or "".
    # Owner, or "". With `owner_first`, only preemptible runs of other users may use the node.
    owner: str = ""
    shared: bool = True  # True if other users than the owner may use the node now.
    # Time at which the calendar next changes `shared`; None for never. Runs of other users start here only if they end
    # before this time, or can be preempted.
    turns_ns: int | None = None
    # True if a waiting run of the owner preempts runs of other users, even while the node is shared.
    owner_first: bool = False
    crews: bool = True  # True if the node can run a part of a gang on several nodes.


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that waits."""

    run_id: str
    title: str  # Name of the run that other users see: `"alice/bert-ft"`.
    owner: str = ""  # Principal whose fair share counts the run; `team` counts the run too, "" for none.
    team: str = ""
    priority: int = NORMAL  # `CRITICAL`, `NORMAL` or `BEST_EFFORT`.
    queued_ns: int  # Time at which the run entered the queue.
    gpus: int | None = None  # Number of devices; None for all devices of a node.
    gpu_type: str | None = None  # Canonical name, or None for the only GPU type.
    # True if the run may use several nodes when no single node could ever hold it. Such a run gets whole nodes and one
    # part, of one type in one pool.
    several_nodes: bool = False
    # Option that would allow several nodes, as the owner would write it, or "": `"without same_node=True"`.
    alone: str = ""
    pool: str = ""  # Requested pool; "" for any on-demand pool.
    machine: str = ""  # The only suitable machine, or "".
    platform: str = ""  # The only suitable platform, or "".
    python: str = ""  # Required version of Python, such as `"3.11"`, or "".
    caller: str = ""  # Machine that certainly has this version, or "".
    # Identifiers of nodes that failed to start the run; used only if no other node is free.
    avoid: frozenset[str] = frozenset()
    # Pairs of nodes that could not connect in an earlier attempt; not used together if possible.
    apart: frozenset[tuple[str, str]] = frozenset()
    not_before_ns: int = 0  # The scheduler ignores the run until this time; 0 for no delay.
    held: str = ""  # Reason for the delayed start.
    limit_s: float | None = None  # Maximum time with devices, as declared; None without a limit.
    # Likely time with devices, learned from earlier runs; None if unknown.
    expected_s: float | None = None
    preemptible: bool = False  # True if the run may be preempted and resumes later, because of the option `resume`.
    preemptions: int = 0  # Number of preemptions so far.
    grace_s: float = 30.0  # Grace period in seconds, which the run may use to stop.
    beyond_s: float = 0.0  # Part of `limit_s` beyond the owner's declared limit: the time to start and to stop.
    # True if the owner is another principal than the one that a `single_principal` pool serves.
    second_principal: bool = False
    # True if the server or a usage policy sets `limit_s`, and the owner declared no shorter limit.
    capped: bool = False


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Devices of one type on one node that a gang has, or will get."""

    node_id: str
    gpu_type: str
    count: int


class RunningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has devices."""

    wanted: QueuedRun  # The run's request, with which the run waits again after a requeue.
    shares: tuple[DeviceShare, ...]
    since_ns: int
    is_leaving: bool = False  # True if the scheduler has requested a stop of the run.
    leaving_ns: int | None = None  # Time of the stop request; None if unknown.


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that the scheduler reserves for a blocked run."""

    run_id: str
    shares: tuple[DeviceShare, ...]  # Reserved devices, as far as known.
    at_ns: int | None  # Time at which the devices are free; None if unknown.
    is_bound: bool  # True if `at_ns` is the latest time, because all runs on the devices have declared time limits.
    # Likely time, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None


# --- changes ----------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """A run waits, or its request has changed.

    A placed run that could not start waits again.
    """

    wanted: QueuedRun


class DevicesTaken(msgspec.Struct, frozen=True):
    """A run has devices: found at the start, placed by another planner, or now stopping."""

    running: RunningRun


class Gone(msgspec.Struct, frozen=True):
    """A run no longer waits, or has released its devices."""

    run_id: str


class NodeSeen(msgspec.Struct, frozen=True):
    """A node is present, in its current state."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    """A node is absent; its runs hold their devices until a `Gone` for each run."""

    node_id: str


class PoolSeen(msgspec.Struct, frozen=True):
    """A pool is present, in its current state; an unknown pool is an on-demand pool."""

    pool: Pool


class QueuePolicySet(msgspec.Struct, frozen=True):
    """The operator has changed the queue policy."""

    policy: QueuePolicy


class Used(msgspec.Struct, frozen=True):
    """Use of ended runs, decayed until `at_ns`: GPU-seconds by team, and by team and user.

    Running runs are not included. They count from the time at which they got their devices (`RunningRun.since_ns`).
    """

    at_ns: int
    teams: Mapping[str, float]
    users: Mapping[tuple[str, str], float]


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """The decayed use of a team."""

    used_gpu_s: float  # GPU-seconds of the team's runs, including active runs.
    counted_gpu_s: float  # Decides the next turn: `used_gpu_s` plus the advance of each running run.


class Promised(msgspec.Struct, frozen=True):
    """A latest time that an earlier planner announced. This planner must not exceed that time."""

    reservation: Reservation


Change = Arrived | DevicesTaken | Gone | NodeSeen | NodeGone | PoolSeen | QueuePolicySet | Used | Promised


# --- outputs ----------------------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that must start now on these devices."""

    run_id: str
    shares: tuple[DeviceShare, ...]


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that must stop for another run. The run stops in order and resumes later."""

    run_id: str
    for_run: str
    sentence: str  # Message to the owner of the preempted run.


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Placements and preemptions to carry out now."""

    # Placements in queue order. The scheduler counts these runs as started until a change reports otherwise.
    placements: tuple[Placement, ...]
    preemptions: tuple[Preemption, ...]  # The scheduler counts these runs as stopping.
    wake_ns: int | None  # Time of the next decision if nothing changes; None for never.


class WaitReason(StrEnum):
    """The reason why a run waits."""

    CAPACITY = "capacity"  # The devices are in use.
    RESERVED = "reserved"  # Devices are free, but held for runs that are ahead.
    TURN = "turn"  # The scheduler has not examined the run yet, or other runs are ahead in the queue.
    MAKING_ROOM = "making_room"  # The scheduler has preempted other runs for this run.
    CALENDAR = "calendar"  # Only the owner may use the node now.
    AWAY = "away"  # Suitable nodes are silent, drained or faulty.
    HELD = "held"  # The run may not start yet: it failed to start, or its owner or the server starts no runs.
    ISOLATION = "isolation"  # Suitable nodes cannot isolate the owner's code from the code of other principals.
    UNSATISFIABLE = "unsatisfiable"  # No current node can ever serve the run.


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A run or person with devices that another run waits for."""

    title: str
    count: int
    until_ns: int | None = None  # Time of the release; None if unknown.
    is_bound: bool = False  # True if `until_ns` is the latest time, as declared.
    is_leaving: bool = False  # True if the scheduler has requested a stop of the run.
    # Time at which the scheduler preempts the run if the run still has devices; None for never, and after a preemption.
    asked_ns: int | None = None
    node: str = ""  # Node of the devices, if the waiting run wants several nodes; else "".
    # Likely time of the release, if earlier runs of the same name indicate a time before `until_ns`.
    likely_ns: int | None = None


class GangPart(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a gang on several nodes awaits on one node."""

    node: str
    count: int  # Devices of the gang on this node.
    free: int  # Devices that are free on this node.


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a run waits, with details; `model/scheduling/wait_messages.py` renders it."""

    run_id: str
    reason: WaitReason
    count: int = 0  # Needed devices; 0 if the number depends on the node.
    whole: bool = False  # True if the run requests all devices of a node.
    gpu_type: str = ""  # Type of the devices; "" if it depends on the node.
    one_node: bool = True  # True if the devices must be on one node.
    nodes: tuple[GangPart, ...] = ()  # Nodes on which a gang on several nodes fits soonest.
    node: str = ""  # Name of the node on which the run fits soonest, or "".
    free: int = 0  # Free devices of the requested kind on that node.
    outside: int = 0  # Devices of that node in quarantine, or in use outside of this server.
    holders: tuple[DeviceHolder, ...] = ()  # Runs that hold the missing devices, the earliest release first.
    ahead: str = ""  # Title of the run for which the free devices are held, or "".
    # Time from which the run in `ahead` needs the devices; other runs may use the devices before. None for now.
    kept_ns: int | None = None
    spare_s: float = 0.0  # Longest time limit with which the run could start now on the held devices; 0 for none.
    # Position among the runs that want the same kind of devices, from 1; 0 for a run without a position.
    place: int = 0
    # Start of the run, if it has a reservation or all times are known; `is_bound`: at the latest.
    at_ns: int | None = None
    is_bound: bool = False
    owner: str = ""  # Owner of `node`, if a calendar is the reason.
    # Time of the calendar's next change. If no devices count as free now, the node is shared from then on. Otherwise
    # only the owner may use the node from then on.
    turns_ns: int | None = None
    words: str = ""  # Text that follows the message, or replaces it.
    # Likely start, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None
    ends_ns: int | None = None  # Time at which the run ends without a start if no suitable node joins; None for never.


class StartEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated start of a run, if a client submitted it now."""

    at_ns: int | None  # Expected time; None if unknown.
    is_bound: bool = False  # True if `at_ns` is the latest time.
    node: str = ""  # Name of the node, or "".
    nodes: tuple[str, ...] = ()  # Names of the nodes, for a gang on several nodes.
    basis: str  # Text that explains the estimate, or why the time is unknown.
    place: int = 0  # Number of runs ahead for the same kind of devices, plus one; 0 if the run starts at once.
    impossible: bool = False  # True if no current node can ever serve the run.
    wait: Wait | None = None  # Details of the wait; None for a run that would not wait, or that no node can serve.


_LEARNED, _DECLARED = 1.5, 1.1
_MINUTES_MAX = 60
"""Runs with similar durations share a line, which uses the exact durations of its first run."""
_WALLS_MAX = 128


class Shape:
    """A request without its duration and its owner."""

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
        self.number = number  # Unique number; the capacity stores the reach of the shape by it.
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.second_principal = wanted.second_principal
        # `unreserved`: number of the last pass in which no more devices could be reserved for this shape.
        # `blocked`: number of the last pass in which no more runs of this shape fitted, for any user.
        self.blocked = self.unreserved = self.walls_of = self.tries = 0
        # Durations that did not fit in the pass `walls_of`, likely and at most. A pair that is longer in both values
        # than another one is left out, so that one value rises while the second falls.
        self.walls: list[tuple[float, float]] = []

    def needs(self, node: Node, gpu_type: str) -> int:
        """Return how many devices of a type the shape needs on a node: the requested number, or all."""
        return node.total.get(gpu_type, 0) if self.gpus is None else self.gpus

    def is_walled(self, number: int, spans: tuple[float, float]) -> bool:
        """Return whether an equal or shorter duration did not fit in a pass."""
        if self.walls_of != number:
            return False
        at = bisect_right(self.walls, (spans[0], math.inf))
        return at > 0 and self.walls[at - 1][1] <= spans[1]

    def wall(self, number: int, spans: tuple[float, float]) -> None:
        """Record that a duration does not fit in a pass; after many records the whole shape is blocked."""
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
        """Return the key that all runs of one shape share."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where, wanted.second_principal)


class TimedShape:
    """A shape with its duration, which together with the owner decides where a run may start."""

    __slots__ = ("__weakref__", "blocked", "expected_ns", "number", "shape")

    def __init__(self, wanted: QueuedRun, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        # Likely time with devices, as learned; infinite if unknown.
        self.expected_ns = math.inf if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED) * 1e9
        self.blocked = 0  # Like `Shape.blocked`, but for this duration only.

    @staticmethod
    def key(wanted: QueuedRun, shape: Shape) -> tuple[object, ...]:
        """Return the key that all runs of one timed shape share."""
        expected_s = None if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED)
        limit_s = None if wanted.limit_s is None else rounded(wanted.limit_s, _DECLARED)
        is_lowest = wanted.priority == BEST_EFFORT
        # The time limit in minutes decides whether the run may borrow devices. Usual return times of pools are whole
        # minutes.
        minutes = 0
        if is_lowest and not wanted.preemptible and wanted.limit_s is not None:
            minutes = min(_MINUTES_MAX, math.ceil((wanted.limit_s - wanted.beyond_s) / 60))
        return (shape.number, limit_s, expected_s, wanted.preemptible, wanted.grace_s, is_lowest, minutes)

    def spans(self, wanted: QueuedRun) -> tuple[float, float]:
        """Return the likely and the maximum time that a run needs devices; infinite if unknown."""
        limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        return min(self.expected_ns, limit_ns), limit_ns


def rounded(seconds: float, step: float) -> float:
    """Return a duration rounded up to one of few values, so that similar runs share a line."""
    if seconds <= 1:
        return 1.0
    return float(step ** math.ceil(math.log(seconds, step) - 1e-9))
