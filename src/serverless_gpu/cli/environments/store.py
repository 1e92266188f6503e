"""`sgpu env capture`, `restore` and `gc`: fills a store, restores a snapshot and deletes unused units."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.amounts import age_s, size_bytes
from serverless_gpu.cli.environments import locations
from serverless_gpu.cli.environments.progress_meter import Meters
from serverless_gpu.cli.environments.show import SHORT, titles
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.environment.capture.snapshot_capture import CaptureResult, scan_and_capture
from serverless_gpu.environment.compression import LEVEL_LOCAL, LEVEL_REMOTE
from serverless_gpu.environment.documents import ProgressPoint, Snapshot, SnapshotMember
from serverless_gpu.environment.restore.cache.eviction import environments
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.export import ExportedTree, ExportRequest, export
from serverless_gpu.environment.stores.blobs import CAPTURE_S_MAX
from serverless_gpu.environment.stores.collection import CollectionResult, Tally, collect
from serverless_gpu.environment.stores.repair import repair_units
from serverless_gpu.environment.stores.store_urls import is_remote
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.units import format_bytes, format_duration_ms

_UNREADABLE_MAX = 5


def capture(python: str | None, store: str | None, *, repair: bool, as_json: bool) -> None:
    """Capture an environment and print the new units."""
    directory = locations.environments_directory()
    described = locations.describe(python)
    blobs = locations.open_blobs(store, directory)
    level = LEVEL_REMOTE if store is not None and is_remote(store) else LEVEL_LOCAL
    clock = SystemClock()
    began_ns = clock.boottime_ns()
    recogniser = locations.known_environments(directory)
    removed: tuple[str, ...] = ()
    with Meters() as meters:
        if repair:
            removed = repair_units(blobs, recogniser.scan(described, meters.report).snapshot.addresses())
        captured = scan_and_capture(described, recogniser, blobs, level=level, report=meters.report)
    took_ms = (clock.boottime_ns() - began_ns) // 1_000_000
    if as_json:
        print_json(_captured_json(captured, blobs.store.url, took_ms) | ({"repaired": removed} if repair else {}))
        return
    if repair:
        shown = ", ".join(key[: key.index("/") + 1 + SHORT] for key in removed)
        say(f"damaged in the store and uploaded again: {shown or 'nothing'}")
    for line in captured_text(captured, blobs.store.url, took_ms):
        say(line)


def captured_text(captured: CaptureResult, url: str, took_ms: int) -> list[str]:
    """Return the summary of a capture. The last line is the snapshot address."""
    snapshot, new = captured.snapshot, _new(captured)
    known = len(snapshot.addresses()) - len(new)
    lines = [f"captured {format_bytes(snapshot.size)} in {snapshot.files:,} files, in {format_duration_ms(took_ms)}"]
    if new:
        size = format_bytes(sum(member.size for member in new))
        lines.append(f"new: {titles(new)} ({size}). The store already had {known} of {len(snapshot.addresses())} units")
    else:
        lines.append("new: nothing. The store already had all units")
    lines.append(f"sent: {format_bytes(captured.sent_bytes)} to {url}")
    return [*lines, snapshot.address]


def _new(captured: CaptureResult) -> list[SnapshotMember]:
    wanted = set(captured.units_new)
    members = {m.address: m for root in captured.snapshot.roots for m in root.members if m.address in wanted}
    return sorted(members.values(), key=lambda member: -member.size)


def _captured_json(captured: CaptureResult, url: str, took_ms: int) -> dict[str, object]:
    snapshot = captured.snapshot
    return {
        "address": snapshot.address,
        "size_bytes": snapshot.size,
        "files": snapshot.files,
        "units": len(snapshot.addresses()),
        "new": _new(captured),
        "sent_bytes": captured.sent_bytes,
        "store": url,
        "took_ms": took_ms,
        "left_out": snapshot.facts.left_out,
    }


def restore_into(
    address: str, target: str, python: str | None, store: str | None, *, copies: bool, as_json: bool
) -> None:
    """Restore a snapshot into a directory and print the command that uses the restored environment."""
    directory = locations.environments_directory()
    blobs = locations.open_blobs(store, directory)
    snapshot = locations.choose_snapshot(address, blobs)
    order = ExportRequest(target=Path(target), python=locations.interpreter(python), copies=copies)
    names = {m.address[:SHORT]: titles([m]) for root in snapshot.roots for m in root.members}
    with Meters() as meters:
        # Replace each unit address in a progress report with the unit's title.
        def report(progress: ProgressPoint) -> None:
            meters.report(msgspec.structs.replace(progress, name=names.get(progress.name, progress.name)))

        made = export(snapshot.address, blobs, UnitCache(directory), order, report=report)
    if as_json:
        print_json({**msgspec.structs.asdict(made), "size_bytes": snapshot.size, "files": snapshot.files})
        return
    for line in restored_text(made, snapshot):
        say(line)


def restored_text(made: ExportedTree, snapshot: Snapshot) -> list[str]:
    """Return the summary of a restore. The last line names the restored environment's interpreter."""
    lines = [
        f"restored {format_bytes(snapshot.size)} in {snapshot.files:,} files, in {format_duration_ms(made.ms)}",
        f"fetched: {made.units_fetched} of {len(snapshot.addresses())} units, {format_bytes(made.fetched_bytes)}",
    ]
    if made.note:
        lines.append(f"note: {made.note}")
    if made.linked:
        lines.append("package files are read-only links to the cache. To edit package files, restore with --copies")
    return [*lines, f"use it: {shlex.quote(made.python)}"]


