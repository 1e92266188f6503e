"""Captures a snapshot: stores missing packs first, then units, and the snapshot last.

    scan_and_capture   scan → capture → remember
    capture            limit of 15 GB → missing units → space → pack → units → snapshot
    capture_remarks    remarks for the user: code that has grown past another 100 MB, and left-out files

A restore finds units and packs only through a snapshot. A killed capture therefore never leads to a partial restore.
The next capture reuses the packs and units that the killed capture stored. If a file's digest differs from RECORD, the
capture corrects the addresses of the unit and the snapshot.

Failure cases: If an environment is too large, the capture raises `EnvironmentTooLarge` before any transfer. The error
message names the ten largest parts of the environment. The capture raises `EnvironmentUnsupported` for a file that is
unreadable, missing or constantly changing, or that has an invalid name. The capture raises `StorageError` for a full
store, and `StoreUnavailable` for a store that does not answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from serverless_gpu.environment.capture.packer import CaptureCounts, PackedUnit, Packer, PackJob, PackSettings
from serverless_gpu.environment.capture.unit_blocks import unreadable
from serverless_gpu.environment.compression import LEVEL_LOCAL
from serverless_gpu.environment.documents import (
    FileRow,
    ProgressPoint,
    Report,
    Root,
    Snapshot,
    SnapshotMember,
    Unit,
    ignore_progress,
    in_order,
    make_snapshot,
)
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.project_files import same_matter
from serverless_gpu.environment.scan.scan import Recogniser, Scan, garbage_kept
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.snapshot_validation import CONTENT_BYTES_MAX, check_rows
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import (
    EnvironmentProblem,
    EnvironmentRejected,
    EnvironmentTooLarge,
    EnvironmentUnsupported,
    StorageError,
)
from serverless_gpu.units import format_bytes

RATIO_EXPECTED = 4
"""Highest expected compression ratio, which the free space check assumes."""
SPACE_KEPT_BYTES = 64 * 1024 * 1024
"""Minimum number of bytes that a capture leaves free in a store."""
_MORE_SPACE = (
    "delete old environments with `sgpu env gc`, exclude data files with `.sgpuignore`, or use a store or a "
    "SERVERLESS_GPU_HOME on a larger disk"
)
LARGEST = 10
REPORT_S = 0.1
CODE_STEP_BYTES = 100_000_000
_LARGEST = 3
_LEFT_OUT_SAID_MAX = 3


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a capture."""

    scan: Scan
    units_new: tuple[str, ...]
    units_known: int
    sent_bytes: int  # Compressed size of the sent packs in bytes.
    packs_sent: int
    packs_known: int  # Number of packs that a killed capture had already stored.
    moved: dict[str, str]

    @property
    def snapshot(self) -> Snapshot:
        """Return the snapshot that the capture stored."""
        return self.scan.snapshot


def scan_and_capture(
    description: Description, recogniser: Recogniser, blobs: StoreBlobs, *, level: int, report: Report = ignore_progress
) -> CaptureResult:
    """Scan and capture an environment, and record the result in the local index."""
    captured = capture(recogniser.scan(description, report), blobs, level=level, report=report)
    recogniser.remember(captured.scan)
    return captured


@garbage_kept()
def capture(
    scan: Scan,
    blobs: StoreBlobs,
    *,
    level: int = LEVEL_LOCAL,
    report: Report = ignore_progress,
    settings: PackSettings | None = None,
) -> CaptureResult:
    """Store the missing parts of a scanned environment, and the snapshot last.

    Raises:
        EnvironmentTooLarge: the environment is over the size limit.
        EnvironmentUnsupported: a file cannot be captured.
        StorageError: the store has not enough space.
    """
    check_size(scan.snapshot)
    missing = set(blobs.missing_units(scan.snapshot.addresses()))
    listed = (member for root in scan.snapshot.roots for member in root.members)
    found = {member.address: member for member in listed if member.address in missing}
    members = dict(sorted(found.items(), key=lambda item: (-item[1].size, item[0])))
    space = _StoreSpace(blobs)
    space.check(sum(member.size for member in members.values()))
    counts, meter = CaptureCounts(), _Meter(report, members)
    with _ReadabilityCheck([scan.sources[address] for address in members]) as look:

        def before_packs(size: int) -> None:
            # The packer reads files during the check, but sends the first pack after the check.
            look.wait()
            space.take(size)

        packer = Packer(
            blobs,
            settings or PackSettings(level=level),
            counts=counts,
            pulse=lambda name: meter.pulse(counts, name),
            before_packs=before_packs,
        )
        # The packer processes the largest and the smallest remaining units in parallel.
        left = deque(members.values())
        large = _jobs(left.popleft, scan.sources, blobs)
        small = _jobs(left.pop, scan.sources, blobs)
        packed = {done.job.address: done for done in packer.pack(large, small)}
    captured = _result(scan, packed, counts, known=len(scan.snapshot.addresses()) - len(members))
    check_size(captured.snapshot)  # Checks the total size again, because a file may have grown after the scan.
    blobs.write_snapshot(captured.snapshot)
    meter.pulse(counts, "", last=True)
    return captured


