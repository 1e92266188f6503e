"""F73 with real processes: the longest time of an attempt, which its node keeps by itself, and what comes after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu import distributed
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import PolicyViolation, RunTimedOut
from serverless_gpu.model.attempt import Reason
from serverless_gpu.model.facts import Fact, FactKind
from serverless_gpu.node.history import read_ending
from tests.local.observe import wait_for
from tests.remote.counting import count, saved
from tests.remote.server_process import ServerProcess

pytestmark = pytest.mark.slow
LIMIT_S, GRACE_S = 3, 1


def test_F73_a_node_that_is_cut_off_ends_an_attempt_in_time_and_the_run_goes_on_where_it_saved(
    own_server: ServerProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CliRunner().invoke(sgpu, ["policy", "set", "short", "--max-run", f"{LIMIT_S}s", "--gpus-per-run", "2"])
    assert made.exit_code == 0, made.output
    monkeypatch.setenv("SGPU_POLICY", "short")
    with pytest.raises(PolicyViolation, match="'short' does not accept gpus=4, which SGPU_POLICY names") as caught:
        distributed(gpus=4, gpu_type="H100", remote=True, quiet=True)(count).submit(1)
    assert caught.value.hint == "it accepts gpus=2 at most"
    asked: dict[str, Any] = {"gpus": 1, "gpu_type": "H100", "remote": True, "quiet": True, "grace": float(GRACE_S)}
    distributed(**asked)(count).distributed(0)  # an interpreter is ready: the limit is short
    final = distributed(**asked, timeout=60)(count).submit(100_000)
    run = distributed(**asked, resume=True)(count).submit(600)
    wait_for(lambda: all("from 0" in each.logs() for each in (final, run)), "both count")
    own_server.kill()
    attempts = [home / "runs" / each.id / "1" for each in (final, run)]
    wait_for(lambda: all((attempt / "stopped.json").exists() for attempt in attempts), "the node has ended both")
    for each, attempt in zip((final, run), attempts, strict=True):
        ending = read_ending(attempt)
        assert ending is not None and ending.reason is Reason.TIMEOUT
        assert saved(home, each.id)["why"] == "timeout"
        facts = [msgspec.json.decode(line, type=Fact) for line in (attempt / "facts.jsonl").read_bytes().splitlines()]
        moments = {fact.kind: fact.boottime_ns for fact in facts}
        assert moments[FactKind.STOPPING] - moments[FactKind.EXEC] >= (LIMIT_S - GRACE_S) * 10**9
    own_server.start()
    with pytest.raises(RunTimedOut, match=f"its time limit of {LIMIT_S} s") as ended:
        final.results(60)
    assert "usage policy 'short' lets an attempt run no longer" in ended.value.__notes__[-1]
    ((first, reached, why),) = run.results(90)
    assert (reached, why) == (600, None) and 0 < first < 600
    before = max(int(path.name) for path in (home / "checkpoints" / run.id).iterdir() if (path / "count.json").exists())
    assert saved(home, run.id, before)["count"] == first
