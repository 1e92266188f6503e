"""Plans a restored tree from a snapshot, without I/O: the path of each part, and the generated files.

    <tree>/bin/python, pyvenv.cfg                 generated
    <tree>/{bin,share,...}                        prefix areas of root 0 · scripts
    <tree>/lib/pythonX.Y/site-packages            site areas of root 0 · RECORD, notes, _sgpu_roots.pth
    <tree>/roots/<n>/...                          the same for a library root
    <tree>/code/<n>                               code root n

A tree plan is a list of parts. Each part has a path below the tree, units in order of precedence, and generated files.
In an overlay tree, each part is a mount. In a tree of links, each part is a directory with links to files of its units.

`moved` translates a path in the original environment to the path in the restored tree.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

import msgspec

from serverless_gpu.environment.documents import Interpreter, Snapshot, SnapshotMember
from serverless_gpu.environment.restore.cache.unit_metadata import (
    UnitOutline,
    record_line,
    record_row,
    scripts,
    specific,
)

ROOTS_PTH = "_sgpu_roots.pth"
_PLACEHOLDER = re.compile(r"\{\{sgpu:(python|\d+)\}\}")
# Python processes `.pth` files only in directories with these names.
_SITE_DIRECTORIES = ("site-packages", "dist-packages")
_OF_GLOBAL_PREFIX = ("bin", "etc", "include", "share")


class TreePart(msgspec.Struct, frozen=True, kw_only=True):
    """A path below the tree, with the units and generated files that fill it."""

    at: str  # path of the part relative to the tree, or "" for the tree itself
    area: str
    root: int
    units: tuple[str, ...]
    files: dict[str, bytes] = {}
    executable: frozenset[str] = frozenset()
    links: dict[str, str] = {}
    directories: tuple[str, ...] = ()


class AssemblyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The location and the interpreter of a restored tree."""

    tree: str  # Absolute path of the tree, as processes in the environment see it.
    base: str  # Absolute path of the base interpreter, outside of the environment.
    version: str  # Version number of the Python interpreter.
    # True for an exported tree. No other component prepares the search path of an exported tree. In an exported tree, a
    # `.pth` file adds the roots that precede the standard library.
    alone: bool = False

    @property
    def python(self) -> str:
        """Return the path of the tree's interpreter."""
        return f"{self.tree}/bin/python"


def assemble(snapshot: Snapshot, outlines: Mapping[str, UnitOutline], place: AssemblyTarget) -> tuple[TreePart, ...]:
    """Return the parts of a tree, outer parts first."""
    parts: list[TreePart] = []
    for number, root in enumerate(snapshot.roots):
        prefix, site = _Files(), _Files()
        notes: dict[str, dict[str, str]] = {}  # part directory → path of a generated file → file content
        for path, text in _notes(snapshot, number).items():
            notes.setdefault(posixpath.dirname(path), {})[path] = text
        for member in root.members:
            outline = outlines[member.address]
            if member.kind == "distribution":
                _add_distribution(outline, place, prefix, site, notes)
            # All scripts in units start the tree's interpreter, including scripts without a distribution.
            for path, content in outline.generic.items():
                prefix.add(path.partition("/")[2], specific(content, place.python), executable=True)
        for path, text in _notes(snapshot, number).items():
            site.add(path.partition("/")[2], text.encode())
        for file in root.generated:
            area, _, path = file.path.partition("/")
            content = _fill_in(file.text, snapshot, place.tree).encode()
            (site if area == "site" else prefix).add(path, content, executable=file.executable)
        if number == 0:
            site.add(ROOTS_PTH, _roots_pth(snapshot, place).encode())
        parts += _parts_of(snapshot, number, outlines, prefix, site)
    parts[0] = _with_interpreter(parts[0], snapshot, place)
    return tuple(parts)


def site_of(snapshot: Snapshot, number: int) -> str:
    """Return the path of a root's `site` area, relative to the tree."""
    if snapshot.roots[number].kind == "code":
        return f"code/{number}"
    return posixpath.join(_prefix_of(number), "lib", library_name(snapshot.interpreter), "site-packages")


def paths_before(snapshot: Snapshot, tree: str) -> tuple[str, ...]:
    """Return the directories that come before the standard library on `sys.path`, in order."""
    return tuple(f"{tree}/{site_of(snapshot, number)}" for number, root in enumerate(snapshot.roots) if root.before)


def library_name(interpreter: Interpreter) -> str:
    """Return the library directory's name, for example ``python3.11``, or ``python3.13t`` without a GIL."""
    digits = interpreter.minor.replace(".", "")
    threaded = "t" if f"-{digits}t" in interpreter.abi else ""
    return f"python{interpreter.minor}{threaded}"


def moved(snapshot: Snapshot, tree: str, path: str) -> str | None:
    """Return the restored path of a path in the original environment.

    Return None if the path did not belong to the original environment. The standard library never belongs to the
    environment, even if its interpreter is inside the project.
    """
    path = posixpath.normpath(path)
    candidates: list[tuple[str, str | None]] = [
        (original, f"{tree}/{site_of(snapshot, number)}")
        for number, original in enumerate(snapshot.facts.originals[: len(snapshot.roots)])
        if original
    ]
    candidates += _prefixes(snapshot, tree)
    if base := posixpath.dirname(posixpath.dirname(snapshot.facts.python)):
        library = library_name(snapshot.interpreter)
        candidates += [(posixpath.join(base, name, library), None) for name in ("lib", "lib64")]
    for original, restored in sorted(candidates, key=lambda pair: len(pair[0]), reverse=True):
        if path == original:
            return restored
        if path.startswith(original.rstrip("/") + "/"):
            return None if restored is None else restored + path[len(original.rstrip("/")) :]
    return None