def check_size(snapshot: Snapshot) -> None:
    """Raise `EnvironmentTooLarge` for an environment over the size limit."""
    if snapshot.size <= CONTENT_BYTES_MAX:
        return
    members = {member.address: member for root in snapshot.roots for member in root.members}
    largest = sorted(members.values(), key=lambda member: -member.size)[:LARGEST]
    listed = "\n".join(f"  {format_bytes(member.size):>9}  {_name(member)}" for member in largest)
    raise EnvironmentTooLarge(
        f"the environment contains {format_bytes(snapshot.size)}; the limit is {format_bytes(CONTENT_BYTES_MAX)}. "
        f"Largest parts:\n{listed}",
        hint="uninstall unused packages, and exclude data files in the code directory with .sgpuignore",
    )


class _StoreSpace:
    """Ensures that a capture leaves a minimum of free space in the store."""

    def __init__(self, blobs: StoreBlobs) -> None:
        self._store = blobs.store

    def check(self, content_bytes: int) -> None:
        """Raise `StorageError` for a capture that does not fit into the store."""
        free = self._store.free_bytes()
        needed = content_bytes // RATIO_EXPECTED
        if content_bytes and free is not None and free < needed + SPACE_KEPT_BYTES:
            raise StorageError(
                f"the store {self._store.url} has {format_bytes(free)} free. The capture must store "
                f"{format_bytes(content_bytes)}, which compress to at least {format_bytes(needed)}. The store must "
                f"keep {format_bytes(SPACE_KEPT_BYTES)} free and lacks "
                f"{format_bytes(needed + SPACE_KEPT_BYTES - free)}. The capture has sent no data",
                hint=_MORE_SPACE,
            )

    def take(self, size: int) -> None:
        """Raise `StorageError` for packs that would fill the store."""
        free = self._store.free_bytes()
        if free is not None and free < size + SPACE_KEPT_BYTES:
            raise StorageError(
                f"the store {self._store.url} has {format_bytes(free)} free and must keep "
                f"{format_bytes(SPACE_KEPT_BYTES)} free. The capture stopped before the next packs of "
                f"{format_bytes(size)} and wrote no snapshot",
                hint=f"{_MORE_SPACE}. The next capture reuses the stored packs",
            )


