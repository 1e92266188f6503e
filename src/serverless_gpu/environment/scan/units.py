"""Divides the files of a root into units, and extracts files that name local directories.

If several distributions claim a file with the same digest, the file belongs to each of them. If the claimed digests
differ, the file belongs to the distributions whose digest matches its content. Files that no distribution claims form
the root's unowned unit, except files that virtual environments create.

`.pth` files, `.egg-link` files and finders of editable installs contain paths of local directories. The capture
replaces each local directory with a placeholder, for example `{{sgpu:2}}` for the directory of root 2. Restore replaces
each placeholder with the restored directory of the root. The capture drops `.pth` lines that add directories outside of
all roots, because these lines would have no effect after a restore. Files without paths of local directories stay
ordinary files of their units.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from serverless_gpu.environment.documents import Generated, UnitKind
from serverless_gpu.environment.scan.digests import may_be_script
from serverless_gpu.environment.scan.directory_listing import ListedFile, read_file, show
from serverless_gpu.environment.scan.distributions import (
    Distribution,
    RecordLine,
    is_dropped,
    is_entry_script,
    is_trusted,
    module_name,
    read_text,
    row_path,
)
from serverless_gpu.environment.scan.roots import FINDER, ImportRoot, SurveyedRoot
from serverless_gpu.environment.snapshot_validation import LINK_HOPS_MAX, TEXT_BYTES_MAX
from serverless_gpu.errors import EnvironmentUnsupported

# Files that venv, virtualenv and uv create in every virtual environment. Python 3.14 also makes `𝜋thon`.
_VENV_FILE = re.compile(
    r"prefix/bin/(activate(\.\w+|_this\.py)?|Activate\.ps1|deactivate(\.\w+)?|pydoc(\.bat)?"
    r"|(python|pypy|𝜋thon)w?[0-9.]*t?(-config)?)"
    r"|site/_virtualenv\.(py|pth)"
)
_ENDS = r"(?![^/\"'\s:;,)\]}\\])"  # regular expression for the end of a directory name in a text


class UnitDraft(msgspec.Struct, kw_only=True):
    """A unit for which some file digests are still unknown."""

    kind: UnitKind
    name: str = ""
    version: str = ""
    files: dict[str, ListedFile] = {}
    believed: dict[str, RecordLine] = {}  # file digests and sizes from a trusted RECORD
    record: ListedFile | None = None
    distribution: Distribution | None = None

    def modules(self) -> tuple[str, ...]:
        """Return the import names of the modules and packages in the unit."""
        return tuple(sorted({name for path in self.files if (name := module_name(path))}))


class RootDrafts(msgspec.Struct, kw_only=True):
    """The units of a root, and the conflicting claims of distributions for the same files."""

    units: list[UnitDraft]
    contested: dict[str, list[tuple[UnitDraft, RecordLine]]]


def draft_units(part: SurveyedRoot) -> RootDrafts:
    """Divide the files of a root into units."""
    if part.spot.kind == "code":
        code = UnitDraft(kind="code", name=os.path.basename(part.spot.real), files=dict(part.files), believed={})
        return RootDrafts(units=[code], contested={})
    units: list[UnitDraft] = []
    claimed: dict[str, list[tuple[UnitDraft, RecordLine]]] = {}
    scripts = part.reused.scripts if part.reused is not None else frozenset()
    for distribution in part.distributions:
        draft = UnitDraft(
            kind="distribution",
            name=distribution.name,
            version=distribution.version,
            files={},
            believed={},
            record=distribution.record,
            distribution=distribution,
        )
        _claim_files(part, distribution, draft, claimed)
        scripts |= distribution.scripts
        units.append(draft)
    unowned = {
        path: file
        for path, file in part.files.items()
        if path not in claimed
        and not is_dropped(path)
        and not (_VENV_FILE.fullmatch(path) or is_entry_script(path, scripts))
    }
    units.append(UnitDraft(kind="unowned", files=unowned, believed={}))
    contested = {path: owners for path, owners in claimed.items() if len({claim[1:] for _, claim in owners}) > 1}
    for path, owners in contested.items():
        for draft, _ in owners:
            draft.believed.pop(path, None)
    return RootDrafts(units=units, contested=contested)


def settle_contested(contested: Mapping[str, list[tuple[UnitDraft, RecordLine]]], sha256: Mapping[str, bytes]) -> None:
    """Assign each disputed file to the distributions that claim its digest, or else to the first claimant."""
    for path, owners in contested.items():
        right = [draft for draft, claim in owners if claim.sha256 == sha256[path]] or [owners[0][0]]
        for draft, _ in owners:
            if draft not in right:
                draft.files.pop(path, None)


def settle_links(draft: UnitDraft) -> list[str]:
    """Keep links to entries of the same unit, and replace or leave out all other links.

    The function replaces links to files with the files themselves. Return a message for each link that the capture
    leaves out.
    """
    links = [path for path, file in draft.files.items() if file.kind == "l"]
    if not links:
        return []
    directories = _directories(draft.files)
    left_out = []
    for path in links:
        if _leads_somewhere(path, draft.files, directories):
            continue
        found = _resolve(path, draft.files, directories)
        if found is not None:
            draft.files[path] = found
        else:
            file = draft.files.pop(path)
            left_out.append(f"{show(file.file)}: the path is a link to {show(file.target)}, which is not captured")
    return left_out


def _claim_files(
    part: SurveyedRoot,
    distribution: Distribution,
    draft: UnitDraft,
    claimed: dict[str, list[tuple[UnitDraft, RecordLine]]],
) -> None:
    site, prefix = part.spot.site, part.spot.prefix
    for claim in distribution.claims:
        path = row_path(claim.path, site, prefix)
        if path is None or path.endswith(".pyc"):
            continue
        file = part.files.get(path)
        if file is None:
            continue
        owners = claimed.setdefault(path, [])
        if is_dropped(path) or is_entry_script(path, distribution.scripts, distribution.name) or path in draft.files:
            continue
        draft.files[path] = file
        owners.append((draft, claim))
        # RECORD contains the digest of a script with a shebang for one machine's interpreter.
        if distribution.trusted and file.kind != "l" and not may_be_script(path, file.size):
            times = {"mtime_ns": file.mtime_ns, "record_mtime_ns": distribution.record.mtime_ns}
            if is_trusted(claim, size=file.size, **times):
                draft.believed[path] = claim


def _directories(paths: Iterable[str]) -> set[str]:
    directories: set[str] = set()
    for path in paths:
        above = posixpath.dirname(path)
        while above and above not in directories:
            directories.add(above)
            above = posixpath.dirname(above)
    return directories


def _leads_somewhere(path: str, files: Mapping[str, ListedFile], directories: set[str]) -> bool:
    """Return True if a link leads to an entry of its unit without passing through other links."""
    for _ in range(LINK_HOPS_MAX):
        target = files[path].target
        if target.startswith("/"):
            return False
        at = posixpath.dirname(path)
        names = target.split("/")
        for index, name in enumerate(names):
            if not name:
                return False
            at = posixpath.dirname(at) if name == ".." else at if name == "." else f"{at}/{name}"
            if index < len(names) - 1 and at not in directories:
                return False
        if at in directories:
            return True
        if at not in files:
            return False
        if files[at].kind != "l":
            return True
        path = at
    return False


def _resolve(path: str, files: Mapping[str, ListedFile], directories: set[str]) -> ListedFile | None:
    """Return a link's replacement: a direct link, the target file, or None."""
    file = files[path]
    depth = path.count("/")
    top = file.file
    for _ in range(depth):
        top = posixpath.dirname(top)
    real, real_top = os.path.realpath(file.file), os.path.realpath(top)
    if real.startswith(real_top + "/"):
        inside = f"{path.partition('/')[0]}/{real[len(real_top) + 1 :]}"
        if inside in directories or (inside in files and files[inside].kind != "l"):
            return file._replace(target=posixpath.relpath(inside, posixpath.dirname(path)))
    found = read_file(real)
    return None if found is None else found._replace(file=file.file)


