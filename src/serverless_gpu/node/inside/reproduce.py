"""A rank under `torchrun <run directory>/_air.py`: the same call by hand, results printed."""

from __future__ import annotations

import os
import sys
import tempfile

from . import protocol
from .payload import load
from .rank import RankOutput, execute


def main(directory: str, *, world_size: int) -> int:
    """Run the call of a run directory as the rank the environment names, and return its exit code.

    Nothing is written to the directory. A `world_size` that differs from the original's is reported on stderr and used.
    """
    rank = int(os.environ.get("RANK", "0"))
    here = int(os.environ.get("WORLD_SIZE", "1"))
    if here != world_size and rank == 0:
        print(f"this run had {world_size} ranks, now there are {here}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="sgpu-reproduce-") as scratch:
        for name in ("results", "failures"):
            os.mkdir(os.path.join(scratch, name))
        os.symlink(os.path.join(directory, "call.pkl"), os.path.join(scratch, "call.pkl"))

        def report(event: protocol.Message) -> None:
            if event["event"] == "returned":
                value = load(os.path.join(scratch, "results", f"{rank}.pkl"))
                sys.stdout.write(f"rank {rank} returned {value!r}\n")  # one write: the other ranks print, too
                sys.stdout.flush()
            elif event["event"] == "failed":
                failure = event["failure"]
                text = failure.get("traceback") if isinstance(failure, dict) else None
                sys.stderr.write(f"rank {rank} failed\n{text}\n")

        return execute(RankOutput(scratch, rank, here, None), report)
