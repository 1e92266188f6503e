"""Parts of a large upload, from several threads as clients send them: one line of JSON in, one out."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
from blake3 import blake3

from benchmarks.load.asking import Asker
from serverless_gpu.model.spec import BLOB_PART_BYTES

THREADS = 4


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """How many parts to send, and where to."""

    url: str
    token: str
    parts: int


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """How long it took, and how many parts were not taken."""

    seconds: float
    refused: int


def main() -> None:
    """Send the parts."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Upload)
    began = time.monotonic()

    def send(first: int) -> int:
        asker, refused = Asker(asked.url, asked.token), 0
        data = bytearray(BLOB_PART_BYTES)
        for number in range(first, asked.parts, THREADS):
            data[:8] = number.to_bytes(8, "little")  # every part another one
            status, _ = asker.ask("PUT", f"/blobs/{blake3(data).hexdigest()}", memoryview(data))
            refused += status >= 300
        return refused

    with ThreadPoolExecutor(THREADS) as threads:
        refused = sum(threads.map(send, range(THREADS)))
    said = Uploaded(seconds=time.monotonic() - began, refused=refused)
    print(msgspec.json.encode(said).decode(), flush=True)


if __name__ == "__main__":
    main()