class DirectoryPlaceholders:
    """Replaces the paths of root directories with placeholders."""

    def __init__(self, spots: Sequence[ImportRoot]) -> None:
        self._tokens: dict[str, str] = {}
        for number, spot in enumerate(spots):
            if not spot.archive:
                for directory in (spot.directory, spot.real):
                    self._tokens.setdefault(directory, f"{{{{sgpu:{number}}}}}")
        # The longest path comes first, because a root may lie inside of another root.
        names = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile(r"(?<![\w.~/-])(" + "|".join(map(re.escape, names)) + ")" + _ENDS)

    def replace(self, text: str) -> str:
        """Return a text with placeholders in place of root directories."""
        return self._pattern.sub(lambda found: self._tokens[found[1]], text)

    def replace_lines(self, text: str) -> str:
        """Return a `.pth` file's text with placeholders, without lines for directories outside of all roots."""
        lines = []
        for line in text.splitlines(keepends=True):
            replaced = self.replace(line)
            if line.startswith("/") and replaced == line:
                continue
            lines.append(replaced)
        return "".join(lines)


def take_generated(drafts: Sequence[UnitDraft], directories: DirectoryPlaceholders) -> tuple[Generated, ...]:
    """Remove files with directory paths from the units, and return the generated files that replace them."""
    texts: dict[str, Generated] = {}
    for draft in drafts:
        for path in [path for path in draft.files if may_name_directories(path)]:
            text = read_text(draft.files[path].file)
            replaced = directories.replace_lines(text) if path.endswith(".pth") else directories.replace(text)
            if replaced == text:
                continue
            if len(replaced.encode()) > TEXT_BYTES_MAX or "\0" in replaced:
                raise EnvironmentUnsupported(
                    f"{show(draft.files[path].file)} names directories of this machine, and is not a text file of "
                    f"at most {TEXT_BYTES_MAX // 1024} KB",
                    hint="remove this file, or install its package without -e",
                )
            del draft.files[path]
            texts[path] = Generated(path=path, text=replaced)
    return tuple(texts[path] for path in sorted(texts))


def archive_line(number: int, spot: ImportRoot) -> Generated:
    """Return the `.pth` file of root 0 that adds an archive to `sys.path`."""
    return Generated(path=f"site/_sgpu_archive_{number}.pth", text=f"{{{{sgpu:{number}}}}}/{spot.archive}\n")


def may_name_directories(path: str) -> bool:
    """Return True if a row's file may contain paths of local directories."""
    area, _, name = path.partition("/")
    if area != "site" or "/" in name:
        return False
    return name.endswith((".pth", ".egg-link")) or FINDER.fullmatch(os.path.basename(name)) is not None
