"""Defines the documents of an environment: rows, units, snapshots, addresses, packages and progress.

    snapshot ─ interpreter
             ├ root 0, the interpreter's own site-packages ─ unit numpy, unit torch, …, unit of unowned files
             ├ root 1, another directory of distributions  ─ units
             └ root 2, the project's code                  ─ one unit
    unit     ─ rows (path, kind, size, sha256, link target)                              → its address
             └ packs, blocks, places: where the bytes of the rows lie in the store          not part of the address

Each row's path starts with an area. `site/` is the directory on `sys.path`. `prefix/` is the directory above `site/`
that contains `bin` and `share`. Relative paths make a unit independent of Python versions, machines and users. The same
wheel therefore has the same address everywhere. The address of a unit is the BLAKE3 digest of its rows, sorted by path.

A snapshot's address covers the interpreter, the roots with ordered units, the generated files, and the snapshot's
origin. The address does not cover facts that have no effect on a restore (`UNADDRESSED_FACTS`). `snapshot_address_1`
computes version 1 addresses, which cover fewer facts.

`Packages` lists the installed packages for comparing two environments. The list omits the project's code, which may
differ. The list also omits distributions without modules, such as an editable install of the project. Captures and
restores report progress as `ProgressPoint`.

Code that reads from a store uses `stores/blobs.py`, which validates each document with `snapshot_validation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
from blake3 import blake3

VERSION = 1
"""Format version of units and of the store's list of condemned objects."""
SNAPSHOT_VERSION = 2
"""Format version of new snapshots. Code that reads snapshots also accepts version 1."""
UNADDRESSED_FACTS = ("captured_ns", "loaded", "variables", "left_out")
"""Fields of a snapshot's origin that the address does not cover, because they do not change the restored files.
"""
BLOCK_BYTES = 4 * 1024 * 1024
"""Maximum number of content bytes in a block. Each block is one zstd frame that a restore can decompress separately."""
PACK_BYTES = 16 * 1024 * 1024
"""Number of compressed bytes at which the packer closes a pack. Each pack is one object in a store."""
_LISTED_MAX = 5
"""Maximum number of packages that `difference` names. `difference` only counts further packages."""

RowKind = Literal["f", "x", "l", "d"]  # Kinds of rows: file, executable file, link, empty directory.
UnitKind = Literal["distribution", "unowned", "code"]
RootKind = Literal["own", "library", "code"]
Phase = Literal["scan", "capture", "fetch", "restore", "compile", "collect"]


class FileRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file, link or empty directory of a unit."""

    path: str  # UTF-8 path that starts with the area, for example ``site/numpy/__init__.py``.
    kind: RowKind = "f"
    size: int = 0  # Content size in bytes, or 0 for links and directories.
    sha256: bytes = b""  # SHA-256 of the content, or empty for links and directories.
    target: str = ""

    @property
    def has_content(self) -> bool:
        """Return True if the row is a file."""
        return self.kind in ("f", "x")


class PackBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block in a pack, compressed as one zstd frame."""

    pack: int
    offset: int
    length: int  # Compressed size of the frame in bytes.
    size: int  # Number of content bytes, at most `BLOCK_BYTES`.


class ContentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Position of a file's first byte: a block, and a byte offset in the block's content.

    A file larger than a block starts at byte 0 of its first block. The following blocks contain no other file.
    """

    block: int
    start: int


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an environment, stored under ``units/<address>``."""

    address: str
    rows: tuple[FileRow, ...]  # Rows of the unit, sorted by path.
    packs: tuple[str, ...] = ()
    blocks: tuple[PackBlock, ...] = ()  # Blocks of the unit, in which each large file is contiguous.
    places: tuple[ContentPlace, ...] = ()  # Content place of each file that is not empty, in row order.
    version: int = VERSION


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter of an environment."""

    implementation: str  # Name of the implementation, for example ``cpython``.
    version: str  # Version of Python, for example ``3.11.7``.
    abi: str  # ABI of extension modules, for example ``cpython-311-x86_64-linux-gnu``.
    platform: str  # Platform tag, for example ``linux-x86_64``.
    glibc: str = ""  # Version of glibc on the captured machine, for example ``2.36``, or "" without glibc.

    @property
    def minor(self) -> str:
        """Return the major and minor version, for example ``3.11``."""
        return ".".join(self.version.split(".")[:2])


class SnapshotMember(msgspec.Struct, frozen=True, kw_only=True):
    """Entry for one unit in a snapshot."""

    address: str
    kind: UnitKind
    # Normalized name of a distribution (``scikit-learn``), name of a code directory, or "" for unowned files.
    name: str = ""
    version: str = ""  # Version of the distribution, or "" for other kinds of units.
    size: int = 0  # Number of content bytes of the unit.
    files: int = 0
    # Import names of the unit's top-level modules and packages.
    modules: tuple[str, ...] = ()


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A small text file that contains machine-specific paths. Each restore generates this text file."""

    path: str
    # Content with placeholders. The placeholder ``{{sgpu:2}}`` is the site area of root 2. The placeholder
    # ``{{sgpu:python}}`` is the interpreter.
    text: str
    executable: bool = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """A directory on `sys.path`, described as a list of units."""

    # Kind ``own`` is root 0, the interpreter's site-packages. Kind ``library`` is another directory with distributions,
    # such as the user site. Kind ``code`` is the user's project.
    kind: RootKind
    members: tuple[SnapshotMember, ...]  # Units of the root, sorted by kind, name and address.
    generated: tuple[Generated, ...] = ()  # Files whose text differs on each machine.
    # True if the root precedes the standard library on `sys.path`, as PYTHONPATH does.
    before: bool = False
    # True if the root is on `sys.path`. The root of an editable install may be reachable through generated files alone.
    on_path: bool = True


class SnapshotOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a snapshot. The snapshot's address covers all fields except `UNADDRESSED_FACTS`."""

    captured_ns: int = 0  # Time of the capture, in nanoseconds since 1970.
    # Path of the base interpreter outside any virtual environment, for example ``/usr/bin/python3.11``.
    python: str = ""
    prefix: str = ""
    originals: tuple[str, ...] = ()
    notes: tuple[dict[str, str], ...] = ()
    loaded: tuple[tuple[str, ...], ...] = ()
    variables: tuple[str, ...] = ()  # Names, without values, of the start-up variables that the environment sets.
    left_out: tuple[str, ...] = ()  # Messages about omitted files, with the reason for each omission.


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An environment: an interpreter and the units of each root, stored under ``snapshots/<address>``."""

    address: str
    interpreter: Interpreter
    roots: tuple[Root, ...]
    facts: SnapshotOrigin = SnapshotOrigin()
    version: int = SNAPSHOT_VERSION

    @property
    def size(self) -> int:
        """Return the total content size of all units in bytes."""
        return sum(member.size for root in self.roots for member in root.members)

    @property
    def files(self) -> int:
        """Return the number of files of all units."""
        return sum(member.files for root in self.roots for member in root.members)

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all units in order, without duplicates."""
        return tuple(dict.fromkeys(member.address for root in self.roots for member in root.members))


def unit_address(rows: Iterable[FileRow]) -> str:
    """Return the address of a unit: the BLAKE3 digest of the unit's rows, sorted by path."""
    digest = blake3(b"serverless-gpu unit 1\n")
    for row in sorted(rows, key=_path):
        digest.update(f"{row.path}\0{row.kind}\0{row.size}\0{row.sha256.hex()}\0{row.target}\n".encode())
    return digest.hexdigest()


def snapshot_address(snapshot: Snapshot) -> str:
    """Return the address of a snapshot, computed by the rules of its format version."""
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
        # Different snapshots never have the same encoding, because msgpack encodes the lengths of lists and strings.
        content = msgspec.msgpack.encode(covered)
    except UnicodeEncodeError:
        # The validation rejects text that is not UTF-8, with an error that names the position.
        content = ascii(covered).encode()
    return blake3(b"serverless-gpu snapshot 2\n" + content).hexdigest()


