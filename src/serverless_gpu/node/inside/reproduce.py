"""Repeats a run's call as one rank under `torchrun <run directory>/_air.py`, and prints the result."""

from __future__ import annotations

import os
import sys
import tempfile

from . import protocol
from .payload import load
from .rank import RankOutput, execute


def main(directory: str, *, world_size: int) -> int:
    """Run the call of a run directory as the rank that the environment names. Return the exit code.

    The rank writes nothing to the directory. `world_size` is the number of ranks of the original run. If WORLD_SIZE
    differs, rank 0 reports the difference on stderr and the ranks use WORLD_SIZE.
    """
    rank = int(os.environ.get("RANK", "0"))
    here = int(os.environ.get("WORLD_SIZE", "1"))
    if here != world_size and rank == 0:
        print(f"the original run had {world_size} ranks, this one has {here}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="sgpu-reproduce-") as scratch:
        for name in ("results", "failures"):
            os.mkdir(os.path.join(scratch, name))
        os.symlink(os.path.join(directory, "call.pkl"), os.path.join(scratch, "call.pkl"))

        def report(event: protocol.Message) -> None:
            if event["event"] == "returned":
                value = load(os.path.join(scratch, "results", f"{rank}.pkl"))
                # The operating system does not mix a single write with the output of other ranks.
                sys.stdout.write(f"rank {rank} returned {value!r}\n")
                sys.stdout.flush()
            elif event["event"] == "failed":
                failure = event["failure"]
                text = failure.get("traceback") if isinstance(failure, dict) else None
                sys.stderr.write(f"rank {rank} failed\n{text}\n")

        return execute(RankOutput(scratch, rank, here, None), report)
