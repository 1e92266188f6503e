"""What a run wants of the queue, made of its row: the one place where a `StoredRun` becomes a `QueuedRun`."""

from __future__ import annotations

import msgspec

from serverless_gpu.ambient import format_clock
from serverless_gpu.model.billing.budget import share_team
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.run_lifecycle import pause_s
from serverless_gpu.model.scheduling.duration_estimates import LEAVING_S, START_S, limit_s
from serverless_gpu.model.scheduling.values import QueuedRun
from serverless_gpu.model.spec import Function, Kernel
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records.runs.runs import StoredRun


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run beside its row.

    Attributes:
        failed: nodes on which an attempt of it was lost, or did not begin.
        preemptions: how often it had to make room.
        expected_s: how long it is likely to have devices, by earlier runs of its name.
        apart: pairs of nodes whose crews did not reach each other.
        second_principal: whether its owner is another principal than the one that pools without isolation serve.
    """

    failed: frozenset[str] = frozenset()
    apart: frozenset[tuple[str, str]] = frozenset()
    preemptions: int = 0
    expected_s: float | None = None
    second_principal: bool = False


NOTHING = Past()


def wanted(run: StoredRun, past: Past = NOTHING, *, now_ns: int) -> QueuedRun:
    """Return what a run wants.

    Args:
        run: as it is stored, or as it would be.
        past: what else is known.
        now_ns: nanoseconds since 1970.
    """
    spec, resources = run.spec, run.spec.resources
    not_before_ns, held = _held(run, now_ns)
    several, alone = _several(run)
    return QueuedRun(
        run_id=run.id,
        title=capacity.title(run),
        owner=run.owner,
        team=share_team(run.team, run.member_of),
        priority=run.priority,
        queued_ns=run.queued_ns,
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        several_nodes=several,
        alone=alone,
        pool=run.pool,
        machine=run.target.machine,
        platform=run.target.platform,
        python=_python(run),
        caller=run.target.caller,
        avoid=past.failed,
        apart=past.apart,
        not_before_ns=not_before_ns,
        held=held,
        limit_s=limit_s(run.spec_now.limit_s, spec.grace_s),
        beyond_s=START_S + spec.grace_s + LEAVING_S,
        expected_s=past.expected_s,
        preemptible=run.life.may_resume,
        preemptions=past.preemptions,
        grace_s=spec.grace_s,
        second_principal=past.second_principal,
        capped=run.spec_now.is_capped,
    )


def _several(run: StoredRun) -> tuple[bool, str]:
    """Return whether a run may have several nodes, and what would let it, as its owner would write it, or "".

    It has them where no node that it may use could hold it: that is the planner's to know. All devices of *a* node are
    on one, a kernel is one process, and files that lie on one machine are on no other.
    """
    spec, resources = run.spec, run.spec.resources
    if resources.gpus is None or isinstance(spec.payload, Kernel):
        return False, ""
    if resources.same_node:
        return False, "without same_node=True"
    if run.target.machine or spec.environment == "live":
        return False, 'with env="snapshot"'
    return True, ""


def begun(asked: QueuedRun, after_s: float) -> QueuedRun:
    """Return what a run wants whose user code began some time after it got devices: its limit counts from there."""
    if asked.limit_s is None:
        return asked
    less_s = START_S - max(0.0, after_s)
    return msgspec.structs.replace(asked, limit_s=asked.limit_s - less_s, beyond_s=asked.beyond_s - less_s)


def _python(run: StoredRun) -> str:
    """Return the version of Python a node has to have for a run, or "": the caller's files name their interpreter."""
    travels = run.snapshot or (isinstance(run.spec.payload, Function) and not run.target.machine)
    return ".".join(run.target.python.split(".")[:2]) if travels else ""


def _held(run: StoredRun, now_ns: int) -> tuple[int, str]:
    """Return until when a run is left alone after an attempt that failed to start, and what it is told."""
    last = run.attempt
    if last is None or last.ended_ns is None:
        return 0, ""
    pause_ns = round(pause_s(run.infra_retries_used, last.reason, began=last.began) * 1e9)
    left_ns = min(pause_ns, last.ended_ns + pause_ns - now_ns)  # no longer than that, whatever was done to the clock
    if left_ns <= 0:
        return 0, ""
    at = format_clock(now_ns + left_ns)
    cause = last.cause if last.reason is Reason.NODES_APART else None
    why = f": {cause.detail}" if cause is not None else ""
    return now_ns + left_ns, f"attempt {last.fence} did not start on {last.node}{why}; it is tried again at {at}"
