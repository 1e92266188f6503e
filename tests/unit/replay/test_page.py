"""The table of traces in the documentation is what replays give."""

from __future__ import annotations

import re

import pytest

from serverless_gpu.replay import cluster_of, read_trace, simulate
from tests.support.paths import REPOSITORY
from tests.support.replay.real import TRACES, needs_traces

PAGE = REPOSITORY / "docs" / "concepts" / "scheduling.md"
ROW = re.compile(r"^\| (cluster\d\d), (\d+) \| (count|nodes of 8) \| (.*) \|$", re.MULTILINE)
ROWS: list[tuple[str, str, str, str]] = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_the_rows_with_bars_and_they_are_met() -> None:
    cells = {(name, int(gpus)): text.split(" | ") for name, gpus, kind, text in ROWS if kind == "count"}
    for key in (("cluster04", 600), ("cluster04", 512), ("cluster02", 128)):
        mean, gangs, gangs_p95 = map(float, cells[key][3:])
        assert mean <= 1.25
        assert max(gangs, gangs_p95) <= 1


@needs_traces
@pytest.mark.parametrize(("name", "gpus", "kind", "text"), ROWS, ids=lambda value: str(value)[:20])
def test_a_row_of_the_page_is_what_a_replay_gives(name: str, gpus: str, kind: str, text: str) -> None:
    trace = read_trace(TRACES / "microsoft_itp_2021.parquet", {"cluster": name})
    cluster = cluster_of(int(gpus) // 8, 8)
    shown = cluster.as_sum() if kind == "count" else cluster
    fifo, first_fit, ours = (simulate(trace, shown, policy).figures for policy in ("fifo", "first-fit", "ours"))
    assert first_fit.gang_wait is not None
    assert ours.gang_wait is not None
    ratios = (
        ours.wait.mean / first_fit.wait.mean,
        ours.gang_wait.mean / first_fit.gang_wait.mean,
        ours.gang_wait.p95 / first_fit.gang_wait.p95,
    )
    means = (figures.wait.mean for figures in (fifo, first_fit, ours))
    assert text == " | ".join([*(f"{mean:,.0f}" for mean in means), *(f"{ratio:.2f}" for ratio in ratios)])
