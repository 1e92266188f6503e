"""What is done to a server, and the bars: requests under load beside the same requests on the same server at rest.

Bars are in milliseconds of the 99th percentile; they hold for a machine that has nothing else to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from benchmarks.contestants import ContestantFailed
from benchmarks.load import gang
from benchmarks.load.asking import Asker
from benchmarks.load.flooding import Flood, Flooded
from benchmarks.load.log_page import Poured, Pouring, follower
from benchmarks.load.nodes import Nodes, Said
from benchmarks.load.probe import Probed, request
from benchmarks.load.scene import Scene, child, everything, p99, percentile, scale, scene, worst_p99
from benchmarks.load.slow import Slow, Slowed
from benchmarks.load.uploading import Upload, Uploaded
from benchmarks.report import Row, Timing
from serverless_gpu.model.spec import BLOB_PART_BYTES
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import stop_all
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.nodes import NodeList
from serverless_gpu.wire.runs import RunPage, RunView

T = TypeVar("T")
RUNS, NODES = 2_000, 20
RANKS = 10_000
UPLOAD_BYTES = 10 << 30
CONNECTIONS = 1_000
API_P99_MS_MAX = 200.0
HEALTH_MS_MAX = 100.0
RANKS_MS_MAX = 30_000.0
MEMORY_MB_MAX = 512.0
LINES_PER_S, LINES_S = 10_000, 15.0
FRAME_MS_MAX = 100.0
HEAP_MB_MAX = 100.0
_REST_S = 10.0
_PROBED_S = 5.0
_SUBMITTERS = 8
_STARTED_S = 240.0
_AT_REST = "at rest"


def many_runs(quick: bool) -> Row:
    """2,000 runs at once on 20 simulated nodes that talk HTTP; each ends within the row, and did not run twice."""
    count = max(NODES, round(RUNS * scale(quick)))
    with scene() as on:
        server = on.server
        devices = f"H100:{-(-count // NODES)}"
        tokens = tuple(server.node_token(f"node-{number:03}") for number in range(NODES))
        run_s = _lasting_s(count)
        said = Nodes(url=server.url, tokens=tokens, devices=devices, run_s=run_s)
        with child("benchmarks.load.nodes", said, answer=Said) as finished:
            _until(lambda: _nodes_there(on) >= NODES, 30, "nodes that have joined")
            rest = on.probe(_REST_S)
            server.ticks()
            submitted_ms = _submit(on, count)
            began = time.monotonic()
            _until(lambda: _count(on, "RUNNING,SUCCEEDED") >= count, _STARTED_S, f"{count} runs that have begun")
            started_ms = (time.monotonic() - began) * 1000
            server.ticks()
            busy = on.probe(_REST_S)
            ticks, memory_mb = server.ticks(), server.memory_mb()
            _until(lambda: _count(on, "SUCCEEDED") >= count, run_s + _STARTED_S, f"{count} runs that have succeeded")
            told = finished()
        if told.twice or told.began != count:
            on.problems.append(f"{told.began} attempts began of {count} runs, {told.twice} of them twice")
        return _row(
            f"{count:,} runs at once on {NODES} nodes",
            (rest, busy),
            (
                f"API p99 ≤ {API_P99_MS_MAX:.0f} ms, memory ≤ {MEMORY_MB_MAX:.0f} MB",
                worst_p99(busy) <= API_P99_MS_MAX and server.memory_mb("VmHWM") <= MEMORY_MB_MAX,
            ),
            also=(
                Timing("one submission of the burst, from 8 threads", tuple(submitted_ms)),
                Timing("last submission → all have begun", (started_ms,)),
                *(Timing(f"tick of the {name}", tuple(ticks[name])) for name in ("scheduler", "reconciler")),
                *(Timing(f"tick of the {name}, p99", (percentile(ticks[name], 0.99),)) for name in ("scheduler",)),
                Timing("memory of the server", (memory_mb,), "mb"),
                Timing("the most it had", (server.memory_mb("VmHWM"),), "mb"),
            ),
            problems=on.problems,
        )


def many_ranks(quick: bool) -> Row:
    """A run of 10,000 ranks: its results, from the first that is sent until a client that waits has all of them."""
    count = max(100, round(RANKS * scale(quick)))
    with scene() as on:
        small = gang.play(on.server, 100, name="small")
        large = gang.play(on.server, count, name="large")
        most_mb = on.server.memory_mb("VmHWM")
        return Row(
            name=f"the results of {count:,} ranks",
            ours=Timing(f"first of {count:,} results sent → the client has the end of the run", (large.ms,)),
            against=(Timing("the same with 100 ranks", (small.ms,)),),
            bar=f"≤ {RANKS_MS_MAX / 1000:.0f} s",
            met=large.ms <= RANKS_MS_MAX,
            value=f"{large.ms / 1000:.2f} s, all of them read after {large.fetched_ms / 1000:.1f} s",
            also=(
                Timing("until the client has read all results", (large.fetched_ms,)),
                Timing("a line of output of each rank sent and taken", (large.logs_ms,)),
                Timing("largest body of a report", (large.sent_mb,), "mb"),
                Timing("largest event of a stream", (large.event_mb,), "mb"),
                Timing("the most memory of the server", (most_mb,), "mb"),
            ),
            problems=tuple(on.problems),
        )


def flood(quick: bool) -> Row:
    """One rank of a run on this machine writes as fast as it can, beside everybody else's requests."""
    seconds = max(4.0, 20.0 * scale(quick))
    with scene(node=True) as on:
        home = on.server.home
        try:
            with child("benchmarks.load.flooding", Flood(seconds=1.0), answer=Flooded, **_at(on)) as warm:
                warm()
            rest = on.probe(_REST_S)
            with (
                child("benchmarks.load.flooding", Flood(seconds=seconds), answer=Flooded, **_at(on)) as finished,
                on.probing(seconds) as probed,
            ):
                busy = probed()
                flooded = finished()
        finally:
            stop_all(Home(home))
            stop_agent(home)
        most_mb = on.server.memory_mb("VmHWM")
        rate = flooded.gigabytes / flooded.seconds
        return _row(
            f"a rank writes {flooded.gigabytes:.0f} GB",
            (rest, busy),
            (
                f"API p99 ≤ {API_P99_MS_MAX:.0f} ms, server ≤ {MEMORY_MB_MAX:.0f} MB",
                worst_p99(busy) <= API_P99_MS_MAX and most_mb <= MEMORY_MB_MAX,
            ),
            value=f"{rate:.2f} GB/s",
            also=(Timing("the most memory of the server", (most_mb,), "mb"),),
            problems=on.problems,
        )


