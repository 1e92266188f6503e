"""Runs all doctor checks and writes the report as text or JSON.

The CLI imports this module only for `sgpu doctor`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from serverless_gpu.doctor import environment_checks, gpu_checks, machine_checks, run_troubles, server_checks
from serverless_gpu.doctor.facts import Check, CheckGroup, CheckOutcome, Finding, MachineFacts
from serverless_gpu.doctor.probes import gather
from serverless_gpu.version import __version__

Judged = Sequence[tuple[Check, Sequence[Finding]]]
Paint = Callable[[str, CheckOutcome], str]

_WORD = 7
_CODE = 16


def examine(limit_s: float, *, as_json: bool, paint: Paint) -> tuple[Iterable[str], bool]:
    """Return the report's lines, and True if a check failed.

    `limit_s` is each probe's time limit in seconds. `paint` colours the name of an outcome.
    """
    facts = gather(os.environ, limit_s)
    judged = judge(facts)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(as_builtins(judged, facts.python)), indent=2)
        return [text.decode()], has_failed(judged)
    return lines(judged, paint), has_failed(judged)


TABLE: tuple[Check, ...] = (
    *machine_checks.CHECKS,
    *server_checks.CHECKS,
    *server_checks.POOL_CHECKS,
    *gpu_checks.CHECKS,
    *environment_checks.CHECKS,
    *server_checks.TRACKING_CHECKS,
    *run_troubles.CHECKS,
)


def judge(facts: MachineFacts) -> list[tuple[Check, tuple[Finding, ...]]]:
    """Return each applicable check's findings, in the order of the check table."""
    judged = [(check, tuple(check.probe(facts))) for check in TABLE if check.probe is not None]
    return [(check, findings) for check, findings in judged if findings]


def has_failed(judged: Judged) -> bool:
    """Return True if any check found a problem that prevents runs."""
    return any(finding.outcome is CheckOutcome.FAILED for _, findings in judged for finding in findings)


def lines(judged: Judged, paint: Paint) -> Iterator[str]:
    """Yield the report's lines: one line per "ok" finding, and up to three lines for any other finding."""
    group = None
    unseen = _unseen(judged)
    for check, findings in judged:
        if check.group is not group:
            if group is not None:
                yield ""
            group = check.group
            yield str(group)
        for finding in findings:
            codes = unseen.get((check.group, finding.sentence), [check.code])
            if finding.outcome is CheckOutcome.UNKNOWN and codes[0] != check.code:
                continue  # The report's line for the first check names all checks with the same reason.
            word = paint(f"{finding.outcome:<{_WORD}}", finding.outcome)
            named = ", ".join(codes if finding.outcome is CheckOutcome.UNKNOWN else [check.code])
            yield f"  {word}  {named:<{_CODE}}  {_one_line(finding.sentence)}"
            if finding.outcome is not CheckOutcome.OK:
                indent = " " * (_WORD + 4)
                if finding.outcome is not CheckOutcome.UNKNOWN:
                    yield f"{indent}cause: {check.cause}"
                if mend := _mend(check, finding):
                    yield f"{indent}mend:  {_one_line(mend)}"
    yield ""
    yield _summary(judged)


def _unseen(judged: Judged) -> dict[tuple[CheckGroup, str], list[str]]:
    """Return the codes of "unknown" checks by group and reason. The report has one line per reason."""
    codes: dict[tuple[CheckGroup, str], list[str]] = {}
    for check, findings in judged:
        for finding in findings:
            if finding.outcome is CheckOutcome.UNKNOWN and not finding.mend:
                codes.setdefault((check.group, finding.sentence), []).append(check.code)
    return codes


def as_builtins(judged: Judged, python: str) -> dict[str, object]:
    """Return the report as JSON-compatible values."""
    return {
        "version": __version__,
        "python": python,
        "failed": has_failed(judged),
        "checks": [
            {
                "code": check.code,
                "group": str(check.group),
                "title": check.title,
                "cause": check.cause,
                "findings": [
                    {
                        "outcome": str(finding.outcome),
                        "sentence": finding.sentence,
                        "mend": _mend(check, finding),
                    }
                    for finding in findings
                ],
            }
            for check, findings in judged
        ],
    }


def _mend(check: Check, finding: Finding) -> str:
    """Return a finding's remedy. An "unknown" finding does not use its check's general remedy."""
    general = check.mend if finding.outcome in (CheckOutcome.WARNING, CheckOutcome.FAILED) else ""
    return finding.mend or general


def _summary(judged: Judged) -> str:
    found = [finding.outcome for _, findings in judged for finding in findings]
    counts = [
        (found.count(outcome), outcome) for outcome in (CheckOutcome.FAILED, CheckOutcome.WARNING, CheckOutcome.UNKNOWN)
    ]
    if not any(count for count, _ in counts):
        return f"all {len(judged)} checks are ok"
    return (
        ", ".join(f"{count} {outcome}" for count, outcome in counts if count) + f", {found.count(CheckOutcome.OK)} ok"
    )


def _one_line(text: str) -> str:
    """Return another program's text without line breaks and control characters."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(letter if letter.isprintable() else "?" for letter in joined)
