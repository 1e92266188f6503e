"""Scans an environment, and stores the result to make the next scan fast.

    gate(d)      ~10 ms   unchanged since it was remembered? returns its snapshot, else None    recognition.py
    check()      ~50 ms   after such a gate, during the launch: files edited in place
    watch()     ~200 ms   in a long-lived process: proves that the libraries remain unchanged   watcher.py
    scan(d)      < 1 s    everything: roots, units, addresses                                   roots.py, units.py
    remember(s)           after a capture: stores the state for later gates                     index.py

A scan reads files that RECORD does not cover: code, unowned files, files of unknown installers, and edited files. A
scan does not read files whose current digests are in the index. If a RECORD is wrong, the scan may compute a wrong
address for the unit. The capture that sends the unit's content detects the wrong digest and corrects the scan. In later
scans, the digests in the index override RECORD.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.documents import ProgressPoint, Report, Snapshot
from serverless_gpu.environment.scan.changes import Change, compare
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.gitignore import user_patterns
from serverless_gpu.environment.scan.index import FilesPart, GatePart, IndexFile
from serverless_gpu.environment.scan.index_codec import known_of, make_parts, read_memory
from serverless_gpu.environment.scan.recognition import find_edits, recognise
from serverless_gpu.environment.scan.roots import Survey, survey
from serverless_gpu.environment.scan.snapshot_composition import Composition, LocalUnit, compose
from serverless_gpu.environment.scan.standard_library_rescan import look_again
from serverless_gpu.environment.scan.watcher import LibraryWatcher, Unwatchable


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """A scanned environment: its snapshot, and its local units by address."""

    snapshot: Snapshot
    sources: Mapping[str, LocalUnit]


_UNKNOWN = Change(kind="root", name="the environment", what="changed")


class _Seen(msgspec.Struct, frozen=True):
    """Result of the last scan, with all data that `remember` needs."""

    key: bytes
    seen_ns: int
    survey: Survey
    composed: Composition


class _Gated(msgspec.Struct, frozen=True):
    """An environment that the gate found unchanged, with the index data of this decision."""

    description: Description
    gate: GatePart


class Recogniser:
    """Recognizes environments that this machine has captured. The class is not thread-safe."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self._directory = directory
        self._clock = clock or SystemClock()
        self._gated: _Gated | None = None
        self._seen: _Seen | None = None

    def gate(self, description: Description, watched: bytes = b"") -> Snapshot | None:
        """Return the snapshot of the last capture if a quick check finds no change.

        If the environment has changed or was never captured, return None.
        """
        self._gated = None
        key = _key(description)
        index = self._index(key)
        gate = index.read_gate()
        if gate is None or gate.key != key:
            return None
        recognised = recognise(gate, description, self._clock.wall_ns(), watched=gate.generation == watched)
        if recognised is None:
            return None
        if recognised.fresher:
            index.renew(gate=recognised.gate)
        self._gated = _Gated(description, recognised.gate)
        return recognised.gate.snapshot

    def known(self) -> Snapshot | None:
        """Return the snapshot that the last `gate` call returned."""
        return None if self._gated is None else self._gated.gate.snapshot

    def generation(self) -> bytes:
        """Return the index generation that the last `gate` call used, or b"" if it found a change."""
        return b"" if self._gated is None else self._gated.gate.generation

    def last(self, description: Description) -> Snapshot | None:
        """Return the last captured snapshot of an environment, which may have changed since then, or None."""
        key = _key(description)
        gate = self._index(key).read_gate()
        return gate.snapshot if gate is not None and gate.key == key else None

    def check(self) -> tuple[Change, ...]:
        """After a successful gate, check every file and return the files that were edited in place.

        The result contains one `Change` for each modified unit.
        """
        gated = self._gated
        if gated is None:
            return ()
        index = self._index(gated.gate.key)
        files = index.read_files()
        if files is None or files.generation != gated.gate.generation:
            return self._check_again(gated)
        names = files.files.names()
        edited, stats = find_edits(
            files.files, lambda number: files.owner(number).row_path(names[number]), self._clock.wall_ns()
        )
        if stats is not files.files:
            index.renew(files=msgspec.structs.replace(files, files=stats))
        return _tell(files, names, edited)

    def _check_again(self, gated: _Gated) -> tuple[Change, ...]:
        """Check an environment again after another process has stored a newer index, and return the changes.

        The new index confirms the earlier gate result only if repeating the gate gives the same result.
        """
        was = gated.gate
        now = self.gate(gated.description)
        if now is None or self._gated is None or self._gated.gate.generation == was.generation:
            return (_UNKNOWN,)
        return compare(was.snapshot, now) or self.check()

    def watch(self, description: Description) -> tuple[LibraryWatcher, bytes]:
        """Place watches on the libraries and check all files, and return the watches and the index generation.

        Raises Unwatchable: watches are unavailable or insufficient, or the environment changed during the check.
        """
        index = self._index(_key(description))
        gate, files = index.read_gate(), index.read_files()
        if gate is None or files is None:
            raise Unwatchable("the environment's index file cannot be read")
        watcher = LibraryWatcher(gate, files.files)
        try:
            # The new watches report all later library changes. The full check finds changes from before the watches.
            if self.gate(description) is None or self.check():
                raise Unwatchable("the environment changed while the watches were placed")
            seen = index.read_files()
            if seen is None or {files.generation, seen.generation, self.generation()} != {gate.generation}:
                raise Unwatchable("another process captured the environment while the watches were placed")
            watcher.begin(seen.files)
            if reason := watcher.ask():
                raise Unwatchable(f"the environment changed while the watches were placed: {reason}")
        except Unwatchable:
            watcher.close()
            raise
        return watcher, gate.generation

    def scan(self, description: Description, report: Report) -> Scan:
        """Scan all code that an interpreter imports, and return units with addresses."""
        seen_ns, key = self._clock.wall_ns(), _key(description)
        counted = 0

        def look_at(name: str, files: int) -> None:
            nonlocal counted
            counted += files
            report(ProgressPoint(phase="scan", files_done=counted, name=name))

        with garbage_kept():
            memory = read_memory(self._index(key))
            found = survey(description, look_at, lambda spot: look_again(spot, memory) if memory else None)
            composed = compose(found, description, known_of(memory, found), seen_ns, report)
        self._seen = _Seen(key, seen_ns, found, composed)
        return Scan(snapshot=composed.snapshot, sources=composed.sources)

    def remember(self, scan: Scan) -> None:
        """Store the captured state in the index, for later `gate` and `check` calls.

        Raises OSError: the index cannot be written. If the index cannot be written, the next scan is as slow as the
        first.
        """
        seen = self._seen
        if seen is None:
            raise ValueError("there is no state to store, because no scan has run")
        digests = {
            file: row.sha256
            for source in scan.sources.values()
            for file, row in zip(source.files, (row for row in source.rows if row.has_content), strict=True)
        }
        memory = make_parts(seen.key, scan.snapshot, seen.survey, seen.composed.made, digests, seen.seen_ns)
        self._index(seen.key).write(memory.gate, memory.files, memory.kept)

    def _index(self, key: bytes) -> IndexFile:
        return IndexFile(self._directory / f"{blake3(key).hexdigest()[:32]}.index")


def _key(description: Description) -> bytes:
    """Return the index key of an environment, derived from its own key and the user's git settings files."""
    return description.key() + "\0".join(user_patterns()[1]).encode(errors="surrogateescape")


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Disable Python's garbage collector while the `with` block runs.

    A scan or capture creates about 100,000 small objects that stay referenced. Repeated garbage collections would take
    a third of the scan's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tell(files: FilesPart, names: list[str], edited: list[int]) -> tuple[Change, ...]:
    by_owner: dict[int, list[str]] = {}
    for number in edited:
        owner = files.owner(number)
        by_owner.setdefault(files.owners.index(owner), []).append(owner.row_path(names[number]).partition("/")[2])
    return tuple(
        Change(
            kind=files.owners[owner].kind,
            name=files.owners[owner].name,
            what="edited",
            detail=files.owners[owner].version,
            files=tuple(sorted(paths)),
        )
        for owner, paths in sorted(by_owner.items())
    )
