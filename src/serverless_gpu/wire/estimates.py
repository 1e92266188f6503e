"""When a run would start, and what it would cost: asked, answered, and nothing is kept of it.

POST   /estimates                       EstimateRequest  → EstimateView

Times are nanoseconds since 1970 by the server's clock.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.cost import CostEstimate
from serverless_gpu.model.scheduling.values import StartEstimate
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.base import Answer, Request
from serverless_gpu.wire.queue import WaitView, wait_of, wait_view
from serverless_gpu.wire.runs import Target


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
