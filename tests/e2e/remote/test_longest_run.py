"""F73 with real processes: the longest time of an attempt, which its node keeps by itself, and what comes after it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu import Run, distributed
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import PolicyViolation, RunError, RunTimedOut
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason
from serverless_gpu.node.attempt.history import read_ending
from tests.e2e.remote.counting import count, saved, stand_still
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.server_process import ServerProcess

pytestmark = pytest.mark.slow
LIMIT_S, GRACE_S = 5, 2
Counted = Run[tuple[int, int, str | None]]


def submit(limit: int, *, timeout: float | None = None, resume: bool = False) -> Counted:
    start = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, grace=GRACE_S, timeout=timeout, resume=resume)
    return start(count).submit(limit)


def began(run: Counted) -> None:
    wait_for(lambda: "from 0" in run.logs(), "it counts")


def ended_in_time(home: Path, run: Counted) -> None:
    """Wait until the node has ended the first attempt: at its limit, with what it had saved before."""
    attempt = home / "runs" / run.id / "1"
    wait_for(lambda: (attempt / "stopped.json").exists(), "its node has ended it")
    ending = read_ending(attempt)
    assert ending is not None and ending.reason is Reason.TIMEOUT
    assert saved(home, run.id)["why"] == "timeout"
    facts = [msgspec.json.decode(line, type=Fact) for line in (attempt / "facts.jsonl").read_bytes().splitlines()]
    moments = {fact.kind: fact.boottime_ns for fact in facts}
    assert moments[FactKind.STOPPING] - moments[FactKind.EXEC] >= (LIMIT_S - GRACE_S) * 10**9


def test_F73_a_node_that_is_cut_off_ends_an_attempt_in_time_and_the_run_goes_on_where_it_saved(
    own_server: ServerProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CliRunner().invoke(sgpu, ["policy", "set", "short", "--max-run", f"{LIMIT_S}s", "--gpus-per-run", "2"])
    assert made.exit_code == 0, made.output
    monkeypatch.setenv("SGPU_POLICY", "short")
    with pytest.raises(PolicyViolation, match=re.escape(golden("remote.longest_run.short-does-accept"))) as caught:
        distributed(gpus=4, gpu_type="H100", remote=True, quiet=True)(count).submit(1)
    assert caught.value.hint == golden("remote.longest_run.accepts-gpus-most")
    submit(0).results(60)  # an interpreter is ready: the limit is short
    final, run = submit(100_000, timeout=60.0), submit(900, resume=True)
    began(final)
    began(run)
    own_server.kill()
    ended_in_time(home, final)
    ended_in_time(home, run)
    own_server.start()
    with pytest.raises(RunTimedOut, match=golden("remote.longest_run.time-limit", LIMIT_S=LIMIT_S)) as ended:
        final.results(60)
    assert golden("remote.longest_run.usage-policy-short") in ended.value.message
    ((first, reached, why),) = run.results(90)
    assert (reached, why) == (900, None) and 0 < first < 900
    before = max(int(path.name) for path in (home / "checkpoints" / run.id).iterdir() if (path / "count.json").exists())
    assert saved(home, run.id, before)["count"] == first


@pytest.mark.parametrize(("has_saved", "attempts"), [(True, 3), pytest.param(False, 2, marks=pytest.mark.long)])
def test_22D2_a_run_that_saves_nothing_new_under_a_time_limit_ends_after_a_few_attempts(
    own_server: ServerProcess, home: Path, monkeypatch: pytest.MonkeyPatch, has_saved: bool, attempts: int
) -> None:
    made = CliRunner().invoke(sgpu, ["policy", "set", "short", "--max-run", "1s", "--unsaved-attempts", "2"])
    assert made.exit_code == 0, made.output
    monkeypatch.setenv("SGPU_POLICY", "short")
    start = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, grace=0.1, resume=True)
    run = start(stand_still).submit()
    if has_saved:  # as the first attempt would: long before it has an interpreter
        (home / "checkpoints" / run.id / "1").mkdir(parents=True)
        (home / "checkpoints" / run.id / "1" / "state").touch()
    says = "several attempts of the run saved no new checkpoint to continue from: 2 in a row"
    with pytest.raises(RunError, match=f"^{says}") as caught:
        run.results(120)
    assert caught.value.reason == Reason.NO_PROGRESS
    assert caught.value.hint.startswith("save to runtime.checkpoint_dir() and start from runtime.resume_dir()")
    assert len(list((home / "runs" / run.id).iterdir())) == attempts
