"""Input and output types of the scheduler, and `Shape`, which runs with equal requests share.

All times are nanoseconds of one monotonic clock. The server uses the jump-tolerant wall clock of
`server/core/loops.py`. A replayed trace starts the clock at 0.
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
"""Priority classes in the order of service. A run's class number is its position in this tuple."""
CRITICAL, NORMAL, BEST_EFFORT = range(3)
"""Priority classes as numbers: their positions in `CLASSES`."""


# --- inputs -----------------------------------------------------------------------------------------------------------


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Queue settings that the operator can change."""

    half_life_s: float = 7 * 86_400.0  # Half-life of past usage in seconds.
    # Advance of the fair share for each placed run, in seconds of the run's devices. With the advance, the scheduler
    # alternates between two users who each submit a thousand runs at once. The scheduler refunds the advance when the
    # run ends.
    entry_penalty_s: float = 60.0
    team_weights: Mapping[str, float] = {}  # Fair-share weights of teams by name. The default is 1.
    user_weights: Mapping[str, float] = {}  # Fair-share weights of users within their team, by name. The default is 1.
    reservations: int = 32  # Maximum number of blocked gangs with reservations.
    # Fraction of a gang's devices that must be free before the scheduler holds devices without a known start time.
    nearly: float = 0.9
    # Minimum usage lag of a blocked gang's team or user before the scheduler holds devices for the gang. The unit is
    # seconds of the gang's devices. Holding devices prevents small runs of other users from starving the gang.
    patience_s: float = 3600.0
    # Waiting time of a whole-node gang before the scheduler holds devices by `patience_s`. Before `node_patience_s`,
    # the scheduler reserves a node at a guessed start time.
    node_patience_s: float = 3 * 86_400.0
    gang_lead: float = 10 / 3  # Factor by which the scheduler multiplies the waiting time of a gang of whole nodes.
    # Number of devices of a whole node, or 0 for the size of the largest node that a gang could use.
    whole_node: int = 0
    # Waiting time (guard) after which a run is next in its class. Later runs then start only if their estimated end is
    # before the start of the waiting run. After twice the guard, the scheduler holds each released device for the
    # waiting run.
    guard_s: float = 14 * 86_400.0
    # Minimum age of an attempt before a run of a higher class may preempt the attempt. Runs of the lending pool or of
    # the node's owner may preempt borrowers and guests at once.
    preempt_after_s: float = 600.0
    preemptions_max: int = 3  # Number of preemptions after which no run may preempt a run by class.


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: nodes under one sharing policy."""

    name: str
    reserved: bool = False  # True if only runs that name the pool may use its nodes.
    # True if a reserved pool lends idle devices to runs of `BEST_EFFORT` that name no pool. A borrower must be
    # preemptible, or its declared time limit must be at most `return_s`.
    lends: bool = False
    # Seconds within which a preempted borrower must release devices that the pool's own runs need.
    return_s: float = 300.0
    # True if the pool's nodes run the code of one principal only, because the nodes cannot isolate several principals.
    single_principal: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node's devices, access rules and availability."""

    id: str
    name: str
    pool: str = ""
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()  # Available versions of Python, or an empty value if unknown.
    total: Mapping[str, int]
    # Number of devices within `total` that are in quarantine, or that programs outside of the server use.
    outside: Mapping[str, int] = {}
    left_out: str = ""  # Text about the devices that an operator has excluded, with reasons, or "".
    own: tuple[GpuType, ...] = ()  # Additional GPU types that the node's configuration declares.
    away: str = ""  # Reason why the node is unavailable now, as text that follows the node's name, or "".
    # Owner of the node, or "". With `owner_first`, other users may use the node only with preemptible runs.
    owner: str = ""
    shared: bool = True  # True if users other than the owner may use the node now.
    # Time at which the calendar next changes `shared`, or None for never. Runs of other users start on the node only if
    # they end before the change, or are preemptible.
    turns_ns: int | None = None
    # True if a waiting run of the owner may preempt runs of other users, even on a shared node.
    owner_first: bool = False
    crews: bool = True  # True if the node can run ranks of a multi-node gang.


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A waiting run, with the parts of its request that the scheduler uses."""

    run_id: str
    title: str  # Name of the run in messages to other users, such as `"alice/bert-ft"`.
    # Principal and team (or "") whose fair-share usage includes the run.
    owner: str = ""
    team: str = ""
    priority: int = NORMAL  # Priority class: `CRITICAL`, `NORMAL` or `BEST_EFFORT`.
    queued_ns: int  # Time at which the run entered the queue.
    gpus: int | None = None  # Requested number of devices, or None for all devices of a node.
    gpu_type: str | None = None  # Canonical name of the GPU type, or None for the only GPU type.
    # True if the run may use several nodes when no single node has enough devices. A multi-node run uses whole nodes
    # and one partly used node, of one device type and pool.
    several_nodes: bool = False
    # Option change that would allow several nodes, such as `"without same_node=True"`, or "".
    alone: str = ""
    pool: str = ""  # Requested pool, or "" for any on-demand pool.
    machine: str = ""  # Identifier of the only suitable machine, or "".
    platform: str = ""  # Name of the only suitable platform, or "".
    python: str = ""  # Required version of Python, such as `"3.11"`, or "".
    caller: str = ""  # Machine that has the required Python version even without a report, or "".
    # Identifiers of nodes that failed to start the run. The scheduler uses nodes with a failed start only if no other
    # node is free.
    avoid: frozenset[str] = frozenset()
    # Pairs of nodes that could not connect in an earlier attempt. The scheduler avoids allocating both nodes of a pair.
    apart: frozenset[tuple[str, str]] = frozenset()
    not_before_ns: int = 0  # Start delay: time until which the scheduler ignores the run, or 0 for no delay.
    held: str = ""  # Reason for the start delay, as text.
    limit_s: float | None = None  # Declared maximum time for which the run holds devices, or None without a limit.
    # Likely time for which the run holds devices, learned from earlier runs, or None if unknown.
    expected_s: float | None = None
    preemptible: bool = False  # True if the scheduler may preempt the run, because the option `resume` is set.
    preemptions: int = 0  # Number of preemptions of the run so far.
    grace_s: float = 30.0  # Grace period in seconds after a stop request.
    # Part of `limit_s` for starting and stopping the run, in addition to the owner's declared limit.
    beyond_s: float = 0.0
    # True if the owner is not the principal that a `single_principal` pool serves.
    second_principal: bool = False
    # True if the server or a usage policy sets `limit_s`, and the owner declared no shorter limit.
    capped: bool = False


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Devices of one type on one node that a gang uses or has reserved."""

    node_id: str
    gpu_type: str
    count: int


class RunningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A running run with its devices."""

    wanted: QueuedRun  # The run's request, which the scheduler queues again after a requeue.
    shares: tuple[DeviceShare, ...]
    since_ns: int
    is_leaving: bool = False  # True if the scheduler has requested a stop of the run.
    leaving_ns: int | None = None  # Time of the stop request, or None if unknown.


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that the scheduler reserves for a blocked run."""

    run_id: str
    shares: tuple[DeviceShare, ...]  # Reserved devices, if known.
    at_ns: int | None  # Time at which the reserved devices are free, or None if unknown.
    is_bound: bool  # True if `at_ns` is a latest time, because all runs on the devices have time limits.
    # Likely start time, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None


# --- changes ----------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """Change: a run has entered the queue, or its request has changed.

    The server also reports this change for a placed run that could not start and waits again.
    """

    wanted: QueuedRun


class DevicesTaken(msgspec.Struct, frozen=True):
    """Change: a run has devices, for example because another planner placed the run."""

    running: RunningRun


class Gone(msgspec.Struct, frozen=True):
    """Change: a run no longer waits, or has released its devices."""

    run_id: str


class NodeSeen(msgspec.Struct, frozen=True):
    """Change: a node is available or has a new state."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    """Change: a node is absent. Each run on the node keeps its devices until a `Gone` change for that run."""

    node_id: str


class PoolSeen(msgspec.Struct, frozen=True):
    """Change: a pool exists or has a new state. Unknown pools are on-demand pools."""

    pool: Pool


class QueuePolicySet(msgspec.Struct, frozen=True):
    """Change: the operator has set a different queue policy."""

    policy: QueuePolicy


class Used(msgspec.Struct, frozen=True):
    """GPU-seconds of ended runs by team, and by team and user, decayed to `at_ns`.

    The planner itself counts running runs, from the start of their allocation (`RunningRun.since_ns`).
    """

    at_ns: int
    teams: Mapping[str, float]
    users: Mapping[tuple[str, str], float]


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """The decayed device usage of a team."""

    used_gpu_s: float  # GPU-seconds of the team's runs, including active runs.
    # Sum of `used_gpu_s` and the advances of running runs, by which the scheduler selects the next team.
    counted_gpu_s: float


class Promised(msgspec.Struct, frozen=True):
    """Latest start time of a run that an earlier planner announced, which this planner must keep."""

    reservation: Reservation


Change = Arrived | DevicesTaken | Gone | NodeSeen | NodeGone | PoolSeen | QueuePolicySet | Used | Promised


# --- outputs ----------------------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that must start now on the listed devices."""

    run_id: str
    shares: tuple[DeviceShare, ...]


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that must stop for another run, and that resumes later from its checkpoint."""

    run_id: str
    for_run: str
    sentence: str  # Message to the owner of the preempted run.


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The placements and preemptions that the server must execute now."""

    # Placements in queue order. The planner counts placed runs as started until a change reports otherwise.
    placements: tuple[Placement, ...]
    preemptions: tuple[Preemption, ...]  # Preempted runs, which the planner already counts as stopping.
    wake_ns: int | None  # Time of the next decision if no change arrives, or None for never.


