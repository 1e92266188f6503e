"""Requests to the server and answers from it, as a network that cannot be trusted delivers them.

A request goes to whatever server there is when it arrives. Whoever asks hears an answer, or `ServerUnavailable` after a
while: then they do not know whether it arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from serverless_gpu.errors import ServerlessGpuError, ServerUnavailable
from serverless_gpu.server.composition import Services
from tests.e2e.simulation.server import Process
from tests.e2e.simulation.storage import Killed
from tests.e2e.simulation.timeline import Timeline

T = TypeVar("T")
TIMEOUT_S = 20.0


class Link:
    """Between one machine and the server.

    Attributes:
        up: whether requests arrive.
        down: whether answers do.
        late_s: how late each message is at most.
        answers_late_s: how late each answer is: the request was heard long before.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = self.down = True
        self.late_s = self.answers_late_s = 0.0


class Network:
    """All links.

    Args:
        time: virtual.
        server: returns the server's process, if there is one.

    Attributes:
        lost: share of messages that do not arrive.
        doubled: share of requests that arrive twice.
        late_s: how late a message may be; such messages overtake each other.
    """

    def __init__(self, time: Timeline, server: Callable[[], Process | None]) -> None:
        self._time, self._server = time, server
        self.lost = self.doubled = 0.0
        self.late_s = 0.0

    def ask(
        self,
        link: Link,
        request: Callable[[Services], T],
        heard: Callable[[T], None],
        failed: Callable[[ServerlessGpuError], None],
    ) -> None:
        """Send a request; exactly one of `heard` and `failed` is called, once."""
        asked = _Asked(heard, failed)
        rng = self._time.rng
        arrives = link.up and rng.random() >= self.lost
        if arrives:
            self._time.after(self._delay_s(link), lambda: self._arrive(link, request, asked))
            if rng.random() < self.doubled:
                self._time.after(self._delay_s(link) * 3, lambda: self._arrive(link, request, asked))
        self._time.after(TIMEOUT_S, lambda: asked.fail(ServerUnavailable("no answer came")))

    def _arrive(self, link: Link, request: Callable[[Services], Any], asked: _Asked) -> None:
        process = self._server()
        if process is None:
            refused = ServerUnavailable("the connection was refused")
            self._back(link, lambda: asked.fail(refused))
            return
        try:
            answer = process.serve(request)
        except Killed:
            self._back(link, lambda: asked.fail(ServerUnavailable("the connection broke")))
        except ServerlessGpuError as error:
            problem = error
            self._back(link, lambda: asked.fail(problem))
        else:
            self._back(link, lambda: asked.hear(answer))

    def _back(self, link: Link, deliver: Callable[[], None]) -> None:
        if link.down and self._time.rng.random() >= self.lost:
            late_s = self._delay_s(link) + link.answers_late_s
            self._time.after(late_s, lambda: deliver() if link.down else None)

    def _delay_s(self, link: Link) -> float:
        rng = self._time.rng
        late_s = rng.uniform(0, self.late_s) if self.late_s and rng.random() < 0.5 else 0.0
        return rng.uniform(0.001, 0.02) + late_s + rng.uniform(0, link.late_s)


class _Asked:
    """A request that is waited for: the first word about it counts."""

    def __init__(self, heard: Callable[[Any], None], failed: Callable[[ServerlessGpuError], None]) -> None:
        self._heard, self._failed = heard, failed
        self._over = False

    def hear(self, answer: Any) -> None:
        if not self._over:
            self._over = True
            self._heard(answer)

    def fail(self, error: ServerlessGpuError) -> None:
        if not self._over:
            self._over = True
            self._failed(error)
