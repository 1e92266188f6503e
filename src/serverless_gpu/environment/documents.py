"""Values of an environment: rows, units and snapshots with their addresses, installed packages, and progress.

    snapshot ─ interpreter
             ├ root 0, the interpreter's own site-packages ─ unit numpy, unit torch, …, unit of unowned files
             ├ root 1, another directory of distributions  ─ units
             └ root 2, the project's code                  ─ one unit
    unit     ─ rows (path, kind, size, sha256, link target)                              → its address
             └ packs, blocks, places: where the bytes of the rows lie in the store          not part of the address

A row's path starts with its area: `site/` is the directory that is on `sys.path`, `prefix/` the directory above it
that has `bin` and `share`. So a unit knows nothing of Python versions, machines or users, and the same wheel has the
same address everywhere. The address of a unit is BLAKE3 over its rows in order of their paths.

The address of a snapshot covers everything that a restore acts on: the interpreter, each root with its units in their
order, the files that are generated, and where the snapshot came from. Two documents with one address differ only in
facts that decide nothing (`UNADDRESSED_FACTS`). Snapshots of version 1 covered less: see `snapshot_address_1`.

`Packages` says whether the same is installed in two environments. It leaves out the project's own code, which may
differ, and distributions that bring nothing to import: an editable install of the project is one, and its metadata
names the project's version. Captures and restores report a `ProgressPoint`.

Readers of a store go through `stores/blobs.py`, which checks each document (`snapshot_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
from blake3 import blake3

VERSION = 1
"""The format of units, and of what garbage collection writes down."""
SNAPSHOT_VERSION = 2
"""The format of snapshots that are written; those of version 1 can still be read."""
UNADDRESSED_FACTS = ("captured_ns", "loaded", "variables", "left_out")
"""Facts that a snapshot's address does not cover: a restore compiles `loaded` first, and only shows the others."""
BLOCK_BYTES = 4 * 1024 * 1024
"""Content bytes of a block: what is compressed as one zstd frame, and restored by itself."""
PACK_BYTES = 16 * 1024 * 1024
"""Compressed bytes after which a pack is closed: what is sent, verified and resumed as one object."""
_LISTED_MAX = 5
"""Packages that `difference` names; it counts the others."""

RowKind = Literal["f", "x", "l", "d"]  # file, executable file, link, empty directory
UnitKind = Literal["distribution", "unowned", "code"]
RootKind = Literal["own", "library", "code"]
Phase = Literal["scan", "capture", "fetch", "restore", "compile", "collect"]


class FileRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file, link or empty directory of a unit."""

    path: str  # area and path below it, for example ``site/numpy/__init__.py``; UTF-8, ``/`` between names
    kind: RowKind = "f"
    size: int = 0  # content bytes; 0 for links and directories
    sha256: bytes = b""  # of the content, 32 bytes; empty for links and directories
    target: str = ""

    @property
    def has_content(self) -> bool:
        """Return whether this is a file."""
        return self.kind in ("f", "x")


class PackBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One zstd frame in a pack."""

    pack: int
    offset: int
    length: int  # its compressed bytes
    size: int  # its content bytes, at most `BLOCK_BYTES`


class ContentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a file's content starts: a block, and a byte in it. A file of more than a block starts at 0 and goes on in
    the blocks that follow, which hold nothing else."""

    block: int
    start: int


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an environment, as it is stored under ``units/<address>``."""

    address: str
    rows: tuple[FileRow, ...]  # in order of their paths
    packs: tuple[str, ...] = ()
    blocks: tuple[PackBlock, ...] = ()  # in the order in which large files run through them
    places: tuple[ContentPlace, ...] = ()  # for each row that is a file and not empty, in order of the rows
    version: int = VERSION


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """The Python an environment is for."""

    implementation: str  # ``cpython``
    version: str  # for example ``3.11.7``
    abi: str  # what extension modules are built for, for example ``cpython-311-x86_64-linux-gnu``
    platform: str  # for example ``linux-x86_64``
    glibc: str = ""  # of the machine it was captured on, for example ``2.36``; "" elsewhere

    @property
    def minor(self) -> str:
        """Return for example ``3.11``."""
        return ".".join(self.version.split(".")[:2])