def snapshot_address_1(interpreter: Interpreter, roots: Iterable[Root]) -> str:
    """Return the version 1 address of a snapshot, which ignores the order, kinds and sizes of units."""
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
    """Sort the members of a root by kind, name and address."""
    return tuple(sorted(members, key=lambda member: (member.kind, member.name, member.address)))


def make_snapshot(interpreter: Interpreter, roots: tuple[Root, ...], facts: SnapshotOrigin) -> Snapshot:
    """Create a snapshot with sorted units, and compute its address."""
    roots = tuple(msgspec.structs.replace(root, members=in_order(root.members)) for root in roots)
    made = Snapshot(address="", interpreter=interpreter, roots=roots, facts=facts)
    return msgspec.structs.replace(made, address=snapshot_address(made))


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """The installed packages of an environment."""

    python: str
    units: dict[str, str]


def packages_of(snapshot: Snapshot) -> Packages:
    """Return the installed packages of an environment."""
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


class UnitContents(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A unit of an environment without its rows, for display."""

    kind: UnitKind
    name: str
    version: str
    address: str
    size: int  # Number of content bytes.
    files: int


class EnvironmentContents(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter and units of an environment without the files' paths, for display."""

    interpreter: Interpreter
    captured_ns: int
    units: tuple[UnitContents, ...]
    size: int
    files: int


def contents_of(snapshot: Snapshot) -> EnvironmentContents:
    """Return the interpreter and units of an environment, sorted by kind and name."""
    members = [member for root in snapshot.roots for member in root.members]
    units = [
        UnitContents(
            kind=member.kind,
            name=member.name,
            version=member.version,
            address=member.address,
            size=member.size,
            files=member.files,
        )
        for member in members
    ]
    return EnvironmentContents(
        interpreter=snapshot.interpreter,
        captured_ns=snapshot.facts.captured_ns,
        units=tuple(sorted(units, key=lambda unit: (unit.kind, unit.name, unit.version, unit.address))),
        size=snapshot.size,
        files=snapshot.files,
    )


def are_same(one: Packages, other: Packages) -> bool:
    """Return True if two environments have the same installed packages."""
    return one.python == other.python and one.units.keys() == other.units.keys()


def difference(asked: Packages, accepted: Packages) -> str:
    """Describe the difference between requested and accepted packages, or return "" for equal packages."""
    if asked.python != accepted.python:
        return f"{asked.python} is not {accepted.python}"
    more = [label for address, label in asked.units.items() if address not in accepted.units]
    less = [label for address, label in accepted.units.items() if address not in asked.units]
    parts = [f"{_listed(more)} more"] if more else []
    parts += [f"{_listed(less)} less"] if less else []
    return ", ".join(parts)


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a capture or restore, for display."""

    phase: Phase
    bytes_done: int = 0  # Number of content bytes processed so far.
    bytes_total: int = 0  # Total number of content bytes, or 0 while unknown.
    files_done: int = 0
    files_total: int = 0  # Total number of files, or 0 while unknown.
    moved_bytes: int = 0  # Number of compressed bytes transferred so far.
    name: str = ""  # Item in progress, for example ``torch 2.13.0``, or "".
    waits_for: str = ""  # Item that another process is fetching, or "".


Report = Callable[[ProgressPoint], None]


def ignore_progress(progress: ProgressPoint) -> None:
    """Discard a progress report."""


def _listed(labels: Iterable[str]) -> str:
    there = sorted(labels)
    rest = f" and {len(there) - _LISTED_MAX} others" if len(there) > _LISTED_MAX else ""
    return ", ".join(there[:_LISTED_MAX]) + rest


def _path(item: FileRow | Generated) -> bytes:
    return item.path.encode()
