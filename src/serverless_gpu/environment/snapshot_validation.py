"""Validates units and snapshots from other machines against rules and limits.

    check_snapshot  interpreter, roots, members ─ generated files ─ facts and notes
    check_together  a snapshot with its units: matching sizes, and no generated file on top of a file or below one
    check_unit      its address ─ rows (paths, kinds, links) ─ the position of their bytes (packs, blocks, places), and
                    the size that they can expand to

The validation functions do no I/O and run in linear time. A reader validates a document before it requests any content.
Texts from a snapshot occur in paths, in generated files and in terminal output. The module therefore validates every
text of a snapshot.

A unit contains only regular files, links inside of its tree, and empty directories. No rule covers modes, owners,
devices, hard links and times, because the unit format does not contain them. Restore gives each file the mode 0444 or
0555.

A path must identify the same file on every file system. Names that differ only in case or Unicode form are one file on
some machines. The rules therefore reject colliding names everywhere. The link check follows each component of a link's
target through the tree of rows. The link check agrees with the kernel, because every directory on the target path must
be a real directory.

Blocks never share a byte of a pack. Files never share a byte of a block. The number of compressed bytes therefore
limits a unit's content by a fixed ratio. zstd compresses 4 MiB of zeros to 150 bytes. A limit per block would also
reject weights that were initialised with zeros. A unit may have 200 content bytes for each compressed byte, plus 256
MiB. The limit of a unit accepts a file with 256 MiB of zeros, and rejects 1 GB of zeros in 1 MB. Real distributions
have compression ratios of 2 to 20.

Failure case: The exception `EnvironmentRejected` names the unit or snapshot, the path, and the broken rule.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from serverless_gpu.environment.documents import (
    BLOCK_BYTES,
    PACK_BYTES,
    SNAPSHOT_VERSION,
    VERSION,
    ContentPlace,
    FileRow,
    Generated,
    Interpreter,
    PackBlock,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    Unit,
    in_order,
    snapshot_address,
    unit_address,
)
from serverless_gpu.errors import EnvironmentRejected

_VERSION = re.compile(r"\d{1,2}\.\d{1,3}(\.\d{1,3})?[a-z0-9.+]{0,16}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
# Control characters and lone surrogates, which represent bytes that are not valid UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_PLACEHOLDER = re.compile(r"\{\{sgpu:([^{}]*)\}\}")
_NATIVE = re.compile(r"\.(so|pyd|dylib|pyc)(\.|$)", re.ASCII | re.IGNORECASE)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KINDS = ("f", "x", "l", "d")
_DIRECTORY = "directory"
AREAS = ("site", "prefix")
EMPTY_SHA256 = hashlib.sha256().digest()

ROWS_MAX = 1_000_000
"""Maximum number of rows in a unit, and of files in a snapshot."""
CONTENT_BYTES_MAX = 15 * 10**9
"""Maximum number of content bytes in an environment, and therefore in a unit."""
PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
DEPTH_MAX = 64
"""Maximum number of components in a path, including its area."""
LINK_HOPS_MAX = 8
"""Maximum number of links in a chain of links."""

PACK_BYTES_MAX = 2 * PACK_BYTES
"""Maximum size of a pack in bytes. The last block of a full pack may extend beyond `PACK_BYTES`."""
PACKS_MAX = 100_000
BLOCKS_MAX = 1_000_000
RATIO_MAX = 200
"""Maximum number of content bytes in a unit per compressed byte, in addition to `FREE_RATIO_BYTES`."""
FREE_RATIO_BYTES = 256 * 1024 * 1024
"""Number of content bytes that any unit may have, regardless of its compressed size."""

ROOTS_MAX = 64
MEMBERS_MAX = 10_000
TEXT_BYTES_MAX = 64 * 1024
"""Maximum size of a generated file in bytes. The generated files are scripts and `.pth` files."""
TEXTS_MAX = 10_000
NOTE_NAMES = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})
NOTE_BYTES_MAX = 64 * 1024
FACTS_MAX = 200_000
"""Maximum number of entries in each list of capture facts."""
FACT_BYTES_MAX = 8 * 1024
"""Maximum length in bytes of a text or path among the capture facts."""


def check_snapshot(snapshot: Snapshot) -> None:
    """Validate the whole content of a snapshot, including its address.

    The function accepts a decoded snapshot with untrusted content.
    """
    if not is_digest(snapshot.address):
        refuse("a snapshot", snapshot.address, "the address must be 64 hexadecimal digits")
    what = f"snapshot {snapshot.address[:12]}"
    if snapshot.version not in (1, SNAPSHOT_VERSION):
        refuse(
            what, "", f"the snapshot's format is {snapshot.version!r}, but this program reads 1 and {SNAPSHOT_VERSION}"
        )
    _check_interpreter(snapshot.interpreter, what)
    roots = snapshot.roots
    if not 1 <= len(roots) <= ROOTS_MAX:
        refuse(what, "", f"the snapshot has {len(roots)} roots, but 1 to {ROOTS_MAX} are allowed")
    for index, root in enumerate(roots):
        if (root.kind == "own") != (index == 0):
            refuse(what, f"root {index}", "the first root, and no other root, must be the interpreter's own")
        _check_root(index, root, len(roots), what)
    if snapshot.size > CONTENT_BYTES_MAX:
        refuse(what, "", f"the snapshot has {snapshot.size} bytes, but at most {CONTENT_BYTES_MAX} are allowed")
    if snapshot.files > ROWS_MAX:
        refuse(what, "", f"the snapshot has {snapshot.files} files, but at most {ROWS_MAX} are allowed")
    _check_facts(snapshot.facts, len(roots), what)
    if snapshot_address(snapshot) != snapshot.address:
        refuse(what, "", "the snapshot's address does not match its content")
    for index, root in enumerate(roots):
        if root.members != in_order(root.members):
            refuse(what, f"root {index}", "units must be in order of their kind, name and address")


def check_together(snapshot: Snapshot, units: Mapping[str, Unit]) -> None:
    """Validate a snapshot against the units that it lists.

    The caller must already have validated the snapshot and each unit separately.
    """
    what = f"snapshot {snapshot.address[:12]}"
    for index, root in enumerate(snapshot.roots):
        tree = RowTree(what)
        texts = {file.path for file in root.generated}
        if index < len(snapshot.facts.notes):
            texts |= snapshot.facts.notes[index].keys()
        for path in sorted(texts):
            tree.add(path, "f")
        for member in root.members:
            unit = units[member.address]
            content = [row.size for row in unit.rows if row.has_content]
            if (member.size, member.files) != (sum(content), len(content)):
                refuse(
                    what,
                    member.name or member.address[:12],
                    "the listed size and number of files differ from those of its unit",
                )
            for row in unit.rows:
                # Units may share directories and files, because the order of overlay layers determines precedence. The
                # collision check therefore covers only generated files.
                tree.meet(row.path, row.kind)


def check_unit(unit: Unit) -> None:
    """Validate the whole content of a unit: its address, its rows, and the position of their bytes.

    The function accepts a decoded unit with untrusted content.
    """
    if not is_digest(unit.address):
        refuse("a unit", unit.address, "the address must be 64 hexadecimal digits")
    what = f"unit {unit.address[:12]}"
    if unit.version != VERSION:
        refuse(what, "", f"the unit's format is {unit.version!r}, but this program reads {VERSION}")
    for pack in unit.packs:
        if not is_digest(pack):
            refuse(what, pack, "the name of a pack must be 64 hexadecimal digits")
    check_rows(unit.rows, what)
    if unit_address(unit.rows) != unit.address:
        refuse(what, "", "the unit's address does not match its rows")
    check_blocks(unit, what)


def check_rows(rows: Sequence[FileRow], what: str = "a unit") -> None:
    """Validate all rows of a unit: each row separately, and the tree that the rows form."""
    if len(rows) > ROWS_MAX:
        refuse(what, "", f"the unit has {len(rows)} rows, but at most {ROWS_MAX} are allowed")
    tree = RowTree(what)
    before, size = "", 0
    for row in rows:
        _check_row(row, what)
        tree.add(row.path, row.kind)
        if row.path < before:
            refuse(what, row.path, "rows must be in order of their paths")
        before = row.path
        size += row.size
    if size > CONTENT_BYTES_MAX:
        refuse(what, "", f"the unit has {size} bytes, but at most {CONTENT_BYTES_MAX} are allowed")
    for row in rows:
        if row.kind == "l":
            tree.targets[row.path] = row.target
    for path in tree.targets:
        tree.check_link(path)


def check_path(path: str, what: str = "a path") -> None:
    """Validate a row's path: its area, names, lengths and depth."""
    _check_text(path, what)
    if path.startswith("/"):
        refuse(what, path, "a path must not be absolute")
    area, _, rest = path.partition("/")
    if area not in AREAS or not rest:
        refuse(what, path, "a path must start with site/ or prefix/, followed by a name")
    names = path.split("/")
    if len(names) > DEPTH_MAX:
        refuse(what, path, f"a path may have at most {DEPTH_MAX} names")
    for name in names:
        _check_name(name, path, what)


