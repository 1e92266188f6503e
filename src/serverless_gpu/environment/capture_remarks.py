"""What a person should know about an environment before it is captured: large code, and what of it stays behind. Pure.

Every call with another version of the code stores and unpacks it, so a checkpoint that a training writes beside its
script costs its size again and again. It is said when the code has grown past another 100 MB, not at every call.
"""

from __future__ import annotations

from collections.abc import Sequence

from serverless_gpu.environment.documents import Root, Snapshot, SnapshotMember
from serverless_gpu.environment.scan.code.ignored_files import same_matter
from serverless_gpu.environment.scan.scan import LocalUnit, Scan
from serverless_gpu.units import format_bytes

CODE_STEP_BYTES = 100_000_000
_LARGEST = 3
_LEFT_OUT_SAID_MAX = 3


def remarks(last: Snapshot | None, scan: Scan) -> tuple[str, ...]:
    """Return what is to be said, once: at a later capture only what is new.

    Args:
        last: what this environment was captured as before.
        scan: what it is now.
    """
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
        f"the code in {directory or member.name} is {format_bytes(member.size)}{grown}; largest: {listed}. "
        f"All of it travels with every change: name data and checkpoints in .sgpuignore to keep them out"
    )


def _left_out(last: Snapshot | None, now: Snapshot) -> Sequence[str]:
    """Return what of the code stays behind though it was not asked for."""
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
    return (*said, f"left out: {more} more, which `sgpu env show --all` names") if more else said


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
