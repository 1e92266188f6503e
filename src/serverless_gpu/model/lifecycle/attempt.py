"""The nouns of an attempt's life: states, reasons and what they mean, limits, failures, events, facts.

`attempt_lifecycle.py` decides what an event does. A fact records what happened to an attempt on its node, one record
for each thing, and never changes; all use and money follows from facts (`metering.py`, `ledger.py`). The node writes
facts down and sends them.

`Stopped` is the message with which a run ends; `stopped.json` in a run directory holds it, too. It is apart from the
other messages (`node/base/protocol.py`) because readers of run directories need only this one.
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
    """The phase of a RUNNING or STOPPING attempt."""

    NONE = "none"
    SETTLING = "settling"
    RETURNED = "returned"
    TERMINATING = "terminating"
    KILLING = "killing"


class Reason(StrEnum):
    """The reason for which an attempt ended."""

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
    """The reason for which a run is asked to stop; ranks read it as `SGPU_STOP_REASON`."""

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
"""The reason with which an attempt ends that was asked to stop."""

SUPERVISOR_GONE = frozenset({Reason.SUPERVISOR_LOST, Reason.SUPERVISOR_KILLED})
"""An attempt ended without a word of its supervisor; `judge_loss` decides which of the two it is."""

# An attempt that is stopped for one of these may go on as another attempt; a later stop of another kind forbids that.
PASSING_STOPS = frozenset({Reason.PREEMPTED, Reason.DRAINED, Reason.NODE_PARTITIONED})

STOPPED_FOR_A_FAILURE = "failure"


def stop_word(reason: Reason | None) -> str:
    """Return `SGPU_STOP_REASON` of ranks: a `StopReason`, or ``"failure"`` when the run has failed already."""
    words = {ending: why.value for why, ending in STOPPED_BY.items()}
    words[Reason.NODE_PARTITIONED] = StopReason.DRAIN.value
    return words.get(reason, STOPPED_FOR_A_FAILURE) if reason is not None else STOPPED_FOR_A_FAILURE


class Meaning(msgspec.Struct, frozen=True):
    """The consequences of a reason."""

    state: State
    # Whether another attempt may be made without the user having asked for retries: nothing of theirs ran.
    may_retry: bool
    is_billed: bool  # whether the time counts as use; faults of the platform do not
    sentence: str  # the message for people


MEANINGS: Mapping[Reason, Meaning] = {
    Reason.COMPLETED: Meaning(State.SUCCEEDED, False, True, "every rank returned"),
    Reason.RANK_RAISED: Meaning(State.FAILED, False, True, "a rank raised an exception"),
    Reason.GPU_OOM: Meaning(State.FAILED, False, True, "a rank ran out of GPU memory"),
    Reason.SYSTEM_EXIT: Meaning(State.FAILED, False, True, "a rank called sys.exit before it returned a result"),
    Reason.RANK_INTERRUPTED: Meaning(State.FAILED, False, True, "a rank raised KeyboardInterrupt"),
    Reason.RANK_CANCELLED: Meaning(State.FAILED, False, True, "a rank's task was cancelled from inside"),
    Reason.RANK_SIGNAL: Meaning(State.FAILED, False, True, "a rank was ended by a signal"),
    Reason.HOST_OOM: Meaning(State.FAILED, False, True, "a rank was ended because host memory ran out"),
    Reason.NO_RESULT: Meaning(State.FAILED, False, True, "a rank's process ended without a result"),
    Reason.RESULT_UNSERIALISABLE: Meaning(
        State.FAILED, False, True, "a rank finished, but its result cannot be pickled"
    ),
    Reason.RESULT_TOO_LARGE: Meaning(State.FAILED, False, True, "a rank finished, but its result is over the limit"),
    Reason.RESULT_STORAGE: Meaning(State.FAILED, False, True, "a rank finished, but its result could not be written"),
    Reason.START_FAILED: Meaning(State.FAILED, True, False, "the ranks could not be started"),
    Reason.RENDEZVOUS: Meaning(State.FAILED, True, False, "no free rendezvous port was found"),
    Reason.NODE_DISK: Meaning(State.FAILED, True, False, "the node's disk is too full for the environment"),
    Reason.ENV_CORRUPT: Meaning(
        State.FAILED, True, False, "what is stored of the environment is gone, or is not what was captured"
    ),
    Reason.ENV_UNAVAILABLE: Meaning(State.FAILED, True, False, "the environment could not be restored"),
    Reason.SESSION_ENDED: Meaning(State.CANCELLED, False, False, "its session ended before the run had devices"),
    Reason.RUNTIME_LOST: Meaning(State.FAILED, False, True, "the ranks' parent process died"),
    Reason.COLLECTIVE_HANG: Meaning(
        State.FAILED, False, True, "the ranks stood still, without output, for as long as hang_timeout allows"
    ),
    Reason.CANCELLED: Meaning(State.CANCELLED, False, True, "the run was cancelled"),
    Reason.TIMEOUT: Meaning(State.TIMED_OUT, False, True, "the run reached its time limit"),
    Reason.BUDGET: Meaning(State.BUDGET_STOPPED, False, True, "the run was stopped for its budget"),
    Reason.SUPERVISOR_LOST: Meaning(State.LOST, False, False, "the run's supervisor process was lost with its machine"),
    Reason.SUPERVISOR_KILLED: Meaning(
        State.LOST, False, True, "the run's supervisor process died, and nothing shows that the machine failed"
    ),
    Reason.NODE_LOST: Meaning(State.LOST, False, False, "the node did not answer any more"),
    Reason.COMMAND_FAILED: Meaning(State.FAILED, False, True, "the command ended with an exit code other than 0"),
    Reason.PREEMPTED: Meaning(State.CANCELLED, False, True, "the run had to make room for another"),
    Reason.DRAINED: Meaning(State.CANCELLED, False, True, "the run had to leave its node"),
    Reason.NODE_PARTITIONED: Meaning(
        State.LOST, False, False, "the node was cut off from the server for longer than it may be, and stopped the run"
    ),
    Reason.NODE_REBOOTED: Meaning(State.FAILED, False, False, "the node restarted"),
    Reason.NODE_GONE: Meaning(State.LOST, False, False, "the node never came back"),
    Reason.GANG_START: Meaning(State.FAILED, True, False, "not every rank could be started"),
    Reason.RESULT_UPLOAD: Meaning(
        State.FAILED, False, True, "the run finished, but its results could not be sent to the server"
    ),
    Reason.REFUSED: Meaning(State.FAILED, True, False, "the node refused to start the run"),
    Reason.IDLE: Meaning(State.TIMED_OUT, False, True, "the run did nothing for as long as idle_timeout allows"),
    Reason.ENGINE_HEAD_LOST: Meaning(
        State.FAILED, False, True, "a process died without which the run's Ray cluster cannot go on"
    ),
    Reason.SERVER_RESTORED: Meaning(
        State.LOST, False, False, "the server was restored from a backup, and nobody knows whether the run ran since"
    ),
    Reason.SECRET_MISSING: Meaning(State.FAILED, False, False, "a secret that the run needs is not there any more"),
    Reason.GPU_LOST: Meaning(State.FAILED, False, False, "a GPU of the run failed"),
    Reason.UNSATISFIABLE: Meaning(
        State.FAILED, False, False, "nothing that has joined could ever serve the run, for as long as it may wait so"
    ),
    Reason.PEER_FAILED: Meaning(State.FAILED, False, False, "the run failed on another of its nodes"),
    Reason.NODES_APART: Meaning(State.FAILED, True, False, "the run's nodes do not reach each other"),
    Reason.NO_PROGRESS: Meaning(
        State.FAILED, False, True, "attempt after attempt of the run saved nothing new to continue from"
    ),
}


UNSAVED_MAX = 3
"""Attempts in a row that save nothing new, after which `resume` gives up where no policy says otherwise."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, in nanoseconds."""

    timeout_ns: int | None = None  # from the first user byte to the last, or None
    # Between SIGTERM and SIGKILL when a run is stopped, or when a rank that returned does not exit.
    grace_ns: int = 30_000_000_000
    failure_grace_ns: int = 2_000_000_000  # the same when another rank failed
    start_ns: int = 300_000_000_000  # from the placement to the first user byte
    hang_warning_ns: int | None = 600_000_000_000  # without a sign of progress until a warning, or None for never
    hang_timeout_ns: int | None = None  # without a sign of progress until the run is ended, or None for never

    def stop_grace_ns(self) -> int:
        """Return the grace that fits into the time limit (half of it when it is short)."""
        if self.timeout_ns is not None and self.timeout_ns < 2 * self.grace_ns:
            return self.timeout_ns // 2
        return self.grace_ns


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of one rank, or of the attempt as a whole (`rank` None)."""

    rank: int | None  # global rank; of a command that runs once per node, the node's number
    reason: Reason
    at_ns: int  # when, by the node's boottime clock
    peer_lost: bool = False  # the rank only says that another one closed its connection
    signal: int | None = None  # that ended it, or None
    exit_code: int | None = None  # of a command that ended with one other than 0, or None
    detail: str = ""
    node: str = ""  # where that was, of an attempt on several nodes; "" on one


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a hung run that wait, and those they wait for.

    Attributes:
        waiting: ranks that wait for others.
        elsewhere: ranks that do not, those that returned among them; none when all wait.
        stacks: Python stacks of a few of those that explain it, by rank.
        file: name of the file with all stacks, in the attempt's directory.
    """

    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...]
    stacks: dict[int, str] = {}
    file: str = ""


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stopped"):
    """How an attempt ended, in `stopped.json` and as the message of its supervisor (`node/base/protocol.py`).

    No rank runs any more; results and failures are in the run directory. The GPU gate comes next.
    """

    state: State
    reason: Reason
    cause: Failure | None
    consequences: tuple[Failure, ...]
    log_tail: str = ""  # of the rank that is the cause
    tails: dict[int, str] = {}  # last lines of ranks that were not shown live, the cause first
    hang: Hang | None = None  # the ranks that waited, and for which
    proven: bool = True  # whether the kernel says that no process of it is left; else one could not be ended
    hint: str = ""  # probable cause of a failure of user code


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next decision depends on."""

    run_id: str
    fence: int
    world_size: int  # processes of the user's on this node; they have the numbers that they have in the gang
    limits: Limits
    has_peers: bool = False  # whether other nodes have ranks of it, too: those that have returned here wait for them
    first: int = 0  # the first of these numbers
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
    fault_ns: int | None = None  # when the first of its GPUs failed, or None

    @property
    def gang(self) -> str:
        """Return the gang id, `run:fence`."""
        return f"{self.run_id}:{self.fence}"

    @property
    def numbers(self) -> range:
        """Return the numbers of its processes."""
        return range(self.first, self.first + self.world_size)

    @property
    def cause(self) -> Failure | None:
        """Return the failure that explains the end."""
        return root_cause(self.failures, self.stop_ns)


class GangPlaced(msgspec.Struct, frozen=True):
    """The gang has its GPUs and a stem."""


class Preparing(msgspec.Struct, frozen=True):
    """What the ranks start from is still being made ready, and it gets on."""


class RanksNotStarted(msgspec.Struct, frozen=True):
    """Ranks could not be started; no user code has run."""

    reason: Reason
    detail: str


class RankExecuting(msgspec.Struct, frozen=True):
    """A rank is about to run its first user byte."""

    rank: int


class RankReturned(msgspec.Struct, frozen=True):
    """A rank's result is durable."""

    rank: int