class WaitReason(StrEnum):
    """Reason category of a waiting run."""

    CAPACITY = "capacity"  # All suitable devices are in use.
    RESERVED = "reserved"  # The scheduler holds the free devices for runs ahead in the queue.
    TURN = "turn"  # The scheduler has not examined the run yet, or other runs are ahead in the queue.
    MAKING_ROOM = "making_room"  # The scheduler has preempted other runs for the waiting run.
    CALENDAR = "calendar"  # Only the node's owner may use the suitable nodes now.
    AWAY = "away"  # Suitable nodes are silent, drained or faulty.
    # The run has a start delay, or the server currently starts no runs of its owner.
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
    # Time at which the scheduler will preempt the holder, or None without a planned preemption.
    asked_ns: int | None = None
    node: str = ""  # Node of the held devices if the waiting run needs several nodes, else "".
    # Likely release time, if earlier runs of the same name indicate a time before `until_ns`.
    likely_ns: int | None = None


class GangPart(msgspec.Struct, frozen=True, kw_only=True):
    """Devices on one node that a multi-node gang waits for."""

    node: str
    count: int  # Number of the gang's devices on the node.
    free: int  # Number of free devices on the node.


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of a run's wait, which `wait_messages.py` formats as text."""

    run_id: str
    reason: WaitReason
    count: int = 0  # Number of needed devices, or 0 if the number depends on the node.
    whole: bool = False  # True if the run requests all devices of a node.
    gpu_type: str = ""  # Type of the devices, or "" if the type depends on the node.
    one_node: bool = True  # True if the devices must be on one node.
    nodes: tuple[GangPart, ...] = ()  # Nodes on which a multi-node gang fits soonest.
    node: str = ""  # Name of the node on which the run fits soonest, or "".
    free: int = 0  # Number of free devices of the requested kind on `node`.
    outside: int = 0  # Number of devices of `node` in quarantine or in use by other programs.
    holders: tuple[DeviceHolder, ...] = ()  # Runs that hold the missing devices, the earliest release first.
    ahead: str = ""  # Title of the run for which the scheduler holds the free devices, or "".
    # Time from which the run in `ahead` needs the devices, or None for now. Other runs may use the devices until
    # `kept_ns`.
    kept_ns: int | None = None
    # Longest time limit with which the run could start now on the held devices, or 0 for no limit.
    spare_s: float = 0.0
    # Queue position, from 1, among the runs for the same kind of devices, or 0 without a position.
    place: int = 0
    # Start time of the run, or None if unknown. If `is_bound` is True, `at_ns` is the latest start time.
    at_ns: int | None = None
    is_bound: bool = False
    owner: str = ""  # Owner of `node`, if a node calendar is the reason for the wait.
    # Time of the next calendar change of `node`. If `free` is 0, the change opens the node to other users. If `free` is
    # positive, the change restricts the node to its owner.
    turns_ns: int | None = None
    words: str = ""  # Text that follows the wait message, or replaces the message.
    # Likely start time, if earlier runs of the same names indicate a time before `at_ns`.
    likely_ns: int | None = None
    # Time at which the server ends the waiting run unless a suitable node joins, or None for never.
    ends_ns: int | None = None


class StartEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated start time of a run that a client would submit now."""

    at_ns: int | None  # Expected start time, or None if unknown.
    is_bound: bool = False  # True if `at_ns` is the latest start time.
    node: str = ""  # Name of the expected node, or "".
    nodes: tuple[str, ...] = ()  # Names of the expected nodes of a multi-node gang.
    basis: str  # Text that explains the estimate or the missing start time.
    place: int = 0  # Queue position, from 1, among runs for the same kind of devices, or 0 if the run starts at once.
    impossible: bool = False  # True if no current node can ever serve the run.
    # Details of the expected wait, or None if the run would not wait or no node can serve the run.
    wait: Wait | None = None


_LEARNED, _DECLARED = 1.5, 1.1
_MINUTES_MAX = 60
"""Number of minutes from which the queue no longer distinguishes the time limits of borrowers."""
_WALLS_MAX = 128


class Shape:
    """A device request without the duration and owner of the run."""

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
        self.number = number  # Unique number of the shape, by which `Capacity` caches the nodes that the shape may use.
        self.gpus, self.gpu_type, self.several = wanted.gpus, wanted.gpu_type, wanted.several_nodes
        self.pool, self.machine, self.platform = wanted.pool, wanted.machine, wanted.platform
        self.python, self.caller = wanted.python, wanted.caller if wanted.python else ""
        self.second_principal = wanted.second_principal
        # `unreserved`: number of the last pass in which the scheduler could not reserve more devices for the shape.
        # `blocked`: number of the last pass in which no further run of the shape fitted, for any user.
        self.blocked = self.unreserved = self.walls_of = self.tries = 0
        # Pairs of likely and maximum run duration that did not fit in the pass `walls_of`. The list omits pairs that
        # exceed another pair in both values. From entry to entry, likely durations increase while maximum durations
        # decrease.
        self.walls: list[tuple[float, float]] = []

    def needs(self, node: Node, gpu_type: str) -> int:
        """Return the number of devices of a type that the shape needs on a node."""
        return node.total.get(gpu_type, 0) if self.gpus is None else self.gpus

    def is_walled(self, number: int, spans: tuple[float, float]) -> bool:
        """Return True if a request of equal or shorter duration did not fit in a pass."""
        if self.walls_of != number:
            return False
        at = bisect_right(self.walls, (spans[0], math.inf))
        return at > 0 and self.walls[at - 1][1] <= spans[1]

    def wall(self, number: int, spans: tuple[float, float]) -> None:
        """Record that a duration does not fit in a pass. After `_WALLS_MAX` records, block the whole shape."""
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
        """Return the shape key of a run, which is equal for all runs of one shape."""
        where = (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")
        return (wanted.gpus, wanted.gpu_type, wanted.several_nodes, where, wanted.second_principal)


class TimedShape:
    """A shape with the duration of its runs.

    Shape, duration and owner determine the nodes on which a run may start.
    """

    __slots__ = ("__weakref__", "blocked", "expected_ns", "number", "shape")

    def __init__(self, wanted: QueuedRun, shape: Shape, number: int = -1) -> None:
        self.number, self.shape = number, shape
        # Likely time for which a run holds devices, infinite if unknown.
        self.expected_ns = math.inf if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED) * 1e9
        self.blocked = 0  # Variant of `Shape.blocked` for runs of the same duration.

    @staticmethod
    def key(wanted: QueuedRun, shape: Shape) -> tuple[object, ...]:
        """Return the timed-shape key of a run, which is equal for all runs of one timed shape."""
        expected_s = None if wanted.expected_s is None else rounded(wanted.expected_s, _LEARNED)
        limit_s = None if wanted.limit_s is None else rounded(wanted.limit_s, _DECLARED)
        is_lowest = wanted.priority == BEST_EFFORT
        # Runs share a key only if pools treat their time limits alike. Pools usually set `return_s` to whole minutes.
        minutes = 0
        if is_lowest and not wanted.preemptible and wanted.limit_s is not None:
            minutes = min(_MINUTES_MAX, math.ceil((wanted.limit_s - wanted.beyond_s) / 60))
        return (shape.number, limit_s, expected_s, wanted.preemptible, wanted.grace_s, is_lowest, minutes)

    def spans(self, wanted: QueuedRun) -> tuple[float, float]:
        """Return the likely and the maximum time for which a run holds devices, each infinite if unknown."""
        limit_ns = math.inf if wanted.limit_s is None else wanted.limit_s * 1e9
        return min(self.expected_ns, limit_ns), limit_ns


def rounded(seconds: float, step: float) -> float:
    """Return a duration rounded up to one of a few values, so that similar runs share a queue line."""
    if seconds <= 1:
        return 1.0
    return float(step ** math.ceil(math.log(seconds, step) - 1e-9))
