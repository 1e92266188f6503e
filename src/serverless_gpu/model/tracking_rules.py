"""Rules for MLflow runs: names, intervals and limits.

    Tracking, RunSpec ─▶ first_tags, params_of        samples ─▶ send_interval_s ─▶ points, below 2 M a run
    State, Receipt    ─▶ status_of, last_tags, receipt_tags      failures in a row ─▶ pause_s

`serverless_gpu.tracking` sends the requests to MLflow. MLflow refuses a whole request if one name or value violates its
rules. This module therefore makes all names and values valid before `serverless_gpu.tracking` sends them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from serverless_gpu.model.arguments import command_text
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import Command, RunSpec, Tracking

KEY_CHARACTERS_MAX = 250
PARAM_CHARACTERS_MAX = 6000
TAG_CHARACTERS_MAX = 8000
"""Maximum number of characters in a value that MLflow accepts."""
RUN_TAG = "sgpu.run_id"
"""Tag by which other processes find an MLflow run."""
ATTEMPT_TAG = "sgpu.attempt"
"""Tag with the number of the most recently started attempt, whose state the MLflow run shows."""
POINTS_MAX = 2_000_000
"""Maximum number of points that this package logs in one MLflow run. The user can log the rest of MLflow's maximum of
10 million points."""
GIVE_UP_S = 86_400
"""Maximum seconds for which the package retries MLflow requests after an attempt ends."""

_NOTE_TAG = "mlflow.note.content"
_NAME_TAG = "mlflow.runName"
_PARENT_TAG = "mlflow.parentRunId"
_RESERVED = ("mlflow.", "sgpu.")
_CUT = "… (cut)"
_FIRST_PAUSE_S = 1.0
_PAUSE_S_MAX = 30.0
_LATE_PAUSE_S_MAX = 300.0
_QUICK_TRIES = 60
_SEND_INTERVAL_S = 10
_DOUBLINGS = 14
_ROWS_EACH_MIN, _ROWS_EACH_MAX = 1, 3600

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

_STATUSES: Mapping[State, Status] = {
    State.SUCCEEDED: "FINISHED",
    State.FAILED: "FAILED",
    State.LOST: "FAILED",
    State.CANCELLED: "KILLED",
    State.TIMED_OUT: "KILLED",
    State.BUDGET_STOPPED: "KILLED",
}


def status_of(state: State) -> Status:
    """Return MLflow's status for the state of an attempt."""
    return _STATUSES.get(state, "RUNNING")


def valid_key(key: str) -> str:
    """Return a name that MLflow accepts for a parameter, tag or series.

    The returned name contains only valid characters, without path segments such as "..".
    """
    clean = "".join(char if char.isalnum() or char in "_-.: /" else "_" for char in key[:KEY_CHARACTERS_MAX])
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"


def cut(text: str, characters_max: int, *, keep_end: bool = False) -> str:
    """Return text truncated to `characters_max` characters, with a marker for omitted text."""
    if len(text) <= characters_max:
        return text
    kept = characters_max - len(_CUT)
    return _CUT + text[-kept:] if keep_end else text[:kept] + _CUT


def spec_params(spec: RunSpec) -> dict[str, str]:
    """Return the spec's parameters for comparing runs, under names that no user parameter has."""
    asked = {
        "name": spec.name,
        "command": command_text(spec.payload.argv) if isinstance(spec.payload, Command) else None,
        "gpus": spec.resources.gpus,
        "gpu_type": spec.resources.gpu_type,
        "environment": spec.environment,
        "timeout_s": spec.timeout_s,
        "retries": spec.retries or None,
    }
    return {f"sgpu.{key}": str(value) for key, value in asked.items() if value not in (None, "")}


def folder(tracking: Tracking, run_id: str, fence: int, node_rank: int) -> str:
    """Return the path of one attempt's files on one node within the artifacts, with a final slash.

    The path omits the attempt folder of the first attempt and the node folder of the first node.
    """
    parts = ["sgpu"]
    parts += [run_id] if tracking.run_id else []
    parts += [f"attempt_{fence}"] if fence > 1 else []
    parts += [f"node_{node_rank}"] if node_rank else []
    return "/".join(parts) + "/"


def params_of(tracking: Tracking, spec_params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a run. Parameters of the call take precedence over parameters of the spec."""
    merged = {valid_key(key): value for key, value in spec_params.items()}
    merged |= {valid_key(key): value for key, value in tracking.params.items()}
    return {key: cut(value, PARAM_CHARACTERS_MAX) for key, value in merged.items()}


def first_tags(tracking: Tracking, run_id: str, fence: int, user_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a run at its first attempt."""
    clean = ((valid_key(key), value) for key, value in user_tags.items())
    tags = {valid_key(f"sgpu.tag.{key}") if key.startswith(_RESERVED) else key: value for key, value in clean}
    if not tracking.run_id:  # The creator of a continued MLflow run has already set the source tags.
        tags |= {valid_key(key): value for key, value in tracking.tags.items()}
    tags |= {RUN_TAG: run_id, ATTEMPT_TAG: str(fence)}
    if tracking.run_name and not tracking.run_id:
        tags[_NAME_TAG] = cut(tracking.run_name, KEY_CHARACTERS_MAX)
    if tracking.parent_id and not tracking.run_id:
        tags[_PARENT_TAG] = tracking.parent_id
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items()}


