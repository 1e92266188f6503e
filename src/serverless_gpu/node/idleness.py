"""The supervisor's eye on a run that leaves its devices idle: asks `model/idling.py` what to do, and does it.

    telemetry ───────seen──▶ IdleWatch ──tell──▶ watchers          at four fifths of the limit
    output, events ─heard──▶     └────────────▶ StopRequested      at the limit: ranks may save first, as at any stop
    somebody attaches ─heard─┘

Nothing is stopped where no limit was asked for, or where no telemetry comes: what nobody sees is not idle.
"""

from __future__ import annotations

from collections.abc import Callable

from serverless_gpu.ambient import Clock
from serverless_gpu.model import idling
from serverless_gpu.model.attempt import Attempt, Phase, State, StopReason, StopRequested
from serverless_gpu.model.idling import Verdict
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.units import format_duration_ms


class IdleWatch:
    """Whether one attempt uses what it has.

    Args:
        spec: the run as it was asked for.
        clock: where time comes from.
        tell: called with a sentence for whoever watches the run.
        notes: sentences for the receipt; added to.

    Attributes:
        said: the warning, as long as it stands.
    """

    def __init__(self, spec: RunSpec, clock: Clock, tell: Callable[[str], None], notes: list[str]) -> None:
        self.said = ""
        self._spec = spec
        self._clock = clock
        self._tell = tell
        self._notes = notes
        self._idle: idling.Idle | None = None
        self._begun = False

    def heard(self) -> None:
        """Take note that somebody needs the run: output, an event, a client that attached."""
        if self._idle is not None:
            self._idle = idling.used(self._idle, self._clock.boottime_ns())
            self._take_back("the run gets on again")

    def seen(self, busy: bool) -> None:
        """Take note of what telemetry saw since it was last asked."""
        if self._idle is not None:
            self._idle = idling.seen(self._idle, self._clock.boottime_ns(), busy=busy)
            if busy:
                self._take_back("the devices work again")

    def look(self, attempt: Attempt) -> StopRequested | None:
        """Do what is due now.

        Args:
            attempt: as it is.

        Returns:
            The event that stops the run, if its devices have done nothing for too long.
        """
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED:  # it waits for other nodes
            self._idle = None
            return None
        if not self._begun:  # user code has just started
            self._begun = True
            self._idle = idling.begin(self._spec, self._clock.boottime_ns())
        if self._idle is None:
            return None
        self._idle, verdict = idling.decide(self._idle)
        idle_for = format_duration_ms(self._idle.idle_ns // 1_000_000)
        if verdict is Verdict.WARN:
            left = format_duration_ms(self._idle.left_ns // 1_000_000)
            self._say(
                f"no device has done anything for {idle_for}: the run is stopped in {left} (idle_timeout); "
                "work, output or `attach` keeps it"
            )
        if verdict is not Verdict.STOP:
            return None
        limit = f"{self._idle.limit_ns / 1e9:g}"
        self._idle = None  # ranks that end are no sign that it gets on
        self._notes.append(f"stopped because no device did anything for {idle_for} (idle_timeout={limit})")
        return StopRequested(StopReason.IDLE)

    def _take_back(self, told: str) -> None:
        if self.said:
            self._say(told)
            self._say("")

    def _say(self, told: str) -> None:
        self.said = told
        self._tell(told)
