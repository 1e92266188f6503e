"""What the user of a gang on two nodes is told: as true, and as whole, as of one node."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu import attach
from serverless_gpu.cli.program import sgpu
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import RankCrashed
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import announced, wait_for
from tests.support.ports import own_port
from tests.support.remote.gang_work import die_in_the_last, fail_in_the_last, lose_a_peer, stay, talk
from tests.support.remote.machines import Machines


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Yield a server with two nodes of two GPUs each, which has a price, stays where it is and misses a node soon."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        use_home(patch, directory)
        with Machines(directory, "Settings.heartbeat_s=1.0", f"port={own_port()}") as found:
            found.join("n1")
            found.join("n2")
            told("price", "set", "H100", "3")
            yield found
    shutil.rmtree(directory)


@pytest.fixture
def pool(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Yield the same to each test, which leaves nothing of a run on them."""
    use_home(monkeypatch, machines.home)
    yield machines
    for node in machines.nodes.values():
        wait_for(node.is_free, f"nothing is left on {node.name}")


def told(*words: str) -> str:
    """Return what a command says."""
    result = CliRunner().invoke(sgpu, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_gang_is_accounted_shown_and_found_as_one_run(
    pool: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pool.submit(stay, str(tmp_path), ranks_log="all", tags={"paper": "7"})
    for rank in range(4):
        announced(tmp_path, f"1.rank{rank}")
    wait_for(lambda: pool.view(run).state is State.RUNNING, "both run")
    assert [(crew.node, crew.state, crew.first_rank) for crew in pool.view(run).crews] == [
        ("n1", State.RUNNING, 0),
        ("n2", State.RUNNING, 2),
    ]
    assert " n1, n2, " in told("runs")
    shown = told("show", run.id)
    assert golden("remote.gangs_told.n1-ranks-running") in shown
    sampled = {"system/node_0/gpu_0_utilization_percentage", "system/node_1/gpu_0_utilization_percentage"}
    wait_for(lambda: sampled <= set(run.metrics()), "both were sampled")
    (tmp_path / "go").touch()
    other = attach(run.id)
    assert other.follow(only_looks=True) is None
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if "goes" in line) == [f"[rank {rank}] rank {rank} goes" for rank in range(4)]
    assert run.results(60) == other.results(60) == [0, 1, 2, 3]
    assert [run.logs(rank) for rank in range(4)] == [f"rank {rank} goes\n" for rank in range(4)]
    accounted(run)
    table = told("show", run.id).partition("\ndevices:\n")[2].splitlines()[:5]
    assert [line.split()[-2] for line in table] == ["NODE", "n1", "n1", "n2", "n2"]
    receipt = run.receipt()
    assert (receipt.state, receipt.reason, receipt.world_size, len(receipt.gpus)) == ("SUCCEEDED", None, 4, 4)
    assert receipt.gate.startswith("on each of 2 nodes, 2 GPUs verified free") and receipt.tags == {"paper": "7"}
    assert None not in (receipt.segments.environment_ms, receipt.segments.first_line_ms, receipt.segments.gate_ms)
    (tmp_path / "out").mkdir()
    told("result", run.id, "--rank", "all", "--output", str(tmp_path / "out"))
    assert len(list((tmp_path / "out").iterdir())) == 4


def accounted(run: Run[object]) -> None:
    """Require that all who say what a run used and costs say the same."""
    receipt, each = run.receipt(60), run.receipts()
    assert receipt.nodes == tuple(each) == ("n1", "n2")
    assert receipt.micros and receipt.micros == sum(one.micros or 0 for one in each.values())
    cost = wait_for(lambda: run.cost() if run.cost().is_final else None, "the ledger has it")
    assert cost is not None and (cost.micros, cost.gpu_ms) == (receipt.micros, receipt.gpu_ms)
    [by_run] = [row for row in json.loads(told("usage", "--by", "run", "--json"))["report"] if row["run"] == run.id]
    assert by_run["micros"] == receipt.micros
    shown = json.loads(told("show", run.id, "--json"))
    assert shown["receipt"]["micros"] == receipt.micros and list(shown["receipts"]) == ["n1", "n2"]
    assert json.loads((run.directory / "receipt.json").read_text())["micros"] == receipt.micros


def test_F06_what_failed_on_one_node_is_told_before_the_other_has_cleaned_up(pool: Machines, tmp_path: Path) -> None:
    where = tmp_path / "raises"
    where.mkdir()
    run = pool.submit(fail_in_the_last, str(where), "fail")
    ranks = [announced(where, f"1.rank{rank}")[0] for rank in range(2)]
    wait_for(lambda: pool.view(run).state is State.RUNNING, "both nodes have said that it runs")
    uplink = pool.nodes["n1"].uplink()
    uplink.send(signal.SIGSTOP)
    (where / "fail").touch()
    try:
        with pytest.raises(ValueError, match=re.escape(golden("crash.gangs.luck-rank"))) as raised:
            run.results(60)
        assert all(rank.alive() for rank in ranks) and pool.view(run).state is State.STOPPING
        with pytest.raises(ValueError, match=re.escape(golden("crash.gangs.luck-rank"))):
            attach(run.id).results(60)
        assert golden("remote.gangs_told.rank-n2-valueerror") in told("show", run.id)
    finally:
        uplink.send(signal.SIGCONT)
    assert golden("remote.gangs_told.rank-host-n2") in "".join(raised.value.__notes__)
    accounted(run)
    assert run.receipt().reason == "rank_raised" and run.receipt().unbilled_text() == ""
    where = tmp_path / "dies"
    where.mkdir()
    run = pool.submit(die_in_the_last, str(where))
    with pytest.raises(RankCrashed, match=re.escape(golden("remote.gangs_told.rank-n2-ended"))) as died:
        run.results(60)
    notes = "\n".join(died.value.__notes__)
    assert "about to die" in notes and "gang_work.py" in notes
    accounted(run)


def test_F17_who_fails_because_a_node_is_gone_hears_of_it_at_once(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(lose_a_peer, str(tmp_path))
    for rank in range(4):
        announced(tmp_path, f"1.rank{rank}")
    uplink = pool.nodes["n2"].uplink()
    uplink.send(signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        with pytest.raises(ConnectionResetError, match="of rank 2") as raised:
            run.results(60)
        assert pool.view(run).state not in TERMINAL and pool.view(run).crews[1].ended_ns is None
    finally:
        uplink.send(signal.SIGCONT)
    notes = "\n".join(raised.value.__notes__)
    assert golden("remote.gangs_told.rank-host-n1") in notes
    assert golden("remote.gangs_told.n2-been-heard") in notes and "keeps its devices reserved" in notes
    accounted(run)  # it was there, and says so
    with pytest.raises(ConnectionResetError) as again:
        run.results()
    assert golden("remote.gangs_told.n2-been-heard-2") not in "\n".join(again.value.__notes__)


def test_output_of_all_ranks_outlives_the_server_and_ctrl_c_ends_both_nodes(pool: Machines, tmp_path: Path) -> None:
    run = pool.submit(talk, str(tmp_path), ranks_log="all", quiet=False)
    ranks = [announced(tmp_path, f"1.rank{rank}")[0] for rank in range(4)]
    program = f"from serverless_gpu import attach; attach({run.id!r}).follow()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as caller:
        assert caller.stdout is not None
        (tmp_path / "go0").touch()
        lines = [caller.stdout.readline() for _ in range(4)]
        pool.server.kill()
        (tmp_path / "go1").touch()
        pool.server.start()
        lines += [caller.stdout.readline() for _ in range(4)]
        caller.send_signal(signal.SIGINT)
        said = caller.communicate(timeout=60)
    assert sorted(lines) == sorted(f"[rank {rank}] line {number}\n" for rank in range(4) for number in range(2))
    assert said[0] == ""
    assert golden("remote.gangs_told.cancelled-each-nodes") in said[1]
    assert not any(rank.alive() for rank in ranks)
    assert pool.view(run).state is State.CANCELLED
