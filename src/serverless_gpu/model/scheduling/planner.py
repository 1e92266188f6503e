"""The state of the queue, kept from change to change, and the pass over it."""

from __future__ import annotations

from collections.abc import Iterable

from serverless_gpu.model.scheduling.values import (
    Change,
    Decision,
    Estimate,
    Policy,
    Reservation,
    Wait,
    Wanted,
)


class Planner:
    """Everything that waits and runs, and what it can run on. Not for several threads at once.

    The same changes and the same times in the same order give the same answers.

    Args:
        policy: what the operator decides.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()

    def apply(self, changes: Iterable[Change]) -> None:
        """Take note of what has changed; nothing is decided."""
        raise NotImplementedError

    def decide(self, now_ns: int) -> Decision:
        """Return who starts and who has to leave, and count it as done.

        Args:
            now_ns: the time; never less than before.
        """
        raise NotImplementedError

    def why(self, run_id: str, now_ns: int) -> Wait | None:
        """Return why a run waits, as of the last decision; None for one that does not wait."""
        raise NotImplementedError

    def estimate(self, wanted: Wanted, now_ns: int) -> Estimate:
        """Return when a run would start if it came now; nothing is changed."""
        raise NotImplementedError

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what is kept for whom, as of the last decision."""
        raise NotImplementedError

    def usage(self, now_ns: int) -> dict[str, float]:
        """Return the decayed use of each team, GPU-seconds; users without a team under ``"~name"``."""
        raise NotImplementedError
