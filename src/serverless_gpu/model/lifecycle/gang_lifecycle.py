"""Lifecycle of a multi-node gang: combines the states of its nodes into the state of one attempt.

A `Crew` is the part of a gang on one node: a supervisor and its ranks. In the text below, "node" means a `Crew`.

    nodes: STARTING RUNNING UNREACHABLE STOPPING, halted?, returned?, over?  ── fold ─▶ the attempt's state
                                                                                     ├─ the cause, decided once
                                                                                     ├─ other nodes must stop
                                                                                     ├─ all returned: ranks may exit
                                                                                     └─ all over: the attempt's end

Each node reports the state of its own ranks to the server. `fold` combines the reports. With one node, `fold` returns
that node's state.

- **The cause** is the first node that failed by itself. A closed connection of a peer is a weak cause while other nodes
  may report more. A dead process is a weak cause while another node is silent. The report of a node that failed by
  itself or was lost replaces a weak cause once. A replaced cause can change again only for a failed GPU.

- **A node that stopped after a stop request** is not the cause, unless the kernel shows an earlier crash. After a stop
  request for the run, all failures are consequences of the request.

- **An attempt ends only after the attempt has ended on all nodes**, because another attempt could collide with
  remaining processes. The caller can learn the cause earlier when no attempt follows (`early_reasons`).

- **Ranks that have returned on one node wait for ranks on other nodes.** Other ranks would fail without the rendezvous
  store of rank 0, which is on rank 0's node. If no rank fails and no stop request exists, the server decides once that
  all ranks may exit. The run then succeeds when its results arrive.

- **A node does not wait for silent nodes.** When all ranks of a node have returned and all nodes with unreturned ranks
  are silent, the node's ranks may exit (`may_leave`). The other nodes still decide how the attempt ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp

_ORDER = (State.STARTING, State.RUNNING, State.STOPPING)
_CRASHES = frozenset({Reason.RANK_SIGNAL, Reason.HOST_OOM, Reason.GPU_LOST})
"""Reasons that the kernel or the GPU driver reports, which are valid even after a stop request."""
_OF_SILENCE = (
    Reason.NODE_GONE,
    Reason.NODE_REBOOTED,
    Reason.NODE_PARTITIONED,
    Reason.SUPERVISOR_LOST,
    Reason.SUPERVISOR_KILLED,
    Reason.TIMEOUT,
)
"""Possible final reasons of a silent node, besides the reasons that always prevent another attempt."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of an early end on one node, which the node's supervisor reports immediately.

    Attributes:
        rank: number of the failed process, or None for all processes of the node.
        peer_lost: True if the rank only reported a closed connection of a peer.
        detail: a one-line message for users.
    """

    reason: Reason
    rank: int | None = None
    peer_lost: bool = False
    detail: str = ""


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt on one node."""

    reason: Reason
    began: bool = False  # True if user code of the node's ranks had started.
    proven: bool = True  # True if all processes of the attempt on the node have ended.
    given_up: bool = False  # True if the end is certain without a report: the node restarted or never reconnected.
    rank: int | None = None  # The fields `rank`, `peer_lost` and `detail` mean the same as in `Halt`.
    peer_lost: bool = False
    detail: str = ""


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a gang's state on one node that affects other nodes."""

    number: int
    # State of the node, one of STARTING, RUNNING, UNREACHABLE and STOPPING. `fold` ignores the state once `over` is
    # set.
    state: State = State.STARTING
    before: State | None = None  # State of the node before UNREACHABLE, or None.
    began: bool = False  # True if user code of the node's ranks has started.
    returned: bool = False  # True if all ranks of the node have returned and wait for other nodes.
    halt: Halt | None = None  # Reason of an early end that the node has reported, or None.
    over: Over | None = None  # End of the attempt on the node, or None.


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a gang ends early."""

    # Number of the node that caused the end, or None if the server decided the end. The server decides the end after a
    # stop request, or if nodes cannot connect.
    crew: int | None
    reason: Reason
    rank: int | None = None
    detail: str = ""
    final: bool = True  # True if no later report can replace the cause.
    # Numbers of two nodes that cannot connect to each other, or None for other causes.
    apart: tuple[int, int] | None = None
    silent: bool = False  # True if a node became silent before any user code could start.


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """Combined state of a gang on all its nodes."""

    # State of the attempt until its end. A silent node makes the state UNREACHABLE. Without silent nodes, a stopping
    # node makes the state STOPPING. In all other cases, the nodes' least advanced state applies.
    state: State
    before: State | None  # Combined state without the silent nodes, or None if no node is silent.
    began: bool  # True if user code has started on any node.
    cause: Cause | None  # Cause of the gang's early end, or None.
    releases: bool  # True if all ranks have returned and may exit.
    # End of the attempt after the attempt has ended on all nodes, or None.
    over: AttemptEnded | GivenUp | None


def fold(
    crews: Sequence[Crew], cause: Cause | None = None, *, stop: StopReason | None = None, released: bool = False
) -> Fold:
    """Return the combined state of a gang from its nodes, in the order of their numbers."""
    began = any(crew.began or (crew.over is not None and crew.over.began) for crew in crews)
    cause = _cause(crews, cause, stop=stop, released=released)
    is_silent = any(crew.over is None and crew.state is State.UNREACHABLE for crew in crews)
    untroubled = cause is None and stop is None
    releases = released or (untroubled and all(crew.returned or _succeeded(crew) for crew in crews))
    awaited = [crew for crew in crews if not _succeeded(crew)]
    known = _known(crews if releases else awaited or crews)
    return Fold(
        state=State.UNREACHABLE if is_silent else known,
        before=known if is_silent else None,
        began=began,
        cause=cause,
        releases=releases,
        over=_over(crews, cause, began=began) if all(crew.over is not None for crew in crews) else None,
    )


def must_stop(crew: Crew, cause: Cause | None) -> bool:
    """Return True if a node must stop its ranks because the gang ends early."""
    return cause is not None and crew.over is None and crew.halt is None


def may_leave(crew: Crew, crews: Sequence[Crew]) -> bool:
    """Return True if a node's ranks may exit because all nodes with unreturned ranks are silent."""
    awaited = [other for other in crews if not other.returned and not _succeeded(other)]
    are_silent = all(other.over is None and other.state is State.UNREACHABLE for other in awaited)
    return crew.returned and bool(awaited) and are_silent


