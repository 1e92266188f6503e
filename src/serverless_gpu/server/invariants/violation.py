"""What is wrong, as a value: the word that all invariants speak (`run_invariants.py`)."""

from __future__ import annotations

import msgspec

from serverless_gpu.server.invariants.invariant_inputs import Booked


class Violation(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Something that is never true, and is.

    Attributes:
        invariant: ``"I3"``.
        subject: what it is about: ``"run <id>"``, ``"device <uuid>"``.
        sentence: what is wrong.
    """

    invariant: str
    subject: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.sentence}"


def of_run(booked: Booked, invariant: str, sentence: str) -> Violation:
    """Return what is wrong with a run."""
    return Violation(invariant=invariant, subject=f"run {booked.run.id}", sentence=sentence)
