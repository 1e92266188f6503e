"""Repeats a run's call as one rank under `torchrun <run directory>/_air.py`, and prints the result."""

from __future__ import annotations

import os
import sys
import tempfile

from . import protocol
from .payload import load
from .rank import RankOutput, execute


def main(directory: str, *, world_size: int) -> int:
    """Run the call of a run directory as the rank given by the environment variables.

    Return the exit code. The rank writes nothing to the run directory. `world_size` is the number of ranks in the
    original run. If WORLD_SIZE differs from `world_size`, rank 0 prints a warning and the ranks use WORLD_SIZE.
    """
    rank = int(os.environ.get("RANK", "0"))
    here = int(os.environ.get("WORLD_SIZE", "1"))
    if here != world_size and rank == 0:
        print(f"the original run had {world_size} ranks, but this run has {here} ranks", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="sgpu-reproduce-") as scratch:
        for name in ("results", "failures"):
            os.mkdir(os.path.join(scratch, name))
        os.symlink(os.path.join(directory, "call.pkl"), os.path.join(scratch, "call.pkl"))

        def report(event: protocol.Message) -> None:
            if event["event"] == "returned":
                value = load(os.path.join(scratch, "results", f"{rank}.pkl"))
                # A single write prevents the operating system from mixing this line with other ranks' output.
                sys.stdout.write(f"rank {rank} returned {value!r}\n")
                sys.stdout.flush()
            elif event["event"] == "failed":
                failure = event["failure"]
                text = failure.get("traceback") if isinstance(failure, dict) else None
                sys.stderr.write(f"rank {rank} failed\n{text}\n")

        return execute(RankOutput(scratch, rank, here, None), report)
