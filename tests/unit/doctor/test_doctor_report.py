"""The doctor's table as a whole, its report, and the page that is made from it."""

from __future__ import annotations

import json

from scripts import troubleshooting
from serverless_gpu.doctor.examination import TABLE, as_builtins, has_failed, judge, lines
from serverless_gpu.doctor.facts import Check, CheckGroup, Finding, MachineFacts
from tests.support.doctor.diagnosed import BY_CODE, FAILED, OK, PYTHON, UNKNOWN, WARNING
from tests.support.golden import golden


def test_what_nobody_looked_at_is_unknown_or_does_not_apply_and_never_fine() -> None:
    judged = judge(MachineFacts())
    states = {finding.outcome for _, findings in judged for finding in findings}
    assert {check.code for check, findings in judged if findings[0].outcome is OK} <= {"pythonpath"}
    assert states <= {OK, UNKNOWN}
    assert not has_failed(judged)


def test_the_table_is_complete_and_its_names_are_stable_ones() -> None:
    assert len(BY_CODE) == len(TABLE)
    for check in TABLE:
        assert check.code == check.code.lower() and check.code.replace("-", "").isalnum()
        assert check.symptoms and all(check.symptoms) and check.title and check.cause and check.mend
        assert (check.probe is None) == (check.group is CheckGroup.RUNS)


def test_the_page_on_troubleshooting_is_what_the_table_says() -> None:
    assert troubleshooting.PAGE.read_text(encoding="utf-8") == troubleshooting.page(), "run `make docs`"


def test_every_check_is_on_the_page() -> None:
    page = troubleshooting.page()
    assert [code for code in BY_CODE if f'<a id="{code}"></a>' not in page] == []


REPORT = [
    (BY_CODE["home"], [Finding(OK, "/h, writable")]),
    (BY_CODE["shared-memory"], [Finding(WARNING, "/dev/shm has 64 MB")]),
    (BY_CODE["agent"], [Finding(FAILED, "two\n lines", "sgpu stop"), Finding(UNKNOWN, "not seen\x1b[31m")]),
]


def test_the_report() -> None:
    assert list(lines(REPORT, lambda word, outcome: word)) == [
        "machine",
        golden("doctor.doctor_report.ok-home-writable"),
        golden("doctor.doctor_report.warning-shared-memory"),
        f"           cause: {BY_CODE['shared-memory'].cause}",
        f"           mend:  {BY_CODE['shared-memory'].mend}",
        "",
        "agent",
        golden("doctor.doctor_report.failed-agent-two"),
        f"           cause: {BY_CODE['agent'].cause}",
        "           mend:  sgpu stop",
        golden("doctor.doctor_report.unknown-agent-seen"),
        "",
        golden("doctor.doctor_report.failed-warning-unknown"),
    ]


def test_a_report_without_trouble() -> None:
    assert list(lines(REPORT[:1], lambda word, outcome: word))[-1] == golden("doctor.doctor_report.all-checks-ok")


def test_the_report_for_machines() -> None:
    report = as_builtins(REPORT, PYTHON)
    assert sorted(report) == ["checks", "failed", "python", "version"]
    assert report["failed"] is True
    assert json.loads(json.dumps(report))["checks"][2]["findings"] == [
        {"outcome": "failed", "sentence": "two\n lines", "mend": "sgpu stop"},
        {"outcome": "unknown", "sentence": "not seen\x1b[31m", "mend": ""},
    ]


def test_codes_fit_their_column() -> None:
    longest: Check = max(TABLE, key=lambda check: len(check.code) if check.probe else 0)
    assert len(longest.code) <= 16
