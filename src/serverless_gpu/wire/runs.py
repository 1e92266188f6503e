"""Defines bodies that estimate, submit, list, follow and stop runs.

Routes:

    POST   /estimates                       EstimateRequest  → EstimateView; the server stores nothing
    POST   /runs                            RunRequest → RunView, or with `Accept: text/event-stream` its stream at once
    GET    /runs?state&owner&team&name&tag&type&from_ns&to_ns&text&sort&limit&cursor&costs → RunPage
    POST   /runs/stop                       BulkStopRequest  → BulkStopAnswer, with the outcome of each run
    GET    /runs/{run}                                       → RunView
    POST   /runs/{run}/again                AgainRequest     → RunView of a new run with the same spec and call
    GET    /runs/{run}/events?after&offsets&ranks            → stream of `StreamMessage`
    POST   /runs/{run}/stop                 StopRequest      → RunView
    GET    /runs/{run}/logs/{rank}/{stream}?fence&offset&limit → bytes; `SGPU-Next-Offset`, `-Complete`, `-Size`
                                                               `stream`: stdout, stderr, or telemetry of node `rank`
    GET    /runs/{run}/logs?fence&rank                       → LogList
    GET    /runs/{run}/logs/{rank}/{stream}/download?fence   → gzip file
    GET    /runs/{run}/log-matches?q&fence&rank&stream&cursor → LogMatches
    GET    /runs/{run}/telemetry?fence&node&from_ms&to_ms    → TelemetryView
    GET    /runs/{run}/results                               → FileList of `results/<rank>.pkl`
    GET    /runs/{run}/files?fence                           → FileList
    GET    /runs/{run}/files/{name}?fence                    → bytes, with Range
    GET    /runs/{run}/receipt?fence&crew                    → the receipt; for several nodes, the sum or one node's
    GET    /runs/{run}/attempts                              → AttemptList
    GET    /runs/{run}/cost                                  → CostView
    GET    /runs/{run}/timeline                              → Timeline: events, and who asked to stop the run
    GET    /runs/{run}/failure?fence                         → FailureView
    GET    /runs/{run}/arguments                             → ArgumentsView
    GET    /runs/{run}/environment                           → RunEnvironmentView
    GET    /runs/{run}/changes                               → ComparisonView with the previous run of the same name
    GET    /comparisons?runs                                 → ComparisonView of two to eight runs
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.model.cost import Cost, CostEstimate
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.scheduling.values import StartEstimate
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.base import Answer, Json, Request
from serverless_gpu.wire.queue import WaitView, wait_of, wait_view


class CostView(Answer, frozen=True, kw_only=True):
    """The current usage and cost of all attempts of a run."""

    id: str
    cost: Cost


class Target(Request, frozen=True, kw_only=True):
    """The requirements of a run for its nodes.

    Attributes:
        machine: `ambient.machine()` of the caller if ranks import the caller's files directly, or "" for any node.
        caller: `ambient.machine()` of the caller, where the caller's interpreter is installed.
        python: version of the caller's interpreter, such as ``"3.11"``.
        platform: platform of the caller, such as ``"linux-x86_64"``.
    """

    machine: str = ""
    caller: str = ""
    python: str
    platform: str


class RunRequest(Request, frozen=True, kw_only=True):
    """A run submission. A repeated request with the same identifier and body returns the same run.

    Attributes:
        id: identifier from `ambient.new_run_id`. The client writes it to disk before it sends the request.
        spec: specification of the run.
        target: requirements for the node.
        context: `node.protocol.Context` as JSON, which ranks inherit from the caller. The server encrypts the stored
            context, because it contains environment variables. The server sends the context only to the node.
        call: the pickled call, up to `INLINE_BYTES_MAX`. None if `spec.payload` is a program or refers to a blob.
        snapshot: address of the environment that ranks import, or "" for the caller's own files.
        version: version of the client's package.
        arguments: arguments of the call as text, for display only (`model.arguments`). None from earlier clients, and
            for a program.
    """

    id: str
    spec: RunSpec
    target: Target
    context: msgspec.Raw
    call: bytes | None = None
    snapshot: str = ""
    version: str = ""
    arguments: dict[str, str] | None = None


class CrewView(Answer, frozen=True, kw_only=True):
    """The part of an attempt on one of several nodes.

    Attributes:
        number: number of the node within the attempt, starting at 0 (NODE_RANK).
        node: name of the node.
        state: last reported state, or the final state on this node. UNREACHABLE without recent reports.
        first_rank: lowest global rank on this node, for runs with one rank per device.
        gpus: number of devices on this node.
        sentence: message of the node about the run.
        heard_ns: time of the last report. The value may be up to 15 s old.
        Times are nanoseconds since 1970.
    """

    number: int
    node: str
    state: State
    reason: Reason | None = None
    first_rank: int = 0
    gpus: int = 0
    sentence: str = ""
    heard_ns: int = 0
    started_ns: int | None = None
    ended_ns: int | None = None


class RunView(Answer, frozen=True, kw_only=True):
    """The API view of a run.

    Attributes:
        fence: number of the current attempt, or 0 before the first.
        sentence: the reason why the run waits or has ended. A wait reason contains the holders of the devices.
        node: name of the node, names of several nodes separated by commas, or "".
        world_size: number of ranks, or 0 while unknown.
        stop: reason of the stop request, or None.
        deduplicated: True if the server had already received this request.
        finished: True if state, files and receipt are final.
        tracked: link to the run in MLflow, if known.
        waiting: the structured form of `sentence` during a wait, after the first scheduling pass.
        crews: parts of the attempt by node, for an attempt on several nodes.
        Times are nanoseconds since 1970.
    """

    id: str
    name: str
    state: State
    reason: Reason | None
    sentence: str
    fence: int
    owner: str
    team: str
    pool: str
    node: str
    gpu_type: str
    world_size: int
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    stop: StopReason | None
    spec: RunSpec
    snapshot: str = ""
    deduplicated: bool = False
    finished: bool = False
    tracked: str = ""
    waiting: WaitView | None = None
    crews: tuple[CrewView, ...] = ()

    @property
    def processes(self) -> int | None:
        """The number of user processes of the run: one per device, or one per node. None if unknown."""
        if self.spec.per_node:
            return len(self.crews) or (1 if self.node else None)
        return self.world_size or self.spec.resources.gpus


class RunPage(Answer, frozen=True, kw_only=True):
    """A page of runs, newest first unless the client requested another order.

    Attributes:
        cursor: cursor of the next page, or "" on the last page.
        previous: cursor of the previous page, or "" on the first page.
        costs: usage and cost of each run up to now, if the client requested costs.
    """

    runs: tuple[RunView, ...]
    cursor: str = ""
    costs: tuple[CostView, ...] = ()
    previous: str = ""


class StopRequest(Request, frozen=True, kw_only=True):
    """A request to stop a run.

    After a stop with `preempt` or `drain`, a run with `resume` continues in a new attempt.
    """

    reason: StopReason = StopReason.CANCEL


class BulkStopRequest(Request, frozen=True, kw_only=True):
    """A request to stop several runs. The server decides about each run separately."""

    runs: tuple[str, ...]
    reason: StopReason = StopReason.CANCEL


class StopOutcome(Answer, frozen=True, kw_only=True):
    """The outcome of a bulk stop for one run.

    Attributes:
        code: code of the error class in `errors.py` if the server did not stop the run, else "".
        message: the error's message, else "".
    """

    id: str
    state: State | None = None
    code: str = ""
    message: str = ""


class BulkStopAnswer(Answer, frozen=True, kw_only=True):
    """The outcome of a bulk stop by run, in the order of the request."""

    outcomes: tuple[StopOutcome, ...]


class AgainRequest(Request, frozen=True, kw_only=True):
    """A request to submit an own run again, with its spec, call, arguments and environment.

    Attributes:
        id: identifier of the new run, from `ambient.new_run_id`. A repeated request returns the same run.
    """

    id: str


class FileView(Answer, frozen=True, kw_only=True):
    """An output file of an attempt, with its name in the attempt's directory on the node.

    Attributes:
        name: `results/<rank>.pkl`, `failures/<rank>.json`, `.pkl`, `.stack`, `hang-<n>.txt`, `receipt.json` … For an
            attempt on several nodes, `hang-<number of the node>-<n>.txt`.
        inline: bytes of a small file. Clients read larger files from `/runs/{run}/files/{name}`.
    """

    name: str
    size: int
    inline: bytes | None = None


class FileList(Answer, frozen=True, kw_only=True):
    """The output files of an attempt, sorted by name."""

    fence: int
    files: tuple[FileView, ...]


class AttemptView(Answer, frozen=True, kw_only=True):
    """An attempt of a run, with its nodes, state and times.

    Attributes:
        secrets: versions of the attempt's secrets, such as ``HF_TOKEN@3``.
        sentence: reason of the stop request, if a stop request ended the attempt.
        crews: parts of the attempt by node, for an attempt on several nodes.
    """

    fence: int
    state: State
    reason: Reason | None
    node: str
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    secrets: tuple[str, ...] = ()
    sentence: str = ""
    crews: tuple[CrewView, ...] = ()


class AttemptList(Answer, frozen=True, kw_only=True):
    """All attempts of a run, oldest first."""

    attempts: tuple[AttemptView, ...]


# --- details of a run -------------------------------------------------------------------------------------------------


class EventView(Answer, frozen=True, kw_only=True):
    """A change of a run's state, or a remark about an attempt.

    Attributes:
        seq: number of the event within the run, from 1.
        sentence: the reason for the change.
        at_ns: time of the change, nanoseconds since 1970.
    """

    seq: int
    fence: int
    at_ns: int
    state: State
    reason: Reason | None = None
    sentence: str = ""
    node: str = ""


class StopView(Answer, frozen=True, kw_only=True):
    """A request to stop a run, with its author. The principal ``server`` enforces limits and calendars."""

    at_ns: int
    principal: str
    reason: str = ""
    because: str = ""


class Timeline(Answer, frozen=True, kw_only=True):
    """The events of a run and the requests to stop the run, oldest first."""

    events: tuple[EventView, ...]
    stops: tuple[StopView, ...] = ()


class HangView(Answer, frozen=True, kw_only=True):
    """Ranks that waited for other ranks when the node ended a hung run.

    Attributes:
        stacks: Python stacks of a few ranks that explain the hang, by rank.
        file: name of the file with the stacks of all ranks.
    """

    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...]
    stacks: dict[int, str] = msgspec.field(default_factory=dict)
    file: str = ""


class FailureView(Answer, frozen=True, kw_only=True):
    """The failure of an attempt, from the reports of its nodes. The server unpickles nothing.

    Attributes:
        rank: rank that failed first, or None.
        node: node of that rank, or the node of the attempt.
        exception: name of the exception's class, such as ``torch.OutOfMemoryError``, or "".
        message: message of the exception.
        notes: notes of the exception.
        traceback: traceback of the exception.
        stack: Python stack of the rank when a signal ended the rank.
        exit_code: exit code of a failed command, or None.
        signal: number of the signal that ended the rank, or None.
        hint: probable cause of the failure according to the node, or "".
        advice: what the user can do next.
        log_tail: last output of the rank.
        consequences: failures of other ranks that followed, and the number of further ones.
    """

    fence: int
    state: State
    reason: Reason
    sentence: str
    rank: int | None = None
    node: str = ""
    exception: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()
    traceback: str = ""
    stack: str = ""
    exit_code: int | None = None
    signal: int | None = None
    hint: str = ""
    advice: str = ""
    log_tail: str = ""
    consequences: tuple[str, ...] = ()
    hang: HangView | None = None


class ArgumentsView(Answer, frozen=True, kw_only=True):
    """The arguments of a run's call as text.

    Attributes:
        arguments: text by name, or None if the client sent no arguments.
        command: command line of a program, or "".
    """

    arguments: dict[str, str] | None = None
    command: str = ""


class RunUnitView(Answer, frozen=True, kw_only=True):
    """A unit of a run's environment: a distribution, code, or files of no distribution.

    Attributes:
        digest: beginning of the unit's address, for comparison.
        size: content bytes.
    """

    kind: str
    name: str
    version: str
    digest: str
    size: int
    files: int


class RunEnvironmentView(Answer, frozen=True, kw_only=True):
    """The environment of a run.

    Attributes:
        kind: ``live`` for ranks that import the caller's own files, or ``snapshot``.
        digest: beginning of the snapshot's address, or "".
        python: implementation and version of the interpreter.
        platform: platform, such as ``linux-x86_64``.
        captured_ns: time of the capture, or 0 if unknown.
        units: units of the snapshot, at most 5,000.
        missing: True if the server no longer stores the snapshot.
    """

    kind: str
    digest: str = ""
    python: str = ""
    platform: str = ""
    captured_ns: int = 0
    size: int = 0
    files: int = 0
    units: tuple[RunUnitView, ...] = ()
    missing: bool = False


class ComparisonRow(Answer, frozen=True, kw_only=True):
    """One property of several runs. A value is "" if a run has no such property."""

    label: str
    values: tuple[str, ...]
    differs: bool


class ComparisonSection(Answer, frozen=True, kw_only=True):
    """A group of properties, with differing ones first.

    Attributes:
        equal: number of further properties that are equal in all runs and omitted.
    """

    name: str
    rows: tuple[ComparisonRow, ...]
    equal: int = 0


class ComparisonView(Answer, frozen=True, kw_only=True):
    """A comparison of runs. It has no runs if there is nothing to compare with."""

    runs: tuple[RunView, ...] = ()
    sections: tuple[ComparisonSection, ...] = ()


# --- output and telemetry ---------------------------------------------------------------------------------------------


class LogFile(Answer, frozen=True, kw_only=True):
    """The size in bytes of one output stream of a rank, or of a node's telemetry."""

    rank: int
    stream: Literal["stdout", "stderr", "telemetry"]
    size: int