def check_blocks(unit: Unit, what: str) -> None:
    """Validate the positions of a unit's bytes in its blocks and packs."""
    if len(unit.packs) > PACKS_MAX or len(unit.blocks) > BLOCKS_MAX:
        refuse(what, "", f"a unit may have at most {PACKS_MAX} packs and {BLOCKS_MAX} blocks")
    for index, block in enumerate(unit.blocks):
        _check_block(index, block, len(unit.packs), what)
    _check_overlap(unit.blocks, what)
    filled = [row for row in unit.rows if row.has_content and row.size]
    if len(filled) != len(unit.places):
        refuse(what, "", f"the unit has {len(unit.places)} places for {len(filled)} files with content")
    _check_places(filled, unit.places, unit.blocks, what)
    _check_ratio(unit, sum(row.size for row in filled), what)


def _check_interpreter(python: Interpreter, what: str) -> None:
    if not _VERSION.fullmatch(python.version):
        refuse(what, python.version, "the interpreter's version must consist of two or three numbers")
    for word in (python.implementation, python.abi, python.platform):
        if not _WORD.fullmatch(word):
            refuse(what, word or "''", "the interpreter's implementation, ABI and platform must be plain words")
    if python.glibc and not _VERSION.fullmatch(python.glibc):
        refuse(what, python.glibc, "the glibc version must consist of two numbers")


