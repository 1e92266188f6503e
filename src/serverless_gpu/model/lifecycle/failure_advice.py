"""Advice about an ended run: what its user can do next, by the reason of the end."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import SUPERVISOR_GONE, Reason

KEEPS = "set a larger idle_timeout= for longer pauses without device activity, output or an attached client"
SAVES = "save to runtime.checkpoint_dir() and start from runtime.resume_dir(), or set a longer limit"
KILLED = "the run's user may have ended this process; set retries=1 for another attempt"


def logs_text(run_id: str, rank: int | None) -> str:
    """Return the command that shows a rank's output."""
    option = "" if rank is None else f" --rank {rank}"
    return f"logs: `sgpu logs {run_id}{option}`"


def advice(reason: Reason, run_id: str, *, node: str, rank: int | None) -> str:
    """Return what the user of a run on a server can do after its end."""
    logs = logs_text(run_id, rank)
    if reason in (Reason.START_FAILED, Reason.RUNTIME_LOST, Reason.ENV_UNAVAILABLE, *SUPERVISOR_GONE):
        killed = f"{KILLED}; " if reason is Reason.RUNTIME_LOST else ""
        return f"{killed}log of the agent and its processes on node {node}: agent.log in the home of its agent"
    if reason is Reason.ENGINE_HEAD_LOST:
        return f"Ray's logs on node {node}: ray/ in the run's directory; {logs}"
    if reason in (Reason.NODE_DISK, Reason.RESULT_STORAGE):
        return f"free some space on node {node} (`sgpu env gc` on that node helps)"
    told = {Reason.IDLE: KEEPS, Reason.NO_PROGRESS: SAVES}.get(reason)
    return f"{told}; {logs}" if told else logs