class LogList(Answer, frozen=True, kw_only=True):
    """The output streams of an attempt, sorted by rank.

    Attributes:
        fence: number of the attempt, or 0 before the first.
        complete: True if the attempt writes no more output.
        count: number of all output streams. `logs` contains the first ones.
    """

    fence: int
    complete: bool
    count: int = 0
    logs: tuple[LogFile, ...] = ()


class LogMatch(Answer, frozen=True, kw_only=True):
    """A line of output that contains the searched text.

    Texts are excerpts without terminal escape sequences.

    Attributes:
        line: number of the line in its stream, starting at 1.
        offset: offset of the line in its stream in bytes.
        text: the line around the match.
        start: position of the match in `text`, in characters.
        end: position after the match in `text`.
        before: the line before.
        after: the line after.
    """

    rank: int
    stream: Literal["stdout", "stderr"]
    line: int
    offset: int
    text: str
    start: int
    end: int
    before: str = ""
    after: str = ""


class LogMatches(Answer, frozen=True, kw_only=True):
    """A part of the matches in an attempt's output.

    Attributes:
        cursor: continues the search, or "" at the end of the output. A part without matches can have a cursor.
        scanned: number of bytes that this request has searched.
    """

    fence: int
    matches: tuple[LogMatch, ...]
    cursor: str = ""
    scanned: int = 0