def _check_root(index: int, root: Root, roots: int, what: str) -> None:
    if len(root.members) > MEMBERS_MAX or len(root.generated) > TEXTS_MAX:
        refuse(what, f"root {index}", f"a root may have at most {MEMBERS_MAX} units and {TEXTS_MAX} generated files")
    if root.kind not in ("own", "library", "code"):
        refuse(what, f"root {index}", f"{root.kind!r} is not a valid kind of root")
    seen: set[str] = set()
    for member in root.members:
        _check_member(member, root, what)
        if member.address in seen:
            refuse(what, member.name or member.address[:12], f"root {index} lists the unit twice")
        seen.add(member.address)
    tree = RowTree(what)
    for file in root.generated:
        _check_generated(file, roots, what)
        tree.add(file.path, "x" if file.executable else "f")


def _check_member(member: SnapshotMember, root: Root, what: str) -> None:
    if not is_digest(member.address):
        refuse(what, member.address, "the address must be 64 hexadecimal digits")
    if member.kind not in ("distribution", "unowned", "code") or (member.kind == "code") != (root.kind == "code"):
        refuse(
            what,
            member.name or member.address[:12],
            f"{member.kind!r} is not a valid kind of unit for a {root.kind} root",
        )
    _check_texts((member.name, member.version, *member.modules), NAME_BYTES_MAX, what)
    if "/" in member.name or len(member.modules) > FACTS_MAX:
        refuse(what, member.name, "a unit's name must not be a path, and a unit must not list too many modules")
    if not 0 <= member.size <= CONTENT_BYTES_MAX or not 0 <= member.files <= ROWS_MAX:
        refuse(
            what, member.name or member.address[:12], f"a unit cannot have {member.size} bytes in {member.files} files"
        )


def _check_generated(file: Generated, roots: int, what: str) -> None:
    check_path(file.path, what)
    name = file.path.rpartition("/")[2]
    if _NATIVE.search(name):
        refuse(what, file.path, "a generated file must not be native code or bytecode")
    if "\0" in file.text or len(file.text) > TEXT_BYTES_MAX or _bytes(file.text, what) > TEXT_BYTES_MAX:
        refuse(what, file.path, f"a generated file must be text of at most {TEXT_BYTES_MAX} bytes")
    for place in _PLACEHOLDER.findall(file.text):
        if place != "python" and not (place.isascii() and place.isdigit() and len(place) <= 3 and int(place) < roots):
            refuse(what, file.path, f"'{{{{sgpu:{place}}}}}' is not a valid placeholder")


