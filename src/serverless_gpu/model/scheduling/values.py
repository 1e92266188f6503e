"""Inputs and outputs of the scheduler, and `Shape`, which runs with equal requests share.

All times are nanoseconds of one monotonic clock. On the server, this clock is the jump-tolerant wall clock of
`server/core/loops.py`. A replayed trace begins at 0.
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
"""Priority classes in the order of service. The class number of a run is the position in the tuple."""
CRITICAL, NORMAL, BEST_EFFORT = range(3)
"""Priority classes as numbers: their positions in `CLASSES`."""


# --- inputs -----------------------------------------------------------------------------------------------------------


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings of the queue."""

    half_life_s: float = 7 * 86_400.0  # Half-life of past usage in seconds.
    # Seconds of a run's devices that the fair share counts in advance. Two users who submit a thousand runs each at
    # once then take turns. The scheduler refunds the advance at the end of the run.
    entry_penalty_s: float = 60.0
    team_weights: Mapping[str, float] = {}  # Fair-share weights of teams by name. The default is 1.
    user_weights: Mapping[str, float] = {}  # Fair-share weights of users within their team, by name. The default is 1.
    reservations: int = 32  # Maximum number of blocked gangs with reservations.
    # Fraction of a gang's devices that must be free before the scheduler holds the devices for a wait of unknown
    # length.
    nearly: float = 0.9
    # Minimum lag of a blocked gang's team or user before the scheduler holds devices for the gang. The unit is seconds
    # of the gang's devices. Held devices prevent that small runs of other users starve the gang.
    patience_s: float = 3600.0
    # Waiting time of a whole-node gang before the scheduler holds devices by `patience_s`. Before that time, the
    # scheduler reserves a node by a guess.
    node_patience_s: float = 3 * 86_400.0
    gang_lead: float = 10 / 3  # Factor on the waiting time of a gang that needs a whole node or more.
    # Number of devices of a whole node, or 0 for the size of the largest node that a gang could use.
    whole_node: int = 0
    # Waiting time (guard) after which a run is next. Later runs then start only if they end, by estimate or guess,
    # before the waiting run can start. After twice the guard, the scheduler holds devices for the waiting run as they
    # become free.
    guard_s: float = 14 * 86_400.0
    # Time after the placement in which no run of a higher class may preempt an attempt. Runs with a right to the
    # devices (of a lending pool, or of a node's owner) may preempt at once.
    preempt_after_s: float = 600.0
    preemptions_max: int = 3  # Maximum number of preemptions of one run.


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: nodes under one sharing policy."""

    name: str
    reserved: bool = False  # True if only runs that name the pool may use it.
    # True if a reserved pool lends idle devices to runs of `BEST_EFFORT` that name no pool. A borrower must be
    # preemptible, or its declared time limit must be at most `return_s`.
    lends: bool = False
    # Seconds within which a preempted borrower must release devices that the pool's own runs need.
    return_s: float = 300.0
    # True if the pool's nodes run the code of one principal only, because the nodes cannot isolate several principals.
    single_principal: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node in its current state."""

    id: str
    name: str
    pool: str = ""
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()  # Available versions of Python, or an empty value if unknown.
    total: Mapping[str, int]
    # Number of devices within `total` that are in quarantine, or in use outside of the server.
    outside: Mapping[str, int] = {}
    left_out: str = ""  # Text about the devices that an operator has excluded, and the reasons, or "".
    own: tuple[GpuType, ...] = ()  # Additional GPU types that the node's configuration declares.
    away: str = ""  # Reason why the node is unavailable now, as text that follows its name, or "".
    # Owner of the node, or "". With `owner_first`, other users may use the node only with preemptible runs.
    owner: str = ""
    shared: bool = True  # True if other users than the owner may use the node now.
    # Time at which the calendar next changes `shared`, or None for never. Runs of other users start on the node only if
    # they end before the change, or are preemptible.
    turns_ns: int | None = None
    # True if a waiting run of the owner preempts runs of other users, even while the node is shared.
    owner_first: bool = False
    crews: bool = True  # True if the node can run ranks of a multi-node gang.


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A waiting run, with the request that the scheduler needs."""

    run_id: str
    title: str  # Name of the run in messages to other users: `"alice/bert-ft"`.
    # Principal whose fair share includes the run. `team` is the team whose fair share includes the run, or "".
    owner: str = ""
    team: str = ""
    priority: int = NORMAL  # Priority class: `CRITICAL`, `NORMAL` or `BEST_EFFORT`.
    queued_ns: int  # Time at which the run entered the queue.
    gpus: int | None = None  # Requested number of devices, or None for all devices of a node.
    gpu_type: str | None = None  # Canonical name of the GPU type, or None for the only GPU type.
    # True if the run may use several nodes when no single node has enough devices. The run then uses whole nodes and a
    # partly used node, of one type in one pool.
    several_nodes: bool = False
    # Option that would allow several nodes, in the syntax of the client, or "": `"without same_node=True"`.
    alone: str = ""
    pool: str = ""  # Requested pool, or "" for any on-demand pool.
    machine: str = ""  # Identifier of the only suitable machine, or "".
    platform: str = ""  # Name of the only suitable platform, or "".
    python: str = ""  # Required version of Python, such as `"3.11"`, or "".
    caller: str = ""  # Machine that certainly has the required Python version, or "".
    # Identifiers of nodes that failed to start the run. The scheduler uses them only if no other node is free.
    avoid: frozenset[str] = frozenset()
    # Pairs of nodes that could not connect in an earlier attempt. The scheduler avoids using a pair together.
    apart: frozenset[tuple[str, str]] = frozenset()
    not_before_ns: int = 0  # Start delay: time until which the scheduler ignores the run, or 0 for no delay.
    held: str = ""  # Reason for the delayed start.
    limit_s: float | None = None  # Declared maximum time with devices, or None without a limit.
    # Likely time with devices, learned from earlier runs, or None if unknown.
    expected_s: float | None = None
    preemptible: bool = False  # True if the scheduler may preempt the run, because the option `resume` is set.
    preemptions: int = 0  # Number of preemptions of the run so far.
    grace_s: float = 30.0  # Grace period in seconds after a stop request.
    beyond_s: float = 0.0  # Part of `limit_s` beyond the owner's declared limit: the time to start and to stop.
    # True if the owner is not the principal that a `single_principal` pool serves.
    second_principal: bool = False
    # True if the server or a usage policy sets `limit_s`, and the owner declared no shorter limit.
    capped: bool = False


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Devices of one type on one node that a gang uses or will use."""

    node_id: str
    gpu_type: str
    count: int


class RunningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A running run with its devices."""

    wanted: QueuedRun  # The run's request, which returns to the queue after a requeue.
    shares: tuple[DeviceShare, ...]
    since_ns: int
    is_leaving: bool = False  # True if the scheduler has requested a stop of the run.
    leaving_ns: int | None = None  # Time of the stop request, or None if unknown.


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that the scheduler reserves for a blocked run."""

    run_id: str
    shares: tuple[DeviceShare, ...]  # Reserved devices, if known.
    at_ns: int | None  # Time at which the reserved devices are free, or None if unknown.
    is_bound: bool  # True if `at_ns` is the latest time, because all runs on the devices have declared time limits.
    # Likely start time, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None


# --- changes ----------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """Change: a run has entered the queue, or a waiting run's request has changed.

    Also reported for a placed run that could not start and waits again.
    """

    wanted: QueuedRun


class DevicesTaken(msgspec.Struct, frozen=True):
    """Change: a run has devices. Another planner placed the run, or the run is stopping, for example."""

    running: RunningRun


class Gone(msgspec.Struct, frozen=True):
    """Change: a run no longer waits, or has released its devices."""

    run_id: str


class NodeSeen(msgspec.Struct, frozen=True):
    """Change: a node is available or has a new state."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    """Change: a node is absent. Runs on the node keep their devices until a `Gone` for each run."""

    node_id: str


class PoolSeen(msgspec.Struct, frozen=True):
    """Change: a pool exists or has a new state. Unknown pools are on-demand pools."""

    pool: Pool


class QueuePolicySet(msgspec.Struct, frozen=True):
    """Change: the operator has set another queue policy."""

    policy: QueuePolicy


class Used(msgspec.Struct, frozen=True):
    """Usage of ended runs, decayed to `at_ns`: GPU-seconds by team, and by team and user.

    The value excludes running runs, which count from the start of their allocation (`RunningRun.since_ns`).
    """

    at_ns: int
    teams: Mapping[str, float]
    users: Mapping[tuple[str, str], float]


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """The decayed usage of a team."""

    used_gpu_s: float  # GPU-seconds of the team's runs, including active runs.
    counted_gpu_s: float  # Value that decides the next turn: `used_gpu_s` plus the advance of each running run.


class Promised(msgspec.Struct, frozen=True):
    """A latest start time that an earlier planner announced. The planner must not exceed that time."""

    reservation: Reservation


Change = Arrived | DevicesTaken | Gone | NodeSeen | NodeGone | PoolSeen | QueuePolicySet | Used | Promised


# --- outputs ----------------------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that must start now on the listed devices."""

    run_id: str
    shares: tuple[DeviceShare, ...]


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that must stop for another run. The preempted run stops in an orderly way and resumes later."""

    run_id: str
    for_run: str
    sentence: str  # Message to the owner of the preempted run.


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Placements and preemptions to carry out now."""

    # Placements in queue order. The scheduler counts placed runs as started until a change reports otherwise.
    placements: tuple[Placement, ...]
    preemptions: tuple[Preemption, ...]  # Preempted runs. The scheduler counts preempted runs as stopping.
    wake_ns: int | None  # Time of the next decision if no change arrives, or None for never.