class TelemetryLine(Answer, frozen=True, kw_only=True):
    """A line of a chart, with one value for each time of its chart; None where a value is missing.

    Attributes:
        label: the device, the rank or the node.
        minimum: lowest value of each bucket. Empty, like `maximum`, if each bucket has one value.
    """

    label: str
    mean: tuple[float | None, ...]
    minimum: tuple[float | None, ...] = ()
    maximum: tuple[float | None, ...] = ()


class TelemetryChart(Answer, frozen=True, kw_only=True):
    """A chart of telemetry.

    Attributes:
        name: identifier, such as ``gpu-memory``.
        limit: capacity of one device in the chart's unit, or None.
        omitted: number of devices or ranks without a line.
    """

    name: str
    title: str
    unit: Literal["percent", "bytes", "celsius", "watts"]
    lines: tuple[TelemetryLine, ...]
    limit: float | None = None
    omitted: int = 0


class TelemetryView(Answer, frozen=True, kw_only=True):
    """The downsampled telemetry of a node in an attempt. A gap has a time at which all lines are None.

    Attributes:
        nodes: numbers of the nodes that have sent telemetry.
        complete: True if the attempt sends no more telemetry.
        start_ms: time of the attempt's first sample, in milliseconds since 1970, or 0 without samples.
        end_ms: time of the last sample.
        step_ms: width of a bucket in milliseconds.
        samples: number of samples in the requested range.
        times_ms: time of the first sample in each bucket.
    """

    fence: int
    node: int
    nodes: tuple[int, ...] = ()
    complete: bool = False
    start_ms: int = 0
    end_ms: int = 0
    step_ms: int = 0
    samples: int = 0
    times_ms: tuple[int, ...] = ()
    charts: tuple[TelemetryChart, ...] = ()


