"""The table of all checks, and the judgement over gathered facts."""

from __future__ import annotations

from serverless_gpu.doctor import environment_checks, gpu_checks, machine_checks, run_troubles, server_checks
from serverless_gpu.doctor.facts import MachineFacts
from serverless_gpu.doctor.findings import Check, Finding

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
