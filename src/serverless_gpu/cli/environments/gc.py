"""`sgpu env gc`: deletes unneeded objects of a store and shrinks the cache of this node."""

from __future__ import annotations

import sys

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.amounts import age_s, size_bytes
from serverless_gpu.cli.environments import locations
from serverless_gpu.cli.environments.progress_meter import Meters
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.environment.restore.cache.eviction_run import environments
from serverless_gpu.environment.restore.cache.unit_cache import Cache
from serverless_gpu.environment.stores.blobs import CAPTURE_S_MAX
from serverless_gpu.environment.stores.collection import CollectionResult, Tally, collect
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.units import format_bytes

_UNREADABLE_MAX = 5


def collect_garbage(
    amounts: tuple[str, str, str | None], store: str | None, *, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Collect garbage by typed keep, grace and cache size; `force` allows a grace shorter than a capture."""
    keep, grace, cache_size = amounts
    keep_s, grace_s = age_s("--keep", keep), age_s("--grace", grace)
    if grace_s < CAPTURE_S_MAX and not (force or dry_run):
        raise InvalidValue(
            f"--grace {grace} is shorter than a capture may take ({CAPTURE_S_MAX // 3600}h)",
            hint="leave it out; or add --force when nobody captures into this store now",
        )
    limit = None if cache_size is None else size_bytes("--cache", cache_size)
    directory = locations.environments()
    blobs, cache = locations.blobs(store, directory), Cache(directory)
    since_ns = SystemClock().wall_ns() - keep_s * 1_000_000_000
    in_use = [one.address for one in environments(cache) if one.held or one.used_ns > since_ns]
    with Meters() as meters:
        done = collect(blobs, in_use=in_use, keep_s=keep_s, grace_s=grace_s, dry_run=dry_run, report=meters.report)
    if done.busy:
        raise StorageError(
            f"another collection of {blobs.store.url} is at work; nothing was done", hint="try again when it has ended"
        )
    freed = cache.evict(max_bytes=limit) if limit is not None and not dry_run else 0
    units, held = cache.sizes()
    if as_json:
        said = {"store": blobs.store.url, "in_use": in_use, "cache_units": units, "cache_bytes": held}
        print_json({**msgspec.structs.asdict(done), **said, "cache_freed_bytes": freed})
    else:
        for line in collected_text(done, blobs.store.url):
            say(line)
        went = f"; {format_bytes(freed)} deleted" if limit is not None and not dry_run else ""
        say(f"unpacked on this node: {units:,} units, {format_bytes(held)}{went}")
    if done.unreadable:
        sys.exit(1)


def collected_text(done: CollectionResult, url: str) -> list[str]:
    """Return the summary of a collection."""
    deleted, condemned = ("would delete", "would condemn") if done.dry_run else ("deleted", "condemned")
    lines = [
        url,
        f"  {deleted}: {_tally_text(done.deleted)}",
        f"  {condemned}: {_tally_text(done.condemned)}",
        f"  condemned before, deleted later: {_tally_text(done.waiting)}",
        f"  needed: {_tally_text(done.kept)}",
    ]
    if done.unreadable:
        few = ", ".join(done.unreadable[:_UNREADABLE_MAX])
        lines.append(f"  {len(done.unreadable)} cannot be read, and what they need was left alone: {few}")
    return lines


def _tally_text(tally: Tally) -> str:
    if not (tally.snapshots or tally.units or tally.packs):
        return "nothing"
    counts = ((tally.snapshots, "snapshot"), (tally.units, "unit"), (tally.packs, "pack"))
    named = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count)
    return f"{named}, {format_bytes(tally.bytes)}"