def _check_facts(facts: SnapshotOrigin, roots: int, what: str) -> None:
    if not 0 <= facts.captured_ns < 2**63:
        refuse(what, "captured_ns", "the capture time is not valid")
    if max(len(facts.originals), len(facts.notes), len(facts.loaded)) > roots:
        refuse(what, "facts", "the capture facts describe more roots than the snapshot has")
    _check_texts((facts.python, facts.prefix, *facts.originals), FACT_BYTES_MAX, what)
    _check_texts(facts.variables, FACT_BYTES_MAX, what)
    _check_texts(facts.left_out, FACT_BYTES_MAX, what)
    for notes in facts.notes:
        _check_notes(notes, what)
    for loaded in facts.loaded:
        if len(loaded) > FACTS_MAX:
            refuse(what, "facts", f"at most {FACTS_MAX} loaded modules are allowed")
        for path in loaded:
            check_path(path, what)


def _check_notes(notes: Mapping[str, str], what: str) -> None:
    if len(notes) > FACTS_MAX:
        refuse(what, "facts", f"at most {FACTS_MAX} notes are allowed")
    for path, text in notes.items():
        check_path(path, what)
        directory, _, name = path.rpartition("/")
        if name not in NOTE_NAMES or not directory.startswith("site/") or not directory.endswith(".dist-info"):
            refuse(what, path, f"a note must be one of {', '.join(sorted(NOTE_NAMES))}, in a .dist-info directory")
        if len(text) > NOTE_BYTES_MAX or _bytes(text, what) > NOTE_BYTES_MAX:
            refuse(what, path, f"a note may have at most {NOTE_BYTES_MAX} bytes")


def _check_texts(texts: Iterable[str], bytes_max: int, what: str) -> None:
    for count, text in enumerate(texts):
        if count >= FACTS_MAX:
            refuse(what, "facts", f"a list of facts may have at most {FACTS_MAX} entries")
        if _CONTROL.search(text) or len(text) > bytes_max or len(text.encode()) > bytes_max:
            refuse(what, text, f"a name or fact may have at most {bytes_max} bytes, without control characters")


def _bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        refuse(what, "a text", "the text is not UTF-8")


