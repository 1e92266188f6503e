"""Small environments made by hand and put into a store, for tests of the cache and of restoring.

store = Counting(); made = Made(Blobs(store))
unit = made.distribution("alpha", {"site/alpha/__init__.py": "x = 1"})
snapshot = made.snapshot([unit])
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.documents import (
    BLOCK_BYTES,
    ContentPlace,
    FileRow,
    Generated,
    Interpreter,
    PackBlock,
    Root,
    RootKind,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    Unit,
    UnitKind,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.restore.interpreters import ask
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import MemoryStore

FRAMES = 4  # in a pack


class Executable(NamedTuple):
    """Content of a file that can be run."""

    text: str


class Link(NamedTuple):
    """A link, and what it says."""

    target: str


class Folder(NamedTuple):
    """An empty directory."""


Content = str | bytes | Executable | Link | Folder


class Counting(MemoryStore):
    """A store in memory that counts what is got, and can hand out altered packs."""

    def __init__(self) -> None:
        super().__init__("test")
        self.got: list[str] = []
        self.altered_times = 0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object; a pack with one bit flipped, as often as `altered_times` says."""
        self.got.append(key)
        data = super().get(key, start, length)
        if self.altered_times and key.startswith("packs/"):
            self.altered_times -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data

    def packs_got(self) -> int:
        """Return how often a pack was asked for."""
        return sum(key.startswith("packs/") for key in self.got)


class Piece(NamedTuple):
    """A unit in the store, and how a snapshot lists it."""

    unit: Unit
    member: SnapshotMember


class Made:
    """Makes units and snapshots in a store."""

    def __init__(self, blobs: StoreBlobs) -> None:
        self.blobs = blobs

    def piece(
        self, files: Mapping[str, Content], kind: UnitKind = "unowned", name: str = "", version: str = ""
    ) -> Piece:
        """Put a unit of these files into the store."""
        rows = tuple(sorted((_row(path, content) for path, content in files.items()), key=lambda row: row.path))
        contents = [_bytes(files[row.path]) for row in rows if row.has_content and row.size]
        packs, blocks, places = self._pack(contents)
        unit = Unit(address=unit_address(rows), rows=rows, packs=packs, blocks=blocks, places=places)
        self.blobs.write_unit(unit)
        member = SnapshotMember(
            address=unit.address,
            kind=kind,
            name=name,
            version=version,
            size=sum(row.size for row in rows),
            files=sum(row.has_content for row in rows),
            modules=tuple(sorted({row.path.split("/")[1].removesuffix(".py") for row in rows if row.path[0] == "s"})),
        )
        return Piece(unit, member)

    def distribution(self, name: str, files: Mapping[str, Content], *, version: str = "1.0", points: str = "") -> Piece:
        """Put a distribution with its metadata into the store."""
        info = f"site/{name}-{version}.dist-info"
        metadata = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        if points:
            metadata[f"{info}/entry_points.txt"] = points
        return self.piece({**files, **metadata}, "distribution", name, version)

    def root(
        self,
        pieces: Iterable[Piece],
        kind: RootKind = "own",
        *,
        generated: Sequence[Generated] = (),
        before: bool = False,
    ) -> Root:
        """Return a root of units."""
        members = sorted((piece.member for piece in pieces), key=lambda m: (m.kind, m.name, m.address))
        return Root(kind=kind, members=tuple(members), generated=tuple(generated), before=before)

    def snapshot(self, roots: Sequence[Root], *, facts: SnapshotOrigin | None = None, python: str = "") -> Snapshot:
        """Put a snapshot into the store."""
        made = make_snapshot(interpreter(python), tuple(roots), facts or SnapshotOrigin())
        self.blobs.write_snapshot(made)
        return made

    def simple(self, *names: str) -> Snapshot:
        """Put a snapshot of distributions with one module each into the store."""
        pieces = [self.distribution(name, {f"site/{name}/__init__.py": f"name = {name!r}\n"}) for name in names]
        return self.snapshot([self.root(pieces)])

    def _pack(
        self, contents: Sequence[bytes]
    ) -> tuple[tuple[str, ...], tuple[PackBlock, ...], tuple[ContentPlace, ...]]:
        blocks: list[bytes] = []
        places: list[ContentPlace] = []
        small = b""
        for content in contents:
            if len(small) + len(content) > BLOCK_BYTES:
                blocks, small = ([*blocks, small] if small else blocks), b""
            if len(content) > BLOCK_BYTES:
                places.append(ContentPlace(len(blocks), 0))
                blocks += [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
            else:
                places.append(ContentPlace(len(blocks), len(small)))
                small += content
        blocks = [*blocks, small] if small else blocks
        frames = [compress(block) for block in blocks]
        packs: list[str] = []
        table: list[PackBlock] = []
        for first in range(0, len(frames), FRAMES):
            group = frames[first : first + FRAMES]
            offset = 0
            for frame, block in zip(group, blocks[first : first + FRAMES], strict=True):
                table.append(PackBlock(len(packs), offset, len(frame), len(block)))
                offset += len(frame)
            packs.append(self.blobs.write_pack(b"".join(group)))
        return tuple(packs), tuple(table), tuple(places)


def interpreter(python: str = "") -> Interpreter:
    """Return the interpreter the tests run with, or another one, without its environment."""
    answer = ask(python or base_python())
    assert answer is not None
    return Interpreter(
        implementation=answer.implementation, version=answer.version, abi=answer.abi, platform=answer.platform
    )


def base_python() -> str:
    """Return the path of the interpreter the tests run with, without its environment."""
    return str(getattr(sys, "_base_executable", sys.executable))


def altered(path: os.PathLike[str]) -> None:
    """Flip a bit of a read-only file, and leave it as it was otherwise."""
    status = os.stat(path)
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    os.chmod(path, status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def with_facts(facts: SnapshotOrigin, **changes: object) -> SnapshotOrigin:
    """Return facts with some of them changed."""
    return msgspec.structs.replace(facts, **changes)


def _row(path: str, content: Content) -> FileRow:
    if isinstance(content, Link):
        return FileRow(path=path, kind="l", target=content.target)
    if isinstance(content, Folder):
        return FileRow(path=path, kind="d")
    data = _bytes(content)
    return FileRow(
        path=path,
        kind="x" if isinstance(content, Executable) else "f",
        size=len(data),
        sha256=hashlib.sha256(data).digest(),
    )


def _bytes(content: Content) -> bytes:
    if isinstance(content, Executable):
        return content.text.encode()
    assert not isinstance(content, (Link, Folder))
    return content if isinstance(content, bytes) else content.encode()