def upload(quick: bool) -> Row:
    """10 GB of parts are put, four at a time, while `/health` is asked."""
    parts = max(16, round(UPLOAD_BYTES * scale(quick) / BLOB_PART_BYTES))
    size = parts * BLOB_PART_BYTES
    with scene(needs_bytes=size) as on:
        rest = on.probe(_REST_S)
        asked = Upload(url=on.server.url, token=on.server.token, parts=parts)
        with child("benchmarks.load.uploading", asked, answer=Uploaded) as finished:
            busy, uploaded = _while(on, finished)
        if uploaded.refused:
            on.problems.append(f"{uploaded.refused} of {parts} parts were refused")
        most_mb = on.server.memory_mb("VmHWM")
        health = percentile(busy.ms["health"], 0.99)
        return _row(
            f"{size / 2**30:.1f} GiB are uploaded",
            (rest, busy),
            (
                f"/health p99 ≤ {HEALTH_MS_MAX:.0f} ms, memory ≤ {MEMORY_MB_MAX:.0f} MB",
                health <= HEALTH_MS_MAX and most_mb <= MEMORY_MB_MAX,
            ),
            value=f"/health p99 {health:.0f} ms, worst {max(busy.ms['health']):.0f} ms,"
            f" {size / 1e6 / uploaded.seconds:.0f} MB/s",
            also=(Timing("the most memory of the server", (most_mb,), "mb"),),
            problems=on.problems,
        )


