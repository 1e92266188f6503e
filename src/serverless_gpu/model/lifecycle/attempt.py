"""Data types of an attempt's lifecycle: states, reasons, limits, failures, events and facts.

`attempt_lifecycle.py` decides the effect of an event. A fact is an immutable record of one event of an attempt on its
node. The server computes all device usage and charges from facts (`metering.py`, `ledger.py`). The node records facts
and sends them to the server.

`Stopped` is the last message of a run, which `stopped.json` in the run directory also contains. `Stopped` is separate
from `node/base/protocol.py`, because readers of run directories need no other message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import pairwise

import msgspec

from serverless_gpu.errors import InvalidValue


class State(StrEnum):
    """The state of an attempt."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    UNREACHABLE = "UNREACHABLE"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    BUDGET_STOPPED = "BUDGET_STOPPED"
    LOST = "LOST"


TERMINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.TIMED_OUT, State.BUDGET_STOPPED, State.LOST}
)
ACTIVE = tuple(state for state in State if state is not State.QUEUED and state not in TERMINAL)


class Phase(StrEnum):
    """The phase of a RUNNING or STOPPING attempt, within its state."""

    NONE = "none"
    SETTLING = "settling"
    RETURNED = "returned"
    TERMINATING = "terminating"
    KILLING = "killing"


class Reason(StrEnum):
    """The reason why an attempt ended."""

    COMPLETED = "completed"
    RANK_RAISED = "rank_raised"
    GPU_OOM = "gpu_oom"
    SYSTEM_EXIT = "system_exit"
    RANK_INTERRUPTED = "rank_interrupted"
    RANK_CANCELLED = "rank_cancelled"
    RANK_SIGNAL = "rank_signal"
    HOST_OOM = "host_oom"
    NO_RESULT = "no_result"
    RESULT_UNSERIALISABLE = "result_unserialisable"
    RESULT_TOO_LARGE = "result_too_large"
    RESULT_STORAGE = "result_storage"
    START_FAILED = "start_failed"
    RENDEZVOUS = "rendezvous"
    NODE_DISK = "node_disk"
    ENV_CORRUPT = "env_corrupt"
    ENV_UNAVAILABLE = "env_unavailable"
    SESSION_ENDED = "session_ended"
    RUNTIME_LOST = "runtime_lost"
    COLLECTIVE_HANG = "collective_hang"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    SUPERVISOR_LOST = "supervisor_lost"
    SUPERVISOR_KILLED = "supervisor_killed"
    NODE_LOST = "node_lost"
    COMMAND_FAILED = "command_failed"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    NODE_PARTITIONED = "node_partitioned"
    NODE_REBOOTED = "node_rebooted"
    NODE_GONE = "node_gone"
    GANG_START = "gang_start"
    RESULT_UPLOAD = "result_upload"
    REFUSED = "refused"
    IDLE = "idle"
    ENGINE_HEAD_LOST = "engine_head_lost"
    SERVER_RESTORED = "server_restored"
    SECRET_MISSING = "secret_missing"
    GPU_LOST = "gpu_lost"
    UNSATISFIABLE = "unsatisfiable"
    PEER_FAILED = "peer_failed"
    NODES_APART = "nodes_apart"
    NO_PROGRESS = "no_progress"


class StopReason(StrEnum):
    """Reason of a request to stop a run. Ranks read the reason as `SGPU_STOP_REASON`."""

    CANCEL = "cancel"
    PREEMPT = "preempt"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    DRAIN = "drain"
    IDLE = "idle"


STOPPED_BY: Mapping[StopReason, Reason] = {
    StopReason.CANCEL: Reason.CANCELLED,
    StopReason.PREEMPT: Reason.PREEMPTED,
    StopReason.TIMEOUT: Reason.TIMEOUT,
    StopReason.BUDGET: Reason.BUDGET,
    StopReason.DRAIN: Reason.DRAINED,
    StopReason.IDLE: Reason.IDLE,
}
"""Final reason of an attempt by the reason of its stop request."""

SUPERVISOR_GONE = frozenset({Reason.SUPERVISOR_LOST, Reason.SUPERVISOR_KILLED})
"""Possible final reasons after a supervisor died without reporting an end. `judge_loss` selects the final reason."""

