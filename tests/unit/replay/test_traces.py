"""Files of several kinds become jobs; what is no job is left out and counted, what is no trace says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import BEST_EFFORT, NORMAL
from serverless_gpu.replay import Job, read_trace
from tests.support.golden import golden

ROWS: list[dict[str, Any]] = [
    {"cluster": "b", "job_id": 7, "submit_time_s": 30, "duration_s": 60, "num_gpus": 2, "vc": "x"},
    {"cluster": "a", "job_id": 8, "submit_time_s": 20, "duration_s": 90, "num_gpus": 1, "vc": "y"},
    {"cluster": "a", "job_id": 9, "submit_time_s": 10, "duration_s": 0, "num_gpus": 1, "vc": "y"},
    {"cluster": "a", "job_id": 10, "submit_time_s": 10, "duration_s": 5, "num_gpus": 0, "vc": "y"},
]
JOBS = (
    Job(job_id="8", submit_s=20, duration_s=90, gpus=1, team="y"),
    Job(job_id="7", submit_s=30, duration_s=60, gpus=2, team="x"),
)


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".csv":
            lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
            path.write_text("\n".join(lines), encoding="utf-8")
        case _:
            path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.json"])
def test_a_file_with_the_columns_of_a_trace(tmp_path: Path, name: str) -> None:
    trace = read_trace(_written(tmp_path / name, ROWS))
    assert trace.jobs == JOBS
    assert trace.left_out == {"that never ran": 1, "without GPUs": 1}
    assert (trace.source, trace.span_s(), trace.gpu_seconds()) == (name, 10, 210)


def test_only_a_part_of_a_file(tmp_path: Path) -> None:
    assert read_trace(_written(tmp_path / "t.csv", ROWS), {"cluster": "b"}).jobs == JOBS[1:]
    assert read_trace(_written(tmp_path / "t.parquet", ROWS), {"job_id": "8"}).jobs == JOBS[:1]


PHILLY: list[dict[str, Any]] = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1506638472019_10258",
        "attempts": [
            {
                "start_time": "2017-10-09 07:02:35",
                "end_time": "2017-10-09 07:03:35",
                "detail": [{"ip": "m68", "gpus": ["gpu1"]}],
            },
            {
                "start_time": "2017-10-09 08:00:00",
                "end_time": "2017-10-09 09:00:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu7"]}],
            },
        ],
        "submitted_time": "2017-10-09 07:02:05",
        "user": "ce2f4c",
    },
    {"status": "Killed", "vc": "v", "jobid": "k", "attempts": [], "submitted_time": "2017-10-08 00:00:00", "user": "u"},
    {"status": "Pass", "vc": "v", "jobid": "n", "attempts": [], "submitted_time": "None", "user": "u"},
]


def test_a_log_of_philly(tmp_path: Path) -> None:
    trace = read_trace(_written(tmp_path / "cluster_job_log.json", PHILLY))
    (job,) = trace.jobs
    assert (job.job_id, job.team, job.user) == ("application_1506638472019_10258", "ee9e8c", "ce2f4c")
    assert (job.submit_s, job.duration_s, job.gpus) == (1507532525.0, 3660.0, 3)
    assert trace.left_out == {"without GPUs": 2}


def test_runs_as_sgpu_runs_prints_them(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {"id": "r1", "name": "train", "created": "2027-01-15T14:00:00Z", "started": "2027-01-15T14:01:00Z",
         "ended": "2027-01-15T14:03:00Z", "ranks": 1, "gpus": 8, "owner": "alice", "team": "search", "pool": "main"},
        {"id": "r2", "name": "here", "created": "2027-01-15T14:00:05Z", "started": "2027-01-15T14:01:00Z",
         "ended": "2027-01-15T14:01:30Z", "ranks": 2, "devices": ["a", "b"]},
        {"id": "r3", "name": "still", "created": "2027-01-15T14:00:00Z", "started": None, "ended": None, "ranks": 0},
        {"id": "r4", "name": "runs", "created": "2027-01-15T14:00:00Z", "started": "2027-01-15T14:01:00Z",
         "ended": None, "ranks": 2},
    ]  # fmt: skip
    trace = read_trace(_written(tmp_path / "runs.json", runs))
    assert [(job.job_id, job.duration_s, job.gpus, job.user, job.team, job.name) for job in trace.jobs] == [
        ("r1", 120.0, 8, "alice", "search", "train"), ("r2", 30.0, 2, "", "", "here"),
    ]  # fmt: skip
    assert sum(trace.left_out.values()) == 2


def test_classes_and_what_may_be_stopped(tmp_path: Path) -> None:
    row = {"submit_time_s": 0, "duration_s": 1, "num_gpus": 1, "priority": "best_effort", "preemptible": "true"}
    job = read_trace(_written(tmp_path / "t.csv", [row])).jobs[0]
    assert (job.priority, job.preemptible, job.job_id) == (BEST_EFFORT, True, "0")
    job = read_trace(_written(tmp_path / "t.csv", [row | {"priority": "1", "preemptible": ""}])).jobs[0]
    assert (job.priority, job.preemptible) == (NORMAL, False)


def test_what_is_not_understood_is_left_out_and_counted(tmp_path: Path) -> None:
    row = {"submit_time_s": 0, "duration_s": 1, "num_gpus": 1, "priority": ""}
    rows = [row, row | {"num_gpus": 1.9}, row | {"priority": "weird"}]
    trace = read_trace(_written(tmp_path / "t.csv", rows))
    assert len(trace.jobs) == 1
    assert trace.left_out == {
        "with a fractional number of GPUs": 1,
        "whose priority is not critical, normal or best_effort": 1,
    }


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.txt", b"", "t.txt is not a trace file"),
        ("t.json", b"{", "t.json is not a valid trace"),
        ("t.json", b"{}", "not a list of jobs"),
        ("t.json", b"[]", "has no jobs"),
        ("t.json", b'[{"attempts": 3, "submitted_time": "x"}]', "is not a valid trace"),
        ("t.parquet", b"nothing", "is not a valid parquet file"),
        ("t.csv", b"a,b\n1,2\n", "has no column submit_time_s, but only a, b"),
        ("t.csv", b"submit_time_s,duration_s,num_gpus\nx,2,3\nnan,1,1\n", "has no jobs"),
        ("t.csv", b"\xff\xfe\x00", "is not a valid trace"),
    ],
)
def test_what_is_no_trace_says_so(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InvalidValue, match=words):
        read_trace(path)


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.traces.gone-csv-cannot"))):
        read_trace(tmp_path / "gone.csv")
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.traces.jobs-cluster"))):
        read_trace(_written(tmp_path / "t.csv", ROWS), {"cluster": "c"})
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.traces.column-clutser"))):
        read_trace(_written(tmp_path / "t.csv", ROWS), {"clutser": "c"})
