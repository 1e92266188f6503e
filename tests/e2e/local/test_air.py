"""A run can be reproduced by hand from its directory: `torchrun <run directory>/_air.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from serverless_gpu import Run, distributed
from tests.support.golden import golden
from tests.support.local.observe import nothing_of_a_run, run_script, wait_for
from tests.support.local.torchrun import torchrun

pytestmark = pytest.mark.usefixtures("warm")


def summed(values: list[int], rank: int = -1, world_size: int = -1) -> tuple[int, int, str]:
    """Use a process group."""
    dist.init_process_group("gloo")
    total = torch.tensor(values[rank])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return rank, int(total), f"{world_size} {os.getcwd()}"


def test_torchrun_reproduces_a_run(warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run: Run[tuple[int, int, str]] = distributed(gpus=2, quiet=True)(summed).submit([10, 32])
    results = run.results(timeout=60)
    assert results == [(0, 42, f"2 {tmp_path}"), (1, 42, f"2 {tmp_path}")]
    wait_for(lambda: nothing_of_a_run(warm), "the last file is written")
    before = sorted(path for path in run.directory.rglob("*"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = torchrun(run.directory, 2, elsewhere)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} returned {results[rank]!r}" for rank in (0, 1)]
    assert sorted(path for path in run.directory.rglob("*")) == before, "the run directory stays as it was"


@pytest.mark.long
def test_torchrun_reproduces_a_failure_with_the_users_lines() -> None:
    def train(rank: int = -1) -> None:
        if rank == 0:
            raise ValueError("by hand, too")

    run = distributed(gpus=2, quiet=True)(train).submit()
    with pytest.raises(ValueError, match="by hand, too"):
        run.results(timeout=60)
    done = torchrun(run.directory, 2, Path("/"))
    assert done.returncode != 0
    assert golden("local.air.raise-valueerror-hand") in done.stderr


def test_a_single_process_needs_no_torchrun() -> None:
    @distributed(gpus=1, quiet=True)
    def train(text: str) -> str:
        return text.upper()

    run = train.submit("abc")
    assert run.results(timeout=60) == ["ABC"]
    done = run_script(run.directory / "_air.py")
    assert (done.returncode, done.stdout) == (0, "rank 0 returned 'ABC'\n"), done.stderr


def test_the_program_is_readable_and_holds_no_secrets(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    run = distributed(gpus=2, quiet=True)(len).submit("ab")
    assert run.wait(50)
    wait_for(lambda: nothing_of_a_run(warm), "the last file is written")
    text = (run.directory / "_air.py").read_text()
    assert f"torchrun --nproc-per-node=2 {run.directory}/_air.py" in text and run.id in text
    compile(text, "_air.py", "exec")
    for path in run.directory.rglob("*"):
        if path.is_file():
            assert b"very-secret" not in path.read_bytes(), path
    assert "MY_TOKEN" in (run.directory / "environment.json").read_text()
    assert run.directory.stat().st_mode & 0o077 == 0