class RowTree:
    """A tree of file rows that detects duplicate, colliding and invalid paths."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._kinds: dict[str, str] = dict.fromkeys(AREAS, _DIRECTORY)
        self._folded: dict[str, str] = {area: area for area in AREAS}  # Path → case-folded form, which must be unique.
        self._taken: dict[str, str] = {area: area for area in AREAS}  # Folded form → path.
        self._clear = set(AREAS)  # Unit directories that do not collide with a generated file.
        self.targets: dict[str, str] = {}

    def add(self, path: str, kind: str) -> None:
        """Add a row to the tree."""
        _check_text(path, self._what)
        directory, _, name = path.rpartition("/")
        if not directory or path.count("/") >= DEPTH_MAX:
            check_path(path, self._what)  # `check_path` raises the error for the broken rule.
        self._enter(directory, path)
        _check_name(name, path, self._what)
        self._put(path, directory, name, kind)

    def meet(self, path: str, kind: str) -> None:
        """Check that no generated file is at, above or below the path of a unit's row."""
        there = self._taken.get(_fold_path(path))
        # An empty directory of a unit may also exist in other units.
        if there is not None and (kind != "d" or self._kinds[there] != _DIRECTORY):
            refuse(self._what, there, f"a generated file collides with a unit's path {path!r}")
        directory = path.rpartition("/")[0]
        while directory not in self._clear:
            there = self._taken.get(_fold_path(directory))
            if there is not None and self._kinds[there] != _DIRECTORY:
                refuse(self._what, there, f"a generated file collides with a unit's directory {directory!r}")
            self._clear.add(directory)
            directory = directory.rpartition("/")[0]

    def check_link(self, path: str) -> None:
        """Check that a link leads to an entry of the same unit, through at most a few other links."""
        at = path
        for _ in range(LINK_HOPS_MAX):
            at = self._follow(at, path)
            if self._kinds[at] != "l":
                return
        refuse(self._what, path, f"a link must not lead in a circle, or through more than {LINK_HOPS_MAX} other links")

    def _follow(self, link: str, path: str) -> str:
        target = self.targets[link]
        if not target or target.startswith("/"):
            refuse(self._what, path, f"a link's target must be relative, not {target!r}")
        at = link.rpartition("/")[0]
        names = target.split("/")
        for index, name in enumerate(names):
            if name == "..":
                at = at.rpartition("/")[0]
                if not at:
                    refuse(self._what, path, f"a link must stay in its tree, but {target!r} leads outside")
            elif name != ".":
                at = f"{at}/{name}"
            kind = self._kinds.get(at)
            if kind is None or not name:
                refuse(self._what, path, f"a link must lead to an entry of its unit, but {target!r} does not exist")
            if index < len(names) - 1 and kind not in (_DIRECTORY, "d"):
                refuse(self._what, path, f"a link must not lead through another link or a file, as {target!r} does")
        return at

    def _enter(self, directory: str, path: str) -> None:
        kind = self._kinds.get(directory)
        if kind == _DIRECTORY:
            return
        if kind is not None:
            below = "an empty directory" if kind == "d" else "a file or link"
            refuse(self._what, path, f"the path lies below {below}")
        above, _, name = directory.rpartition("/")
        if not above:
            check_path(path, self._what)
        self._enter(above, path)
        _check_name(name, path, self._what)
        self._put(directory, above, name, _DIRECTORY)

    def _put(self, path: str, directory: str, name: str, kind: str) -> None:
        if path in self._kinds:
            twice = "the path occurs twice" if self._kinds[path] != _DIRECTORY else "the path is also a directory"
            refuse(self._what, path, twice)
        folded = f"{self._folded[directory]}/{fold_name(name)}"
        other = self._taken.setdefault(folded, path)
        if other != path:
            refuse(self._what, path, f"the path equals {other!r} on a system that ignores case or Unicode forms")
        self._kinds[path] = kind
        if kind == _DIRECTORY:
            self._folded[path] = folded


def _check_row(row: FileRow, what: str) -> None:
    if row.kind not in _KINDS:
        refuse(what, row.path, f"{row.kind!r} is not a valid kind of row")
    if not row.has_content:
        if row.size or row.sha256:
            refuse(what, row.path, "only files can have a size and a digest")
        if row.kind == "l":
            _check_text(row.target, what)
        elif row.target:
            refuse(what, row.path, "only links can have a target")
        return
    if row.target:
        refuse(what, row.path, "only links can have a target")
    if not 0 <= row.size <= CONTENT_BYTES_MAX:
        refuse(what, row.path, f"a size must be between 0 and {CONTENT_BYTES_MAX}, not {row.size}")
    if len(row.sha256) != 32 or (row.size == 0 and row.sha256 != EMPTY_SHA256):
        refuse(what, row.path, "a digest must be the content's SHA-256, with 32 bytes")
    if row.path.endswith(".pyc") and row.path.rpartition("/")[0].endswith("/__pycache__"):
        # Python would run the unit's bytecode instead of the source code that users read.
        refuse(what, row.path, "nodes compile bytecode themselves, so a unit must not contain it")


def _check_text(text: str, what: str) -> None:
    if _CONTROL.search(text):
        refuse(what, text, "the text has control characters, or bytes that are not UTF-8")
    if len(text) * 4 > PATH_BYTES_MAX and len(text.encode()) > PATH_BYTES_MAX:
        refuse(what, text, f"a path may have at most {PATH_BYTES_MAX} bytes")


def _check_name(name: str, path: str, what: str) -> None:
    if not name:
        refuse(what, path, "a name must not be empty")
    if name == "." or name == "..":
        refuse(what, path, "a name must not be '.' or '..'")
    if len(name) * 4 > NAME_BYTES_MAX and len(name.encode()) > NAME_BYTES_MAX:
        refuse(what, path, f"a name may have at most {NAME_BYTES_MAX} bytes")


def _fold_path(path: str) -> str:
    return path.lower() if path.isascii() else "/".join(fold_name(name) for name in path.split("/"))


