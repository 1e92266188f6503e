"""Commands over run directories made by hand: which run is meant, what is shown, what is deleted."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from serverless_gpu import Run
from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.output import columns
from serverless_gpu.cli.runs.logs import tail_start
from serverless_gpu.cli.runs.run_actions import describe_gate
from serverless_gpu.cli.runs.run_location import choose
from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.node.base.home import Home
from serverless_gpu.units import parse_duration_s
from tests.support.cli.cli import FIRST, SECOND, SPEC, make, sgpu
from tests.support.golden import golden


@pytest.fixture
def runs(home: Path) -> Path:
    """Return the directory of runs of a fresh home, with one failed run in it."""
    path = home / "runs"
    make(path, FIRST)
    return path


# --- which run -------------------------------------------------------------------------------------------------------


def test_a_beginning_or_an_end_is_enough_and_case_means_nothing(runs: Path) -> None:
    make(runs, SECOND)
    home = Home(runs.parent)
    assert choose(home, None) == SECOND
    for text in ("01m7wtgc0", "Q3MA4", FIRST, f" {FIRST.upper()} "):
        assert choose(home, text) == FIRST


def test_what_means_several_runs_names_them(runs: Path) -> None:
    make(runs, SECOND)
    with pytest.raises(InvalidValue) as caught:
        choose(Home(runs.parent), "01m7")
    assert str(caught.value) == golden("cli.cli.01m7-means-runs", SECOND=SECOND, FIRST=FIRST)


def test_what_means_no_run_names_the_latest(runs: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        choose(Home(runs.parent), "zebra")
    expected = (
        f"run 'zebra' does not exist in {runs}\nhint: the latest runs are {FIRST}. List all runs with `sgpu runs`"
    )
    assert str(caught.value) == expected


def test_a_slip_of_the_finger_is_understood(runs: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        choose(Home(runs.parent), FIRST[:-1] + "x")
    assert caught.value.hint == golden("cli.cli.did-you-mean", FIRST=FIRST)


def test_an_empty_home_says_so(home: Path) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("cli.cli.runs"))):
        sgpu("show")
    with pytest.raises(InvalidValue) as caught:
        sgpu("show", "x")
    assert caught.value.hint == golden("cli.cli.runs-here-serverless")


def test_an_empty_name_means_no_run(runs: Path) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("cli.cli.run"))):
        choose(Home(runs.parent), "")


# --- runs and show ---------------------------------------------------------------------------------------------------


def test_the_list(runs: Path) -> None:
    head, row = sgpu("runs").output.splitlines()
    assert head.split() == ["RUN", "NAME", "STATE", "STARTED", "TOOK", "DEVICES", "WHERE", "USED"]
    assert row.startswith(f"{FIRST}  train  FAILED  2026-11-")
    assert row.endswith("  2.5 s  2 H100 (fake)  here   5.0 GPU-seconds, 0.0042 USD")


def test_the_list_can_be_shortened(runs: Path) -> None:
    make(runs, SECOND, stopped=False)
    assert [line.split()[0] for line in sgpu("runs", "--limit", "1").output.splitlines()] == ["RUN", SECOND]
    assert [line.split()[0] for line in sgpu("runs", "--state", "failed").output.splitlines()] == ["RUN", FIRST]
    assert sgpu("runs", "--state", "RUNNING").output == golden("cli.cli.runs-running", runs=runs)
    assert "SIZE" in sgpu("runs", "--size").output


def test_the_list_of_an_empty_home(home: Path) -> None:
    assert sgpu("runs").output == golden("cli.cli.runs-2", value=home / "runs")
    assert json.loads(sgpu("runs", "--json").output) == []


def test_the_list_for_machines(runs: Path) -> None:
    (row,) = json.loads(sgpu("runs", "--json").output)
    assert list(row) == [
        "id",
        "kind",
        "name",
        "state",
        "reason",
        "live",
        "created",
        "started",
        "ended",
        "took_ms",
        "ranks",
        "gpu_type",
        "devices",
        "gpu_ms",
        "micros",
        "currency",
        "directory",
        "problem",
    ]
    assert (row["id"], row["state"], row["created"], row["ended"]) == (
        FIRST,
        "FAILED",
        "2026-11-20T15:51:51Z",
        "2001-09-09T01:46:40Z",
    )
    assert (row["took_ms"], row["gpu_ms"], row["micros"], row["live"]) == (2500, 5000, 4200, False)


def test_a_foreign_directory_is_listed_and_harms_nobody(runs: Path) -> None:
    (runs / "notes").mkdir()
    assert "notes" in sgpu("runs").output and "UNREADABLE" in sgpu("runs").output
    assert golden("cli.cli.holds-attempt") in sgpu("show", "notes").output


def test_one_run_in_full(runs: Path) -> None:
    (runs / FIRST / "1" / "hang-1.txt").write_text("stacks")
    lines = sgpu("show").output.splitlines()
    assert lines[0] == golden("cli.cli.run-train-failed", FIRST=FIRST)
    assert lines[1] == golden("cli.cli.asked-ranks-gpus")
    assert lines[2].startswith("started: 2026-11-") and lines[2].endswith(" · took 2.5 s")
    assert lines[4:8] == ["rank 1: ValueError: boom", "Traceback:", '  File "t.py", line 3', "ValueError: boom"]
    assert lines[9:11] == ["receipt:", golden("cli.cli.h100-fake-ranks")]
    assert f"files: {runs / FIRST / '1'} (" in "\n".join(lines)
    assert ["14", "B", "logs/0.stdout"] in [line.split() for line in lines]
    assert lines[-1] == golden("cli.cli.ranks-stood-nothing")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "Ray cluster"),
        ({"dashboard": True}, "Ray cluster with dashboard"),
        (
            {"dashboard": True, "object_store_bytes": 20_000_000_000},
            "Ray cluster with dashboard, object store 20.0 GB",
        ),
    ],
)
def test_a_run_with_a_ray_cluster_says_so(runs: Path, asked: dict[str, object], said: str) -> None:
    spec = cast("dict[str, object]", SPEC["spec"]) | {"ray": asked}
    (runs / FIRST / "1" / "spec.json").write_text(json.dumps(SPEC | {"spec": spec, "world_size": 1}))
    assert sgpu("show").output.splitlines()[1] == golden("cli.cli.asked-gpus-gpu", said=said)


def test_a_link_that_came_after_the_receipt_is_shown_and_where_it_is_tracked_is_nothing_that_was_asked_for(
    runs: Path,
) -> None:
    directory, url = runs / FIRST / "1", "http://m:5000/#/experiments/1/runs/abc"
    spec = cast("dict[str, object]", SPEC["spec"]) | {"tracker": {"experiment": "/Users/me/train"}}
    (directory / "spec.json").write_text(json.dumps(SPEC | {"spec": spec}))
    (directory / "tracking.json").write_text(json.dumps({"state": "ready", "run_id": "abc", "url": url}))
    lines = sgpu("show").output.splitlines()
    assert lines[1] == golden("cli.cli.asked-ranks-gpus")
    assert lines.count(f"tracked: {url}") == 1
    assert json.loads(sgpu("show", "--json").output)["tracked"] == url


def test_one_run_for_machines(runs: Path) -> None:
    shown = json.loads(sgpu("show", "--json").output)
    assert shown["failure"].startswith("rank 1: ValueError: boom\nTraceback:")
    assert shown["spec"]["name"] == "train" and shown["receipt"]["gpu_ms"] == 5000
    assert {"name": "logs/0.stdout", "size_bytes": 14} in shown["files"]
    assert shown["size_bytes"] > 0


def test_showing_loads_nothing_of_the_users(runs: Path) -> None:
    (runs / FIRST / "1" / "failures" / "1.json").write_text('{"pickled": true, "type": "Boom", "traceback": "T"}')
    (runs / FIRST / "1" / "failures" / "1.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/sg-was-unpickled'\ntR.")
    assert golden("cli.cli.rank-valueerror-boom") in sgpu("show").output


# --- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "out", "err"),
    [
        (("--rank", "0"), "one\ntwo\nthree\n", "100%\nnot ended\n"),
        (("--rank", "0", "--stream", "stdout"), "one\ntwo\nthree\n", ""),
        (("--rank", "0", "--tail", "1"), "three\n", "not ended\n"),
        (("--rank", "0", "--tail", "0"), "", ""),
        (("--rank", "1"), "other �\n", ""),
        (
            ("--rank", "all", "--tail", "2"),
            "[rank 0] two\n[rank 0] three\n[rank 1] other �\n",
            "[rank 0] 100%\n[rank 0] not ended\n",
        ),
        (
            ("--rank", "1", "--stream", "stderr"),
            "",
            f"sgpu: rank 1 of run {FIRST} wrote nothing to stderr; rank 0 wrote output. "
            f"To print the output, run: sgpu logs {FIRST} --rank 0; "
            f"print the failure with: sgpu show {FIRST}\n",
        ),
        (("--rank", "0", "--follow"), "one\ntwo\nthree\n", "100%\nnot ended\n"),
    ],
    ids=str,
)
def test_logs(runs: Path, arguments: tuple[str, ...], out: str, err: str) -> None:
    result = sgpu("logs", *arguments)
    assert (result.stdout, result.stderr) == (out, err)


def test_23B3_logs_of_a_failed_run_are_those_of_the_rank_that_failed(runs: Path) -> None:
    result = sgpu("logs")
    told = f"sgpu: rank 1 of run {FIRST} failed (--rank N or --rank all prints other ranks)\n"
    assert (result.stdout, result.stderr) == ("other \ufffd\n", told)


def test_23B3_a_rank_that_wrote_nothing_names_the_option_that_shows_the_others(runs: Path) -> None:
    for path in (runs / FIRST / "1" / "logs").glob("0.*"):
        path.unlink()
    result = sgpu("logs", "--rank", "0")
    told = (
        f"sgpu: rank 0 of run {FIRST} wrote nothing to stdout or stderr; "
        f"rank 1 wrote output. To print the output, run: sgpu logs {FIRST} --rank 1\n"
    )
    assert (result.stdout, result.stderr) == ("", told)


def test_logs_byte_by_byte(runs: Path) -> None:
    assert sgpu("logs", "--raw", "--rank", "0").stdout_bytes == b"one\ntwo\nthree\n 1%\r 50%\r100%\nnot ended"
    assert sgpu("logs", "--raw", "--rank", "1").stdout_bytes == b"other \xff\n"


@pytest.mark.parametrize("rank", ["2", "-1", "x", "٣", ""])
def test_a_rank_that_is_not_there(runs: Path, rank: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        sgpu("logs", f"--rank={rank}")
    assert str(caught.value) == golden("cli.cli.run-ranks-hint", FIRST=FIRST, rank=rank)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 100_000 + b"\ny\n" * 70_000]
)
@pytest.mark.parametrize("lines", [1, 2, 3, 50_000])
def test_the_last_lines_of_a_file(text: bytes, lines: int) -> None:
    rest = text[tail_start(len(text), lambda start, size: text[start : start + size], lines) :]
    assert rest == b"".join(text.splitlines(keepends=True)[-lines:])


# --- clean and cancel ------------------------------------------------------------------------------------------------


def test_clean_by_the_configuration(runs: Path) -> None:
    assert sgpu("clean", "--dry-run").output.splitlines()[-1].startswith("would delete 1 run, ")
    assert (runs / FIRST).exists()
    assert sgpu("clean").output.startswith("deleted 1 run, ")
    assert os.listdir(runs) == []
    assert sgpu("clean").output == golden("cli.cli.nothing-delete-runs")


@pytest.mark.parametrize("arguments", [("--older-than", "7d"), ("--keep", "0 GiB"), ("--keep", "1kB"), (FIRST[-6:],)])
def test_clean_as_it_is_told(runs: Path, arguments: tuple[str, ...]) -> None:
    young = make(runs, SECOND)
    now_ns = SystemClock().wall_ns()
    for path in young.rglob("*"):
        os.utime(path, ns=(now_ns, now_ns))
    sgpu("clean", *arguments)
    assert os.listdir(runs) == [SECOND]


@pytest.mark.parametrize("size", ["0", "0B", "0 MiB", "1kB"])
def test_clean_says_which_rule_keeps_what_is_too_much(runs: Path, size: str) -> None:
    now_ns = SystemClock().wall_ns()
    for path in make(runs, SECOND).rglob("*"):
        os.utime(path, ns=(now_ns, now_ns))
    rule = "; 1 run that ended less than an hour ago is kept; to delete it now, name it: sgpu clean RUN\n"
    assert sgpu("clean", "--keep", size, "--dry-run").output.endswith(rule)
    assert sgpu("clean", "--keep", size).output.startswith("deleted 1 run, ")
    assert sgpu("clean", "--keep", size).output == golden("cli.cli.nothing-delete-run") + rule


def test_clean_everything_that_has_ended(runs: Path) -> None:
    make(runs, SECOND)
    sgpu("clean", "--older-than", "0s")
    assert os.listdir(runs) == []


def test_a_run_that_goes_on_is_not_deleted(runs: Path) -> None:
    directory = make(runs, SECOND, stopped=False)
    with (directory / "supervisor.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InvalidValue) as caught:
            sgpu("clean", SECOND)
        assert str(caught.value) == golden("cli.cli.run-queued-hint", SECOND=SECOND)
        sgpu("clean", "--older-than", "0s")
        assert os.listdir(runs) == [SECOND]
        listed = sgpu("cancel")
    assert listed.exit_code == 2
    assert listed.stderr.startswith(f"{SECOND}  train  QUEUED  ")
    assert listed.stderr.endswith("Error: name a run; these runs are running.\n")


def test_a_run_that_gives_its_devices_back_is_not_deleted_and_not_to_be_cancelled(runs: Path) -> None:
    directory = make(runs, SECOND)
    with (directory / "supervisor.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InvalidValue) as caught:
            sgpu("clean", SECOND)
    said = f"run {SECOND} is FAILED and has not released its devices yet"
    assert str(caught.value) == golden("cli.cli.hint-can-deleted", said=said)
    sgpu("clean", SECOND)
    assert os.listdir(runs) == [FIRST]


def test_cancel_without_a_run_when_none_goes_on(runs: Path) -> None:
    listed = sgpu("cancel")
    assert listed.exit_code == 2
    assert listed.stderr.endswith("Error: name a run; no run is running.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--older-than", "soon"),
            "--older-than: 'soon' is not a duration. Write a whole number and a unit: 90s, 15m, 12h, 7d or 2w",
        ),
        *(
            (("--keep", text), f"--keep: '{text}' is not a size. Write a number and a unit, for example 500MB or 20GiB")
            for text in ("much", "-1GiB", "5", "2000000TiB", "0x")
        ),
    ],
)
def test_what_clean_does_not_understand(runs: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ServerlessGpuError) as caught:
        sgpu("clean", *arguments)
    assert str(caught.value) == message
    assert (runs / FIRST).exists()


def test_clean_takes_names_or_limits(runs: Path) -> None:
    result = sgpu("clean", FIRST, "--keep", "1GB")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: RUN cannot be combined with --older-than or --keep\n")


# --- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), (" 12H ", 43_200), ("7d", 604_800), ("2 w", 1_209_600)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1.5h", "1y", "٣d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration_s(text)


def test_columns() -> None:
    assert columns([["a", "bb", "c"], ["ccc", "d", ""]]) == ["a    bb  c", "ccc  d"]
    assert columns([]) == []


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("CANCELLED", "1 GPU free: no process of the run is left"),
        (
            "FAILED",
            "the run had no devices. Attempt 1 had released its devices: 1 GPU free: no process of the run is left",
        ),
    ],
)
def test_who_cancels_what_waits_again_is_not_told_of_an_earlier_attempt_as_of_this(ended: str, told: str) -> None:
    class Handle:
        """A run of which only an earlier attempt, or this one, has a receipt."""

        def receipt(self) -> object:
            return SimpleNamespace(state=ended, fence=1, gate="1 GPU free: no process of the run is left")

        def status(self) -> str:
            return "CANCELLED"

    assert describe_gate(cast("Run[object]", Handle())) == told
