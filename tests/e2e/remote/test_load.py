"""The rows about load, small and all at once on one server. `make load` does the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.load import gang
from benchmarks.load.nodes import Nodes, Said
from benchmarks.load.probe import request
from benchmarks.load.scene import Scene, child, scene
from benchmarks.load.slow import Slow, Slowed
from benchmarks.load.uploading import Upload, Uploaded
from serverless_gpu.server.http.listener import HEAD_S
from serverless_gpu.wire.base import INLINE_BYTES_MAX
from serverless_gpu.wire.runs import RunPage, RunView
from tests.support.local.observe import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
RUNS, NODES, RANKS, PARTS, SLOW = 60, 3, 1_000, 8, 200
MEMORY_MB_MAX = 400.0


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Scene]:
    with scene(place=str(tmp_path)) as there:
        yield there


def test_F51_runs_ranks_parts_and_slow_connections_at_once_and_nothing_is_lost(on: Scene) -> None:
    server = on.server
    slow = Slow(url=server.url, connections=SLOW, refused=20, seconds=HEAD_S + 40)
    parts = Upload(url=server.url, token=server.token, parts=PARTS)
    tokens = tuple(server.node_token(f"node-{number:03}") for number in range(NODES))
    nodes = Nodes(url=server.url, tokens=tokens, devices=f"H100:{RUNS // NODES}", run_s=5.0)
    with (
        child("benchmarks.load.slow", slow, answer=Slowed) as slowed,
        child("benchmarks.load.uploading", parts, answer=Uploaded) as uploaded,
        child("benchmarks.load.nodes", nodes, answer=Said) as told,
        ThreadPoolExecutor(3) as waiting,
    ):
        ended = waiting.submit(slowed)
        sent = waiting.submit(uploaded)
        asker = server.asker()
        asked = [request(f"machine-node-{number % NODES:03}") for number in range(RUNS)]
        for one in asked:
            asker.get("POST", "/runs", one, answer=RunView)
        played = gang.play(server, RANKS, name="large")

        def succeeded() -> bool:
            page = asker.get("GET", "/runs?state=SUCCEEDED&limit=500", answer=RunPage)
            return {one.id for one in asked} <= {run.id for run in page.runs}

        wait_for(succeeded, "all runs to have succeeded", 180)
        said = told()
        assert (said.began, said.twice) == (RUNS, 0)
        assert not [kind for kind in said.answers if kind.split()[1] not in ("200", "204") and kind != "orders 0"]
        assert played.event_mb * 1e6 < 2 * INLINE_BYTES_MAX
        assert sent.result(60).refused == 0
        assert ended.result(60).closed == SLOW
        assert sum(ended.result().answers.get(status, 0) for status in ("400", "413", "431", "0")) == slow.refused
    assert server.memory_mb("VmHWM") < MEMORY_MB_MAX