class WaitReason(StrEnum):
    """The reason why a run waits."""

    CAPACITY = "capacity"  # All suitable devices are in use.
    RESERVED = "reserved"  # Devices are free, but the scheduler holds them for runs ahead in the queue.
    TURN = "turn"  # The scheduler has not examined the run yet, or further runs are ahead in the queue.
    MAKING_ROOM = "making_room"  # The scheduler has preempted other runs for the waiting run.
    CALENDAR = "calendar"  # Only the owner may use the node now.
    AWAY = "away"  # Suitable nodes are silent, drained or faulty.
    # The run may not start yet: an earlier start failed, or the server currently starts no runs of its owner.
    HELD = "held"
    ISOLATION = "isolation"  # Suitable nodes cannot isolate the owner's code from the code of other principals.
    UNSATISFIABLE = "unsatisfiable"  # No current node can ever serve the run.


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A run or person with devices that another run waits for."""

    title: str
    count: int
    until_ns: int | None = None  # Time of the device release, or None if unknown.
    is_bound: bool = False  # True if `until_ns` is the latest time, from a declared time limit.
    is_leaving: bool = False  # True if the scheduler has requested a stop of the run.
    # Time at which the scheduler preempts the run if the run still has devices. None for never, and after a preemption.
    asked_ns: int | None = None
    node: str = ""  # Node of the devices if the waiting run needs several nodes, else "".
    # Likely time of the release, if earlier runs of the same name indicate a time before `until_ns`.
    likely_ns: int | None = None


class GangPart(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a gang on several nodes awaits on one node."""

    node: str
    count: int  # Number of the gang's devices on the node.
    free: int  # Number of free devices on the node.


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a run waits, with details that `wait_messages.py` formats as text."""

    run_id: str
    reason: WaitReason
    count: int = 0  # Number of needed devices, or 0 if the number depends on the node.
    whole: bool = False  # True if the run requests all devices of a node.
    gpu_type: str = ""  # Type of the devices, or "" if the type depends on the node.
    one_node: bool = True  # True if the devices must be on one node.
    nodes: tuple[GangPart, ...] = ()  # Nodes on which a gang on several nodes fits soonest.
    node: str = ""  # Name of the node on which the run fits soonest, or "".
    free: int = 0  # Number of free devices of the requested kind on `node`.
    outside: int = 0  # Number of devices of `node` in quarantine, or in use outside of the server.
    holders: tuple[DeviceHolder, ...] = ()  # Runs that hold the missing devices, the earliest release first.
    ahead: str = ""  # Title of the run for which the scheduler holds the free devices, or "".
    # Time from which the run in `ahead` needs the devices, or None for now. Other runs may use the devices before that
    # time.
    kept_ns: int | None = None
    # Longest time limit with which the run could start now on the held devices, or 0 for no limit.
    spare_s: float = 0.0
    # Queue position, from 1, among the runs for the same kind of devices, or 0 without a position.
    place: int = 0
    # Start time of the run, if a reservation or all release times are known. `is_bound` marks a latest start time.
    at_ns: int | None = None
    is_bound: bool = False
    owner: str = ""  # Owner of `node`, if a calendar is the reason.
    # Time of the calendar's next change. If no devices count as free now, the change shares the node. Otherwise the
    # change restricts the node to its owner.
    turns_ns: int | None = None
    words: str = ""  # Text that follows the message, or replaces it.
    # Likely start time, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None
    # Time at which the run ends without a start if no suitable node joins, or None for never.
    ends_ns: int | None = None


class StartEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated start of a run, as if a client submitted the run now."""

    at_ns: int | None  # Expected start time, or None if unknown.
    is_bound: bool = False  # True if `at_ns` is the latest start time.
    node: str = ""  # Name of the expected node, or "".
    nodes: tuple[str, ...] = ()  # Names of the nodes, for a gang on several nodes.
    basis: str  # Text that explains the estimate, or why the start time is unknown.
    place: int = 0  # Number of runs ahead for the same kind of devices plus one, or 0 if the run starts at once.
    impossible: bool = False  # True if no current node can ever serve the run.
    wait: Wait | None = None  # Details of the wait, or None for a run that would not wait or that no node can serve.


