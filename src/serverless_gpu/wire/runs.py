"""Runs: how they are estimated, asked for, listed, watched and stopped.

POST   /estimates                       EstimateRequest  → EstimateView; nothing of it is kept
POST   /runs                            RunRequest → RunView, or with `Accept: text/event-stream` its stream at once
GET    /runs?state&owner&team&name&tag&limit&cursor&costs → RunPage
GET    /runs/{run}                                       → RunView
GET    /runs/{run}/events?after&offsets&ranks            → stream of `StreamMessage`
POST   /runs/{run}/stop                 StopRequest      → RunView
GET    /runs/{run}/logs/{rank}/{stream}?fence&offset&limit → bytes; `SGPU-Next-Offset`, `-Complete`, `-Size`
                                                           `stream`: stdout, stderr, or telemetry of node `rank`
GET    /runs/{run}/results                               → FileList of `results/<rank>.pkl`
GET    /runs/{run}/files?fence                           → FileList
GET    /runs/{run}/files/{name}?fence                    → bytes, with Range
GET    /runs/{run}/receipt?fence&crew                    → the receipt; of several nodes, one for all, or of one
GET    /runs/{run}/attempts                              → AttemptList
GET    /runs/{run}/cost                                  → CostView
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
    """What a run used so far, over all of its attempts, and what that costs."""

    id: str
    cost: Cost


class Target(Request, frozen=True, kw_only=True):
    """What the node has to be like.

    Attributes:
        machine: `ambient.machine()` of the caller when ranks import its files where they lie; "" for any node.
        caller: `ambient.machine()` of the caller in any case: its interpreter is there.
        python: version of the caller's interpreter, as ``"3.11"``.
        platform: for example ``"linux-x86_64"``.
    """

    machine: str = ""
    caller: str = ""
    python: str
    platform: str


class RunRequest(Request, frozen=True, kw_only=True):
    """A run as it is asked for. The same identifier and the same body again mean the same run.

    Attributes:
        id: made by the client (`ambient.new_run_id`) and written to its disk before this is sent.
        spec: what to run.
        target: what the node has to be like.
        context: `node.protocol.Context` as JSON: what ranks take on of the caller. Opaque to the server, which keeps it
            encrypted (it holds variables) and gives it to the node only.
        call: the pickled call, up to `INLINE_BYTES_MAX`; None when `spec.payload` has it as a blob, or has none.
        snapshot: address of the environment ranks import from; "" for the caller's own files.
        version: of the client's package.
    """

    id: str
    spec: RunSpec
    target: Target
    context: msgspec.Raw
    call: bytes | None = None
    snapshot: str = ""
    version: str = ""


class CrewView(Answer, frozen=True, kw_only=True):
    """What an attempt on several nodes has on one of them.

    Attributes:
        number: of the node within the attempt, from 0 on: NODE_RANK.
        node: its name.
        state: what it says of the run, UNREACHABLE while nothing is heard of it, or how it ended there.
        first_rank: the lowest global rank there, where each device has a rank.
        gpus: how many devices it has there.
        sentence: what the node says about it.
        heard_ns: when it was heard of last, up to 15 s behind.
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
    """A run as everybody who may see it sees it.

    Attributes:
        fence: number of the current attempt; 0 before the first.
        sentence: what it waits for, and who has it; or why it ended.
        node: name of the node it is on, of several all of them with commas, or "".
        world_size: ranks; 0 while that is not known.
        stop: why it is asked to stop, or None.
        deduplicated: whether this answers a request that had come before.
        finished: whether state, files and receipt are final.
        tracked: link to it in MLflow, once known.
        waiting: what it waits for, part by part, while it does and somebody has looked; `sentence` says the same.
        crews: what it has on each of its nodes, where it is on several.
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
        """Return how many processes of the user's it has, one for each device or node; None while that is not known."""
        if self.spec.per_node:
            return len(self.crews) or (1 if self.node else None)
        return self.world_size or self.spec.resources.gpus


class RunPage(Answer, frozen=True, kw_only=True):
    """Runs, newest first.

    Attributes:
        cursor: asks for the next page, "" when there is none.
        costs: what each used so far, where that was asked for.
    """

    runs: tuple[RunView, ...]
    cursor: str = ""
    costs: tuple[CostView, ...] = ()


class StopRequest(Request, frozen=True, kw_only=True):
    """Stop a run. `preempt` and `drain` let a run that asked for `resume` continue as a new attempt."""

    reason: StopReason = StopReason.CANCEL


class FileView(Answer, frozen=True, kw_only=True):
    """One output of an attempt, as it lies in the attempt's directory on the node.

    Attributes:
        name: `results/<rank>.pkl`, `failures/<rank>.json`, `.pkl`, `.stack`, `hang-<n>.txt`, `receipt.json` …
            Of several nodes, whose files lie side by side, `hang-<number of the node>-<n>.txt`.
        inline: its bytes, when they are few; else they are read from `/runs/{run}/files/{name}`.
    """

    name: str
    size: int
    inline: bytes | None = None