# Stop reasons after which the run may continue in another attempt. A later stop request may have a final reason.
PASSING_STOPS = frozenset({Reason.PREEMPTED, Reason.DRAINED, Reason.NODE_PARTITIONED})

STOPPED_FOR_A_FAILURE = "failure"


def stop_word(reason: Reason | None) -> str:
    """Return the value of `SGPU_STOP_REASON`: a `StopReason`, or ``"failure"`` after a failure of the run."""
    words = {ending: why.value for why, ending in STOPPED_BY.items()}
    words[Reason.NODE_PARTITIONED] = StopReason.DRAIN.value
    return words.get(reason, STOPPED_FOR_A_FAILURE) if reason is not None else STOPPED_FOR_A_FAILURE


class Meaning(msgspec.Struct, frozen=True):
    """Consequences of a final reason for retries, billing and messages."""

    state: State
    # True if the server may start a new attempt without the user's `retries`, because no user code ran.
    may_retry: bool
    is_billed: bool  # True if the server bills the attempt's device time. The server does not bill platform failures.
    sentence: str  # Explanation of the final reason for users.


MEANINGS: Mapping[Reason, Meaning] = {
    Reason.COMPLETED: Meaning(State.SUCCEEDED, False, True, "every rank returned"),
    Reason.RANK_RAISED: Meaning(State.FAILED, False, True, "a rank raised an exception"),
    Reason.GPU_OOM: Meaning(State.FAILED, False, True, "a rank ran out of GPU memory"),
    Reason.SYSTEM_EXIT: Meaning(State.FAILED, False, True, "a rank called sys.exit before it returned a result"),
    Reason.RANK_INTERRUPTED: Meaning(State.FAILED, False, True, "a rank raised KeyboardInterrupt"),
    Reason.RANK_CANCELLED: Meaning(State.FAILED, False, True, "a rank cancelled its own task"),
    Reason.RANK_SIGNAL: Meaning(State.FAILED, False, True, "a signal ended a rank"),
    Reason.HOST_OOM: Meaning(State.FAILED, False, True, "the kernel killed a rank because host memory ran out"),
    Reason.NO_RESULT: Meaning(State.FAILED, False, True, "a rank's process ended without a result"),
    Reason.RESULT_UNSERIALISABLE: Meaning(
        State.FAILED, False, True, "a rank finished, but its result cannot be pickled"
    ),
    Reason.RESULT_TOO_LARGE: Meaning(State.FAILED, False, True, "a rank finished, but its result is over the limit"),
    Reason.RESULT_STORAGE: Meaning(State.FAILED, False, True, "a rank finished, but its result could not be written"),
    Reason.START_FAILED: Meaning(State.FAILED, True, False, "the ranks could not start"),
    Reason.RENDEZVOUS: Meaning(State.FAILED, True, False, "no free rendezvous port was found"),
    Reason.NODE_DISK: Meaning(State.FAILED, True, False, "the node's disk is too full for the environment"),
    Reason.ENV_CORRUPT: Meaning(
        State.FAILED, True, False, "the stored environment is missing or differs from the captured environment"
    ),
    Reason.ENV_UNAVAILABLE: Meaning(State.FAILED, True, False, "the environment could not be restored"),
    Reason.SESSION_ENDED: Meaning(
        State.CANCELLED, False, False, "the session ended before it allocated devices to the run"
    ),
    Reason.RUNTIME_LOST: Meaning(State.FAILED, False, True, "the ranks' parent process died"),
    Reason.COLLECTIVE_HANG: Meaning(
        State.FAILED, False, True, "the ranks made no progress and wrote no output within hang_timeout"
    ),
    Reason.CANCELLED: Meaning(State.CANCELLED, False, True, "the run was cancelled"),
    Reason.TIMEOUT: Meaning(State.TIMED_OUT, False, True, "the run reached its time limit"),
    Reason.BUDGET: Meaning(State.BUDGET_STOPPED, False, True, "the server stopped the run to stay within a budget"),
    Reason.SUPERVISOR_LOST: Meaning(
        State.LOST, False, False, "the run's supervisor process died because its machine failed"
    ),
    Reason.SUPERVISOR_KILLED: Meaning(
        State.LOST, False, True, "the run's supervisor process died, without evidence that the machine failed"
    ),
    Reason.NODE_LOST: Meaning(State.LOST, False, False, "the node stopped answering"),
    Reason.COMMAND_FAILED: Meaning(State.FAILED, False, True, "the command ended with an exit code other than 0"),
    Reason.PREEMPTED: Meaning(State.CANCELLED, False, True, "the scheduler preempted the run for another run"),
    Reason.DRAINED: Meaning(State.CANCELLED, False, True, "the server stopped the run to drain its node"),
    Reason.NODE_PARTITIONED: Meaning(
        State.LOST, False, False, "the node stopped the run after losing contact with the server for too long"
    ),
    Reason.NODE_REBOOTED: Meaning(State.FAILED, False, False, "the node restarted"),
    Reason.NODE_GONE: Meaning(State.LOST, False, False, "the node did not reconnect"),
    Reason.GANG_START: Meaning(State.FAILED, True, False, "not every rank could start"),
    Reason.RESULT_UPLOAD: Meaning(
        State.FAILED, False, True, "the run finished, but the node could not send its results to the server"
    ),
    Reason.REFUSED: Meaning(State.FAILED, True, False, "the node refused to start the run"),
    Reason.IDLE: Meaning(State.TIMED_OUT, False, True, "the run was idle for as long as idle_timeout allows"),
    Reason.ENGINE_HEAD_LOST: Meaning(State.FAILED, False, True, "the run's Ray cluster lost a process that it needs"),
    Reason.SERVER_RESTORED: Meaning(
        State.LOST,
        False,
        False,
        "after a restore from a backup, the server cannot know whether the run started",
    ),
    Reason.SECRET_MISSING: Meaning(State.FAILED, False, False, "a secret that the run needs no longer exists"),
    Reason.GPU_LOST: Meaning(State.FAILED, False, False, "a GPU of the run failed"),
    Reason.UNSATISFIABLE: Meaning(
        State.FAILED, False, False, "no joined node can ever serve the run, and its wait limit has passed"
    ),
    Reason.PEER_FAILED: Meaning(State.FAILED, False, False, "the run failed on another of its nodes"),
    Reason.NODES_APART: Meaning(State.FAILED, True, False, "the run's nodes cannot reach each other"),
    Reason.NO_PROGRESS: Meaning(
        State.FAILED, False, True, "several attempts of the run saved no new checkpoint to continue from"
    ),
}


