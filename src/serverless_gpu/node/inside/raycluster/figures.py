"""Reads Ray's metrics as few figures: a filter over Prometheus' text, and the table of wanted metrics.

    ray_tasks{Name="g",Source="executor",State="RUNNING",…} 1.0 ─┐
    ray_tasks{Name="h",Source="executor",State="RUNNING",…} 2.0 ─┴─▶ {"tasks_running": 3.0}

Ray has a line for every task's name, every process and every bucket: 400 kB on an idle node, megabytes on a busy one.
So lines are taken one by one, and only sums are kept. A metric that Ray lacks has no figure, not 0.

Failure cases: a line that is no metric, or longer than any of Ray's (left out); labels hold users' names of tasks, with
anything in them (parsed by their quotes); a gauge that Ray keeps as a difference between processes falls below 0 when
one of them is gone (0 is reported).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_NAME_BYTES_MAX = 128
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?')
_DRIVER = "f" * 24
"""End of the identifier of a driver's worker: it is the job's, filled up."""


class _Rule(NamedTuple):
    """A figure: the sum of a metric's matching lines, or the number of different `distinct` values."""

    figure: str
    metric: str
    labels: tuple[tuple[str, frozenset[str]], ...] = ()
    distinct: str = ""


def _rule(figure: str, metric: str, distinct: str = "", **labels: str) -> _Rule:
    return _Rule(figure, metric, tuple((key, frozenset(values.split())) for key, values in labels.items()), distinct)


# Names before and after Ray 2.50; the head alone knows placement groups, and actors that do not run anywhere yet.
_RULES = (
    _rule("cpus", "ray_resources", Name="CPU", State="USED AVAILABLE"),
    _rule("cpus_used", "ray_resources", Name="CPU", State="USED"),
    _rule("gpus", "ray_resources", Name="GPU", State="USED AVAILABLE"),
    _rule("gpus_used", "ray_resources", Name="GPU", State="USED"),
    _rule("object_store_bytes", "ray_object_store_used_memory"),
    _rule("object_store_free_bytes", "ray_object_store_available_memory"),
    _rule("objects", "ray_object_store_num_local_objects"),
    _rule("spilled_bytes", "ray_object_store_memory", Location="SPILLED"),
    _rule(
        "tasks_pending",
        "ray_tasks",
        State="PENDING_ARGS_AVAIL PENDING_NODE_ASSIGNMENT PENDING_OBJ_STORE_MEM_AVAIL PENDING_ARGS_FETCH "
        "PENDING_ACTOR_TASK_ARGS_FETCH PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY",
    ),
    _rule(
        "tasks_running",
        "ray_tasks",
        State="RUNNING RUNNING_IN_RAY_GET RUNNING_IN_RAY_WAIT GETTING_AND_PINNING_ARGS",
    ),
    _rule("tasks_finished", "ray_tasks", State="FINISHED"),
    _rule("tasks_failed", "ray_tasks", State="FAILED"),
    _rule("tasks_infeasible", "ray_scheduler_unscheduleable_tasks", Reason="Infeasible"),
    _rule(
        "actors",
        "ray_actors",
        Source="executor",
        State="ALIVE_IDLE ALIVE_RUNNING_TASKS IDLE RUNNING_TASK RUNNING_IN_RAY_GET RUNNING_IN_RAY_WAIT",
    ),
    _rule("actors_pending", "ray_actors", State="DEPENDENCIES_UNREADY PENDING_CREATION"),
    _rule("actors_restarting", "ray_actors", State="RESTARTING"),
    _rule("actors_dead", "ray_actors", State="DEAD"),
    _rule("placement_groups", "ray_placement_groups", State="CREATED"),
    _rule("placement_groups_pending", "ray_placement_groups", State="PENDING PREPARED RESCHEDULING"),
    _rule("workers", "ray_object_store_memory", distinct="WorkerId", Location="WORKER_HEAP"),
    _rule("workers_out_of_memory", "ray_memory_manager_worker_eviction_total"),
    _rule("cpu_percent", "ray_node_cpu_utilization"),
    _rule("memory_bytes", "ray_node_mem_used"),
    _rule("memory_total_bytes", "ray_node_mem_total"),
)

FIGURES = tuple(rule.figure for rule in _RULES)
"""Names of all figures there can be."""


class RayFigures:
    """The figures of one text, line by line."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._distinct: dict[str, set[str]] = {}

    def add(self, line: bytes) -> None:
        """Take a line; all but those of the table are left out."""
        end = line.find(b"{", 0, _NAME_BYTES_MAX)
        if end < 0:
            end = line.find(b" ", 0, _NAME_BYTES_MAX)
        rules = _BY_METRIC.get(line[: max(end, 0)])
        read = _read(line[end:].decode("utf-8", "replace")) if rules else None
        if rules is None or read is None:
            return
        labels, value = read
        for rule in rules:
            if all(labels.get(key) in values for key, values in rule.labels):
                if rule.distinct:
                    self._distinct.setdefault(rule.figure, set()).add(labels.get(rule.distinct, ""))
                else:
                    self._sums[rule.figure] = self._sums.get(rule.figure, 0.0) + value

    def result(self) -> dict[str, float]:
        """Return the figures that are known."""
        found = {figure: max(0.0, value) for figure, value in self._sums.items()}
        for figure, values in self._distinct.items():
            found[figure] = float(len([value for value in values if value and not value.endswith(_DRIVER)]))
        return found


_BY_METRIC: dict[bytes, list[_Rule]] = {}
for _each in _RULES:
    _BY_METRIC.setdefault(_each.metric.encode(), []).append(_each)


def _read(text: str) -> tuple[dict[str, str], float] | None:
    """Return labels and value of the text behind a metric's name; None if it is no metric's line."""
    labels: dict[str, str] = {}
    at = 0
    if text.startswith("{"):
        at = 1
        while True:
            found = _LABEL.match(text, at)
            if found is None:
                break
            labels[found.group(1)] = found.group(2)
            at = found.end()
        if not text.startswith("}", at):
            return None
        at += 1
    words = text[at:].split()  # a moment may follow the value
    if not words:
        return None
    try:
        value = float(words[0])
    except ValueError:
        return None
    return (labels, value) if math.isfinite(value) else None
