"""The nouns of a diagnosis: a check (one row of the table), and what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from typing import TypeVar

import msgspec

from serverless_gpu.doctor.facts import MachineFacts, UnknownFact


class CheckOutcome(StrEnum):
    """What a check says."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class CheckGroup(StrEnum):
    """Where a check looks, in the order of the report."""

    MACHINE = "machine"
    AGENT = "agent"
    SERVER = "server"
    GPUS = "GPUs"
    ENVIRONMENT = "environment"
    TRACKING = "tracking"
    RUNS = "runs"


class Finding(msgspec.Struct, frozen=True):
    """One thing a check saw; `mend` is the command or sentence that helps, where the row's own is not exact enough."""

    outcome: CheckOutcome
    sentence: str
    mend: str = ""


Probe = Callable[[MachineFacts], Sequence[Finding]]
A = TypeVar("A")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a trouble people have, why, and what mends it."""

    code: str  # stable name
    group: CheckGroup  # where it looks
    title: str  # what it is about, in a few words
    symptoms: tuple[str, ...]  # what a person sees, verbatim where there is a text
    cause: str  # why, in a sentence
    mend: str  # what to do, a command or a sentence
    # Judges the facts; None for what only a run can show. No finding means that it does not apply here.
    probe: Probe | None = None


def about(
    look: Callable[[MachineFacts], A | UnknownFact],
) -> Callable[[Callable[[MachineFacts, A], Sequence[Finding]]], Probe]:
    """Return a decorator for a probe that judges one area: where that could not be looked at, nothing is known."""

    def decorate(judge: Callable[[MachineFacts, A], Sequence[Finding]]) -> Probe:
        @wraps(judge)
        def probe(facts: MachineFacts) -> Sequence[Finding]:
            area = look(facts)
            return unknown(area.why) if isinstance(area, UnknownFact) else judge(facts, area)

        return probe

    return decorate


def ok(sentence: str) -> list[Finding]:
    """Return the one finding of a check that is fine."""
    return [Finding(CheckOutcome.OK, sentence)]


def warning(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that will bite sooner or later."""
    return [Finding(CheckOutcome.WARNING, sentence, mend)]


def failed(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that keeps runs from working."""
    return [Finding(CheckOutcome.FAILED, sentence, mend)]


def unknown(sentence: str, mend: str = "") -> list[Finding]:
    """Return the one finding of a check that could not see what it needs."""
    return [Finding(CheckOutcome.UNKNOWN, sentence, mend)]