def slow_loris(quick: bool) -> Row:
    """1,000 connections say nothing, or a byte a second; others send headers over the bounds; the rest is served."""
    count = max(50, round(CONNECTIONS * scale(quick)))
    with scene() as on:
        rest = on.probe(_REST_S)
        asked = Slow(url=on.server.url, connections=count, refused=count // 10, seconds=30.0)
        with child("benchmarks.load.slow", asked, answer=Slowed) as finished:
            busy, slowed = _while(on, finished)
        right = sum(slowed.answers.get(status, 0) for status in ("400", "413", "431", "0"))
        if slowed.closed != count or right != asked.refused:
            on.problems.append(f"closed {slowed.closed} of {count} slow ones; refusals: {slowed.answers}")
        most_mb = on.server.memory_mb("VmHWM")
        return _row(
            f"{count:,} slow connections, {asked.refused} with headers over the bounds",
            (rest, busy),
            (
                f"all of them ended, API p99 ≤ {API_P99_MS_MAX:.0f} ms",
                slowed.closed == count and right == asked.refused and worst_p99(busy) <= API_P99_MS_MAX,
            ),
            value=f"{slowed.closed} closed, {slowed.most} at once",
            also=(Timing("the most memory of the server", (most_mb,), "mb"),),
            problems=on.problems,
        )


def log_page(quick: bool) -> Row:
    """A browser follows a log that grows by 10,000 lines a second: the time between its frames."""
    seconds = 4.0 if quick else LINES_S
    with scene(node=True) as on:
        try:
            with child("benchmarks.load.flooding", Flood(seconds=0.1), answer=Flooded, **_at(on)) as warm:
                warm()
            asked = Pouring(lines_per_s=LINES_PER_S, seconds=seconds)
            with child("benchmarks.load.log_page", asked, answer=Poured, **_at(on)) as finished:
                _until(lambda: _count(on, "STARTING,RUNNING") > 0, _STARTED_S, "a run that writes")
                page = on.server.asker().get("GET", "/runs?state=STARTING,RUNNING&limit=1", answer=RunPage)
                with follower(on.server, page.runs[0].id) as following:
                    following.begin()
                    poured = finished()
                    following.wait_for(poured.lines)
                    followed = following.result()
                    rest = following.rest(_PROBED_S)
        finally:
            stop_all(Home(on.server.home))
            stop_agent(on.server.home)
    worst = max(followed.frames_ms)
    return Row(
        name=f"load: a browser follows {poured.lines / poured.seconds:,.0f} lines a second",
        ours=Timing("time between two frames of the page, under load", followed.frames_ms),
        against=(Timing(f"the same {_AT_REST}", rest),),
        bar=f"longest ≤ {FRAME_MS_MAX:.0f} ms, heap ≤ {HEAP_MB_MAX:.0f} MB",
        met=worst <= FRAME_MS_MAX and followed.heap_mb <= HEAP_MB_MAX,
        value=f"longest {worst:.0f} ms, p99 {percentile(followed.frames_ms, 0.99):.1f} ms, "
        f"{len(followed.tasks_ms)} long tasks, {followed.elements} elements",
        also=(
            Timing("heap of the page's scripts", (followed.heap_mb,), "mb"),
            Timing("tasks of 50 ms and longer", followed.tasks_ms or (0.0,)),
        ),
        problems=tuple(on.problems),
    )


ROWS: dict[str, Callable[[bool], Row]] = {
    "load-runs": many_runs,
    "load-ranks": many_ranks,
    "load-flood": flood,
    "load-upload": upload,
    "load-slow": slow_loris,
    "load-log": log_page,
}


def _row(
    name: str,
    probed: tuple[Probed, Probed],
    verdict: tuple[str, bool],
    *,
    value: str = "",
    also: Sequence[Timing] = (),
    problems: Sequence[str] = (),
) -> Row:
    """Return requests at rest and under load as a row; the verdict is the bar and whether it was met."""
    rest, busy = probed
    told = f"worst p99 {worst_p99(busy):.0f} ms, {worst_p99(rest):.0f} ms {_AT_REST}"
    return Row(
        name=f"load: {name}",
        ours=everything("a request under load, any kind", busy),
        against=(everything(f"the same {_AT_REST}", rest),),
        bar=verdict[0],
        met=verdict[1],
        value=" · ".join(filter(None, (value, told))),
        also=(*also, *p99("under load", busy), *p99(_AT_REST, rest)),
        problems=tuple(problems),
    )


def _while(on: Scene, finished: Callable[[], T]) -> tuple[Probed, T]:
    """Probe until a child has finished; return what came, and what the child says."""
    with ThreadPoolExecutor(1) as waiting:
        told = waiting.submit(finished)
        busy = on.probe(_PROBED_S)
        while not told.done():
            more = on.probe(_PROBED_S)
            ms = {kind: busy.ms[kind] + more.ms[kind] for kind in busy.ms}
            busy = Probed(ms=ms, failed=more.failed, first_failure=more.first_failure)
        return busy, told.result()


def _at(on: Scene) -> dict[str, str]:
    return {"SERVERLESS_GPU_HOME": str(on.server.home)}


def _lasting_s(count: int) -> float:
    """Return how long runs last, so that the last has begun well before the first ends, on a busy machine, too."""
    return 30.0 + 0.06 * count


def _submit(on: Scene, count: int) -> list[float]:
    mine = threading.local()

    def submit(number: int) -> float:
        if not hasattr(mine, "asker"):
            mine.asker = on.server.asker()
        began = time.monotonic()
        asker: Asker = mine.asker
        asker.get("POST", "/runs", request(f"machine-node-{number % NODES:03}"), answer=RunView)
        return (time.monotonic() - began) * 1000

    with ThreadPoolExecutor(_SUBMITTERS) as threads:
        return list(threads.map(submit, range(count)))


def _count(on: Scene, states: str) -> int:
    asker, found, cursor = on.server.asker(), 0, ""
    while True:
        page = asker.get("GET", f"/runs?state={states}&limit=500&cursor={cursor}", answer=RunPage)
        found, cursor = found + len(page.runs), page.cursor
        if not cursor:
            return found


def _nodes_there(on: Scene) -> int:
    return sum(1 for node in on.server.asker().get("GET", "/nodes", answer=NodeList).nodes if node.state == "UP")


def _until(happened: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > deadline:
            raise ContestantFailed(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.5)