class _Files:
    """Collects the generated files of one part of a tree."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.executable: set[str] = set()

    def add(self, path: str, content: bytes, *, executable: bool = False) -> None:
        self.contents[path] = content
        if executable:
            self.executable.add(path)


def _add_distribution(
    outline: UnitOutline, place: AssemblyTarget, prefix: _Files, site: _Files, notes: Mapping[str, Mapping[str, str]]
) -> None:
    lines = [outline.record]
    for name, text in scripts(outline.points, place.python).items():
        prefix.add(f"bin/{name}", text.encode(), executable=True)
        lines.append(record_line(record_row(f"prefix/bin/{name}", text.encode()), outline.dist_info))
    if not outline.dist_info:
        return
    for path, content in outline.generic.items():
        lines.append(record_line(record_row(path, specific(content, place.python)), outline.dist_info))
    for path, text in notes.get(f"site/{outline.dist_info}", {}).items():
        lines.append(record_line(record_row(path, text.encode()), outline.dist_info))
    lines.append(f"{outline.dist_info}/RECORD,,\n")
    site.add(f"{outline.dist_info}/RECORD", "".join(lines).encode())


def _parts_of(
    snapshot: Snapshot, number: int, outlines: Mapping[str, UnitOutline], prefix: _Files, site: _Files
) -> Iterator[TreePart]:
    members = snapshot.roots[number].members
    in_prefix = _with_area(members, outlines, "prefix") if snapshot.roots[number].kind != "code" else ()
    if number == 0 or in_prefix or prefix.contents:
        yield TreePart(
            at=_prefix_of(number),
            area="prefix",
            root=number,
            units=in_prefix,
            files=prefix.contents,
            executable=frozenset(prefix.executable),
            directories=(site_of(snapshot, number).removeprefix(_prefix_of(number)).lstrip("/"),),
        )
    yield TreePart(
        at=site_of(snapshot, number),
        area="site",
        root=number,
        units=_with_area(members, outlines, "site"),
        files=site.contents,
        executable=frozenset(site.executable),
    )


def _with_interpreter(part: TreePart, snapshot: Snapshot, place: AssemblyTarget) -> TreePart:
    """Return the outermost part, with the interpreter and the empty directories of all other parts."""
    config = (
        f"home = {posixpath.dirname(place.base)}\n"
        "include-system-site-packages = false\n"
        f"version = {place.version}\n"
        f"executable = {place.base}\n"
    )
    links = {"bin/python": place.base, "bin/python3": "python", f"bin/python{snapshot.interpreter.minor}": "python"}
    directories = [site_of(snapshot, number) for number in range(len(snapshot.roots))]
    return msgspec.structs.replace(
        part,
        files={**part.files, "pyvenv.cfg": config.encode()},
        links=links,
        directories=tuple(dict.fromkeys(directories)),
    )


def _roots_pth(snapshot: Snapshot, place: AssemblyTarget) -> str:
    """Return `.pth` lines that add the other roots to `sys.path`, in order."""
    lines = []
    before = paths_before(snapshot, place.tree)
    if place.alone and before:
        # Python executes each `.pth` line that starts with "import", and does so twice in a virtual environment. Python
        # later inserts the script's directory at the front of `sys.path`.
        lines.append(f"import sys; sys.path[:0] = [path for path in {list(before)!r} if path not in sys.path]")
    for number, root in enumerate(snapshot.roots):
        if number == 0 or root.before or not root.on_path:
            continue
        path = f"{place.tree}/{site_of(snapshot, number)}"
        lines.append(f"import site; site.addsitedir({path!r})" if _had_pth_files(snapshot, number) else path)
    return "".join(f"{line}\n" for line in lines)


def _had_pth_files(snapshot: Snapshot, number: int) -> bool:
    """Return True if Python treated a root as a site directory and therefore processed its `.pth` files."""
    originals = snapshot.facts.originals
    original = originals[number] if number < len(originals) else ""
    return snapshot.roots[number].kind == "library" and posixpath.basename(original) in _SITE_DIRECTORIES


def _fill_in(text: str, snapshot: Snapshot, tree: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match[1] == "python":
            return f"{tree}/bin/python"
        number = int(match[1])
        return f"{tree}/{site_of(snapshot, number)}" if number < len(snapshot.roots) else match[0]

    return _PLACEHOLDER.sub(replacement, text)


def _prefixes(snapshot: Snapshot, tree: str) -> Iterator[tuple[str, str]]:
    prefix = snapshot.facts.prefix.rstrip("/")
    if not prefix:
        return
    if posixpath.dirname(posixpath.dirname(snapshot.facts.python)) != prefix:
        yield prefix, tree
        return
    # Without a virtual environment, the standard library lies below the prefix and keeps its path.
    for name in _OF_GLOBAL_PREFIX:
        yield f"{prefix}/{name}", f"{tree}/{name}"


def _prefix_of(number: int) -> str:
    return "" if number == 0 else f"roots/{number}"


def _with_area(members: tuple[SnapshotMember, ...], outlines: Mapping[str, UnitOutline], area: str) -> tuple[str, ...]:
    return tuple(member.address for member in members if area in outlines[member.address].areas)


def _notes(snapshot: Snapshot, number: int) -> dict[str, str]:
    notes = snapshot.facts.notes
    return notes[number] if number < len(notes) else {}
