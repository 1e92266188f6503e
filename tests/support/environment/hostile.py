"""Units and snapshots that somebody who means harm would send, each with the words of the rule that stops it.

Every value here is built with a correct address where it can be, so that nothing but its own rule refuses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from serverless_gpu.environment.documents import (
    BLOCK_BYTES,
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
    make_snapshot,
    unit_address,
)

PACK = "ab" * 32
MIB = 1024 * 1024
PYTHON = Interpreter(
    implementation="cpython",
    version="3.11.7",
    abi="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    glibc="2.36",
)


def file(path: str, size: int = 3, kind: str = "f") -> FileRow:
    """Return the row of a file whose content nobody will read."""
    digest = hashlib.sha256(b"" if size == 0 else b"%d" % size).digest()
    return FileRow(path=path, kind=kind, size=size, sha256=digest)  # type: ignore[arg-type]  # hostile kinds are the point


def link(path: str, target: str) -> FileRow:
    return FileRow(path=path, kind="l", target=target)


def unit(*rows: FileRow, ordered: bool = True, **changes: object) -> Unit:
    """Return a unit that is right but for its rows, or for what is changed in it."""
    listed = tuple(sorted(rows, key=lambda row: row.path.encode(errors="surrogatepass"))) if ordered else rows
    try:
        address = unit_address(listed)
    except UnicodeEncodeError:
        address = "0" * 64
    made = Unit(address=address, rows=listed, packs=(PACK,), **places(listed))  # type: ignore[arg-type]  # blocks and places come as a dict
    return msgspec.structs.replace(made, **changes)


def places(rows: Sequence[FileRow]) -> dict[str, object]:
    """Return blocks and places for rows: one block for each small file, as many as needed for a large one."""
    blocks: list[PackBlock] = []
    found: list[ContentPlace] = []
    offset = 0
    for row in rows:
        if not row.has_content or row.size <= 0:
            continue
        found.append(ContentPlace(len(blocks), 0))
        left = min(row.size, 64 * MIB)  # larger ones are refused before anybody looks at their blocks
        while left > 0:
            size = min(left, BLOCK_BYTES)
            length = max(1, size // 4)
            blocks.append(PackBlock(0, offset % MIB * 16 if offset > 16 * MIB else offset, length, size))
            offset, left = offset + length, left - size
    return {"blocks": tuple(blocks), "places": tuple(found)}


def hostile_units() -> Iterator[tuple[str, Unit, str]]:
    """Yield a name, a unit, and words of the error it has to raise."""
    yield from _paths()
    yield from _trees()
    yield from _links()
    yield from _rows()
    yield from _blocks()
    yield from _bombs()


def _paths() -> Iterator[tuple[str, Unit, str]]:
    for name, path, rule in (
        ("absolute", "/etc/passwd", "not be absolute"),
        ("absolute at the root", "/x", "not be absolute"),
        ("another area", "etc/passwd", "start with site/ or prefix/"),
        ("the area itself", "site", "start with site/ or prefix/"),
        ("nothing", "", "start with site/ or prefix/"),
        ("up", "site/../../x", "'.' or '..'"),
        ("up at the end", "site/a/..", "'.' or '..'"),
        ("dot", "site/./x", "'.' or '..'"),
        ("dot at the end", "site/a/.", "'.' or '..'"),
        ("empty name", "site//x", "not be empty"),
        ("empty at the end", "site/a/", "not be empty"),
        ("area and slash", "site/", "not be empty"),
        ("NUL", "site/a\0b", "control character"),
        ("newline", "site/a\nb", "control character"),
        ("escape", "site/\x1b[2Ja", "control character"),
        ("C1 control", "site/a\x9bb", "control character"),
        ("delete", "site/a\x7f", "control character"),
        ("half a surrogate pair", "site/\udcff", "not UTF-8"),
        ("long name", "site/" + "a" * 256, "at most 255 bytes"),
        ("long name in UTF-8", "site/" + "é" * 128, "at most 255 bytes"),
        ("long directory", f"site/{'a' * 256}/x", "at most 255 bytes"),
        ("long path", "site/" + "/".join(["a" * 99] * 11), "at most 1024 bytes"),
        ("long path in UTF-8", "site/" + "/".join(["é" * 99] * 6), "at most 1024 bytes"),
        ("PATH_MAX chain", "site/" + "/".join(["d" * 247] * 20), "at most 1024 bytes"),
        ("deep", "site/" + "/".join("a" * 64), "at most 64 names"),
    ):
        yield name, unit(file(path)), rule
        if "\0" not in path:
            yield f"{name}, an empty directory", unit(FileRow(path=path, kind="d")), rule
            yield f"{name}, a link", unit(link(path, "x"), file("site/x")), rule


def _trees() -> Iterator[tuple[str, Unit, str]]:
    one, two = file("site/a"), file("site/b")
    yield "duplicate", unit(one, one), "twice"
    yield "duplicate of two kinds", unit(one, link("site/a", "b"), two), "twice"
    yield "unsorted", unit(two, one, ordered=False), "in order of their paths"
    for name, first, second in (
        ("case", "site/A", "site/a"),
        ("case of directories", "site/Pkg/a.py", "site/pkg/b.py"),
        ("case of a file and a directory", "site/PKG", "site/pkg/b.py"),
        ("sharp s", "site/straße", "site/strasse"),
        ("composed and decomposed", "site/e\u0301", "site/\u00e9"),
        ("composed directories", "site/e\u0301/a", "site/\u00e9/b"),
        ("ligature", "site/\ufb01le", "site/file"),
        ("Kelvin sign", "site/\u212a", "site/k"),
        ("dotted capital I", "site/\u0130", "site/i\u0307"),
        ("full width", "site/\uff41", "site/A"),
    ):
        yield name, unit(file(first), file(second)), "path equals"
    yield "below a file", unit(file("site/a"), file("site/a/b")), "below a file or link"
    yield "below a file, deep", unit(file("site/a"), file("site/a/b/c")), "below a file or link"
    yield "below a link", unit(link("site/a", "b"), file("site/a/c"), file("site/b/x")), "below a file or link"
    yield "directory, then file", unit(file("site/a!/b"), file("site/a!")), "below a file or link"
    yield (
        "below an empty directory",
        unit(FileRow(path="site/a", kind="d"), file("site/a/b")),
        "below an empty directory",
    )


def _links() -> Iterator[tuple[str, Unit, str]]:
    secret, inside = file("site/secret"), file("site/a/b/x")
    for name, target, rule in (
        ("absolute link", "/etc/passwd", "relative"),
        ("empty link", "", "relative"),
        ("link out of everything", "../../../../etc/passwd", "leads out"),
        ("link out by one", "../../../x", "leads out"),
        ("link to its area's parent", "../../..", "leads out"),
        ("link to the other area", "../../../prefix/bin/x", "leads out"),
        ("link out and in again", "../../../site/secret", "leads out"),
        ("link to nothing", "nothing", "does not exist"),
        ("link to nothing, deep", "../nothing/x", "does not exist"),
        ("link with empty name", "..//b/x", "does not exist"),
        ("link with a slash at the end", "../", "does not exist"),
        ("link through a file", "x/../x", "through another link or a file"),
        ("link to itself", "link", "circle"),
        ("link with a control character", "x\n", "control character"),
        ("link with a NUL", "x\0", "control character"),
        ("long link", "./" * 600 + "x", "at most 1024 bytes"),
    ):
        yield name, unit(link("site/a/b/link", target), inside, secret, file("prefix/bin/x")), rule
    yield "circle of two", unit(link("site/a", "b"), link("site/b", "a")), "circle"
    # The archive of CVE-2025-4517 and its family: a directory behind a link, so that `..` means something else.
    yield (
        "through a link to a directory",
        unit(
            link("site/a/b/c", "../../deep/er"), link("site/a/out", "b/c/../../secret"), file("site/deep/er/x"), secret
        ),
        "through another link",
    )
    chain = [link(f"site/{n:02}", f"{n + 1:02}") for n in range(12)]
    yield "long chain", unit(*chain, file("site/12")), "more than 8 other links"


def _rows() -> Iterator[tuple[str, Unit, str]]:
    good = file("site/a")
    for kind in ("h", "c", "b", "p", "s", "D", "", "ff", 7):
        yield f"kind {kind!r}", unit(msgspec.structs.replace(good, kind=kind)), "not a valid kind of row"
    for size in (-1, -(2**63), 15 * 10**9 + 1, 2**63, 2**64):
        yield f"size {size}", unit(msgspec.structs.replace(good, size=size)), "a size must be between"
    for digest in (b"", b"\0" * 31, b"\0" * 33):
        yield f"digest of {len(digest)}", unit(msgspec.structs.replace(good, sha256=digest)), "content's SHA-256"
    yield "digest of nothing", unit(msgspec.structs.replace(good, size=0, sha256=b"\1" * 32)), "content's SHA-256"
    yield "file with a target", unit(msgspec.structs.replace(good, target="b")), "only links can have a target"
    yield "directory with a target", unit(FileRow(path="site/a", kind="d", target="b")), "only links can have a target"
    yield "directory with a size", unit(FileRow(path="site/a", kind="d", size=4)), "only files can have a size"
    yield (
        "link with a digest",
        unit(FileRow(path="site/b", kind="l", target="a", sha256=b"\0" * 32), good),
        "only files",
    )
    yield "bytecode", unit(file("site/p/__pycache__/a.cpython-311.pyc")), "nodes compile bytecode themselves"
    yield "a million rows and one", Unit(address="0" * 64, rows=(good,) * 1_000_001), "1000001 rows"
    two = [file(f"site/{n}", 8 * 10**9) for n in range(2)]
    yield "more than 15 GB", unit(*two), "at most 15000000000"
    yield "another address", unit(good, address="0" * 64), "does not match its rows"
    yield "an address that is a path", unit(good, address="../../x"), "64 hexadecimal digits"
    yield "upper case address", unit(good, address=unit(good).address.upper()), "64 hexadecimal digits"
    yield "another format", unit(good, version=2), "format is 2"


def _blocks() -> Iterator[tuple[str, Unit, str]]:
    rows = (file("site/a", 100), file("site/b", 50))
    two = (PackBlock(0, 0, 60, 100), PackBlock(0, 60, 30, 50))
    spots = (ContentPlace(0, 0), ContentPlace(1, 0))
    for name, blocks, found, rule in (
        ("no such pack", (PackBlock(1, 0, 60, 100), two[1]), spots, "pack 1 of 1"),
        ("pack -1", (PackBlock(-1, 0, 60, 100), two[1]), spots, "pack -1 of 1"),
        ("before the pack", (PackBlock(0, -1, 60, 100), two[1]), spots, "outside its pack"),
        ("after the pack", (PackBlock(0, 33 * MIB, 60, 100), two[1]), spots, "outside its pack"),
        ("far after the pack", (PackBlock(0, 2**70, 60, 100), two[1]), spots, "outside its pack"),
        ("no bytes", (PackBlock(0, 0, 0, 100), two[1]), spots, "outside its pack"),
        ("shared bytes", (PackBlock(0, 0, 61, 100), two[1]), spots, "share bytes of a pack"),
        ("one block twice", (two[0], two[0]), spots, "share bytes of a pack"),
        ("large block", (PackBlock(0, 0, 60, 4 * MIB + 1), two[1]), spots, "a block must have"),
        ("empty block", (PackBlock(0, 0, 60, 0), two[1]), spots, "a block must have"),
        ("no such block", two, (ContentPlace(2, 0), ContentPlace(1, 0)), "block 2 of 2"),
        ("block -1", two, (ContentPlace(-1, 0), ContentPlace(1, 0)), "block -1 of 2"),
        ("byte -1", two, (ContentPlace(0, 0), ContentPlace(1, -1)), "byte -1"),
        ("out of the block", two, (ContentPlace(0, 1), ContentPlace(1, 0)), "start at the block's first byte"),
        ("after the last block", two, (ContentPlace(0, 0), ContentPlace(1, 1)), "start at the block's first byte"),
        ("no blocks left", (two[0], PackBlock(0, 60, 30, 49)), spots, "after the last block"),
        (
            "not the end of a block",
            (PackBlock(0, 0, 60, 90), two[1]),
            (ContentPlace(0, 0), ContentPlace(1, 0)),
            "not have content of other files",
        ),
        ("no places", two, (), "0 places for 2 files"),
        ("one place too few", two, (ContentPlace(0, 0),), "1 places for 2 files"),
        ("one place too many", two, (*spots, ContentPlace(1, 0)), "3 places for 2 files"),
        ("two files in one place", two, (ContentPlace(0, 0), ContentPlace(0, 0)), "shares bytes with"),
        ("files overlap", two, (ContentPlace(0, 0), ContentPlace(0, 50)), "shares bytes with"),
    ):
        yield name, unit(*rows, blocks=blocks, places=found), rule
    yield "packs without end", unit(*rows, packs=(PACK,) * 100_001), "at most 100000 packs"
    yield "pack that is a path", unit(*rows, packs=("../../../etc/passwd",)), "name of a pack"


def _bombs() -> Iterator[tuple[str, Unit, str]]:
    zeros = file("site/zeros", 10**9)
    count = -(-(10**9) // BLOCK_BYTES)
    size = [BLOCK_BYTES] * (count - 1) + [10**9 - BLOCK_BYTES * (count - 1)]
    each = 10**6 // count
    blocks = tuple(PackBlock(0, each * n, each, size[n]) for n in range(count))
    yield (
        "1 GB of zeros in 1 MB",
        unit(zeros, blocks=blocks, places=(ContentPlace(0, 0),)),
        "would expand to 1000000000",
    )
    twice = tuple(PackBlock(n, 0, 10**6, size[n]) for n in range(count))
    yield (
        "1 GB in one pack, again and again",
        unit(zeros, packs=(PACK,) * count, blocks=twice, places=(ContentPlace(0, 0),)),
        ("1000000 bytes would expand to 1000000000"),
    )
    many = tuple(file(f"site/{n}", 1) for n in range(100))
    waste = tuple(PackBlock(0, 40_000 * n, 40_000, BLOCK_BYTES) for n in range(100))
    spots = tuple(ContentPlace(n, 0) for n in range(100))
    yield "work for nothing", unit(*many, blocks=waste, places=spots), "far more than the 100 bytes of all files"


def snapshot(
    *members: SnapshotMember, generated: Sequence[Generated] = (), facts: SnapshotOrigin | None = None
) -> Snapshot:
    """Return a snapshot of one root that is right but for what is put into it."""
    return make_snapshot(
        PYTHON, (Root(kind="own", members=members, generated=tuple(generated)),), facts or SnapshotOrigin()
    )


def member_of(unit: Unit, name: str = "thing") -> SnapshotMember:
    content = [row.size for row in unit.rows if row.has_content]
    return SnapshotMember(address=unit.address, kind="distribution", name=name, size=sum(content), files=len(content))


def hostile_snapshots() -> Iterator[tuple[str, Snapshot, str]]:
    """Yield a name, a snapshot, and words of the error it has to raise."""
    good = member_of(unit(file("site/a")))
    replace = msgspec.structs.replace
    own = Root(kind="own", members=(good,))
    yield "another address", replace(snapshot(good), address="0" * 64), "does not match its content"
    yield "address that is a path", replace(snapshot(good), address="../x"), "64 hexadecimal digits"
    yield "another format", replace(snapshot(good), version=0), "format is 0"
    for field, value in (("version", "../../x"), ("version", "3"), ("abi", "a/b"), ("platform", ""), ("glibc", "../x")):
        yield (
            f"{field} {value!r}",
            make_snapshot(replace(PYTHON, **{field: value}), (own,), SnapshotOrigin()),
            "interpreter" if (field == "version") else "glibc" if field == "glibc" else "plain words",
        )
    yield "no roots", make_snapshot(PYTHON, (), SnapshotOrigin()), "0 roots"
    yield (
        "65 roots",
        make_snapshot(PYTHON, (own,) + (Root(kind="library", members=()),) * 64, SnapshotOrigin()),
        "65 roots",
    )
    yield "own root twice", make_snapshot(PYTHON, (own, own), SnapshotOrigin()), "the first root, and no other"
    yield "no own root", make_snapshot(PYTHON, (Root(kind="library", members=()),), SnapshotOrigin()), "the first root"
    odd = Root(kind="temp", members=())  # type: ignore[arg-type]  # hostile kinds are the point
    yield "kind of a root", make_snapshot(PYTHON, (own, odd), SnapshotOrigin()), "not a valid kind of root"
    yield "units without end", snapshot(*(good,) * 10_001), "at most 10000 units"
    yield "unit twice", snapshot(good, good), "lists the unit twice"
    for changes, rule in (
        ({"address": "../units/x"}, "64 hexadecimal digits"),
        ({"kind": "code"}, "not a valid kind of unit"),
        ({"kind": "device"}, "not a valid kind of unit"),
        ({"name": "a\x1b[31m"}, "control characters"),
        ({"name": "../x"}, "not be a path"),
        ({"name": "a" * 256}, "at most 255 bytes"),
        ({"version": "1\n2"}, "control characters"),
        ({"modules": ("a\0",)}, "control characters"),
        ({"size": -1}, "cannot have"),
        ({"files": -1}, "cannot have"),
        ({"size": 15 * 10**9 + 1}, "cannot have"),
    ):
        yield f"member with {changes}", snapshot(replace(good, **changes)), rule
    large = [replace(good, address=f"{n:064x}", size=10**10) for n in range(2)]
    yield "more than 15 GB", snapshot(*large), "20000000000 bytes"
    many = [replace(good, address=f"{n:064x}", files=600_000) for n in range(2)]
    yield "more than a million files", snapshot(*many), "1200000 files"
    yield from _generated(good)
    yield from _facts(good)


def _generated(good: SnapshotMember) -> Iterator[tuple[str, Snapshot, str]]:
    for path, text, rule in (
        ("site/../../x.pth", "", "'.' or '..'"),
        ("/etc/cron.d/x", "", "not be absolute"),
        ("etc/x", "", "start with site/ or prefix/"),
        ("site/evil.so", "", "native code or bytecode"),
        ("site/evil.SO.1", "", "native code or bytecode"),
        ("site/evil.cpython-311-x86_64-linux-gnu.so", "", "native code or bytecode"),
        ("site/evil.pyc", "", "native code or bytecode"),
        ("site/a.pth", "x" * 65537, "at most 65536 bytes"),
        ("site/a.pth", "é" * 40_000, "at most 65536 bytes"),
        ("site/a.pth", "a\0b", "must be text"),
        ("site/a.pth", "{{sgpu:1}}/src", "not a valid placeholder"),
        ("site/a.pth", "{{sgpu:-1}}/src", "not a valid placeholder"),
        ("site/a.pth", "{{sgpu:²}}", "not a valid placeholder"),
        ("site/a.pth", "{{sgpu:home}}", "not a valid placeholder"),
    ):
        yield f"generated {path!r} {text[:12]!r}", snapshot(good, generated=[Generated(path=path, text=text)]), rule
    twice = [Generated(path="site/a.pth", text=""), Generated(path="site/A.pth", text="")]
    yield "generated twice", snapshot(good, generated=twice), "path equals"
    below = [Generated(path="site/a", text=""), Generated(path="site/a/b", text="")]
    yield "generated below a generated file", snapshot(good, generated=below), "below a file"


def _facts(good: SnapshotMember) -> Iterator[tuple[str, Snapshot, str]]:
    for name, facts, rule in (
        ("another name", SnapshotOrigin(notes=({"site/a.dist-info/sitecustomize.py": ""},)), "a note must be one of"),
        ("not in a dist-info", SnapshotOrigin(notes=({"site/INSTALLER": "pip"},)), "a note must be one of"),
        ("in the prefix", SnapshotOrigin(notes=({"prefix/a.dist-info/INSTALLER": "pip"},)), "a note must be one of"),
        ("note outside", SnapshotOrigin(notes=({"site/../a.dist-info/INSTALLER": ""},)), "'.' or '..'"),
        ("long note", SnapshotOrigin(notes=({"site/a.dist-info/INSTALLER": "x" * 65537},)), "at most 65536 bytes"),
        ("notes of no root", SnapshotOrigin(notes=({}, {})), "more roots than the snapshot has"),
        ("loaded outside", SnapshotOrigin(loaded=(("../x.py",),)), "start with site/ or prefix/"),
        ("control character", SnapshotOrigin(left_out=("a\x1b",)), "control characters"),
        ("long sentence", SnapshotOrigin(left_out=("a" * 9000,)), "at most 8192 bytes"),
        ("before time", SnapshotOrigin(captured_ns=-1), "time is not valid"),
        ("modules without end", SnapshotOrigin(loaded=(("site/a.py",) * 200_001,)), "loaded modules are allowed"),
        (
            "notes without end",
            SnapshotOrigin(notes=(dict.fromkeys(map(str, range(200_001)), ""),)),
            "notes are allowed",
        ),
        ("variables without end", SnapshotOrigin(variables=("A",) * 200_001), "at most 200000 entries"),
        ("note that is not UTF-8", SnapshotOrigin(notes=({"site/a.dist-info/INSTALLER": "\udcff"},)), "not UTF-8"),
    ):
        yield name, snapshot(good, facts=facts), rule
