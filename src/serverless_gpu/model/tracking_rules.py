"""Rules for an MLflow run: names, intervals and limits; values in, values out.

    Tracking, RunSpec ─▶ first_tags, params_of        samples ─▶ send_interval_s ─▶ points, below 2 M a run
    State, Receipt    ─▶ status_of, last_tags, receipt_tags      failures in a row ─▶ pause_s

Who sends it is `serverless_gpu.tracking`. MLflow refuses a request as a whole when one name or value in it breaks its
rules, so they are kept here, before anything is sent.
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
"""MLflow refuses what is longer, and with it all that came in the same request."""
RUN_TAG = "sgpu.run_id"
"""The tag by which others than its maker find an MLflow run."""
ATTEMPT_TAG = "sgpu.attempt"
"""The tag that says which attempt's state an MLflow run shows: that of the last one that has begun."""
POINTS_MAX = 2_000_000
"""Of ours in one MLflow run; a run has room for 10 million, and those are for its user."""
GIVE_UP_S = 86_400
"""For so long after the end of an attempt MLflow is tried."""

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
    """Return what MLflow calls the state of an attempt."""
    return _STATUSES.get(state, "RUNNING")


def valid_key(key: str) -> str:
    """Return a name for a parameter, tag or series that MLflow takes: its alphabet, no path that leads elsewhere."""
    clean = "".join(char if char.isalnum() or char in "_-.: /" else "_" for char in key[:KEY_CHARACTERS_MAX])
    parts = [part for part in clean.split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"


def cut(text: str, characters_max: int, *, keep_end: bool = False) -> str:
    """Return text of at most so many characters, which says so where something is missing."""
    if len(text) <= characters_max:
        return text
    kept = characters_max - len(_CUT)
    return _CUT + text[-kept:] if keep_end else text[:kept] + _CUT


def spec_params(spec: RunSpec) -> dict[str, str]:
    """Return what a spec says that is worth comparing runs by; names that no parameter of the user's has."""
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
    """Return below which path the files of one attempt on one node lie in the artifacts, with a slash at its end.

    The first attempt and the first node need no folder of their own.
    """
    parts = ["sgpu"]
    parts += [run_id] if tracking.run_id else []
    parts += [f"attempt_{fence}"] if fence > 1 else []
    parts += [f"node_{node_rank}"] if node_rank else []
    return "/".join(parts) + "/"


def params_of(tracking: Tracking, spec_params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a run: what its client said of the call, then what its spec says."""
    merged = {valid_key(key): value for key, value in spec_params.items()}
    merged |= {valid_key(key): value for key, value in tracking.params.items()}
    return {key: cut(value, PARAM_CHARACTERS_MAX) for key, value in merged.items()}


def first_tags(tracking: Tracking, run_id: str, fence: int, user_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags with which a run is made."""
    clean = ((valid_key(key), value) for key, value in user_tags.items())
    tags = {valid_key(f"sgpu.tag.{key}") if key.startswith(_RESERVED) else key: value for key, value in clean}
    if not tracking.run_id:  # its maker has said where it is from
        tags |= {valid_key(key): value for key, value in tracking.tags.items()}
    tags |= {RUN_TAG: run_id, ATTEMPT_TAG: str(fence)}
    if tracking.run_name and not tracking.run_id:
        tags[_NAME_TAG] = cut(tracking.run_name, KEY_CHARACTERS_MAX)
    if tracking.parent_id and not tracking.run_id:
        tags[_PARENT_TAG] = tracking.parent_id
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items()}


def resumed_tags(tracking: Tracking, run_id: str, fence: int) -> dict[str, str]:
    """Return the tags with which another attempt goes on: nothing of how the one before ended is left."""
    tags = {RUN_TAG: run_id, ATTEMPT_TAG: str(fence)}
    if not tracking.run_id:
        tags |= {"sgpu.state": State.RUNNING.value, "sgpu.reason": "", "sgpu.sentence": "", _NOTE_TAG: ""}
    return tags


def last_tags(tracking: Tracking, state: State, reason: Reason, sentence: str) -> dict[str, str]:
    """Return the tags that say how an attempt ended; none in a run that is not ours to end."""
    if tracking.run_id:
        return {}
    tags = {"sgpu.state": state.value, "sgpu.reason": reason.value, "sgpu.sentence": sentence}
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items() if value}


def receipt_tags(tracking: Tracking, receipt: Receipt, node_rank: int = 0, nodes: int = 1) -> dict[str, str]:
    """Return the tags that an account of a run adds: as the page's description, too, where the run is ours."""
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
        tags[_NOTE_TAG] = "    " + receipt.text().replace("\n", "\n    ")  # as code: the page reads it as Markdown
    return {key: cut(value, TAG_CHARACTERS_MAX) for key, value in tags.items() if value}


def gang_tags(tracking: Tracking, tags: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return what the accounts of all nodes come to, once all have told theirs; nothing until then."""
    seconds = [tags.get(f"sgpu.node_{node}.gpu_seconds", "") for node in range(nodes)]
    costs = [tags.get(f"sgpu.node_{node}.cost", "").split() for node in range(nodes)]
    try:
        found = {"sgpu.gpu_seconds": f"{sum(map(float, seconds)):.3f}"}
        if all(len(cost) == 2 for cost in costs) and len({currency for _, currency in costs}) == 1:
            found["sgpu.cost"] = f"{sum(float(amount) for amount, _ in costs):.6f} {costs[0][1]}"
    except ValueError:  # one is missing, or a user wrote another text there
        return {}
    if not tracking.run_id:
        found[_NOTE_TAG] = (
            f"{found['sgpu.gpu_seconds']} device-seconds on {nodes} nodes"
            + (f", {found['sgpu.cost']}" if "sgpu.cost" in found else "")
            + ". Each node has a receipt among the artifacts: `sgpu/receipt.json`, `sgpu/node_<i>/receipt.json`."
        )
    return found


def is_reported_elsewhere(reason: Reason, tags: Mapping[str, str]) -> bool:
    """Return whether another node has reported the gang's end, of which this one knows only the fact."""
    weak = (Reason.PEER_FAILED, Reason.COMPLETED)
    return reason in weak and tags.get("sgpu.reason", "") not in ("", *weak)


def variables(run_id: str, experiment_id: str, uri: str) -> dict[str, str]:
    """Return the variables with which any MLflow in a rank finds a run.

    `uri` is "" where the caller's own variable has it, which may carry a password.
    """
    found = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": run_id, "MLFLOW_EXPERIMENT_ID": experiment_id}
    return {name: value for name, value in found.items() if value}


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row, in seconds, before a little is added by chance."""
    if failures > _QUICK_TRIES:
        return _LATE_PAUSE_S_MAX
    return min(_FIRST_PAUSE_S * 2.0 ** min(max(0, failures - 1), 10), _PAUSE_S_MAX)


def send_interval_s(elapsed_s: float, series: int, nodes: int) -> int:
    """Return how far apart the points of a series are, in seconds: 10, and doubled whenever so many were sent.

    It depends on nothing but the time since the call, so that a monitor that was started again goes on alike, and so
    that all points of all nodes stay below `POINTS_MAX` in a run of ten days.
    """
    rows_each = POINTS_MAX // (_DOUBLINGS * max(1, series) * max(1, nodes))
    rows_each = min(max(rows_each, _ROWS_EACH_MIN), _ROWS_EACH_MAX)
    phases = max(0.0, elapsed_s) / (_SEND_INTERVAL_S * rows_each)
    return int(_SEND_INTERVAL_S * 2.0 ** int(math.log2(phases + 1)))
