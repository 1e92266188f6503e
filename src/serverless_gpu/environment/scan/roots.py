"""Finds the directories that an interpreter imports from, with their files and distributions.

    sys.path                                      root
    /proj                       (script, cwd)     code, before the standard library
    /usr/lib/python311.zip, /usr/lib/python3.11   –     the standard library belongs to the interpreter
    /venv/lib/python3.11/site-packages            own   always root 0
    ~/.local/lib/python3.11/site-packages         library
    /usr/lib/python3/dist-packages                library
    /tmp/deps          (pip install --target)     library, flat: both site and prefix
    /opt/lib/tools.zip                            library of one file, an archive
    /src/pkg/src       (.pth of an editable)      code
    –                  (finder of an editable)    code, not on the path: only generated files name it

    find_import_roots ─ libraries first, the outermost first ─ then code ─▶ survey: parts, in the order of `sys.path`

The module finds roots by checking which paths are directories and reading small `.pth` files and editable finders. A
root inside of another scanned root does not become a separate part. For example, `pywin32.pth` adds subdirectories of
site-packages to `sys.path`. A library below a code directory becomes a separate part instead of project code
(`project_files.py`).

Failure case: The root search raises `EnvironmentUnsupported` for conda environments. The original content of a conda
environment's files is unknown, because conda rewrites installed files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from serverless_gpu.environment.documents import FileRow, SnapshotMember
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.directory_listing import (
    BYTECODE,
    Keep,
    ListedFile,
    Listing,
    is_inside,
    is_plain,
    keep_all,
    read_file,
    show,
    walk,
)
from serverless_gpu.environment.scan.distributions import (
    Distribution,
    flat_path,
    read_distributions,
    read_text,
    row_path,
)
from serverless_gpu.environment.scan.project_files import CodeDirectory, list_code, wanted_files
from serverless_gpu.environment.snapshot_validation import ROOTS_MAX
from serverless_gpu.errors import EnvironmentUnsupported

ImportRootKind = Literal["own", "library", "archive", "code"]
_LAYOUT = re.compile(r"(?P<prefix>/.*?)/(?P<site>lib(?:64)?/(?:python|pypy)[0-9.]*t?/(?:site|dist)-packages)")
FINDER = re.compile(r"__editable__.*\.py|_?__editable___.*_finder\.py|_editable_impl_.*\.py")
_QUOTED_PATH = re.compile(r"""(["'])(/[^"'\n]+)\1""")
_PROJECT_FILES = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_SYSTEM_SCRIPTS = frozenset({"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"})
_PREFIX_DIRECTORIES = frozenset({"bin", "etc", "include", "lib", "libexec", "man", "sbin", "share"})


class ImportRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A directory from which an interpreter imports modules."""

    kind: ImportRootKind
    directory: str  # Absolute path of the root, as in `sys.path`, or the directory of an archive.
    real: str  # Path of the root with all symbolic links resolved.
    # Parent directory of a library, with ``bin`` and ``share``. For a flat library, the prefix equals `directory`.
    prefix: str = ""
    site: str = ""  # Path of the library below its prefix, or "" for a flat library.
    # True if no other root uses the library's prefix. If no other root uses the prefix, unowned files in the prefix
    # belong to the library.
    is_venv: bool = False
    before: bool = False  # True if the root comes before the standard library on `sys.path`.
    on_path: bool = True  # True if the root is on `sys.path`, or False if only a generated file names the root.
    shallow: bool = False  # True if the root is not a project, for example the home directory or ``/``.
    archive: str = ""  # File name of an archive root, or "" for a directory root.


class ImportRoots(msgspec.Struct, frozen=True, kw_only=True):
    """All directories from which an interpreter imports modules."""

    # Import roots: the interpreter's own root, then the other roots in the order of `sys.path`. The list names each
    # root once. A root may lie inside of another root.
    spots: tuple[ImportRoot, ...]
    absent: tuple[str, ...]  # Entries of `sys.path` that do not exist.
    left_out: tuple[str, ...]  # Paths that the scan skips, each with the reason.


def find_import_roots(description: Description) -> ImportRoots:
    """Return the directories from which an interpreter imports modules."""
    search = _Search(description)
    search.add_own()
    for entry in description.search_path():
        search.add_entry(entry)
    for directory in description.site_directories:
        for entry in _pth_directories(directory):
            search.add_entry(entry)
    for spot in list(search.spots.values()):
        if spot.kind in ("own", "library"):
            for source in _finder_sources(spot.directory):
                search.add_source(source)
    if len(search.spots) > ROOTS_MAX:
        raise EnvironmentUnsupported(
            f"sys.path has {len(search.spots)} separate directories, but at most {ROOTS_MAX} can be captured",
            hint="install all packages into one environment, instead of one directory per package",
        )
    return ImportRoots(spots=tuple(search.spots.values()), absent=tuple(search.absent), left_out=tuple(search.left_out))


class _Search:
    """Collects import roots by their real path."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._stdlib = _standard_library(description)
        # `sys.path` contains the directory of the running program, which has no modules of the user.
        prefixes = (description.prefix, description.base_prefix, os.path.join(description.home, ".local"))
        programs = (description.executable, description.base_executable)
        places = [os.path.join(prefix, "bin") for prefix in prefixes] + [os.path.dirname(path) for path in programs]
        self._scripts = frozenset(os.path.realpath(place) for place in places if place) | _SYSTEM_SCRIPTS
        self._before = any(os.path.realpath(entry) in self._stdlib for entry in description.search_path())
        self.spots: dict[str, ImportRoot] = {}
        self.absent: list[str] = []
        self.left_out: list[str] = []

    def add_own(self) -> None:
        directory = os.path.normpath(self._description.purelib)
        self._add(_library("own", directory))

    def add_entry(self, entry: str) -> None:
        """Add the import root for a `sys.path` entry."""
        real = os.path.realpath(entry)
        if real in self._stdlib:
            self._before = False
            return
        if real in self.spots or real in self._scripts:
            return
        if os.path.isfile(entry):
            directory, name = os.path.split(entry)
            spot = ImportRoot(kind="archive", directory=directory, real=os.path.realpath(directory), archive=name)
            self._add(msgspec.structs.replace(spot, before=self._before), key=real)
        elif not os.path.isdir(entry):
            self.absent.append(entry)
        elif os.path.basename(entry) == ".ipython":
            self.left_out.append(f"{entry}: IPython's own directory")
        elif self._is_library(entry):
            self._add(msgspec.structs.replace(_library("library", entry), before=self._before))
        else:
            self._add(self._code(entry, before=self._before))

    def add_source(self, source: str) -> None:
        """Add a source directory that the finder of an editable install names."""
        if os.path.realpath(source) not in self.spots:
            self._add(msgspec.structs.replace(self._code(source, before=False), on_path=False))

    def _add(self, spot: ImportRoot, key: str = "") -> None:
        for place in {spot.prefix or spot.directory, spot.directory}:
            if os.path.isdir(os.path.join(place, "conda-meta")):
                raise EnvironmentUnsupported(
                    f"{place} is a conda environment, which cannot be captured: conda rewrites the files that it "
                    "installs",
                    hint='env="live" uses it unchanged on this machine; for a snapshot, make a virtual '
                    "environment "
                    "with its Python and install all your packages there with pip, including torch: "
                    f"{shlex.quote(place)}/bin/python -m venv .venv && "
                    ".venv/bin/python -m pip install serverless-gpu torch …",
                )
        self.spots[key or spot.real] = spot

    def _code(self, directory: str, *, before: bool) -> ImportRoot:
        real = os.path.realpath(directory)
        home = os.path.realpath(self._description.home or "/")
        shallow = is_inside(home, real) or real in temporary_directories()
        return ImportRoot(kind="code", directory=directory, real=real, before=before, shallow=shallow)

    def _is_library(self, directory: str) -> bool:
        if os.path.basename(directory) in ("site-packages", "dist-packages"):
            return True
        if directory in self._description.site_directories:
            return True
        try:
            names = os.listdir(directory)
        except OSError:  # The later scan of an unreadable directory reports the error.
            return False
        return any(name.endswith(".dist-info") for name in names) and not any(name in names for name in _PROJECT_FILES)


def temporary_directories() -> frozenset[str]:
    """Return the world-writable directories, which are neither projects nor packages."""
    found = ["/tmp", "/var/tmp", "/dev/shm"]
    # `gettempdir` raises FileNotFoundError if it finds no writable directory, for example on a read-only file system.
    with contextlib.suppress(FileNotFoundError):
        found.append(tempfile.gettempdir())
    return frozenset(os.path.realpath(path) for path in found)


def _library(kind: ImportRootKind, directory: str) -> ImportRoot:
    match = _LAYOUT.fullmatch(directory)
    prefix, site = (match["prefix"], match["site"]) if match else (directory, "")
    return ImportRoot(
        kind=kind,
        directory=directory,
        real=os.path.realpath(directory),
        prefix=prefix,
        site=site,
        is_venv=kind == "own" and bool(site) and os.path.isfile(os.path.join(prefix, "pyvenv.cfg")),
    )


def _standard_library(description: Description) -> frozenset[str]:
    stdlib = (description.stdlib, description.platstdlib)
    version = "".join(description.version.split(".")[:2])
    return frozenset(
        os.path.realpath(path)
        for directory in stdlib
        for path in (
            directory,
            os.path.join(directory, "lib-dynload"),
            os.path.join(os.path.dirname(directory), f"python{version}.zip"),
        )
    )


def _pth_directories(directory: str) -> Iterator[str]:
    """Yield the directories that a site directory's `.pth` files add to `sys.path`."""
    for file in _names(directory, ".pth"):
        for line in read_text(file).splitlines():
            line = line.strip()
            if not line or line.startswith(("#", "import ", "import\t")):
                continue
            path = os.path.normpath(os.path.join(directory, line))
            if "\0" not in path and os.path.exists(path):
                yield path


def _finder_sources(directory: str) -> Iterator[str]:
    """Yield the source directories that the finders of editable installs name."""
    for file in _names(directory, ".py"):
        if not FINDER.fullmatch(os.path.basename(file)):
            continue
        for _, path in _QUOTED_PATH.findall(read_text(file)):
            if is_inside(path, directory) or not os.path.exists(path):
                continue
            package = os.path.dirname(path) if os.path.basename(path) == "__init__.py" else path
            yield os.path.dirname(os.path.normpath(package))


def _names(directory: str, ending: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(ending))
    except OSError:  # A missing directory has no installed packages. The scan reports an unreadable directory.
        return []
    return [os.path.join(directory, name) for name in names]


class Area(msgspec.Struct, frozen=True, array_like=True):
    """A walked directory, and the rules by which a later check lists parts of the directory again."""

    kind: Literal["site", "prefix", "code"]
    top: str  # absolute path of the walked directory
    place: CodeDirectory | None = None


class KeptDistribution(msgspec.Struct, frozen=True, array_like=True):
    """A distribution whose unit a rescan can reuse while its files are unchanged."""

    owner: int
    info: str  # name of the distribution's ``.dist-info`` directory
    scripts: tuple[str, ...]
    notes: dict[str, str]
    missing: tuple[str, ...]  # rows of missing files that RECORD claims


class ReusedUnits(msgspec.Struct, frozen=True, kw_only=True):
    """The unchanged part of a root, whose files a rescan does not read again."""

    members: tuple[SnapshotMember, ...]
    scripts: frozenset[str]
    notes: dict[str, str]
    files: frozenset[str]
    distributions: dict[str, KeptDistribution]
    # files that RECORD claims but that do not belong to the unit, by unit address
    others: dict[str, tuple[ListedFile, ...]]
    unit: Callable[[str], list[tuple[FileRow, ListedFile]]]


class SurveyedRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A root with the files and distributions that the survey found."""

    spot: ImportRoot
    files: dict[str, ListedFile]
    areas: tuple[tuple[Area, Listing], ...] = ()
    distributions: tuple[Distribution, ...] = ()
    watched: tuple[str, ...] = ()
    reused: ReusedUnits | None = None  # unchanged units, which are missing from `files` and `distributions`

    def holds(self, path: str) -> bool:
        """Return True if a resolved path is a directory or file of this root."""
        if self.spot.archive or not is_inside(path, self.spot.real):
            return False
        _, listing = self.areas[0]
        relative = path[len(self.spot.real) :].strip("/")
        if self.reused is not None and (path in self.reused.files or f"site/{relative}" in self.files):
            return True
        return relative in listing.directories or relative in listing.files


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Survey of all roots (the interpreter's own first), missing `sys.path` entries, and skipped paths."""

    parts: tuple[SurveyedRoot, ...]
    absent: tuple[str, ...]
    left_out: tuple[str, ...]


def keep_prefix(above: str, name: str, is_directory: bool) -> bool:
    """Return True for prefix entries to list, except Python directories and unknown top-level names."""
    if not above:
        return is_directory and name in _PREFIX_DIRECTORIES
    if above == "lib/" and name.startswith(("python", "pypy")):
        return False
    return name != "__pycache__" and not name.endswith(BYTECODE)


def keep_for(area: Area) -> Keep:
    """Return the rule that selects which entries of a library area the scan lists."""
    return keep_prefix if area.kind == "prefix" else keep_all


def survey(
    description: Description,
    look_at: Callable[[str, int], None] = lambda name, files: None,
    again: Callable[[ImportRoot], SurveyedRoot | None] = lambda spot: None,
) -> Survey:
    """Scan all directories that an interpreter imports modules from.

    The survey calls `look_at` with each directory and the number of its files. `again` returns the survey of the
    interpreter's own library, or None to request a full scan.
    """
    spots = find_import_roots(description)
    parts: dict[int, SurveyedRoot] = {}
    # The survey sorts roots by depth, because it finds an inner root only after walking the outer root. Code roots come
    # after all library roots.
    order = sorted(
        enumerate(spots.spots), key=lambda one: (one[1].kind != "own", one[1].kind == "code", len(one[1].real))
    )
    left_out = list(spots.left_out)
    for number, spot in order:
        target = os.path.realpath(os.path.join(spot.real, spot.archive)) if spot.archive else spot.real
        if any(part.holds(target) for part in parts.values()):
            continue
        part = (again(spot) if spot.is_venv else None) or _look(spot, spots, description)
        parts[number] = part
        left_out += _say_odd(part)
        look_at(spot.directory, len(part.files))
    return Survey(parts=tuple(parts[number] for number in sorted(parts)), absent=spots.absent, left_out=tuple(left_out))


def _look(spot: ImportRoot, spots: ImportRoots, description: Description) -> SurveyedRoot:
    if spot.kind == "code":
        return _look_at_code(spot, spots, description)
    if spot.kind == "archive":
        path = os.path.join(spot.directory, spot.archive)
        file = read_file(path)
        return SurveyedRoot(spot=spot, files={f"site/{spot.archive}": file} if file else {}, watched=(path,))
    return _look_at_library(spot)


def _look_at_library(spot: ImportRoot) -> SurveyedRoot:
    site = walk(spot.directory) if os.path.isdir(spot.directory) else Listing(spot.directory)
    areas = [(Area("site", spot.directory), site)]
    if spot.site:
        files = {f"site/{path}": file for path, file in site.files.items()}
    else:
        files = {flat_path(path): file for path, file in site.files.items()}
    watched = [file.file for path, file in site.files.items() if path.endswith(".dist-info/RECORD")]
    if spot.is_venv:
        prefix = walk(spot.prefix, keep_prefix)
        areas.append((Area("prefix", spot.prefix), prefix))
        files.update((f"prefix/{path}", file) for path, file in prefix.files.items())
        watched.append(os.path.join(spot.prefix, "pyvenv.cfg"))
    check_names(spot, files)
    distributions = tuple(read_distributions(site))
    if not spot.is_venv:
        _add_claimed(spot, distributions, files)
    return SurveyedRoot(spot=spot, files=files, areas=tuple(areas), distributions=distributions, watched=tuple(watched))


def check_names(spot: ImportRoot, files: Iterable[str]) -> None:
    """Raise an error for file names that a restore would reject."""
    for path in files:
        if not is_plain(path):
            raise EnvironmentUnsupported(
                f"{show(spot.directory)} contains {show(path)}: this name has control characters, or is not UTF-8",
                hint="rename or remove this file",
            )


def _add_claimed(spot: ImportRoot, distributions: tuple[Distribution, ...], files: dict[str, ListedFile]) -> None:
    """Add the files of distributions in a shared prefix, which the scan does not walk."""
    for distribution in distributions:
        for claim in distribution.claims:
            path = row_path(claim.path, spot.site, spot.prefix)
            if path is None or not path.startswith("prefix/") or path in files or path.endswith(BYTECODE):
                continue
            found = read_file(os.path.join(spot.prefix, path[len("prefix/") :]))
            if found is not None:
                files[path] = found


def _look_at_code(spot: ImportRoot, spots: ImportRoots, description: Description) -> SurveyedRoot:
    libraries = [one for one in spots.spots if one.kind in ("own", "library")]
    others = [description.stdlib, description.platstdlib, description.own_home]
    others += [directory for one in libraries for directory in (one.directory, one.real)]
    if spot.shallow:
        others += [one.directory for one in spots.spots if one.kind == "code"]
        # The scan excludes temporary directories, because a leftover `__init__.py` must not make `/tmp` a package.
        others += temporary_directories()
    out = tuple(sorted({path for path in others if path and path != spot.directory}))
    wanted = wanted_files(spot.directory, description.loaded, out)
    place = CodeDirectory(directory=spot.directory, shallow=spot.shallow, out=out, wanted=wanted)
    code = list_code(place, ask=True)
    files = {f"site/{path}": file for path, file in code.listing.files.items() if is_plain(path)}
    for path in code.listing.files.keys() - {path[5:] for path in files}:
        code.listing.odd[path] = "the name has control characters, or bytes that are not UTF-8"
    place = msgspec.structs.replace(code.place, wanted=tuple(path for path in wanted if path in code.listing.files))
    area = Area("code", spot.directory, place)
    return SurveyedRoot(spot=spot, files=files, areas=((area, code.listing),), watched=code.watched)


def _say_odd(part: SurveyedRoot) -> list[str]:
    sentences = []
    for area, listing in part.areas:
        for path, reason in listing.odd.items():
            file = os.path.join(listing.top, path)
            # The scan raises an error for a device in a library, because no installer creates devices. For a link to an
            # outside path, the scan only reports the link.
            if area.kind != "code" and not os.path.islink(file):
                raise EnvironmentUnsupported(f"{show(file)} cannot be captured: {reason}", hint="remove it")
            sentences.append(f"{show(file)}: {reason}")
    return sentences