def resumed_tags(tracking: Tracking, run_id: str, fence: int) -> dict[str, str]:
    """Return the tags for the start of another attempt. These tags clear the preceding attempt's end tags."""
    tags = {RUN_TAG: run_id, ATTEMPT_TAG: str(fence)}
    if not tracking.run_id:
        tags |= {"sgpu.state": State.RUNNING.value, "sgpu.reason": "", "sgpu.sentence": "", _NOTE_TAG: ""}
    return tags


def last_tags(tracking: Tracking, state: State, reason: Reason, sentence: str) -> dict[str, str]:
    """Return the tags for the end of an attempt, or no tags for an MLflow run that its creator ends."""
    if tracking.run_id:
        return {}
    tags = {"sgpu.state": state.value, "sgpu.reason": reason.value, "sgpu.sentence": sentence}
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items() if value}


def receipt_tags(tracking: Tracking, receipt: Receipt, node_rank: int = 0, nodes: int = 1) -> dict[str, str]:
    """Return the tags of a receipt, and the page's description for an MLflow run of this package."""
    tags = {
        "sgpu.gpu_seconds": f"{receipt.gpu_ms / 1000:.3f}",
        "sgpu.devices": receipt.devices_text(),
        "sgpu.environment": receipt.environment,
        "sgpu.gate": receipt.gate,
        "sgpu.warm": "true" if receipt.warm else "false",
    }
    if receipt.micros is not None:
        tags["sgpu.cost"] = f"{receipt.micros / 1_000_000:.6f} {receipt.currency}"
    if nodes > 1:
        tags = {f"sgpu.node_{node_rank}.{key.removeprefix('sgpu.')}": value for key, value in tags.items()}
    elif not tracking.run_id:
        # The receipt is indented as code, because the MLflow page renders Markdown.
        tags[_NOTE_TAG] = "    " + receipt.text().replace("\n", "\n    ")
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items() if value}


def gang_tags(tracking: Tracking, tags: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return tags with sums over all nodes, or no tags until all nodes have sent receipts."""
    seconds = [tags.get(f"sgpu.node_{node}.gpu_seconds", "") for node in range(nodes)]
    costs = [tags.get(f"sgpu.node_{node}.cost", "").split() for node in range(nodes)]
    try:
        found = {"sgpu.gpu_seconds": f"{sum(map(float, seconds)):.3f}"}
        if all(len(cost) == 2 for cost in costs) and len({currency for _, currency in costs}) == 1:
            found["sgpu.cost"] = f"{sum(float(amount) for amount, _ in costs):.6f} {costs[0][1]}"
    except ValueError:  # A node's value is missing, or a user has overwritten the tag.
        return {}
    if not tracking.run_id:
        found[_NOTE_TAG] = (
            f"{found['sgpu.gpu_seconds']} device-seconds on {nodes} nodes"
            + (f", {found['sgpu.cost']}" if "sgpu.cost" in found else "")
            + ". Each node has a receipt among the artifacts: `sgpu/receipt.json`, `sgpu/node_<i>/receipt.json`."
        )
    return found


def is_reported_elsewhere(reason: Reason, tags: Mapping[str, str]) -> bool:
    """Return True if another node has reported a more specific reason for the gang's end."""
    weak = (Reason.PEER_FAILED, Reason.COMPLETED)
    return reason in weak and tags.get("sgpu.reason", "") not in ("", *weak)


def variables(run_id: str, experiment_id: str, uri: str) -> dict[str, str]:
    """Return the environment variables that point MLflow clients in a rank to a run.

    If the caller's own variable contains the tracking address, possibly with a password, `uri` is "".
    """
    found = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": run_id, "MLFLOW_EXPERIMENT_ID": experiment_id}
    return {name: value for name, value in found.items() if value}


def pause_s(failures: int) -> float:
    """Return the pause in seconds after consecutive failures, without random jitter."""
    if failures > _QUICK_TRIES:
        return _LATE_PAUSE_S_MAX
    return min(_FIRST_PAUSE_S * 2.0 ** min(max(0, failures - 1), 10), _PAUSE_S_MAX)


def send_interval_s(elapsed_s: float, series: int, nodes: int) -> int:
    """Return the seconds between points of a series, which start at 10 and double over time.

    The interval depends only on the elapsed time and the size of the run. A restarted monitor therefore continues with
    the same intervals. In a run of ten days, all nodes together log fewer than `POINTS_MAX` points.
    """
    rows_each = POINTS_MAX // (_DOUBLINGS * max(1, series) * max(1, nodes))
    rows_each = min(max(rows_each, _ROWS_EACH_MIN), _ROWS_EACH_MAX)
    phases = max(0.0, elapsed_s) / (_SEND_INTERVAL_S * rows_each)
    return int(_SEND_INTERVAL_S * 2.0 ** int(math.log2(phases + 1)))
