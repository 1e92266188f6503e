"""The report of `sgpu node canary` for a person, and its exit code."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.cli import canary
from serverless_gpu.model.canary import ATTEMPTS, SANDBOX, CanaryReport, Trial, rows
from tests.support.cli.cli import sgpu
from tests.support.golden import golden

REFUSED, POSSIBLE = Trial("refused", "EPERM"), Trial("possible")
ALL = {each.name: REFUSED for each in ATTEMPTS}
CONTROLS = {each.name: POSSIBLE for each in ATTEMPTS}
REPORT = CanaryReport(node="gpu-1", level=SANDBOX, at_ns=1_700_000_000_000_000_000, version="1.2")


def shown(monkeypatch: pytest.MonkeyPatch, report: CanaryReport, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(canary, "_on_this_machine", lambda _level: report)
    done = sgpu("node", "canary", *arguments)
    return done.exit_code, done.stdout


def test_a_report_names_node_level_time_version_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = {**ALL, "fill-disk": POSSIBLE, "io-uring": Trial("failed", "a bug")}
    report = msgspec.structs.replace(REPORT, rows=rows(SANDBOX, attempts, CONTROLS))
    code, text = shown(monkeypatch, report)
    assert code == 0
    last = next(line for line in text.splitlines() if line.startswith("gpu-1 at isolation sandbox"))
    assert last.endswith(
        f"version 1.2: {len(ATTEMPTS)} attempts, {len(ATTEMPTS) - 2} refused, 0 possible, 1 open, 1 unknown"
    )
    assert any(line.startswith("kernel") and " unknown " in line and "a bug" in line for line in text.splitlines())


def test_a_possible_attempt_shows_its_remedy_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    report = msgspec.structs.replace(REPORT, rows=rows(SANDBOX, {**ALL, "io-uring": POSSIBLE}, CONTROLS))
    code, text = shown(monkeypatch, report)
    (row,) = [each for each in report.rows if each.attempt == "io-uring"]
    assert code == 1
    assert any(" possible " in line and line.endswith(row.remedy) for line in text.splitlines())
    code, text = shown(monkeypatch, report, "--json")
    assert (code, msgspec.json.decode(text, type=CanaryReport)) == (1, report)


def test_a_canary_that_cannot_run_exits_with_1_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    report = msgspec.structs.replace(REPORT, problem="no CPU slot is free", rows=rows(SANDBOX, {}, {}))
    assert shown(monkeypatch, report) == (1, f"{golden('cli.canary.no-slot')}\n")


def test_a_pool_has_a_line_for_each_node_and_fails_with_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    good = msgspec.structs.replace(REPORT, rows=rows(SANDBOX, {**ALL, "fill-disk": POSSIBLE}, CONTROLS))
    bad = msgspec.structs.replace(good, node="gpu-2", rows=rows(SANDBOX, {**ALL, "io-uring": POSSIBLE}, CONTROLS))
    away = msgspec.structs.replace(REPORT, node="gpu-3", problem="not connected")
    monkeypatch.setattr(canary, "_on_pool", lambda _pool: (good, bad, away))
    done = sgpu("node", "canary", "--pool", "default")
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    total = len(ATTEMPTS)
    assert lines["gpu-1"] == ["gpu-1", "sandbox", str(total - 1), "0", "1", "0"]
    assert lines["gpu-2"] == ["gpu-2", "sandbox", str(total - 1), "1", "0", "0", "io-uring"]
    assert lines["gpu-3"][-2:] == ["not", "connected"]
    assert (done.exit_code, "2 of 3" in done.stdout) == (1, True)
    monkeypatch.setattr(canary, "_on_pool", lambda _pool: (good,))
    assert sgpu("node", "canary", "--pool", "default").exit_code == 0
    listed = sgpu("node", "canary", "--pool", "default", "--json")
    assert msgspec.json.decode(listed.stdout, type=list[CanaryReport]) == [good]


@pytest.mark.parametrize("more", [("gpu-1",), ("--level", "user")])
def test_a_pool_excludes_a_node_and_a_level(more: tuple[str, ...]) -> None:
    assert sgpu("node", "canary", "--pool", "default", *more).exit_code == 2


def test_a_level_for_a_node_of_a_server_is_refused() -> None:
    done = sgpu("node", "canary", "gpu-1", "--level", "none")
    assert done.exit_code == 2
    assert "pool determines" in done.output