class SnapshotMember(msgspec.Struct, frozen=True, kw_only=True):
    """A unit as a snapshot lists it."""

    address: str
    kind: UnitKind
    # of the distribution in its normal form (``scikit-learn``), of the code's directory, or "" (unowned files)
    name: str = ""
    version: str = ""  # of the distribution, or ""
    size: int = 0  # content bytes
    files: int = 0
    # names it adds to what can be imported: top-level files and directories, without endings
    modules: tuple[str, ...] = ()


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A small text file that names directories of its machine: written again on restore."""

    path: str
    # its content, ``{{sgpu:2}}`` standing for the directory of root 2 (its site area), ``{{sgpu:python}}`` for the
    # interpreter
    text: str
    executable: bool = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """A directory on `sys.path`, as a list of units."""

    # root 0 is the interpreter's ``own``; a ``library`` holds distributions too (user site, system site, `pip
    # --target`); ``code`` is the user's
    kind: RootKind
    members: tuple[SnapshotMember, ...]  # its units, in order of kind, name and address
    generated: tuple[Generated, ...] = ()  # files that come out different on each machine
    # whether it comes before the standard library on `sys.path` (PYTHONPATH, the script's directory)
    before: bool = False
    # whether it is on `sys.path` at all: the source of an editable install may only be named by generated files
    on_path: bool = True


class SnapshotOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a snapshot came from. Its address covers all but `UNADDRESSED_FACTS`."""

    captured_ns: int = 0  # when, nanoseconds since 1970
    python: str = ""  # the interpreter without its environment, for example ``/usr/bin/python3.11``
    prefix: str = ""
    originals: tuple[str, ...] = ()
    notes: tuple[dict[str, str], ...] = ()
    loaded: tuple[tuple[str, ...], ...] = ()
    variables: tuple[str, ...] = ()  # names of the start-up variables that were set, never their values
    left_out: tuple[str, ...] = ()  # what was not captured, and why, one sentence each


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An environment: an interpreter and the units of each root, as it is stored under ``snapshots/<address>``."""

    address: str
    interpreter: Interpreter
    roots: tuple[Root, ...]
    facts: SnapshotOrigin = SnapshotOrigin()
    version: int = SNAPSHOT_VERSION

    @property
    def size(self) -> int:
        """Return the content bytes of all units."""
        return sum(member.size for root in self.roots for member in root.members)

    @property
    def files(self) -> int:
        """Return the number of files of all units."""
        return sum(member.files for root in self.roots for member in root.members)

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all units, each once, in order."""
        return tuple(dict.fromkeys(member.address for root in self.roots for member in root.members))


def unit_address(rows: Iterable[FileRow]) -> str:
    """Return the address of a unit: BLAKE3 over its rows in order of their paths."""
    digest = blake3(b"serverless-gpu unit 1\n")
    for row in sorted(rows, key=_path):
        digest.update(f"{row.path}\0{row.kind}\0{row.size}\0{row.sha256.hex()}\0{row.target}\n".encode())
    return digest.hexdigest()


def snapshot_address(snapshot: Snapshot) -> str:
    """Return the address of a snapshot, by the rules of its version."""
    if snapshot.version == 1:
        return snapshot_address_1(snapshot.interpreter, snapshot.roots)
    python, facts = snapshot.interpreter, snapshot.facts
    covered = (
        (python.implementation, python.version, python.abi, python.platform, python.glibc),
        tuple(
            (
                (root.kind, root.before, root.on_path),
                tuple((m.kind, m.name, m.version, m.address, m.size, m.files, m.modules) for m in root.members),
                tuple((file.path, file.executable, file.text) for file in root.generated),
            )
            for root in snapshot.roots
        ),
        (facts.python, facts.prefix, facts.originals, tuple(tuple(sorted(notes.items())) for notes in facts.notes)),
    )
    try:
        # Lists and strings carry their length in msgpack, so no two snapshots come to the same bytes.
        content = msgspec.msgpack.encode(covered)
    except UnicodeEncodeError:
        content = ascii(covered).encode()  # the rules refuse text that is not UTF-8, and say where it is
    return blake3(b"serverless-gpu snapshot 2\n" + content).hexdigest()


