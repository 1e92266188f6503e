"""A browser that follows the log of a run, whose one rank writes so many lines a second.

The run is a child process (`python -m benchmarks.load.log_page`): one line of JSON in, one out. The browser is
Debian's Chromium. What is measured there: time between two frames, long tasks, heap, and number of elements.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from playwright.sync_api import Page, sync_playwright

from benchmarks.contestants import ContestantFailed
from benchmarks.load.servers import MeasuredServer
from serverless_gpu import distributed
from serverless_gpu.wire.access import SignInLink

LINE_BYTES = 56
_TICK_S = 0.02
_SHOWN_S = 60.0
_PROBE = """() => {
  const found = window.probe = {frames: [], tasks: []};
  new PerformanceObserver(list => { for (const one of list.getEntries()) found.tasks.push(one.duration); })
    .observe({type: "longtask"});
  let last = performance.now();
  const frame = now => { found.frames.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}"""
_RESET = "() => { window.probe.frames.length = window.probe.tasks.length = 0; }"


class Pouring(msgspec.Struct, frozen=True, kw_only=True):
    """How many lines the rank writes, and in what time."""

    lines_per_s: int
    seconds: float


class Poured(msgspec.Struct, frozen=True, kw_only=True):
    """What it wrote, and how long it took."""

    lines: int
    seconds: float


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What the browser measured.

    Attributes:
        frames_ms: time between two frames, one by one.
        tasks_ms: tasks of 50 ms and longer.
        heap_mb: of scripts, after a collection.
        elements: of the document.
        last: number of the last line that is shown.
    """

    frames_ms: tuple[float, ...]
    tasks_ms: tuple[float, ...]
    heap_mb: float
    elements: int
    last: int


@distributed(gpus=1, gpu_type="CPU", quiet=True, remote=True)
def pour_lines(lines_per_s: int, seconds: float) -> tuple[int, float]:
    """Write numbered lines at a steady rate, and the number of lines last."""
    began, written = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        due = round(elapsed * lines_per_s)
        lines = (f"\x1b[32mline\x1b[0m {number} ".ljust(LINE_BYTES - 1, "x") for number in range(written, due))
        data = "\n".join([*lines, ""]).encode()
        while data:
            data = data[os.write(1, data) :]
        written = due
        time.sleep(_TICK_S)
    os.write(1, f"line {written} end\n".encode())
    return written, time.monotonic() - began


class Follower:
    """A page that shows the log of one run."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable")
        page.evaluate(_PROBE)

    def rest(self, seconds: float) -> tuple[float, ...]:
        """Return the time between frames while nothing is written."""
        self._page.evaluate(_RESET)
        time.sleep(seconds)
        return tuple(self._page.evaluate("() => window.probe.frames"))

    def begin(self) -> None:
        """Forget what was measured."""
        self._page.evaluate(_RESET)

    def last_line(self) -> int:
        """Return the number of the last line that is shown, or -1."""
        text: str = self._page.evaluate(
            "() => [...document.querySelectorAll('.log-row:not([hidden]) .log-text')].at(-1)?.textContent ?? ''"
        )
        words = text.split()
        return int(words[1]) if len(words) > 1 and words[0] == "line" and words[1].isdigit() else -1

    def wait_for(self, line: int) -> None:
        """Wait until a line is shown."""
        deadline = time.monotonic() + _SHOWN_S
        while self.last_line() < line:
            if time.monotonic() > deadline:
                raise ContestantFailed(f"the page shows line {self.last_line()} and not line {line}")
            time.sleep(0.1)

    def result(self) -> Followed:
        """Return what was measured since `begin`."""
        probe: dict[str, Any] = self._page.evaluate("() => window.probe")
        self._session.send("HeapProfiler.collectGarbage")
        metrics = {one["name"]: one["value"] for one in self._session.send("Performance.getMetrics")["metrics"]}
        return Followed(
            frames_ms=tuple(probe["frames"]),
            tasks_ms=tuple(probe["tasks"]),
            heap_mb=metrics["JSHeapUsedSize"] / 1e6,
            elements=self._page.evaluate("() => document.querySelectorAll('*').length"),
            last=self.last_line(),
        )


@contextlib.contextmanager
def follower(server: MeasuredServer, run: str) -> Iterator[Follower]:
    """Open the log of a run in a browser that is signed in.

    Raises:
        ContestantFailed: Chromium is not installed.
    """
    path = shutil.which("chromium")
    if path is None:
        raise ContestantFailed("needs chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            page = browser.new_context(base_url=server.url).new_page()
            page.goto(server.asker().get("POST", "/sign-in-links", answer=SignInLink).path)
            page.goto(f"/ui/runs/{run}/logs")
            yield Follower(page)
        finally:
            browser.close()


def main() -> None:
    """Have a run write, and say what it wrote."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Pouring)
    ((lines, seconds),) = pour_lines.distributed(asked.lines_per_s, asked.seconds)
    print(msgspec.json.encode(Poured(lines=lines, seconds=seconds)).decode(), flush=True)


if __name__ == "__main__":
    main()
