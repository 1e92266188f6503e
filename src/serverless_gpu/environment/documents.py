"""Defines the values of an environment: rows, units, snapshots, addresses, packages and progress.

    snapshot ─ interpreter
             ├ root 0, the interpreter's own site-packages ─ unit numpy, unit torch, …, unit of unowned files
             ├ root 1, another directory of distributions  ─ units
             └ root 2, the project's code                  ─ one unit
    unit     ─ rows (path, kind, size, sha256, link target)                              → its address
             └ packs, blocks, places: where the bytes of the rows lie in the store          not part of the address

A row's path starts with its area. `site/` is the directory on `sys.path`. `prefix/` is the directory above `site/` that
has `bin` and `share`. A unit therefore does not depend on Python versions, machines or users. The same wheel has the
same address everywhere. The address of a unit is the BLAKE3 digest of its rows in order of their paths.

The address of a snapshot covers everything that a restore uses: the interpreter, the roots with ordered units, the
generated files, and the snapshot's origin. Two documents with the same address can differ only in facts that have no
effect on a restore (`UNADDRESSED_FACTS`). `snapshot_address_1` returns addresses of version 1, which cover fewer facts.

`Packages` lists the installed packages, to compare two environments. `Packages` leaves out the project's own code,
which may differ, and distributions that add no module. An editable install of the project adds no module, and its
metadata names the project's version. Captures and restores report a `ProgressPoint`.

Readers of a store use `stores/blobs.py`, which checks each document (`snapshot_validation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
from blake3 import blake3

VERSION = 1
"""Format version of units and of the list of condemned objects."""
SNAPSHOT_VERSION = 2
"""Format version of new snapshots. Readers also accept version 1."""
UNADDRESSED_FACTS = ("captured_ns", "loaded", "variables", "left_out")
"""Facts that a snapshot's address does not cover. Restore compiles the files in `loaded` first, and only displays all
other facts.
"""
BLOCK_BYTES = 4 * 1024 * 1024
"""Maximum number of content bytes in a block. A block is one zstd frame, and can be restored separately."""
PACK_BYTES = 16 * 1024 * 1024
"""Number of compressed bytes at which the packer closes a pack. Each pack is one object of a store."""
_LISTED_MAX = 5
"""Maximum number of packages that `difference` names. `difference` counts all further packages."""

RowKind = Literal["f", "x", "l", "d"]  # kind of a row: file, executable file, link, empty directory
UnitKind = Literal["distribution", "unowned", "code"]
RootKind = Literal["own", "library", "code"]
Phase = Literal["scan", "capture", "fetch", "restore", "compile", "collect"]


class FileRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file, link or empty directory of a unit."""

    path: str  # area and path below the area, for example ``site/numpy/__init__.py``; UTF-8, ``/`` between names
    kind: RowKind = "f"
    size: int = 0  # Content bytes; 0 for links and directories.
    sha256: bytes = b""  # SHA-256 of the content, 32 bytes; empty for links and directories.
    target: str = ""

    @property
    def has_content(self) -> bool:
        """Return True if the row is a file."""
        return self.kind in ("f", "x")


class PackBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A zstd frame in a pack."""

    pack: int
    offset: int
    length: int  # Number of compressed bytes.
    size: int  # Number of content bytes, at most `BLOCK_BYTES`.


class ContentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The start of a file's content: a block, and a byte offset in its content.

    A file larger than a block starts at byte 0 and continues in the next blocks, which have no content of other files.
    """

    block: int
    start: int


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an environment, stored under ``units/<address>``."""

    address: str
    rows: tuple[FileRow, ...]  # rows of the unit, sorted by path
    packs: tuple[str, ...] = ()
    blocks: tuple[PackBlock, ...] = ()  # Blocks in an order in which a large file continues in the next block.
    places: tuple[ContentPlace, ...] = ()  # Content place of each file that is not empty, in order of the rows.
    version: int = VERSION


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter of an environment."""

    implementation: str  # ``cpython``
    version: str  # Version of Python, for example ``3.11.7``.
    abi: str  # ABI of extension modules, for example ``cpython-311-x86_64-linux-gnu``.
    platform: str  # Platform tag, for example ``linux-x86_64``.
    glibc: str = ""  # Version of glibc on the machine of the capture, for example ``2.36``; "" without glibc.

    @property
    def minor(self) -> str:
        """Return the major and minor version, for example ``3.11``."""
        return ".".join(self.version.split(".")[:2])