def early_reasons(crews: Sequence[Crew], cause: Cause | None, quiet: Collection[int] = ()) -> tuple[Reason, ...]:
    """Return the possible reasons of a gang's end before all nodes have ended, most likely first.

    The reasons are known if the attempt has ended on the causing node, unless a later report can replace the cause. The
    reasons are also known if the attempt has ended on all nodes that are not silent. The caller need not wait for proof
    that a silent node is gone. The caller must check that no reason leads to another attempt.

    The result is empty while the reasons are unknown, or if the server decided the end.
    """
    if cause is None or cause.crew is None:
        return ()
    own = crews[cause.crew]
    # A later report of a failed GPU replaces every cause.
    reasons = (_explained(crews, cause), Reason.GPU_LOST)
    if cause.final and own.over is not None:
        return reasons
    are_over = all(crew.over is not None or crew.number in quiet for crew in crews)
    return (*reasons, *_OF_SILENCE) if are_over else ()


def _known(crews: Sequence[Crew]) -> State:
    states = [(crew.before or State.STARTING) if crew.state is State.UNREACHABLE else crew.state for crew in crews]
    if any(crew.over is not None or state is State.STOPPING for crew, state in zip(crews, states, strict=True)):
        return State.STOPPING
    return min(states, key=_ORDER.index)


def _succeeded(crew: Crew) -> bool:
    return crew.over is not None and MEANINGS[crew.over.reason].state is State.SUCCEEDED


def _cause(crews: Sequence[Crew], before: Cause | None, *, stop: StopReason | None, released: bool) -> Cause | None:
    if before is not None and before.final:
        return before
    found = [cause for crew in crews if (cause := _story(crew, crews, released=released)) is not None]
    if stop is not None and before is None:
        # After a stop request, only a failed GPU or a certainly lost node replaces the stop request as the cause.
        given_up = {crew.number for crew in crews if crew.over is not None and crew.over.given_up}
        proofs = [cause for cause in found if cause.reason is Reason.GPU_LOST or cause.crew in given_up]
        asked = Cause(crew=None, reason=STOPPED_BY[stop])
        return proofs[0] if proofs else asked if found else None
    final = next((cause for cause in found if cause.final), None)
    return final or before or (found[0] if found else None)


def _story(crew: Crew, crews: Sequence[Crew], *, released: bool) -> Cause | None:
    """Return the cause that a node reports, or None.

    A node that continues, succeeded, or ended after a stop request reports no cause.
    """
    halt, over = crew.halt, crew.over
    has_said = halt is not None and halt.reason is not Reason.PEER_FAILED
    if over is not None and over.given_up and not (has_said and halt is not None and not halt.peer_lost):
        return Cause(crew=crew.number, reason=over.reason, detail=over.detail)
    if has_said and halt is not None and not (released and crew.returned):
        # The signal is not a final cause, because a silent node may have killed the process indirectly.
        doubtful = halt.reason is Reason.RANK_SIGNAL and any(other.state is State.UNREACHABLE for other in crews)
        final = not halt.peer_lost and not doubtful
        return Cause(crew=crew.number, reason=halt.reason, rank=halt.rank, detail=halt.detail, final=final)
    if over is None or _succeeded(crew) or over.reason is Reason.PEER_FAILED:
        return None
    return Cause(crew=crew.number, reason=over.reason, rank=over.rank, detail=over.detail, final=not over.peer_lost)


def _over(crews: Sequence[Crew], cause: Cause | None, *, began: bool) -> AttemptEnded | GivenUp:
    ends = [crew.over for crew in crews if crew.over is not None]
    proven = all(over.proven for over in ends)
    if cause is None:
        if all(_succeeded(crew) for crew in crews):
            return AttemptEnded(ends[0].reason, began=began, proven=proven)
        # The attempt failed on all nodes without a reported cause.
        return AttemptEnded(Reason.RUNTIME_LOST if began else Reason.GANG_START, began=began, proven=proven)
    lost = ends[cause.crew] if cause.crew is not None else None
    if lost is not None and lost.given_up and lost.reason is cause.reason and proven:
        return GivenUp(cause.reason)
    return AttemptEnded(_explained(crews, cause), began=began, proven=proven, uncounted=cause.silent and not began)


def _explained(crews: Sequence[Crew], cause: Cause) -> Reason:
    """Return the reason that best explains a gang's end.

    A node's later failure may be more specific than the cause.
    """
    if any(crew.over is not None and crew.over.reason is Reason.GPU_LOST for crew in crews):
        return Reason.GPU_LOST
    over = crews[cause.crew].over if cause.crew is not None else None
    if over is None or over.given_up or MEANINGS[over.reason].state is State.SUCCEEDED:
        return cause.reason
    says_more = not cause.final and over.reason is not Reason.PEER_FAILED
    return over.reason if says_more or over.reason in _CRASHES else cause.reason
