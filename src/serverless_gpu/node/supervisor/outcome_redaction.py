"""Masks secrets in the failures of ranks, and searches their results for secrets.

    failures/<rank>.json   texts masked                              ┐ when the rank reports its failure
    failures/<rank>.pkl    asterisks of the same length              ┘
    results/<rank>.pkl     unchanged; the receipt counts occurrences   after the attempt has ended

A changed result could be a wrong result without an error. The supervisor therefore never changes results.

Failure cases: A file that the supervisor cannot read or write stays unchanged, and the receipt reports the file. Ranks
may write both directories. The supervisor therefore follows no links and replaces whole files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from serverless_gpu.model.receipt import counted
from serverless_gpu.model.redaction import BYTES_MIN, Redactor
from serverless_gpu.node.attempt.usage_account import write_bytes
from serverless_gpu.operating_system import open_regular
from serverless_gpu.units import format_bytes

FAILURE_BYTES_MAX = 64 << 20
"""Size up to which the supervisor masks a failure, equal to the largest pickled exception."""
SEARCHED_BYTES_MAX = 16 << 20
"""Number of bytes of an attempt's results that the supervisor searches, which takes up to a second."""
_CHUNK_BYTES = 1 << 20


def unmasked_notes(redactor: Redactor) -> list[str]:
    """Return a receipt note if secrets are too short to be masked."""
    if not redactor.unmasked:
        return []
    names = ", ".join(redactor.unmasked)
    return [f"secrets with less than {BYTES_MIN} bytes are not masked in output: {names}. Use longer secrets"]


def mask_failure(directory: Path, rank: int, redactor: Redactor) -> list[str]:
    """Mask secrets in the failure files of a rank. Return receipt notes about files that remain unmasked."""
    notes: list[str] = []
    for path, mask in ((f"{rank}.json", _masked_json), (f"{rank}.pkl", _masked_pickle)):
        file = directory / "failures" / path
        try:
            with open_regular(file) as stream:
                data = stream.read(FAILURE_BYTES_MAX + 1)
            if len(data) > FAILURE_BYTES_MAX:
                raise ValueError(f"the file has more than {format_bytes(FAILURE_BYTES_MAX)}")
            masked = mask(data, redactor)
            if masked != data:
                write_bytes(file, masked, directory)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"secrets in failures/{path} are not masked: {error}")
    return notes


def result_notes(directory: Path, ranks: Iterable[int], redactor: Redactor) -> list[str]:
    """Return receipt notes about secrets in the results of ranks."""
    notes: list[str] = []
    left = SEARCHED_BYTES_MAX
    for rank in ranks:
        found: dict[str, int] = {}
        stream = redactor.stream(found)
        try:
            with open_regular(directory / "results" / f"{rank}.pkl") as file:
                while left > 0 and (data := file.read(min(_CHUNK_BYTES, left))):
                    left -= len(data)
                    stream.feed(data)
                is_cut = left <= 0 and bool(file.read(1))
        except OSError:
            continue  # The rank has no result.
        stream.end()
        if found:
            notes.append(f"the result of rank {rank} contains secrets, which are not masked there: {counted(found)}")
        if is_cut:
            searched = format_bytes(SEARCHED_BYTES_MAX)
            return [*notes, f"the supervisor searched only the first {searched} of the results for secrets"]
    return notes


def _masked_json(data: bytes, redactor: Redactor) -> bytes:
    value = json.loads(data)
    masked = redactor.value(value)
    return data if masked == value else json.dumps(masked).encode()


def _masked_pickle(data: bytes, redactor: Redactor) -> bytes:
    return redactor.filled(data)