# --- the stream -------------------------------------------------------------------------------------------------------
# After a connection failure, the client sends `after`, the last `seq` that it received, and `offsets` =
# "<fence>.<rank>.<stream>:<next byte>,…". The server resumes the stream exactly at the position in `after` and
# `offsets`. With `ranks` = "all" or "0,3,…", the reader requests the output of other ranks than the run's live ranks
# (`spec.ranks_log`). One event stream contains at most `LIVE_STREAMS_MAX` output streams.


class StateMessage(Answer, frozen=True, kw_only=True, tag="state"):
    """A change of a run's state or status message.

    Attributes:
        seq: number of the event, or 0 if only the message or the link has changed.
        tracked: link to the run in MLflow, or "" if it is unknown or already sent.
        waiting: the structured form of the message about a wait.
    """

    seq: int
    fence: int
    state: State
    reason: Reason | None = None
    sentence: str = ""
    node: str = ""
    at_ns: int = 0
    tracked: str = ""
    waiting: WaitView | None = None


class LogMessage(Answer, frozen=True, kw_only=True, tag="log"):
    """A piece of a rank's output. `offset` is the position of the piece in the output stream."""

    fence: int
    rank: int
    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class GapMessage(Answer, frozen=True, kw_only=True, tag="gap"):
    """A gap of `size` bytes in the live output at `offset`. The log file contains the missing bytes."""

    fence: int
    rank: int
    stream: Literal["stdout", "stderr"]
    offset: int
    size: int