class _ReadabilityCheck:
    """Checks in a background thread that all files are readable."""

    def __init__(self, sources: Sequence[LocalUnit]) -> None:
        self._sources = sources
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "sgpu-look")

    def __enter__(self) -> _ReadabilityCheck:
        self._done = self._thread.submit(self._run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.shutdown(wait=True)

    def wait(self) -> None:
        """Wait for the end of the check, and raise the first error."""
        self._done.result()

    def _run(self) -> None:
        access = os.access
        for source in self._sources:
            for path in source.files:
                if not access(path, os.R_OK, effective_ids=True):
                    try:
                        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                    except OSError as error:
                        raise unreadable(path, error) from None
            if self._stop.is_set():
                return


class _Meter:
    """Reports the progress of a capture several times per second."""

    def __init__(self, report: Report, members: Mapping[str, SnapshotMember]) -> None:
        self._report = report
        self._bytes = sum(member.size for member in members.values())
        self._files = sum(member.files for member in members.values())
        self._next_s = 0.0

    def pulse(self, counts: CaptureCounts, name: str, *, last: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_s and not last:
            return
        self._next_s = now + REPORT_S
        self._report(
            ProgressPoint(
                phase="capture",
                bytes_done=counts.bytes_done,
                bytes_total=max(self._bytes, counts.bytes_done),
                files_done=counts.files_done,
                files_total=max(self._files, counts.files_done),
                moved_bytes=counts.sent_bytes,
                name=name,
            )
        )


def _jobs(take: Callable[[], SnapshotMember], sources: Mapping[str, LocalUnit], blobs: StoreBlobs) -> Iterator[PackJob]:
    """Yield a pack job for each remaining unit."""
    while True:
        try:
            member = take()
        except IndexError:
            return
        source = sources[member.address]
        try:
            check_rows(source.rows, _name(member))
        except EnvironmentRejected as error:
            said = error.message.replace("'site/", "'")  # The message omits the area `site/`, which users do not know.
            where = "list the file in .sgpuignore" if member.kind == "code" else "remove the file from the environment"
            raise EnvironmentUnsupported(
                f"the capture does not support a file name: {said}", hint=f"rename the file, or {where}"
            ) from None
        yield PackJob(address=member.address, name=_name(member), source=source, old=_old(source, blobs))


def _old(source: LocalUnit, blobs: StoreBlobs) -> Unit | None:
    """Return the previous version of a unit if the store has all packs of that version."""
    if not source.previous:
        return None
    try:
        if blobs.missing_units((source.previous,)):
            return None
        unit = blobs.read_unit(source.previous)
        return None if blobs.missing_packs(unit.packs) else unit
    except EnvironmentProblem as error:
        if error.retryable:
            raise
        return None  # The packer packs all files, because the old unit is corrupt or has a different format.


def _result(scan: Scan, packed: Mapping[str, PackedUnit], counts: CaptureCounts, *, known: int) -> CaptureResult:
    moved = {address: done.unit.address for address, done in packed.items() if done.unit.address != address}
    return CaptureResult(
        scan=_corrected(scan, {address: packed[address].unit.rows for address in moved}, moved) if moved else scan,
        units_new=tuple(done.unit.address for done in packed.values()),
        units_known=known,
        sent_bytes=counts.sent_bytes,
        packs_sent=counts.packs_sent,
        packs_known=counts.packs_known,
        moved=moved,
    )


def _corrected(scan: Scan, rows: Mapping[str, Sequence[FileRow]], moved: Mapping[str, str]) -> Scan:
    """Return the scan with the corrected rows and addresses of the stored units."""

    def corrected(member: SnapshotMember) -> SnapshotMember:
        if member.address not in moved:
            return member
        content = [row.size for row in rows[member.address] if row.has_content]
        return msgspec.structs.replace(member, address=moved[member.address], size=sum(content), files=len(content))

    roots: list[Root] = []
    for root in scan.snapshot.roots:
        # Corrected rows may give two units the same address.
        members = {member.address: member for member in map(corrected, root.members)}
        roots.append(msgspec.structs.replace(root, members=in_order(members.values())))
    sources = {
        moved.get(address, address): (
            msgspec.structs.replace(source, rows=tuple(rows[address])) if address in moved else source
        )
        for address, source in scan.sources.items()
    }
    snapshot = scan.snapshot
    return Scan(snapshot=make_snapshot(snapshot.interpreter, tuple(roots), snapshot.facts), sources=sources)


def _name(member: SnapshotMember) -> str:
    if member.kind == "unowned":
        return "files that no distribution owns"
    if member.kind == "code":
        return f"code in {member.name or 'a directory'}"
    return f"{member.name} {member.version}".strip()


def capture_remarks(last: Snapshot | None, scan: Scan) -> tuple[str, ...]:
    """Return the remarks about a capture that are new since the previous capture."""
    said: list[str] = []
    for number, root in enumerate(scan.snapshot.roots):
        directory = _directory(scan.snapshot, number)
        before = _code_bytes(last, directory)
        for member in _code(root):
            if member.size // CODE_STEP_BYTES > before // CODE_STEP_BYTES:
                said.append(_large(member, directory, before, scan.sources[member.address]))
    return (*said, *_left_out(last, scan.snapshot))


def _large(member: SnapshotMember, directory: str, before: int, source: LocalUnit) -> str:
    rows = [row for row in source.rows if row.has_content]
    largest = sorted(rows, key=lambda row: -row.size)[:_LARGEST]
    listed = ", ".join(f"{row.path.partition('/')[2]} {format_bytes(row.size)}" for row in largest)
    grown = f", {format_bytes(member.size - before)} more than at the last capture" if before else ""
    return (
        f"the code in {directory or member.name} is {format_bytes(member.size)}{grown}; largest: {listed}. After "
        "every code change, the next call sends the whole directory. To exclude data and checkpoints, list the "
        "files in .sgpuignore"
    )


def _left_out(last: Snapshot | None, now: Snapshot) -> Sequence[str]:
    """Return the remarks about omitted code that are new since the previous capture."""
    known = frozenset(map(same_matter, last.facts.left_out if last is not None else ()))
    tops = [f"{_directory(now, number).rstrip('/')}/" for number in range(len(now.roots))]
    code = tuple(top for top, root in zip(tops, now.roots, strict=True) if _code(root))
    libraries = tuple(top for top, root in zip(tops, now.roots, strict=True) if not _code(root))
    new = [
        sentence
        for sentence in now.facts.left_out
        if same_matter(sentence) not in known and sentence.startswith(code) and not sentence.startswith(libraries)
    ]
    said = [f"left out: {sentence}" for sentence in new[:_LEFT_OUT_SAID_MAX]]
    more = len(new) - len(said)
    return (*said, f"left out: {more} more; to list them, run `sgpu env show --all`") if more else said


def _code(root: Root) -> list[SnapshotMember]:
    return [member for member in root.members if member.kind == "code"]


def _code_bytes(snapshot: Snapshot | None, directory: str) -> int:
    roots = () if snapshot is None else snapshot.roots
    return sum(
        member.size
        for number, root in enumerate(roots)
        if snapshot is not None and _directory(snapshot, number) == directory
        for member in _code(root)
    )


def _directory(snapshot: Snapshot, number: int) -> str:
    originals = snapshot.facts.originals
    return originals[number] if number < len(originals) else ""
