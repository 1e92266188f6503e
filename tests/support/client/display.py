"""Helpers of the tests of display that other tests use as well."""

from __future__ import annotations

import io

from tests.support.tiny_terminal import screen


class Terminal(io.StringIO):
    """stdout and stderr of a person at a terminal of 80 columns."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        return screen(self.getvalue())