def snapshot_address_1(interpreter: Interpreter, roots: Iterable[Root]) -> str:
    """Return the address by version 1, which covers neither the order of units nor their kinds and sizes."""
    digest = blake3(b"serverless-gpu snapshot 1\n")
    python = (interpreter.implementation, interpreter.minor, interpreter.abi, interpreter.platform)
    digest.update("\0".join(python).encode() + b"\n")
    for root in roots:
        off_path = "" if root.on_path else "\0off path"
        digest.update(f"root\0{root.kind}\0{int(root.before)}{off_path}\n".encode())
        for address in sorted(member.address for member in root.members):
            digest.update(f"unit\0{address}\n".encode())
        for file in sorted(root.generated, key=_path):
            text = file.text.encode()
            digest.update(f"generated\0{file.path}\0{int(file.executable)}\0{len(text)}\n".encode() + text)
    return digest.hexdigest()


def in_order(members: Iterable[SnapshotMember]) -> tuple[SnapshotMember, ...]:
    """Return members in the order in which a root lists them: of kind, name and address."""
    return tuple(sorted(members, key=lambda member: (member.kind, member.name, member.address)))


def make_snapshot(interpreter: Interpreter, roots: tuple[Root, ...], facts: SnapshotOrigin) -> Snapshot:
    """Return a snapshot with its address, the units of each root in their order."""
    roots = tuple(msgspec.structs.replace(root, members=in_order(root.members)) for root in roots)
    made = Snapshot(address="", interpreter=interpreter, roots=roots, facts=facts)
    return msgspec.structs.replace(made, address=snapshot_address(made))


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed."""

    python: str
    units: dict[str, str]


def packages_of(snapshot: Snapshot) -> Packages:
    """Return what is installed in an environment."""
    python = snapshot.interpreter
    return Packages(
        python=f"{python.implementation} {python.minor} {python.abi} {python.platform}",
        units={
            member.address: f"{member.name} {member.version}".strip() or "files of no distribution"
            for root in snapshot.roots
            if root.kind != "code"
            for member in root.members
            if member.kind == "unowned" or (member.kind == "distribution" and member.modules)
        },
    )


def are_same(one: Packages, other: Packages) -> bool:
    """Return whether the same is installed in two environments."""
    return one.python == other.python and one.units.keys() == other.units.keys()


def difference(asked: Packages, accepted: Packages) -> str:
    """Return how what is installed differs from what is accepted, in words; "" where it does not."""
    if asked.python != accepted.python:
        return f"{asked.python} is not {accepted.python}"
    more = [label for address, label in asked.units.items() if address not in accepted.units]
    less = [label for address, label in accepted.units.items() if address not in asked.units]
    parts = [f"{_listed(more)} more"] if more else []
    parts += [f"{_listed(less)} less"] if less else []
    return ", ".join(parts)


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How far a capture or a restore is, for display."""

    phase: Phase
    bytes_done: int = 0  # content bytes dealt with so far
    bytes_total: int = 0  # of how many; 0 while not known
    files_done: int = 0
    files_total: int = 0  # of how many; 0 while not known
    moved_bytes: int = 0  # bytes that really went to or came from the store, compressed
    name: str = ""  # what is being dealt with, for example ``torch 2.13.0``, or ""
    waits_for: str = ""  # what another process brings, and is waited for, or ""


Report = Callable[[ProgressPoint], None]


def ignore_progress(progress: ProgressPoint) -> None:
    """Take a report and ignore it."""


def _listed(labels: Iterable[str]) -> str:
    there = sorted(labels)
    rest = f" and {len(there) - _LISTED_MAX} others" if len(there) > _LISTED_MAX else ""
    return ", ".join(there[:_LISTED_MAX]) + rest


def _path(item: FileRow | Generated) -> bytes:
    return item.path.encode()