_LEARNED, _DECLARED = 1.5, 1.1
_MINUTES_MAX = 60
"""Runs with similar durations share a queue line, which uses the exact durations of its oldest run."""
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
        self.number = number  # Unique number of the shape, by which `Capacity` caches the shape's reach.
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.second_principal = wanted.second_principal
        # `unreserved`: number of the last pass in which the scheduler could not reserve more devices for the shape.
        # `blocked`: number of the last pass in which no further run of the shape fitted, for any user.
        self.blocked = self.unreserved = self.walls_of = self.tries = 0
        # Pairs of likely and maximum duration that did not fit in the pass `walls_of`. The list omits a pair if another
        # pair is shorter in both values. The likely durations therefore rise while the maximum durations fall.
        self.walls: list[tuple[float, float]] = []

    def needs(self, node: Node, gpu_type: str) -> int:
        """Return the number of devices of a type that the shape needs on a node."""
        return node.total.get(gpu_type, 0) if self.gpus is None else self.gpus

    def is_walled(self, number: int, spans: tuple[float, float]) -> bool:
        """Return True if an equal or shorter duration did not fit in a pass."""
        if self.walls_of != number:
            return False
        at = bisect_right(self.walls, (spans[0], math.inf))
        return at > 0 and self.walls[at - 1][1] <= spans[1]

    def wall(self, number: int, spans: tuple[float, float]) -> None:
        """Record that a duration does not fit in a pass. After many records, the whole shape is blocked."""
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
        """Return the key of the shape, which is equal for all runs of the shape."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where, wanted.second_principal)


class TimedShape:
    """A shape with its duration. Shape, duration and owner determine the nodes on which a run may start."""

    __slots__ = ("__weakref__", "blocked", "expected_ns", "number", "shape")

    def __init__(self, wanted: QueuedRun, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        # Likely time with devices, learned from earlier runs, infinite if unknown.
        self.expected_ns = math.inf if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED) * 1e9
        self.blocked = 0  # Like `Shape.blocked`, but only for runs of the same duration.

    @staticmethod
    def key(wanted: QueuedRun, shape: Shape) -> tuple[object, ...]:
        """Return the key of the timed shape, which is equal for all its runs."""
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
        """Return the likely and the maximum time with devices, each infinite if unknown."""
        limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        return min(self.expected_ns, limit_ns), limit_ns


def rounded(seconds: float, step: float) -> float:
    """Return a duration rounded up to one of few values, so that similar runs share a queue line."""
    if seconds <= 1:
        return 1.0
    return float(step ** math.ceil(math.log(seconds, step) - 1e-9))