class EndedMessage(Answer, frozen=True, kw_only=True, tag="ended"):
    """The message about the end of a run, after all ranks have ended.

    In a run on several nodes, the server may send an early ending message with `seq` 0 while nodes still clean up. The
    early ending message contains the final cause of a run without further attempts. The final ending message with a
    higher `seq` also contains the failures on further nodes.

    Attributes:
        ending: `node.protocol.Stopped` as JSON. Unset if no node could report, so that only the state and the reason
            are known.
        files: output files of the last attempt.
    """

    seq: int
    fence: int
    state: State
    reason: Reason
    sentence: str = ""
    ending: Json = msgspec.UNSET
    files: tuple[FileView, ...] = ()


class SettledMessage(Answer, frozen=True, kw_only=True, tag="settled"):
    """The last message of a stream, after the node has verified and released the devices.

    Attributes:
        receipt: `model.receipt.Receipt` as JSON. The field is unset for a run without a receipt.
    """

    receipt: Json = msgspec.UNSET


class AcceptedMessage(Answer, frozen=True, kw_only=True, tag="accepted"):
    """The first message of a stream, after the server has stored the run durably."""

    run: RunView


StreamMessage = AcceptedMessage | StateMessage | LogMessage | GapMessage | EndedMessage | SettledMessage


class EstimateRequest(Request, frozen=True, kw_only=True):
    """A request for the estimated start time of a run, without submitting the run.

    Attributes:
        spec: specification of the run, as in `RunRequest`, without its call.
        target: requirements for the node.
        snapshot: True if the ranks would import a captured environment.
    """

    spec: RunSpec
    target: Target
    snapshot: bool = False


class EstimateView(Answer, frozen=True, kw_only=True):
    """The estimated start time and cost of a run.

    Attributes:
        at_ns: expected start time, or None if unknown.
        is_bound: True if `at_ns` is the latest possible time.
        node: name of the node, or "".
        nodes: names of the nodes of a gang on several nodes.
        basis: the basis of the estimate, or the reason why the start time is unknown.
        place: number of earlier runs that need the same type of devices, plus one. 0 means an immediate start.
        impossible: True if no node that has joined can ever serve the run.
        now_ns: the server's time in nanoseconds since 1970.
        waiting: the structured form of the expected wait, or None without a wait.
        cost: estimated cost.
        policy: usage policy of the run, or "".
        budgets: sentences about the remaining amount of each budget that the run counts toward.
    """

    at_ns: int | None
    is_bound: bool = False
    node: str = ""
    nodes: tuple[str, ...] = ()
    basis: str
    place: int = 0
    impossible: bool = False
    now_ns: int
    waiting: WaitView | None = None
    cost: CostEstimate | None = None
    policy: str = ""
    budgets: tuple[str, ...] = ()


def estimate_view(estimate: StartEstimate, now_ns: int) -> EstimateView:
    """Convert the scheduler's start estimate to an `EstimateView`."""
    parts = msgspec.structs.asdict(estimate)
    wait = parts.pop("wait")
    return EstimateView(now_ns=now_ns, waiting=None if wait is None else wait_view(wait), **parts)


def estimate_of(view: EstimateView) -> StartEstimate:
    """Convert an `EstimateView` to the scheduler's start estimate."""
    wait = None if view.waiting is None else wait_of(view.waiting, "")
    parts = {name: getattr(view, name) for name in StartEstimate.__struct_fields__ if name != "wait"}
    return StartEstimate(**parts, wait=wait)