def _check_ratio(unit: Unit, content_bytes: int, what: str) -> None:
    """Check that the unit does not expand from few compressed bytes to very much content."""
    # The check counts packs with equal content once, because the store has one object for them.
    first = {digest: index for index, digest in reversed(list(enumerate(unit.packs)))}
    once = set(first.values())
    sent = sum(block.length for block in unit.blocks if block.pack in once)
    made = sum(block.size for block in unit.blocks)
    if made > RATIO_MAX * sent + FREE_RATIO_BYTES:
        rule = (
            f"{sent} bytes would expand to {made}, but at most {RATIO_MAX} for each byte plus {FREE_RATIO_BYTES} "
            "are allowed"
        )
        refuse(what, "", rule)
    # Decompressing unused content also costs time. In an edited unit, up to half of the old packs' content may be
    # unused.
    if made > 4 * content_bytes + FREE_RATIO_BYTES:
        refuse(
            what, "", f"the blocks have {made} bytes of content, far more than the {content_bytes} bytes of all files"
        )


def _check_block(index: int, block: PackBlock, packs: int, what: str) -> None:
    name = f"block {index}"
    if not 0 <= block.pack < packs:
        refuse(what, name, f"a block refers to pack {block.pack} of {packs}")
    if not 0 < block.size <= BLOCK_BYTES:
        refuse(what, name, f"a block must have 1 to {BLOCK_BYTES} bytes of content, not {block.size}")
    if block.offset < 0 or block.length < 1 or block.offset + block.length > PACK_BYTES_MAX:
        refuse(what, name, f"a block lies outside its pack, at {block.offset} with {block.length} bytes")


def _check_overlap(blocks: Sequence[PackBlock], what: str) -> None:
    pack, end = -1, 0
    for index in sorted(range(len(blocks)), key=lambda index: (blocks[index].pack, blocks[index].offset)):
        block = blocks[index]
        if block.pack == pack and block.offset < end:
            refuse(what, f"block {index}", "two blocks share bytes of a pack")
        pack, end = block.pack, block.offset + block.length


def _check_places(
    filled: Sequence[FileRow], places: Sequence[ContentPlace], blocks: Sequence[PackBlock], what: str
) -> None:
    parts: list[tuple[int, int, int, str]] = []  # block, start, end and path of each part of a file
    for row, place in zip(filled, places, strict=True):
        if not 0 <= place.block < len(blocks) or place.start < 0:
            refuse(what, row.path, f"the file cannot start in block {place.block} of {len(blocks)}, byte {place.start}")
        block = blocks[place.block]
        if place.start + row.size <= block.size:
            parts.append((place.block, place.start, place.start + row.size, row.path))
            continue
        if place.start:
            refuse(what, row.path, "a file that continues in the next block must start at the block's first byte")
        parts += _run(row, place.block, blocks, what)
    parts.sort()
    for before, part in itertools.pairwise(parts):
        if before[0] == part[0] and before[2] > part[1]:
            refuse(what, part[3], f"the file's content shares bytes with {before[3]!r}")


def _run(row: FileRow, first: int, blocks: Sequence[PackBlock], what: str) -> list[tuple[int, int, int, str]]:
    """Return the parts of all blocks that a large file's content fills."""
    parts, left, index = [], row.size, first
    while left:
        if index >= len(blocks):
            refuse(what, row.path, "the file continues after the last block")
        size = blocks[index].size
        if size > left:
            refuse(what, row.path, "the blocks of a large file must not have content of other files")
        parts.append((index, 0, size, row.path))
        left, index = left - size, index + 1
    return parts


def refuse(what: str, path: str, rule: str) -> NoReturn:
    """Raise `EnvironmentRejected` for a broken rule."""
    shown = path if len(path) <= 200 else f"{path[:100]}…{path[-60:]}"
    raise EnvironmentRejected(f"{what}: {shown!r}: {rule}" if path else f"{what}: {rule}")


def is_digest(text: str) -> bool:
    """Return True if a text is a BLAKE3 digest as 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def fold_name(name: str) -> str:
    """Return a form of a name that ignores differences in case and Unicode form."""
    if name.isascii():
        return name.lower()
    # The function normalizes before and after case folding, because case folding can undo Unicode normalization.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
