"""`python -m tests.e2e.chaos --seed 7 --seconds 600 --database sqlite|postgresql`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.e2e.chaos.driving import play
from tests.support.server.postgres import cluster as postgres


def main() -> int:
    """Play one history; return how many things are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    if asked.database == "sqlite":
        outcome = play(home, "", seed=asked.seed, seconds=asked.seconds)
    else:
        with postgres() as running:
            outcome = play(home, running.url(running.new_database()), seed=asked.seed, seconds=asked.seconds)
    print(outcome.text)
    if outcome.wrongs:
        print(f"what is left: {home}", file=sys.stderr)
    return len(outcome.wrongs)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
