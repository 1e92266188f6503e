"""`sgpu simulate`: what it prints, what it writes, and what is wrong with what was typed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from serverless_gpu.cli.planning import pictures
from serverless_gpu.cli.planning import simulate as simulate_module
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, StorageError
from serverless_gpu.replay import generate
from tests.support.golden import golden

CSV = """job_id,submit_time_s,duration_s,num_gpus,vc
a,0,100,6,search
b,1,50,8,vision
c,2,200,2,search
d,3,5,1,vision
e,4,5,64,vision
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "four.csv"
    path.write_text(CSV, encoding="utf-8")
    return str(path)


def ran(*arguments: str) -> Result:
    result = CliRunner().invoke(sgpu, ["simulate", *arguments], catch_exceptions=True)
    if isinstance(result.exception, ServerlessGpuError):
        raise result.exception
    return result


def test_policies_side_by_side(trace: str) -> None:
    result = ran(trace, "--cluster", "1x8", "--policy", "fifo", "--policy", "first-fit")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == golden("replay.simulate_command.jobs-four-csv")
    assert lines[1] == golden("replay.simulate_command.left-out-need")
    rows = {line[:31].strip(): line[31:].split("  ") for line in lines[3:]}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells[""] == ["fifo", "first-fit"]
    assert cells["wait, mean"] == ["1 min 39 s", "1 min 15 s"]  # 0 99 148 147, and 0 201 0 97
    assert cells["share of vision"] == ["0.0 %", "0.0 %"]


def test_the_same_as_json(trace: str) -> None:
    result = ran(trace, "--cluster", "1x8", "--policy", "srtf", "--json")
    told = json.loads(result.output)
    assert (told["trace"], told["gpus"], told["impossible"]) == (
        "four.csv",
        8,
        {"that need more GPUs than the cluster has": 1},
    )
    figures = told["policies"]["srtf"]
    assert (figures["jobs"], figures["preemptions"], figures["unserved"]) == (4, 3, 0)
    assert set(figures["wait"]) == {"mean", "p50", "p95", "p99", "most"}


def test_a_part_of_a_trace_on_a_sum_of_gpus(trace: str) -> None:
    result = ran(trace, "--only", "vc=search", "--cluster", "2x4", "--placement", "count", "--policy", "fifo")
    assert result.output.splitlines()[0] == golden("replay.simulate_command.jobs-four-csv-gpus")


def test_made_up_jobs() -> None:
    arguments = (
        "--generate",
        "200",
        "--seed",
        "4",
        "--load",
        "1.2",
        "--cluster",
        "2x8",
        "--policy",
        "first-fit",
        "--json",
    )
    told = json.loads(ran(*arguments).output)
    assert told["trace"] == golden("replay.simulate_command.made-up-200")
    assert told["policies"]["first-fit"]["jobs"] == len(generate(200, gpus=16, load=1.2, seed=4).jobs)


def test_a_picture(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "waits.png"
    result = ran(trace, "--cluster", "1x8", "--policy", "fifo", "--policy", "srsf", "--png", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_that_cannot_be_written(trace: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=re.escape(golden("replay.advise_command.picture-cannot-written"))):
        ran(trace, "--policy", "fifo", "--png", str(tmp_path / "gone" / "waits.png"))
    with pytest.raises(InvalidValue, match="cannot be written"):
        ran(trace, "--policy", "fifo", "--png", str(tmp_path / "waits.docx"))


def test_a_picture_of_jobs_that_never_wait(tmp_path: Path) -> None:
    path = tmp_path / "waits.svg"
    result = ran("--generate", "1", "--policy", "fifo", "--png", str(path))
    assert (result.exit_code, path.exists()) == (0, True)


def test_ctrl_c(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_module, "simulate", interrupted)
    result = ran(trace, "--policy", "fifo")
    assert result.exit_code == 130
    assert golden("replay.simulate_command.stopped-while-fifo") in result.output


def test_without_matplotlib_it_says_which_extra(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_room: str) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.axes")

    monkeypatch.setattr(pictures, "load", missing)
    with pytest.raises(ServerlessGpuError, match="Matplotlib") as raised:
        ran(trace, "--policy", "fifo", "--png", str(tmp_path / "waits.png"))
    assert "serverless-gpu[simulate]" in raised.value.hint


def test_without_pyarrow_it_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ServerlessGpuError, match="pyarrow") as raised:
        ran(str(path), "--policy", "fifo")
    assert "serverless-gpu[simulate]" in raised.value.hint


def test_runs_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    closed: list[bool] = []

    def ask(_method: str, _path: str, *, answer: object, query: dict[str, str]) -> object:
        asked.append(query)
        return SimpleNamespace(runs=("r1", "r2"), cursor="") if "cursor" in query else SimpleNamespace(
            runs=("r3",), cursor="next"
        )  # fmt: skip

    def as_json(run: str) -> dict[str, Any]:
        ended = None if run == "r3" else "2027-01-15T14:03:00Z"
        times = {"created": "2027-01-15T14:00:00Z", "started": "2027-01-15T14:01:00Z", "ended": ended}
        return {"id": run, "gpus": 2, "owner": "alice", "team": "search", **times}

    monkeypatch.setattr(simulate_module, "find_profile", lambda *_: None)
    monkeypatch.setattr(
        simulate_module, "connect", lambda _: SimpleNamespace(ask=ask, close=lambda: closed.append(True))
    )
    modules = {
        "serverless_gpu.wire.runs": SimpleNamespace(RunPage=object),
        "serverless_gpu.cli.runs.run_rows": SimpleNamespace(as_json=as_json),
    }
    monkeypatch.setattr(simulate_module, "load", modules.__getitem__)
    lines = ran("--history", "--cluster", "1x2", "--policy", "fifo").output.splitlines()
    assert lines[:2] == [
        golden("replay.simulate_command.jobs-server-runs"),
        golden("replay.simulate_command.left-out-without"),
    ]
    assert [query.get("cursor", "") for query in asked] == ["", "next"]
    assert closed == [True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "specify one source of jobs"),
        (("TRACE", "--history"), "specify one source of jobs"),
        (("--generate", "0"), "0 is not in the range"),
        (("TRACE", "--policy", "best"), "'best' is not one of"),
        (("TRACE", "--only", "vc"), "'vc' does not have the form NAME=VALUE"),
        (("TRACE", "--share", "search=much"), "'much' is not a number"),
        (("TRACE", "--share", "search=0"), "0 is not a weight"),
        (("TRACE", "--half-life", "soon"), "'soon' is not a duration"),
        (("--generate", "9", "--only", "vc=x"), "--only requires TRACE or --history"),
    ],
)
def test_what_was_typed_wrong(trace: str, arguments: tuple[str, ...], words: str) -> None:
    result = ran(*(trace if word == "TRACE" else word for word in arguments))
    assert result.exit_code == 2
    assert words in result.output


def test_a_cluster_that_is_too_small_for_all(trace: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.simulate_command.job-four-csv"))):
        ran(trace, "--only", "job_id=e", "--cluster", "1x4", "--policy", "fifo")