UNSAVED_MAX = 3
"""Default number of consecutive attempts without a new checkpoint after which `resume` stops retrying."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of an attempt, in nanoseconds."""

    timeout_ns: int | None = None  # Maximum duration of user code, or None for no limit.
    # Time between SIGTERM and SIGKILL after a stop request, or after a rank returned but does not exit.
    grace_ns: int = 30_000_000_000
    failure_grace_ns: int = 2_000_000_000  # Time between SIGTERM and SIGKILL after another rank failed.
    start_ns: int = 300_000_000_000  # Maximum time from the placement to the first user code.
    # Time without progress until the supervisor warns of a hang, or None for no warning.
    hang_warning_ns: int | None = 600_000_000_000
    hang_timeout_ns: int | None = None  # Time without progress until the supervisor ends the run, or None for no limit.

    def stop_grace_ns(self) -> int:
        """Return the grace period, reduced to at most half of the time limit."""
        if self.timeout_ns is not None and self.timeout_ns < 2 * self.grace_ns:
            return self.timeout_ns // 2
        return self.grace_ns


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of one rank, or of the whole attempt (`rank` None)."""

    rank: int | None  # Global rank, or the node's number for a command that runs once per node.
    reason: Reason
    at_ns: int  # Time of the failure on the node's boot clock.
    peer_lost: bool = False  # True if the rank only reported that a peer closed its connection.
    signal: int | None = None  # Signal that ended the rank, or None without a signal.
    exit_code: int | None = None  # Exit code of a failed command, or None for a function.
    detail: str = ""
    node: str = ""  # Name of the node on which the failure occurred, or "" for an attempt on one node.


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting ranks of a hung run, and the ranks that hold up the waiting ranks.

    Attributes:
        waiting: ranks that wait for other ranks.
        elsewhere: ranks that do not wait, including ranks that returned. Empty when all ranks wait.
        stacks: Python stacks of a few ranks that explain the hang, by rank.
        file: name of the file with all stacks, in the attempt's directory.
    """

    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...]
    stacks: dict[int, str] = {}
    file: str = ""


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stopped"):
    """The end of an attempt, in `stopped.json` and as a message of the supervisor.

    The supervisor sends `Stopped` after all ranks have ended and the run directory contains results and failures. The
    supervisor then verifies that the GPUs are free.
    """

    state: State
    reason: Reason
    cause: Failure | None
    consequences: tuple[Failure, ...]
    log_tail: str = ""  # Last output of the rank that caused the end.
    # Last output lines of ranks whose output clients do not show live, starting with the rank that caused the end.
    tails: dict[int, str] = {}
    hang: Hang | None = None  # Ranks of a hung run that waited for other ranks, or None without a hang.
    # True if the kernel confirms that all processes of the attempt have ended.
    proven: bool = True
    hint: str = ""  # Probable cause of a failure of user code.
    killed: bool = False  # True if ranks did not stop within the grace period and were killed.


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """State of an attempt on one node, from which `advance` makes its next decision."""

    run_id: str
    fence: int
    world_size: int  # Number of user processes on the node. Process numbers are unique within a gang.
    limits: Limits
    # True if other nodes have ranks of the gang. Returned ranks then wait for ranks on other nodes.
    has_peers: bool = False
    first: int = 0  # The lowest process number on the node.
    state: State = State.QUEUED
    phase: Phase = Phase.NONE
    reason: Reason | None = None
    exec_ns: int | None = None
    stop_ns: int | None = None
    wake_ns: int | None = None
    returned: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    failures: tuple[Failure, ...] = ()
    killed: bool = False
    fault_ns: int | None = None  # Time of the attempt's first GPU failure, or None.

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def numbers(self) -> range:
        """Return the numbers of the attempt's processes on the node."""
        return range(self.first, self.first + self.world_size)

    @property
    def cause(self) -> Failure | None:
        """Return the failure that caused the end of the attempt."""
        return root_cause(self.failures, self.stop_ns)


