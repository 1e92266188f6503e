"""Helpers of the tests of ray monitor that other tests use as well."""

from __future__ import annotations

from tests.support.node.ray_agents import RECORDED

TEXT = RECORDED.read_bytes()
KNOWN = {
    "cpus": 3.0,
    "cpus_used": 3.0,
    "gpus": 2.0,
    "gpus_used": 1.0,
    "object_store_bytes": 93000012.0,
    "object_store_free_bytes": 6999988.0,
    "objects": 4.0,
    "spilled_bytes": 210000051.0,
    "tasks_pending": 2.0,
    "tasks_running": 1.0,
    "tasks_finished": 14.0,
    "tasks_failed": 1.0,
    "tasks_infeasible": 0.0,
    "actors": 1.0,
    "actors_pending": 0.0,
    "placement_groups": 1.0,
    "placement_groups_pending": 0.0,
    "workers": 4.0,
    "cpu_percent": 50.9,
    "memory_bytes": 1394958336.0,
    "memory_total_bytes": 25276502016.0,
}
