"""The canary's catalogue and verdicts."""

from __future__ import annotations

import itertools
import re
from typing import get_args

import pytest

from serverless_gpu.model import canary
from serverless_gpu.model.canary import (
    ATTEMPTS,
    GROUPS,
    SANDBOX,
    USER,
    CanaryReport,
    Control,
    Outcome,
    Trial,
    Verdict,
    judge,
    open_at,
    rows,
)
from serverless_gpu.model.isolation import LEVELS, NONE
from serverless_gpu.node.canary.examination import OBSERVED
from serverless_gpu.node.inside.canary import runner
from tests.support.paths import REPOSITORY

CONCEPT = (REPOSITORY / "docs" / "concepts" / "isolation.md").read_text(encoding="utf-8")
OUTCOMES: tuple[Outcome | None, ...] = (*get_args(Outcome), None)


def test_the_catalogue_has_at_least_60_attempts_that_a_sandbox_refuses() -> None:
    assert sum(SANDBOX in each.refused_at for each in ATTEMPTS) >= 60


def test_each_attempt_has_code_and_each_code_is_in_the_catalogue() -> None:
    names = [each.name for each in ATTEMPTS]
    assert len(set(names)) == len(names)
    assert set(names) - set(OBSERVED) == set(runner.ATTEMPTS)


def test_each_attempt_is_complete() -> None:
    for each in ATTEMPTS:
        assert re.fullmatch(r"[a-z][a-z0-9-]+", each.name)
        assert each.group in GROUPS
        assert each.control in get_args(Control)
        assert each.measure.remedy and each.measure.name
        assert each.text[0].islower() and not each.text.endswith(".")
    assert {each.group for each in ATTEMPTS} == set(GROUPS)


def test_a_stronger_level_refuses_at_least_as_much() -> None:
    assert {each.name for each in open_at(SANDBOX)} < {each.name for each in open_at(USER)}
    assert open_at(NONE) == ATTEMPTS
    assert {level for each in ATTEMPTS for level in each.refused_at} <= {*LEVELS, USER}


@pytest.mark.parametrize(("attempt", "control"), [*itertools.product(OUTCOMES, OUTCOMES)])
def test_a_refusal_counts_only_with_a_control_and_a_success_always(
    attempt: Outcome | None, control: Outcome | None
) -> None:
    trials = [None if outcome is None else Trial(outcome, "detail") for outcome in (attempt, control)]
    verdict, detail = judge(*trials)
    expected: dict[tuple[Outcome | None, Outcome | None], Verdict] = {("refused", "possible"): "refused"}
    assert verdict == ("possible" if attempt == "possible" else expected.get((attempt, control), "unknown"))
    assert detail


@pytest.mark.parametrize("level", [NONE, USER, SANDBOX])
def test_a_report_fails_only_if_the_level_breaks_its_promise(level: str) -> None:
    for each in ATTEMPTS:
        found = rows(level, {each.name: Trial("possible")}, {})
        report = CanaryReport(node="n1", level=level, at_ns=1, version="1", rows=found)
        assert report.failed is (level in each.refused_at)
        (row,) = [row for row in found if row.verdict == "possible"]
        assert (row.attempt, row.remedy) == (each.name, each.measure.remedy)


def test_a_report_without_outcomes_refuses_nothing_and_a_problem_fails() -> None:
    found = rows(SANDBOX, {}, {})
    assert {row.verdict for row in found} == {"unknown"}
    report = CanaryReport(node="n1", level=SANDBOX, at_ns=1, version="1", rows=found)
    assert not report.failed
    assert CanaryReport(node="n1", level=SANDBOX, at_ns=1, version="1", problem="no agent").failed


def test_the_concept_page_lists_exactly_what_remains_open() -> None:
    table = CONCEPT.partition("### Attempts that a level leaves open")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+) \| (open|refused) \| (open|refused) \|$", table, re.MULTILINE)
    open_now = {USER: open_at(USER), SANDBOX: open_at(SANDBOX)}
    assert [(name, text.strip()) for name, text, _, _ in listed] == [(each.name, each.text) for each in open_now[USER]]
    assert {name for name, _, at_user, _ in listed if at_user == "open"} == {each.name for each in open_now[USER]}
    assert {name for name, _, _, at_sandbox in listed if at_sandbox == "open"} == {
        each.name for each in open_now[SANDBOX]
    }


def test_each_measure_of_the_module_is_used() -> None:
    measures = {value for value in vars(canary).values() if isinstance(value, canary.Measure)}
    assert measures == {each.measure for each in ATTEMPTS}
