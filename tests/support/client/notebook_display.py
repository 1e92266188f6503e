"""Helpers of the tests of notebook display that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.client.display.notebook_display import NotebookDisplay
from serverless_gpu.testing import FakeClock


class Screen:
    """A front end that keeps what it was shown, and fails when told to."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.error: Exception | None = None

    def show(self, bundle: dict[str, str]) -> None:
        if self.error is not None:
            raise self.error
        self.shown.append(bundle)

    @property
    def plain(self) -> list[str]:
        return [bundle["text/plain"] for bundle in self.shown]


class Cell:
    """A display with its clock and its front end."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.clock = FakeClock()
        self.screen = Screen()
        self.account = Screen()
        self.display = NotebookDisplay(
            quiet=quiet, logs=Path("/logs"), clock=self.clock, status=self.screen, account=self.account
        )

    def pass_time(self, seconds: float) -> None:
        """Let time pass, ticks as often as the display wants them."""
        tick_s = self.display.tick_s
        assert tick_s is not None
        for _ in range(round(seconds / tick_s)):
            self.clock.advance(tick_s)
            self.display.tick()