def collect_garbage(
    amounts: tuple[str, str, str | None], store: str | None, *, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Delete unused units.

    Args:
        amounts: Texts of --keep, --grace and --cache.
        store: URL of the store, or None for the store of this home.
        force: Allow a grace period shorter than a capture.
        dry_run: Delete nothing.
        as_json: Print JSON.
    """
    keep, grace, cache_size = amounts
    keep_s, grace_s = age_s("--keep", keep), age_s("--grace", grace)
    if grace_s < CAPTURE_S_MAX and not (force or dry_run):
        raise InvalidValue(
            f"--grace {grace} is shorter than the maximum capture time ({CAPTURE_S_MAX // 3600}h)",
            hint="omit --grace, or add --force if no capture into this store is running",
        )
    limit = None if cache_size is None else size_bytes("--cache", cache_size)
    directory = locations.environments_directory()
    blobs, cache = locations.open_blobs(store, directory), UnitCache(directory)
    since_ns = SystemClock().wall_ns() - keep_s * 1_000_000_000
    in_use = [one.address for one in environments(cache) if one.held or one.used_ns > since_ns]
    with Meters() as meters:
        done = collect(blobs, in_use=in_use, keep_s=keep_s, grace_s=grace_s, dry_run=dry_run, report=meters.report)
    if done.busy:
        raise StorageError(
            f"another garbage collection of {blobs.store.url} is running. This command deleted nothing",
            hint="run `sgpu env gc` again after the other garbage collection ends",
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
        say(f"unit cache of this node: {units:,} units, {format_bytes(held)}{went}")
    if done.unreadable:
        sys.exit(1)


def collected_text(done: CollectionResult, url: str) -> list[str]:
    """Return the summary of a garbage collection."""
    deleted, condemned = ("would delete", "would condemn") if done.dry_run else ("deleted", "condemned")
    lines = [
        url,
        f"  {deleted}: {_tally_text(done.deleted)}",
        f"  {condemned}: {_tally_text(done.condemned)}",
        f"  condemned earlier, to be deleted later: {_tally_text(done.waiting)}",
        f"  needed: {_tally_text(done.kept)}",
    ]
    if done.unreadable:
        few = ", ".join(done.unreadable[:_UNREADABLE_MAX])
        lines.append(f"  {len(done.unreadable)} unreadable snapshots, whose units the command kept: {few}")
    return lines


def _tally_text(tally: Tally) -> str:
    if not (tally.snapshots or tally.units or tally.packs):
        return "nothing"
    counts = ((tally.snapshots, "snapshot"), (tally.units, "unit"), (tally.packs, "pack"))
    named = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count)
    return f"{named}, {format_bytes(tally.bytes)}"
