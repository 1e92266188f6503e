"""Helpers of the tests of cli that other tests use as well."""

from __future__ import annotations

from click.testing import CliRunner, Result

from serverless_gpu.cli import program

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
    return CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")
