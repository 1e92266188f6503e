"""How long pages take with 100,000 runs and 1,000 GPUs in the database, beside the JSON API of the same data.

A page calls the handlers of the API and renders a template. The ratio is therefore what the page costs beyond its data.
The client is on the same machine, and requests follow one another.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx2

from benchmarks.contestants import wait_for_quiet
from benchmarks.report import Row, Timing
from serverless_gpu.wire.base import API
from tests.support.web.browser import sign_in_path
from tests.support.web.filled import Filling, filled

RUNS, NODES, GPUS = 100_000, 125, 8
PAGE_MS_MAX = 100.0
SETTLED_S = 60.0
PAGES = {
    "/": "/runs?limit=20",
    "/runs": "/runs?limit=50",
    "/queue": "/queue",
    "/nodes": "/devices",
    "/nodes/gpu-000": "/devices?node=gpu-000",
    "/pools": "/pools",
    "/usage": "/usage?by=team",
    "/budgets": "/budgets",
    "/policies": "/policies",
    "/prices": "/prices",
    "/people": "/users",
    "/secrets": "/secrets",
    "/environments": "/environments",
    "/indexes": "/indexes",
    "/audit": "/audit",
    "/server": "/version",
}
"""Each page, and the route of the API with most of its data."""


def pages(quick: bool) -> Row:
    """Open every page, and ask the API for the same data, in turns."""
    rounds = 8 if quick else 60
    with tempfile.TemporaryDirectory(prefix="sg-pages-") as home:
        filling = Filling(runs=5_000 if quick else RUNS, nodes=NODES, gpus=GPUS, active=200, queued=100, days=60)
        with (
            filled(Path(home), filling) as server,
            httpx2.Client(base_url=server.url, timeout=60) as client,
        ):
            client.get(sign_in_path(server))
            headers = {"Authorization": f"Bearer {server.token}"}
            wait_for_quiet(SETTLED_S)  # The started server first adds up the charges of all runs.
            timings: list[tuple[Timing, Timing]] = []
            for page, route in PAGES.items():
                shown, asked = [], []
                for _ in range(rounds):
                    shown.append(_ms(functools.partial(client.get, f"/ui{page}")))
                    asked.append(_ms(functools.partial(client.get, API + route, headers=headers)))
                timings.append((Timing(f"/ui{page}", tuple(shown)), Timing(f"{API}{route}", tuple(asked))))
    slowest = max(timings, key=lambda pair: p95(pair[0]))
    return Row(
        name=f"page, p95, {filling.runs:,} runs and {NODES * GPUS:,} GPUs",
        ours=Timing(f"the slowest, {slowest[0].label}", slowest[0].values),
        against=(Timing(f"its data, {slowest[1].label}", slowest[1].values),),
        bar=f"p95 ≤ {PAGE_MS_MAX:.0f} ms",
        met=p95(slowest[0]) <= PAGE_MS_MAX,
        value=f"{p95(slowest[0]):.0f} ms",
        also=tuple(timing for pair in timings for timing in pair),
    )


def p95(timing: Timing) -> float:
    """Return the 95th percentile of a timing, in milliseconds."""
    return sorted(timing.values)[math.ceil(0.95 * len(timing.values)) - 1]


def _ms(ask: Callable[[], httpx2.Response]) -> float:
    began = time.perf_counter()
    answer = ask()
    taken = 1000 * (time.perf_counter() - began)
    answer.raise_for_status()
    return taken


ROWS = {"pages": pages}