class SnapshotMember(msgspec.Struct, frozen=True, kw_only=True):
    """The entry for a unit in a snapshot."""

    address: str
    kind: UnitKind
    # Normalized name of a distribution (``scikit-learn``), name of a code directory, or "" (unowned files).
    name: str = ""
    version: str = ""  # Version of the distribution, or "".
    size: int = 0  # Number of content bytes of the unit.
    files: int = 0
    # Import names of the unit's top-level files and directories, without endings.
    modules: tuple[str, ...] = ()


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A small text file that names directories of one machine. Restore generates the file for each tree."""

    path: str
    # Content with placeholders: ``{{sgpu:2}}`` is the directory of root 2 (its site area), ``{{sgpu:python}}`` the
    # interpreter.
    text: str
    executable: bool = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """A directory on `sys.path`, as a list of units."""

    # ``own`` is root 0, the interpreter's own library. A ``library`` also holds distributions (user site, system site,
    # `pip --target`). ``code`` is the user's project.
    kind: RootKind
    members: tuple[SnapshotMember, ...]  # Units of the root, in order of kind, name and address.
    generated: tuple[Generated, ...] = ()  # Generated files, whose text differs on each machine.
    # True if the root comes before the standard library on `sys.path` (PYTHONPATH, the script's directory).
    before: bool = False
    # True if the root is on `sys.path`. Only generated files may name the source of an editable install.
    on_path: bool = True


class SnapshotOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a snapshot. A snapshot's address covers the whole origin except `UNADDRESSED_FACTS`."""

    captured_ns: int = 0  # Time of the capture, in nanoseconds since 1970.
    # Path of the base interpreter, outside of any virtual environment, for example ``/usr/bin/python3.11``.
    python: str = ""
    prefix: str = ""
    originals: tuple[str, ...] = ()
    notes: tuple[dict[str, str], ...] = ()
    loaded: tuple[tuple[str, ...], ...] = ()
    variables: tuple[str, ...] = ()  # Names of the start-up variables that were set; values are never stored.
    left_out: tuple[str, ...] = ()  # Messages about left-out files, with the reason for each file.


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An environment: an interpreter and the units of each root, stored under ``snapshots/<address>``."""

    address: str
    interpreter: Interpreter
    roots: tuple[Root, ...]
    facts: SnapshotOrigin = SnapshotOrigin()
    version: int = SNAPSHOT_VERSION

    @property
    def size(self) -> int:
        """Return the number of content bytes of all units."""
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
        # msgpack stores the lengths of lists and strings, so two different snapshots never give the same bytes.
        content = msgspec.msgpack.encode(covered)
    except UnicodeEncodeError:
        # The rules refuse text that is not UTF-8, with an error that names the position of the text.
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
    """Return members in the order of a root's list: by kind, name and address."""
    return tuple(sorted(members, key=lambda member: (member.kind, member.name, member.address)))


def make_snapshot(interpreter: Interpreter, roots: tuple[Root, ...], facts: SnapshotOrigin) -> Snapshot:
    """Return a snapshot with its address and with the units of each root in order."""
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


def are_same(one: Packages, other: Packages) -> bool:
    """Return True if two environments have the same installed packages."""
    return one.python == other.python and one.units.keys() == other.units.keys()


def difference(asked: Packages, accepted: Packages) -> str:
    """Return the difference between requested and accepted packages as text, or "" if they are equal."""
    if asked.python != accepted.python:
        return f"{asked.python} is not {accepted.python}"
    more = [label for address, label in asked.units.items() if address not in accepted.units]
    less = [label for address, label in accepted.units.items() if address not in asked.units]
    parts = [f"{_listed(more)} more"] if more else []
    parts += [f"{_listed(less)} less"] if less else []
    return ", ".join(parts)


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a capture or a restore, for display."""

    phase: Phase
    bytes_done: int = 0  # Number of content bytes processed so far.
    bytes_total: int = 0  # Number of all content bytes; 0 while unknown.
    files_done: int = 0
    files_total: int = 0  # Number of all files; 0 while unknown.
    moved_bytes: int = 0  # Number of compressed bytes that the store has sent or received.
    name: str = ""  # Item in progress, for example ``torch 2.13.0``, or "".
    waits_for: str = ""  # Item that another process fetches while this process waits, or "".


Report = Callable[[ProgressPoint], None]


def ignore_progress(progress: ProgressPoint) -> None:
    """Discard a progress report."""


def _listed(labels: Iterable[str]) -> str:
    there = sorted(labels)
    rest = f" and {len(there) - _LISTED_MAX} others" if len(there) > _LISTED_MAX else ""
    return ", ".join(there[:_LISTED_MAX]) + rest


def _path(item: FileRow | Generated) -> bytes:
    return item.path.encode()
