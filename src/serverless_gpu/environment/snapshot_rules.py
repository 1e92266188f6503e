"""Rules of a snapshot: names that become paths, sums, generated files, facts.

    check_snapshot  interpreter, roots, members ─ files that are generated ─ facts and notes
    check_together  a snapshot with its units: sizes as it says, nothing generated on top of a file, or below one

Nothing that a snapshot says is worth believing for a decision, but some of it becomes part of a path (the interpreter's
version), of a generated file (placeholders), or of a line in a terminal (names). `unit_rules.py` has the limits.

Failure: `EnvironmentRejected` naming the snapshot, the path, and the rule it breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from serverless_gpu.environment.documents import (
    SNAPSHOT_VERSION,
    Generated,
    Interpreter,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    Unit,
    in_order,
    snapshot_address,
)
from serverless_gpu.environment.unit_rules import (
    CONTENT_BYTES_MAX,
    FACT_BYTES_MAX,
    FACTS_MAX,
    MEMBERS_MAX,
    NAME_BYTES_MAX,
    NOTE_BYTES_MAX,
    NOTE_NAMES,
    ROOTS_MAX,
    ROWS_MAX,
    TEXT_BYTES_MAX,
    TEXTS_MAX,
    RowTree,
    check_path,
    is_digest,
    refuse,
)

_VERSION = re.compile(r"\d{1,2}\.\d{1,3}(\.\d{1,3})?[a-z0-9.+]{0,16}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_PLACEHOLDER = re.compile(r"\{\{sgpu:([^{}]*)\}\}")
_NATIVE = re.compile(r"\.(so|pyd|dylib|pyc)(\.|$)", re.ASCII | re.IGNORECASE)


def check_snapshot(snapshot: Snapshot) -> None:
    """Check everything a snapshot says by itself, its address included.

    It is as decoded; nothing of it is believed.
    """
    if not is_digest(snapshot.address):
        refuse("a snapshot", snapshot.address, "an address is 64 hexadecimal digits")
    what = f"snapshot {snapshot.address[:12]}"
    if snapshot.version not in (1, SNAPSHOT_VERSION):
        refuse(what, "", f"its format is {snapshot.version!r}, and this program reads 1 and {SNAPSHOT_VERSION}")
    _check_interpreter(snapshot.interpreter, what)
    roots = snapshot.roots
    if not 1 <= len(roots) <= ROOTS_MAX:
        refuse(what, "", f"it has {len(roots)} roots; 1 to {ROOTS_MAX} are allowed")
    for index, root in enumerate(roots):
        if (root.kind == "own") != (index == 0):
            refuse(what, f"root {index}", "the first root, and no other, is the interpreter's own")
        _check_root(index, root, len(roots), what)
    if snapshot.size > CONTENT_BYTES_MAX:
        refuse(what, "", f"it holds {snapshot.size} bytes, and at most {CONTENT_BYTES_MAX} are allowed")
    if snapshot.files > ROWS_MAX:
        refuse(what, "", f"it has {snapshot.files} files, and at most {ROWS_MAX} are allowed")
    _check_facts(snapshot.facts, len(roots), what)
    if snapshot_address(snapshot) != snapshot.address:
        refuse(what, "", "its address is not that of what it lists")
    for index, root in enumerate(roots):
        if root.members != in_order(root.members):
            refuse(what, f"root {index}", "units are in order of kind, name and address")


def check_together(snapshot: Snapshot, units: Mapping[str, Unit]) -> None:
    """Check a snapshot against its units, both already checked by themselves."""
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
                refuse(what, member.name or member.address[:12], "size and number of files are not those of its unit")
            for row in unit.rows:
                # Units may share directories, and even files (then the order of layers decides): only generated
                # files are looked for.
                tree.meet(row.path, row.kind)


def _check_interpreter(python: Interpreter, what: str) -> None:
    if not _VERSION.fullmatch(python.version):
        refuse(what, python.version, "the interpreter's version is two or three numbers")
    for word in (python.implementation, python.abi, python.platform):
        if not _WORD.fullmatch(word):
            refuse(what, word or "''", "implementation, ABI and platform are plain words")
    if python.glibc and not _VERSION.fullmatch(python.glibc):
        refuse(what, python.glibc, "the version of glibc is two numbers")


def _check_root(index: int, root: Root, roots: int, what: str) -> None:
    if len(root.members) > MEMBERS_MAX or len(root.generated) > TEXTS_MAX:
        refuse(what, f"root {index}", f"it has at most {MEMBERS_MAX} units and {TEXTS_MAX} generated files")
    if root.kind not in ("own", "library", "code"):
        refuse(what, f"root {index}", f"{root.kind!r} is no kind of root")
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
        refuse(what, member.address, "an address is 64 hexadecimal digits")
    if member.kind not in ("distribution", "unowned", "code") or (member.kind == "code") != (root.kind == "code"):
        refuse(what, member.name or member.address[:12], f"{member.kind!r} is no kind of unit for a {root.kind} root")
    _check_texts((member.name, member.version, *member.modules), NAME_BYTES_MAX, what)
    if "/" in member.name or len(member.modules) > FACTS_MAX:
        refuse(what, member.name, "a unit's name is no path, and it adds a bounded number of modules")
    if not 0 <= member.size <= CONTENT_BYTES_MAX or not 0 <= member.files <= ROWS_MAX:
        refuse(what, member.name or member.address[:12], f"{member.size} bytes in {member.files} files cannot be")


def _check_generated(file: Generated, roots: int, what: str) -> None:
    check_path(file.path, what)
    name = file.path.rpartition("/")[2]
    if _NATIVE.search(name):
        refuse(what, file.path, "code for the machine, and bytecode, is never generated")
    if "\0" in file.text or len(file.text) > TEXT_BYTES_MAX or _bytes(file.text, what) > TEXT_BYTES_MAX:
        refuse(what, file.path, f"a generated file is text of at most {TEXT_BYTES_MAX} bytes")
    for place in _PLACEHOLDER.findall(file.text):
        if place != "python" and not (place.isascii() and place.isdigit() and len(place) <= 3 and int(place) < roots):
            refuse(what, file.path, f"'{{{{sgpu:{place}}}}}' stands for nothing")


def _check_facts(facts: SnapshotOrigin, roots: int, what: str) -> None:
    if not 0 <= facts.captured_ns < 2**63:
        refuse(what, "captured_ns", "it is no time")
    if max(len(facts.originals), len(facts.notes), len(facts.loaded)) > roots:
        refuse(what, "facts", "they tell of more roots than there are")
    _check_texts((facts.python, facts.prefix, *facts.originals), FACT_BYTES_MAX, what)
    _check_texts(facts.variables, FACT_BYTES_MAX, what)
    _check_texts(facts.left_out, FACT_BYTES_MAX, what)
    for notes in facts.notes:
        _check_notes(notes, what)
    for loaded in facts.loaded:
        if len(loaded) > FACTS_MAX:
            refuse(what, "facts", f"at most {FACTS_MAX} modules were loaded")
        for path in loaded:
            check_path(path, what)


def _check_notes(notes: Mapping[str, str], what: str) -> None:
    if len(notes) > FACTS_MAX:
        refuse(what, "facts", f"at most {FACTS_MAX} notes are kept")
    for path, text in notes.items():
        check_path(path, what)
        directory, _, name = path.rpartition("/")
        if name not in NOTE_NAMES or not directory.startswith("site/") or not directory.endswith(".dist-info"):
            refuse(what, path, f"a note is one of {', '.join(sorted(NOTE_NAMES))}, in a .dist-info directory")
        if len(text) > NOTE_BYTES_MAX or _bytes(text, what) > NOTE_BYTES_MAX:
            refuse(what, path, f"a note has at most {NOTE_BYTES_MAX} bytes")


def _check_texts(texts: Iterable[str], bytes_max: int, what: str) -> None:
    for count, text in enumerate(texts):
        if count >= FACTS_MAX:
            refuse(what, "facts", f"a list has at most {FACTS_MAX} entries")
        if _CONTROL.search(text) or len(text) > bytes_max or len(text.encode()) > bytes_max:
            refuse(what, text, f"a name or fact is at most {bytes_max} bytes without control characters")


def _bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        refuse(what, "a text", "it is not UTF-8")