class FileList(Answer, frozen=True, kw_only=True):
    """Outputs of an attempt, by name."""

    fence: int
    files: tuple[FileView, ...]


class AttemptView(Answer, frozen=True, kw_only=True):
    """One try at a run.

    Attributes:
        secrets: which versions it has, as ``HF_TOKEN@3``.
        sentence: why it was asked to stop, where that is what ended it.
        crews: what it has on each of its nodes, where it is on several.
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
    """All tries at a run, in order."""

    attempts: tuple[AttemptView, ...]


# --- the stream -------------------------------------------------------------------------------------------------------
#
# A reader that lost its connection asks again with `after` = the last `seq` it has, and `offsets` =
# "<fence>.<rank>.<stream>:<next byte>,…": then nothing is missing and nothing comes twice. `ranks` = "all" or
# "0,3,…" asks for the output of these instead of those that the run shows live (`spec.ranks_log`); either way no more
# than `LIVE_STREAMS_MAX` streams come.


class StateMessage(Answer, frozen=True, kw_only=True, tag="state"):
    """The run's state, or the sentence about it, is another one.

    Attributes:
        seq: number of the event; 0 where it is none: only the sentence, or the link, is news.
        tracked: link to the run in MLflow; "" where that is not known, or was said before.
        waiting: the parts of a sentence about a wait.
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
    """Bytes a rank wrote, from `offset` of its stream on."""

    fence: int
    rank: int
    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class GapMessage(Answer, frozen=True, kw_only=True, tag="gap"):
    """A flood: so many bytes from `offset` on are not shown here; they are in the log."""

    fence: int
    rank: int
    stream: Literal["stdout", "stderr"]
    offset: int
    size: int


class EndedMessage(Answer, frozen=True, kw_only=True, tag="ended"):
    """No rank runs any more; this is final.

    Of a run on several nodes one with `seq` 0 may come before it, while nodes still clean up: what ended the run is
    known, and nothing is tried again. What failed on others meanwhile is in the last one.

    Attributes:
        ending: `node.protocol.Stopped` as JSON; unset when no node could tell: state and reason are all there is.
        files: outputs of the last attempt.
    """

    seq: int
    fence: int
    state: State
    reason: Reason
    sentence: str = ""
    ending: Json = msgspec.UNSET
    files: tuple[FileView, ...] = ()


class SettledMessage(Answer, frozen=True, kw_only=True, tag="settled"):
    """Devices were checked and given back; the last message of a stream.

    Attributes:
        receipt: `model.receipt.Receipt` as JSON; unset when there is none.
    """

    receipt: Json = msgspec.UNSET


class AcceptedMessage(Answer, frozen=True, kw_only=True, tag="accepted"):
    """The first message of a stream: the run is durable."""

    run: RunView


StreamMessage = AcceptedMessage | StateMessage | LogMessage | GapMessage | EndedMessage | SettledMessage


class EstimateRequest(Request, frozen=True, kw_only=True):
    """A run that is not asked for: when would it start?

    Attributes:
        spec: what it would run, as for `RunRequest`, without what it would call.
        target: what the node has to be like.
        snapshot: whether its ranks would import a captured environment.
    """

    spec: RunSpec
    target: Target
    snapshot: bool = False


class EstimateView(Answer, frozen=True, kw_only=True):
    """When a run would start if it were asked for now.

    Attributes:
        at_ns: the expected time; None where it is unknown.
        is_bound: whether that is the latest time.
        node: where, by name, or "".
        nodes: where, by name, of a gang on several nodes.
        basis: what that rests on, or why it is unknown, in words.
        place: how many runs are ahead of it for the same kind of devices, plus one; 0 when it starts at once.
        impossible: whether nothing that has joined can ever serve it.
        now_ns: the server's time.
        waiting: what it would wait for, part by part; None where it would not.
        cost: what it would cost.
        policy: the usage policy that it would be under, or "".
        budgets: in words, what is left of the budgets that it would count for.
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
    """Return when a run would start, as it travels."""
    parts = msgspec.structs.asdict(estimate)
    wait = parts.pop("wait")
    return EstimateView(now_ns=now_ns, waiting=None if wait is None else wait_view(wait), **parts)


def estimate_of(view: EstimateView) -> StartEstimate:
    """Return a view as the scheduler's estimate."""
    wait = None if view.waiting is None else wait_of(view.waiting, "")
    parts = {name: getattr(view, name) for name in StartEstimate.__struct_fields__ if name != "wait"}
    return StartEstimate(**parts, wait=wait)
