"""Ray's metrics on their way into a file: the text's reader, the request, and the process that asks."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from serverless_gpu.model.telemetry import RaySample
from serverless_gpu.node.inside.raycluster import metrics
from serverless_gpu.node.inside.raycluster.metrics import FIGURES, RayFigures
from tests.support.node.ray_monitor import KNOWN, TEXT


def figures(text: str) -> dict[str, float]:
    read = RayFigures()
    for line in text.encode().split(b"\n"):
        read.add(line)
    return read.result()


# --- the text ---


def test_the_figures_of_a_real_text() -> None:
    assert figures(TEXT.decode()) == KNOWN


def test_every_figure_has_a_value_in_samples_and_nothing_else_has() -> None:
    assert sorted(FIGURES) == sorted(RaySample.__struct_fields__)


def test_labels_hold_whatever_users_write() -> None:
    hostile = r"a}b, State=\"FAILED\",c\\"
    text = f'ray_tasks{{Name="{hostile}",State="RUNNING",Source="executor",}} 2.0 1795330261000\n'
    assert figures(text) == {"tasks_running": 2.0}


def test_a_task_that_is_called_like_another_metric_is_not_one() -> None:
    assert figures('ray_tasks{Name="ray_node_mem_used 5",State="FINISHED"} 1') == {"tasks_finished": 1.0}
    assert figures('my_metric{Name="ray_node_mem_used"} 5\nray_node_mem_used_host{ip="1"} 5') == {}


def test_what_a_process_took_away_with_it_leaves_no_count_below_nothing() -> None:
    text = 'ray_tasks{State="RUNNING",Name="f"} 1\nray_tasks{State="RUNNING_IN_RAY_GET",Name="f"} -3'
    assert figures(text) == {"tasks_running": 0.0}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# HELP ray_node_mem_used memory",
        "ray_node_mem_used",
        "ray_node_mem_used ",
        "ray_node_mem_used NaN",
        "ray_node_mem_used +Inf",
        "ray_node_mem_used five",
        'ray_node_mem_used{ip="1',
        'ray_node_mem_used{ip="1" 5',
        "ray_node_mem_used{ip=1} 5",
        'ray_node_mem_used{ip="1"}',
        '{ip="1"} 5',
        "\x00\xff",
    ],
)
def test_a_line_that_is_no_metric_is_left_out(line: str) -> None:
    assert figures(line + "\nray_node_mem_total 7") == {"memory_total_bytes": 7.0}


def test_custom_resources_and_those_of_placement_groups_are_no_cpus() -> None:
    text = 'ray_resources{Name="CPU_group_0_ab",State="USED"} 1\n'
    text += 'ray_resources{Name="accelerator_type:H100",State="USED"} 1'
    assert figures(text) == {}


def test_names_of_older_rays_count_likewise() -> None:
    text = (
        'ray_actors{Name="A",Source="gcs",State="ALIVE"} 2\nray_actors{Name="A",Source="executor",State="ALIVE"} -2\n'
        'ray_actors{Name="A",Source="executor",State="IDLE"} 1\n'
        'ray_actors{Name="A",Source="executor",State="RUNNING_IN_RAY_GET"} 1'
    )
    assert figures(text) == {"actors": 2.0}


# --- the request ---


# --- the process ---


def test_an_environment_whose_ray_has_no_metrics_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"grpc"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    sentence = "Ray's own metrics are not recorded: grpc is missing (pip install 'ray[default]')"
    assert metrics.missing() == sentence
    absent.clear()
    assert metrics.missing() == ""


def test_a_module_that_does_not_know_where_it_is_from_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiohttp", "aiohttp_cors", "grpc", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert metrics.missing() == ""
