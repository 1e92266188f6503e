"""An attempt as its node reports it: with its own token, fenced; of one on several nodes, each reports its crew.

    POST /attempts/{run}/{fence}/report     Report → ReportAnswer; also the heartbeat, every `heartbeat_s`
    GET  /attempts/{run}/{fence}/blobs/{digest}      → a part of the payload
    PUT  /blobs/{digest}, POST /blobs/missing        as for users (see blobs.py)

A report is applied whole or not at all, and may come twice: logs by their offset, facts and files by their name, states
because nothing goes backwards. An answer with `stale` means: this attempt is over for the server; stop it, keep
nothing running, report nothing more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.model.hangs.hang_detection import CrewObservation, InspectionRequest, Judgement, Silence
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.lifecycle.attempt import Fact, Reason, State, StopReason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import Chosen, CrewReach, Offer
from serverless_gpu.model.spec import BlobReference
from serverless_gpu.wire.base import Answer, Json, Request

NOT_SENT = "results do not get to the server: "
"""How a sentence begins that says so, and why: clients that wait for the run show it."""


class LogPiece(Request, frozen=True, kw_only=True):
    """Bytes of a file from `offset` on: what a rank wrote, or the samples of a node (`rank` is its number then)."""

    rank: int
    stream: Literal["stdout", "stderr", "telemetry"]
    offset: int
    data: bytes


class File(Request, frozen=True, kw_only=True):
    """An output of the attempt: its bytes, or where they were put as a blob before."""

    name: str
    size: int
    inline: bytes | None = None
    blob: BlobReference | None = None


class Ending(Request, frozen=True, kw_only=True):
    """How the attempt ended; every file it has was reported before or with it.

    Attributes:
        began: whether user code had started.
        stopped: `node.protocol.Stopped` as JSON; unset when its supervisor was lost.
        log_ends: where logs end on the node that the server had no room for: ``"<rank>.<stream>"`` → bytes.
        proven: whether the node's kernel says that no process of it is left; if not, there is no other attempt, and
            nothing is placed on the node until it is.
    """

    state: State
    reason: Reason
    began: bool
    stopped: Json = msgspec.UNSET
    log_ends: dict[str, int] = msgspec.field(default_factory=dict)
    proven: bool = True


class Report(Request, frozen=True, kw_only=True):
    """What is new about an attempt since the last report that was answered.

    Attributes:
        state: STARTING, RUNNING or STOPPING as the node sees it.
        sentence: what it waits for, or says about itself.
        world_size: ranks, once known.
        exec_ns: when user code began, nanoseconds since 1970 in the server's time, as far as the node knows that; None
            while it has not.
        ending: set once no rank runs any more.
        receipt: `model.receipt.Receipt` as JSON, once devices are given back; with it the attempt is settled.
        freed: no process of it is left, and its devices are given back; outputs may still be on their way.
        tracked: link to the run in MLflow, once known.
        offer: where this crew can be tried by the others, before they have met.
        reach: what it reached of the others, once all offers were told to it.
        returned: all of its ranks have returned, and wait for those on other nodes.
        halt: why it ends before its end, as soon as that is known: its ending may take a while.
        silence: of its ranks, of a gang on several nodes; None while they say something.
        seen: what it saw of its ranks when it was asked last.
        idle: how far its devices are from being idle for too long, of a gang on several nodes.
        saved: number of the newest attempt of the run whose checkpoints this node sees; 0 for none, or not known.
    """

    state: State
    sentence: str = ""
    world_size: int = 0
    gpus: tuple[str, ...] = ()
    exec_ns: int | None = None
    logs: tuple[LogPiece, ...] = ()
    facts: tuple[Fact, ...] = ()
    files: tuple[File, ...] = ()
    ending: Ending | None = None
    receipt: Json = msgspec.UNSET
    freed: bool = False
    tracked: str = ""
    offer: Offer | None = None
    reach: CrewReach | None = None
    returned: bool = False
    halt: Halt | None = None
    silence: Silence | None = None
    seen: CrewObservation | None = None
    idle: IdleVerdict = IdleVerdict.GO_ON
    saved: int = 0


class ReportAnswer(Answer, frozen=True, kw_only=True):
    """What the server makes of a report.

    Attributes:
        stale: the attempt is over for the server.
        stop: the run is to be stopped, and why.
        offsets: where a log piece did not continue what the server has: `"<rank>.<stream>"` → the offset it wants.
        partition_grace_s: seconds from the *start* of the request for which the attempt may go on without another
            answer.
        heartbeat_s: report at least this often.
        token: to be used from now on, or "": the one that was used is good for a while.
        offers: of all crews, once they are there, until this one has said what it reached.
        chosen: how the gang meets, once that is decided; user code waits for it.
        release: all ranks have returned, on every node: those here may exit.
        peer_failed: what failed on another node, for people, or "": this crew is to end, too.
        ask: the ranks of all nodes are silent, and to be looked at.
        judgement: what came of that, or of the last time.
        idle: how far devices of all nodes are; None where that is not known.
    """

    stale: bool = False
    stop: StopReason | None = None
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    partition_grace_s: float = 900.0
    heartbeat_s: float = 5.0
    token: str = ""
    offers: tuple[Offer, ...] = ()
    chosen: Chosen | None = None
    release: bool = False
    peer_failed: str = ""
    ask: InspectionRequest | None = None
    judgement: Judgement | None = None
    idle: IdleVerdict | None = None
