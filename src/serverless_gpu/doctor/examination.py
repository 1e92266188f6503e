"""The whole examination: gather, judge, write the report. What the command loads when it is asked for.

The table of all checks, and the judgement over gathered facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from serverless_gpu.doctor import environment_checks, gpu_checks, machine_checks, run_troubles, server_checks
from serverless_gpu.doctor.facts import MachineFacts
from serverless_gpu.doctor.findings import Check, Finding
from serverless_gpu.doctor.probes import gather
from serverless_gpu.doctor.report import Paint, as_builtins, has_failed, lines

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
    """Return what each check that applies here found, in the order of the table."""
    judged = [(check, tuple(check.probe(facts))) for check in TABLE if check.probe is not None]
    return [(check, findings) for check, findings in judged if findings]


def examine(limit_s: float, *, as_json: bool, paint: Paint) -> tuple[Iterable[str], bool]:
    """Return the report, line by line, and whether a check failed.

    Args:
        limit_s: seconds for each look.
        as_json: the report for machines.
        paint: colours a word by its outcome.
    """
    facts = gather(os.environ, limit_s)
    judged = judge(facts)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(as_builtins(judged, facts.python)), indent=2)
        return [text.decode()], has_failed(judged)
    return lines(judged, paint), has_failed(judged)
