"""Dashboard, alerts and the how-to page name figures that exist, with labels that they have; every figure is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.operations.server_status import StateSample, families
from tests.support.paths import REPOSITORY

FILES = [REPOSITORY / "deploy" / name for name in ("grafana.json", "alerts.yml", "prometheus.yml")]
PAGE = REPOSITORY / "docs" / "how-to" / "operating-a-server.md"
BESIDE = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}
"""Of the process, by prometheus-client."""
EMPTY = StateSample(
    at_ns=0,
    runs={"QUEUED": 0},
    oldest_wait_s=0,
    nodes={},
    devices={("H100", "free"): 1},
    lease_age_s=0,
    orders=(0, 0),
    free=1,
    drained=False,
    unchained=0,
    uncharged=0,
    clock_off_s=0,
)


def labels_by_figure() -> dict[str, set[str]]:
    """Return the labels of every figure, by the names that queries use."""
    found: dict[str, set[str]] = {name: set() for name in BESIDE}
    for metric in vars(ServerMetrics()).values():
        if isinstance(metric, MetricWrapperBase):
            described = next(iter(metric.describe()))
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(described.type, ("",))
            for suffix in suffixes:
                found[described.name + suffix] = {*metric._labelnames, *(["le"] if suffix == "_bucket" else [])}
    found |= {"sgpu_build_info": {"version"}, "sgpu_healthy": {"check"}, "sgpu_sample_age_seconds": set()}
    for family in families(EMPTY):
        found[family.name] = {label for sample in family.samples for label in sample.labels}
    return found


FIGURES = labels_by_figure()


def used(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the figures that a text names, with the labels it picks them by."""
    for name, chosen in re.findall(r"\b((?:sgpu|process)_[a-z0-9_]+)(?:\{([^}]*)\})?", text):
        yield name, set(re.findall(r"(\w+)\s*=", chosen))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_figure_that_is_asked_for_exists_and_has_the_label(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('\\"', '"')
    asked = list(used(text))
    assert asked or path.name == "prometheus.yml"
    for name, labels in asked:
        assert name in FIGURES, name
        assert labels <= FIGURES[name], (name, labels)
    for by, metric in re.findall(r"by \(([^)]*)\) \((?:rate|increase)?\(?(sgpu_[a-z_]+)", text):
        assert {label.strip() for label in by.split(",")} <= FIGURES[metric], (by, metric)


def test_a_figure_that_does_not_exist_is_found() -> None:
    assert list(used('rate(sgpu_nothing_total{a="b", c=~"d"}[5m])')) == [("sgpu_nothing_total", {"a", "c"})]
    assert "sgpu_nothing_total" not in FIGURES
    assert len(FIGURES) > 40


def test_the_page_has_every_figure_and_its_labels() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("\n## Monitor with Prometheus\n")[2].partition("\n## ")[0]
    told = {
        name: set(filter(None, labels.split(","))) for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", page)
    }
    for name, labels in FIGURES.items():
        if name.endswith(("_sum", "_count")) or name in BESIDE:
            continue
        assert told.get(name.removesuffix("_bucket")) == labels - {"le"}, name
    known = {name.removesuffix("_bucket") for name in FIGURES}
    assert {name for name in told if name.startswith("sgpu_")} <= known


def test_every_figure_is_on_the_dashboard() -> None:
    board = FILES[0].read_text(encoding="utf-8")
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in used(board)}
    figures = {re.sub(r"_(bucket|count|sum)$", "", name) for name in FIGURES}
    assert figures - shown <= {"process_open_fds"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(FILES[0].read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and place["h"] > 0, panel["title"]
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"]), panel["title"]


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    rules = (REPOSITORY / "deploy" / "alerts.yml").read_text(encoding="utf-8").split("- alert: ")[1:]
    assert len(rules) >= 12
    for rule in rules:
        for wanted in ("expr:", "severity:", "summary:", "action:"):
            assert wanted in rule, rule.splitlines()[0]