class RankFailed(msgspec.Struct, frozen=True):
    """A rank reported a failure."""

    failure: Failure


class RankExited(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process was reaped."""

    rank: int
    signal: int | None  # the signal that ended it, or None
    out_of_memory: bool = False  # the kernel's counters say it was ended for memory
    detail: str = ""  # a sentence for people


class StemLost(msgspec.Struct, frozen=True, kw_only=True):
    """The parent of the ranks is gone."""

    detail: str
    out_of_memory: bool = False


class StopRequested(msgspec.Struct, frozen=True):
    """The attempt is to end before its end: its user asked, or the server did."""

    why: StopReason


class HangConfirmed(msgspec.Struct, frozen=True):
    """At least one rank has stood still, and none has said a word, for as long as `hang_timeout` allows."""

    detail: str


class GpuFailed(msgspec.Struct, frozen=True):
    """The driver says that a GPU of the attempt failed; its rank may not have noticed yet."""

    detail: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; `wake_ns` says when this is next of interest."""


class TreeEmpty(msgspec.Struct, frozen=True):
    """No process of the attempt is left."""


class LeaseExpired(msgspec.Struct, frozen=True):
    """The server has not answered for as long as it may; soon it will count the attempt as gone."""


class Released(msgspec.Struct, frozen=True):
    """Every rank has returned, on every node."""


class PeerFailed(msgspec.Struct, frozen=True):
    """The attempt failed on another of its nodes."""

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
    """Return the failure that explains the others: the first in time, lowest rank on a tie.

    A rank that only says its peer went away explains nothing while any other failure is known. After the stop began,
    only a crash counts (a rank that dies has closed its sockets before it can be reaped); exceptions from then on are
    consequences. A GPU that failed explains whatever its rank says of that, and may be heard of a moment later. That it
    failed on another node explains what ranks say of their peers, and no crash.
    """

    def weight(failure: Failure) -> tuple[bool, bool, bool, int, int]:
        is_of_a_rank, is_of_here = failure.reason is not Reason.GPU_LOST, failure.reason is not Reason.PEER_FAILED
        rank = -1 if failure.rank is None else failure.rank
        return (is_of_a_rank, failure.peer_lost, failure.peer_lost and is_of_here, failure.at_ns, rank)

    crashes = (Reason.RANK_SIGNAL, Reason.HOST_OOM, Reason.GPU_LOST)
    eligible = [f for f in failures if stop_ns is None or f.at_ns <= stop_ns or f.reason in crashes]
    return min(eligible or failures, key=weight, default=None)


class FactKind(StrEnum):
    """The event that a fact records."""

    RESERVED = "reserved"
    HYDRATING = "hydrating"  # the devices wait for the environment
    STARTING = "starting"  # it is there: the ranks are started
    EXEC = "exec"
    HELD = "held"
    ALIVE = "alive"
    STOPPING = "stopping"  # the ranks are to end, or have done what they had to
    EXITED = "exited"
    FREED = "freed"


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record of what happened to an attempt on a node.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        seq: number within the attempt; ``(attempt, seq)`` names the fact.
        kind: what happened.
        boot_id: the boot in which `boottime_ns` counts.
        boottime_ns: nanoseconds since boot; all durations come from it.
        wall_ns: nanoseconds since 1970; only places the fact on a calendar.
        gpus: identifiers of the devices lent.
        cpus: cores lent; 0 when they were not limited.
        memory_bytes: host memory lent; 0 when it was not limited.
        grace_ms: of `stopping`, where it was asked of the ranks: how long they may take, which is as long as they are
            billed at most; else None.
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
    """Return the fact that an attempt was still alive at a boottime, after the last one that is known of it."""
    return msgspec.structs.replace(
        last,
        seq=last.seq + 1,
        kind=FactKind.ALIVE,
        boottime_ns=at_ns,
        wall_ns=last.wall_ns + at_ns - last.boottime_ns,
        grace_ms=None,
    )


def distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts of one attempt in their order, each once.

    Raises InvalidValue when they are of several attempts, or two different ones share a number.
    """
    ordered = sorted(facts, key=lambda fact: fact.seq)
    for fact, following in pairwise(ordered):
        if fact.attempt != following.attempt:
            attempts = ", ".join(sorted({each.attempt for each in ordered}))
            raise InvalidValue(f"a charge is for one attempt, these facts are of {attempts}")
        if fact.seq == following.seq and fact != following:
            raise InvalidValue(f"two different facts of attempt {fact.attempt} carry the number {fact.seq}")
    return [fact for fact, following in pairwise(ordered) if fact.seq != following.seq] + ordered[-1:]