class GangPlaced(msgspec.Struct, frozen=True):
    """The gang has its GPUs and a running stem (parent process of the ranks)."""


class Preparing(msgspec.Struct, frozen=True):
    """The preparation of the environment makes progress, but has not finished."""


class RanksNotStarted(msgspec.Struct, frozen=True):
    """The ranks failed to start, so no user code has run."""

    reason: Reason
    detail: str


class RankExecuting(msgspec.Struct, frozen=True):
    """A rank is about to run user code for the first time."""

    rank: int


class RankReturned(msgspec.Struct, frozen=True):
    """The node has stored a rank's result durably."""

    rank: int


class RankFailed(msgspec.Struct, frozen=True):
    """A rank reported a failure."""

    failure: Failure


class RankExited(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor has reaped a rank's process."""

    rank: int
    signal: int | None  # Signal that ended the process, or None without a signal.
    out_of_memory: bool = False  # True if the kernel's counters show an out-of-memory kill.
    detail: str = ""  # A message for users.


class StemLost(msgspec.Struct, frozen=True, kw_only=True):
    """The stem (parent process of the ranks) has died."""

    detail: str
    out_of_memory: bool = False


class StopRequested(msgspec.Struct, frozen=True):
    """The user or the server requested a stop of the attempt."""

    why: StopReason


class HangConfirmed(msgspec.Struct, frozen=True):
    """At least one rank made no progress, and no rank wrote output, within `hang_timeout`."""

    detail: str


class GpuFailed(msgspec.Struct, frozen=True):
    """The driver reports a failed GPU of the attempt, possibly before a rank notices the failure."""

    detail: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. `wake_ns` is the next time at which the attempt may need an action."""


class TreeEmpty(msgspec.Struct, frozen=True):
    """All processes of the attempt have ended."""


class LeaseExpired(msgspec.Struct, frozen=True):
    """The server has not answered during the lease, and will soon treat the attempt as lost."""


class Released(msgspec.Struct, frozen=True):
    """All ranks on all nodes have returned."""


class PeerFailed(msgspec.Struct, frozen=True):
    """The attempt failed on another node."""

    detail: str


Event = (
    GangPlaced
    | Preparing
    | RanksNotStarted
    | RankExecuting
    | RankReturned
    | RankFailed
    | RankExited
    | StemLost
    | StopRequested
    | HangConfirmed
    | GpuFailed
    | Tick
    | TreeEmpty
    | LeaseExpired
    | Released
    | PeerFailed
)


def root_cause(failures: tuple[Failure, ...], stop_ns: int | None) -> Failure | None:
    """Return the failure that caused all later failures, or the lowest rank's failure on a tie.

    A dying rank closes its sockets before the supervisor can reap the rank. A report of a lost peer is therefore not
    the cause while another failure is known. After the start of a stop, only a crash can be the cause, because
    exceptions are consequences of the stop. A failed GPU explains all failures of its rank, even if the driver reports
    the GPU failure later. A failure on another node explains reports of lost peers, but no crash.
    """

    def weight(failure: Failure) -> tuple[bool, bool, bool, int, int]:
        is_of_a_rank, is_of_here = failure.reason is not Reason.GPU_LOST, failure.reason is not Reason.PEER_FAILED
        rank = -1 if failure.rank is None else failure.rank
        return (is_of_a_rank, failure.peer_lost, failure.peer_lost and is_of_here, failure.at_ns, rank)

    crashes = (Reason.RANK_SIGNAL, Reason.HOST_OOM, Reason.GPU_LOST)
    eligible = [f for f in failures if stop_ns is None or f.at_ns <= stop_ns or f.reason in crashes]
    return min(eligible or failures, key=weight, default=None)


class FactKind(StrEnum):
    """The kind of event that a fact records."""

    RESERVED = "reserved"
    HYDRATING = "hydrating"  # The devices are reserved while the node prepares the environment.
    STARTING = "starting"  # The node starts the ranks in the prepared environment.
    EXEC = "exec"
    HELD = "held"
    ALIVE = "alive"
    STOPPING = "stopping"  # The ranks have finished their work or must stop.
    EXITED = "exited"
    FREED = "freed"


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable record of an event of an attempt on a node.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        seq: number within the attempt. ``(attempt, seq)`` identifies the fact.
        kind: the kind of event.
        boot_id: the boot that `boottime_ns` refers to.
        boottime_ns: nanoseconds since boot. All durations use the boot time.
        wall_ns: nanoseconds since 1970. The wall time only determines the calendar day of the fact.
        gpus: identifiers of the allocated devices.
        cpus: allocated cores, or 0 without a limit.
        memory_bytes: allocated host memory, or 0 without a limit.
        grace_ms: grace period after a stop request, only for `stopping`, else None. The server does not bill the time
            beyond the grace period.
    """

    attempt: str
    seq: int
    kind: FactKind
    boot_id: str
    boottime_ns: int
    wall_ns: int
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int
    grace_ms: int | None = None


def alive_after(last: Fact, at_ns: int) -> Fact:
    """Return an `alive` fact at a boot time, numbered after the attempt's last known fact."""
    return msgspec.structs.replace(
        last,
        seq=last.seq + 1,
        kind=FactKind.ALIVE,
        boottime_ns=at_ns,
        wall_ns=last.wall_ns + at_ns - last.boottime_ns,
        grace_ms=None,
    )


def distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts of one attempt in order, without duplicates.

    Raises InvalidValue for facts of several attempts, or for two different facts with the same number.
    """
    ordered = sorted(facts, key=lambda fact: fact.seq)
    for fact, following in pairwise(ordered):
        if fact.attempt != following.attempt:
            attempts = ", ".join(sorted({each.attempt for each in ordered}))
            raise InvalidValue(f"a charge covers one attempt, but the facts belong to {attempts}")
        if fact.seq == following.seq and fact != following:
            raise InvalidValue(f"two different facts of attempt {fact.attempt} have the number {fact.seq}")
    return [fact for fact, following in pairwise(ordered) if fact.seq != following.seq] + ordered[-1:]
