"""A run on this machine's own node whose one rank writes as fast as it can: one line of JSON in, one out."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from serverless_gpu import distributed


class Flood(msgspec.Struct, frozen=True, kw_only=True):
    """How long the rank writes."""

    seconds: float


class Flooded(msgspec.Struct, frozen=True, kw_only=True):
    """What it wrote."""

    gigabytes: float
    seconds: float


@distributed(gpus=1, gpu_type="CPU", quiet=True, remote=True)
def pour_for(seconds: float) -> tuple[float, float]:
    """Write blocks of short lines; return gigabytes and seconds."""
    block = (b"x" * 63 + b"\n") * (1 << 14)
    began, written = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        written += os.write(1, block)
    return written / 1e9, time.monotonic() - began


def main() -> None:
    """Have a run flood, and say what it did."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Flood)
    ((gigabytes, seconds),) = pour_for.distributed(asked.seconds)
    print(msgspec.json.encode(Flooded(gigabytes=gigabytes, seconds=seconds)).decode(), flush=True)


if __name__ == "__main__":
    main()
