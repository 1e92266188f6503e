"""Gangs on two nodes of a real server: they meet, run as one, end as one, and are told as one run."""

from __future__ import annotations

import re
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu import attach, faults
from serverless_gpu.cli import program
from serverless_gpu.errors import CollectiveHang, RunCancelled, RunTimedOut
from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import announced, wait_for
from tests.support.ports import own_port
from tests.support.remote.gang_work import (
    add_up,
    fail_in_the_last,
    save_and_go_on,
    save_when_told,
    stay,
    wait_for_the_last,
)
from tests.support.remote.machines import Machines

SITE = sysconfig.get_path("purelib")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Yield a server with two nodes of two GPUs each, which all tests leave as they were."""
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            use_home(patch, home)
            with Machines(home) as pool:
                pool.join("n1")
                pool.join("n2")
                yield pool
    finally:
        shutil.rmtree(home)


@pytest.fixture
def pool(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Yield the machines, and require that no run outlives the test."""
    use_home(monkeypatch, machines.home)
    yield machines
    for node in machines.nodes.values():
        wait_for(node.is_free, f"nothing is left on {node.name}")


@pytest.mark.long
def test_four_ranks_on_two_nodes_add_up_over_gloo(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(add_up, SITE)
    assert run.results(60) == [(rank, 6, str(rank // 2)) for rank in range(4)]


def test_F06_a_rank_that_raises_on_the_second_node_is_the_callers_exception(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(fail_in_the_last, str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(golden("crash.gangs.luck-rank"))):
        run.results(60)


def test_23B3_the_rank_that_failed_on_the_second_node_is_shown(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(fail_in_the_last, str(tmp_path))
    run.wait(60)
    attached, logs = (CliRunner().invoke(program.sgpu, [command, run.id]) for command in ("attach", "logs"))
    assert attached.exit_code == 1 and golden("remote.gangs.sgpu-valueerror-luck") in attached.stderr
    assert logs.stderr.startswith(f"sgpu: rank 3 of run {run.id} failed (--rank N or --rank all prints other ranks)\n")


def test_cancel_ends_both(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(stay, str(tmp_path))
    for rank in range(4):
        announced(tmp_path, f"1.rank{rank}")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(60)


@pytest.mark.long
def test_F04_a_rank_on_one_node_that_does_not_come_is_named_with_its_node(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(wait_for_the_last, str(tmp_path), SITE, hang_timeout=3)
    with pytest.raises(CollectiveHang) as caught:
        run.results(90)
    error = caught.value
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0, 1, 2], [3])
    waits = r"no output for .* s, and ranks 0, 1 on n1, rank 2 on n2 wait in gang_work\.py:\d+ wait_for_the_last: "
    assert re.fullmatch(f"{waits}rank 3 on n2 is elsewhere, in gang_work.py:.* wait_for_file", error.message)
    note, *others = error.__notes__
    assert all(other.startswith("consequence: ") for other in others)  # whoever hears its peer go before it is ended
    assert note.startswith("rank 3 is here (most recent call first):") and "in wait_for_file" in note
    # Where ranks are slow to come there they were looked at more than once.
    files = re.fullmatch(
        f"Python stacks of all ranks: {re.escape(str(run.directory))}/(hang-\\*-[0-9]+.txt)", error.hint
    )
    assert files is not None
    run.receipt(60)  # the end is told as soon as one node's is, whose stacks may be there before the other's
    run = attach(run.id)
    with pytest.raises(CollectiveHang):
        run.results(60)
    for number, ranks in enumerate(((0, 1), (2, 3))):
        text = (run.directory / files[1].replace("*", str(number))).read_text()
        assert f"node n{number + 1}, at" in text
        assert error.message in text or golden("remote.gangs.run-ended-before") in text
        assert all(f"---- rank {rank} (" in text for rank in ranks)


def test_a_time_limit_gives_the_ranks_of_all_nodes_their_grace_to_save(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(save_when_told, str(tmp_path), timeout=8, grace=4)
    with pytest.raises(RunTimedOut) as caught:
        run.results(60)
    assert caught.value.reason == "timeout"
    run.receipt(60)  # the end is told as soon as one node's is
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(4)] == ["timeout"] * 4
    assert pool.view(run).reason == "timeout"


@pytest.mark.heavy
def test_F31_killed_before_its_engine_is_asked_the_next_server_has_it_reserve_and_all_of_the_gang_starts_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2")
    monkeypatch.setenv(faults.VARIABLE, f"@{armed}")
    with Machines(home, "node=true", f"port={own_port()}") as pool, ThreadPoolExecutor(1) as others:
        try:
            pool.join("n2")
            armed.write_text("after_commit_before_launch")
            submitting = others.submit(pool.submit, stay, str(tmp_path))
            assert pool.server.ended() == -signal.SIGKILL
            assert list((home / "server" / "gangs").iterdir()) == []
            pool.server.start()
            run = submitting.result(60)
            for rank in range(4):
                announced(tmp_path, f"1.rank{rank}")
            (tmp_path / "go").touch()
            assert run.results(60) == [0, 1, 2, 3]
            wait_for(lambda: list((home / "server" / "gangs").iterdir()) == [], "its engine has it no more")
        finally:
            end_node(home)


def test_a_gang_that_makes_room_goes_on_from_what_all_of_its_nodes_see(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(save_and_go_on, str(tmp_path), resume=True)
    for rank in range(4):
        announced(tmp_path, f"1.rank{rank}")
    run.preempt()
    assert run.results(90) == ["1"] * 4
    run.receipt(60)
    devices = {name for name in run.metrics() if name.endswith("_utilization_percentage") and "gpu" in name}
    assert devices == {f"system/node_{node}/gpu_{gpu}_utilization_percentage" for node in (0, 1) for gpu in (0, 1)}
