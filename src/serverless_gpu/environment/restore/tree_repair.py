"""Before a start: what ranks have changed in a restored environment is found, thrown away and made again.

    units that were ever linked ─ every file looked at ─ suspicious? read; wrong: fetched again, trees made again
    units that are mounted      ─ the same, once in a boot and then every ten minutes (`cache.look`)
    a tree of links             ─ every directory's time, every generated file ─ changed? the tree is made again

Lives here: the order, and the words for what was found. `exposure.py` and `tree_stamp.py` look.

Failure cases: the store does not have a changed unit any more, or cannot be reached (what it raises; the unit is not
used then).
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.progress import Report
from serverless_gpu.environment.restore.cache.unit_cache import Cache
from serverless_gpu.environment.restore.cache.unit_seal import expose, exposed_since, linking, suspects
from serverless_gpu.environment.restore.fork_pool import divide
from serverless_gpu.environment.stores.blobs import StoreBlobs

_NAMED_MAX = 3

Suspects = tuple[list[str], list[str]]


def mend_units(snapshot: Snapshot, blobs: StoreBlobs, cache: Cache, report: Report) -> tuple[str, ...]:
    """Look at the units of an environment that links lead to, and fetch again what was changed through them.

    Args:
        snapshot: of which; the caller holds it.
        blobs: where its units are.
        cache: of this node.
        report: how far fetching is.
    """
    files = {member.address: member.files for root in snapshot.roots for member in root.members}
    addresses = sorted(files, key=lambda address: -files[address])  # so that no process is left with a large one
    if not any(exposed_since(cache.unit(address)) for address in addresses):
        return ()
    with linking(cache):
        found = _suspects([cache.unit(address) for address in addresses])
        wrong = [_mend(addresses[number], *found[number], blobs, cache, report) for number in sorted(found)]
    return tuple(filter(None, wrong))


def changed_units(snapshot: Snapshot, cache: Cache) -> tuple[str, ...]:
    """Look at the units of an environment that are only mounted, and put aside what was written to.

    Args:
        snapshot: of which; the caller holds it.
        cache: of this node.
    """
    return tuple(what.partition("/")[2] or what for what in cache.look(snapshot))


def said(changes: Sequence[str]) -> str:
    """Return the sentence for receipts and logs, or ""."""
    if not changes:
        return ""
    more = f" and {len(changes) - _NAMED_MAX} more" if len(changes) > _NAMED_MAX else ""
    which = "; ".join(changes[:_NAMED_MAX])
    return f"files of the restored environment were changed by a run: {which}{more}; restored again"


def _suspects(units: Sequence[Path]) -> dict[int, Suspects]:
    """Return which files of units may have been written to, by the unit's number; without those that have none."""

    def work(numbers: Iterator[int]) -> dict[int, Suspects]:
        found = {}
        for number in numbers:
            since_ns = exposed_since(units[number])
            if since_ns and any(here := suspects(units[number], since_ns)):
                found[number] = here
        return found

    return functools.reduce(operator.or_, divide(len(units), work, dict[int, Suspects]))


def _mend(address: str, own: list[str], bytecode: list[str], blobs: StoreBlobs, cache: Cache, report: Report) -> str:
    unit = cache.unit(address)
    for path in bytecode:
        Path(path).unlink(missing_ok=True)  # it is compiled again
    wrong = cache.verify(address, blobs, report) if own else ""
    if bytecode and not wrong:
        wrong = f"{os.path.relpath(bytecode[0], unit)} was written to"
        cache.forget_made_of(address)
    expose(unit)
    return wrong.partition("/")[2]  # the first name of a path in a unit is its area
