"""Helpers of the tests of cli that other tests use as well."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner, Result

from serverless_gpu.cli import program
from tests.support.cli.json_output import check_json

FIRST, SECOND = "01m7wtgc0mdrq1jtwz87xq3ma4", "01m7wtgcvn7dzamkbw6x08yjqb"
SPEC = {
    "run_id": "r",
    "fence": 1,
    "world_size": 2,
    "version": "0.1.0",
    "spec": {"name": "train", "resources": {"gpus": 2, "gpu_type": "H100"}, "tags": {"team": "search"}},
}
RECEIPT = {
    "run_id": FIRST,
    "fence": 1,
    "state": "FAILED",
    "reason": "rank_raised",
    "gpu_type": "H100",
    "gpus": ["FAKE-H100-0", "FAKE-H100-1"],
    "kind": "fake",
    "segments": {"run_ms": 2500},
    "gpu_ms": 5000,
    "micros": 4200,
    "currency": "USD",
    "peak_memory_bytes": None,
    "warm": True,
    "warm_reason": "",
    "gate": "2 GPUs verified free",
    "quarantined": [],
    "tags": {},
    "facts": 6,
    "world_size": 2,
}


def sgpu(*arguments: str) -> Result:
    """Run the command in this process; an error of ours is raised."""
    done = CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")
    if "--json" in arguments and done.exit_code == 0 and "--records" not in arguments:
        check_json(arguments, done.stdout)
    return done


STOPPED = {"type": "stopped", "state": "FAILED", "reason": "rank_raised", "consequences": [], "log_tail": ""}
CAUSE = {"rank": 1, "reason": "rank_raised", "at_ns": 1, "detail": "ValueError: boom"}
OLD_NS = 1_000_000_000_000_000_000


def make(runs: Path, run_id: str, *, stopped: bool = True) -> Path:
    """Make the directory of a run that failed long ago."""
    directory = runs / run_id / "1"
    for name in ("logs", "failures"):
        (directory / name).mkdir(parents=True)
    files: dict[str, object] = {"spec.json": SPEC}
    if stopped:
        files |= {"stopped.json": STOPPED | {"cause": CAUSE}, "receipt.json": RECEIPT | {"run_id": run_id}}
        files["failures/1.json"] = {"traceback": 'Traceback:\n  File "t.py", line 3\nValueError: boom\n'}
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    (directory / "supervisor.lock").touch()
    (directory / "logs" / "0.stdout").write_bytes(b"one\ntwo\nthree\n")
    (directory / "logs" / "0.stderr").write_bytes(b" 1%\r 50%\r100%\nnot ended")
    (directory / "logs" / "1.stdout").write_bytes(b"other \xff\n")
    for path in directory.rglob("*"):
        os.utime(path, ns=(OLD_NS, OLD_NS))
    return directory
