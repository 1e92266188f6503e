"""`sgpu env capture` and `sgpu env restore`: into a store, and out of it into a tree of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.environments import locations
from serverless_gpu.cli.environments.progress_meter import Meters
from serverless_gpu.cli.environments.show import SHORT, titles
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.environment.capture.snapshot_capture import Captured, take
from serverless_gpu.environment.compression import LEVEL_LOCAL, LEVEL_REMOTE
from serverless_gpu.environment.documents import Snapshot, SnapshotMember
from serverless_gpu.environment.progress import ProgressPoint
from serverless_gpu.environment.restore.cache.unit_cache import Cache
from serverless_gpu.environment.restore.export import Exported, ExportRequest, export
from serverless_gpu.environment.stores import repair as mending
from serverless_gpu.environment.stores.store_urls import is_remote
from serverless_gpu.units import format_bytes, format_duration_ms


def capture(python: str | None, store: str | None, *, repair: bool, as_json: bool) -> None:
    """Capture an environment and print what was new."""
    directory = locations.environments()
    described = locations.describe(python)
    blobs = locations.blobs(store, directory)
    level = LEVEL_REMOTE if store is not None and is_remote(store) else LEVEL_LOCAL
    clock = SystemClock()
    began_ns = clock.boottime_ns()
    recogniser = locations.recogniser(directory)
    removed: tuple[str, ...] = ()
    with Meters() as meters:
        if repair:
            removed = mending.repair(blobs, recogniser.scan(described, meters.report).snapshot.addresses())
        captured = take(described, recogniser, blobs, level=level, report=meters.report)
    took_ms = (clock.boottime_ns() - began_ns) // 1_000_000
    if as_json:
        print_json(_captured_json(captured, blobs.store.url, took_ms) | ({"repaired": removed} if repair else {}))
        return
    if repair:
        shown = ", ".join(key[: key.index("/") + 1 + SHORT] for key in removed)
        say(f"damaged in the store, and sent again: {shown or 'nothing'}")
    for line in captured_text(captured, blobs.store.url, took_ms):
        say(line)


def captured_text(captured: Captured, url: str, took_ms: int) -> list[str]:
    """Return the summary of a capture; its last line is the address."""
    snapshot, new = captured.snapshot, _new(captured)
    known = len(snapshot.addresses()) - len(new)
    lines = [f"captured {format_bytes(snapshot.size)} in {snapshot.files:,} files, in {format_duration_ms(took_ms)}"]
    if new:
        size = format_bytes(sum(member.size for member in new))
        lines.append(f"new: {titles(new)} ({size}); {known} of {len(snapshot.addresses())} units were there")
    else:
        lines.append("new: nothing, the store had all of it")
    lines.append(f"sent: {format_bytes(captured.sent_bytes)} to {url}")
    return [*lines, snapshot.address]


def _new(captured: Captured) -> list[SnapshotMember]:
    wanted = set(captured.units_new)
    members = {m.address: m for root in captured.snapshot.roots for m in root.members if m.address in wanted}
    return sorted(members.values(), key=lambda member: -member.size)


def _captured_json(captured: Captured, url: str, took_ms: int) -> dict[str, object]:
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
    """Restore a snapshot into a directory and say how to use it."""
    directory = locations.environments()
    blobs = locations.blobs(store, directory)
    snapshot = locations.choose_snapshot(address, blobs)
    order = ExportRequest(target=Path(target), python=locations.interpreter(python), copies=copies)
    names = {m.address[:SHORT]: titles([m]) for root in snapshot.roots for m in root.members}
    with Meters() as meters:

        def report(progress: ProgressPoint) -> None:  # a node knows units by their addresses
            meters.report(msgspec.structs.replace(progress, name=names.get(progress.name, progress.name)))

        made = export(snapshot.address, blobs, Cache(directory), order, report=report)
    if as_json:
        print_json({**msgspec.structs.asdict(made), "size_bytes": snapshot.size, "files": snapshot.files})
        return
    for line in restored_text(made, snapshot):
        say(line)


def restored_text(made: Exported, snapshot: Snapshot) -> list[str]:
    """Return the summary of a restore; its last line is the command that uses it."""
    lines = [
        f"restored {format_bytes(snapshot.size)} in {snapshot.files:,} files, in {format_duration_ms(made.ms)}",
        f"fetched: {made.units_fetched} of {len(snapshot.addresses())} units, {format_bytes(made.fetched_bytes)}",
    ]
    if made.note:
        lines.append(f"note: {made.note}")
    if made.linked:
        lines.append("files of packages are links to the cache, read-only: to edit one, restore with --copies")
    return [*lines, f"use it: {shlex.quote(made.python)}"]
