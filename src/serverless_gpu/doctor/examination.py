"""The whole examination: gather, judge, write the report. What the command loads when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from serverless_gpu.doctor.probes import gather
from serverless_gpu.doctor.report import Paint, as_builtins, has_failed, lines
from serverless_gpu.doctor.table import judge


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
