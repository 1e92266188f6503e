"""Everything that counts in an environment, looked at once: roots, their files, their distributions.

    spots (roots.py) ─ libraries first, the outermost first ─ then code ─▶ parts, in the order of `sys.path`

A spot that lies in a part already looked at is no part of its own: `pywin32.pth` adds directories of site-packages,
and a project's `src` may lie in the directory its scripts are started from. A library below a directory of code is a
part, and left out of the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from serverless_gpu.environment.documents import FileRow, SnapshotMember
from serverless_gpu.environment.scan.code.project import CodePlace, list_code, wanted_files
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
from serverless_gpu.environment.scan.distributions import Distribution, flat_path, read_distributions, row_path
from serverless_gpu.environment.scan.roots import Spot, Spots, find_spots, temporary_directories
from serverless_gpu.errors import EnvironmentUnsupported

_PREFIX_DIRECTORIES = frozenset({"bin", "etc", "include", "lib", "libexec", "man", "sbin", "share"})


class Area(msgspec.Struct, frozen=True, array_like=True):
    """A directory that was walked, and how: so that a part of it can be looked at again."""

    kind: Literal["site", "prefix", "code"]
    top: str  # absolute path
    place: CodePlace | None = None


class KeptDistribution(msgspec.Struct, frozen=True, array_like=True):
    """A distribution whose unit can be used again while its files are what they are."""

    owner: int
    info: str  # name of its ``.dist-info`` directory
    scripts: tuple[str, ...]
    notes: dict[str, str]
    missing: tuple[str, ...]  # rows of files it claims that were not there


class Reused(msgspec.Struct, frozen=True, kw_only=True):
    """What of a root is as it was captured, and was not looked at in detail."""

    members: tuple[SnapshotMember, ...]
    scripts: frozenset[str]
    notes: dict[str, str]
    files: frozenset[str]
    distributions: dict[str, KeptDistribution]
    others: dict[str, tuple[ListedFile, ...]]  # files each claims that are not in its unit, by address
    unit: Callable[[str], list[tuple[FileRow, ListedFile]]]


class SurveyedRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A root as it was found."""

    spot: Spot
    files: dict[str, ListedFile]
    areas: tuple[tuple[Area, Listing], ...] = ()
    distributions: tuple[Distribution, ...] = ()
    watched: tuple[str, ...] = ()
    reused: Reused | None = None  # what is not among files and distributions, because it is as it was

    def holds(self, path: str) -> bool:
        """Return whether a real path is a directory or file that is part of this one."""
        if self.spot.archive or not is_inside(path, self.spot.real):
            return False
        _, listing = self.areas[0]
        relative = path[len(self.spot.real) :].strip("/")
        if self.reused is not None and (path in self.reused.files or f"site/{relative}" in self.files):
            return True
        return relative in listing.directories or relative in listing.files


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All parts, the interpreter's own first; entries of `sys.path` that are not there; what was left out, and why."""

    parts: tuple[SurveyedRoot, ...]
    absent: tuple[str, ...]
    left_out: tuple[str, ...]


def keep_prefix(above: str, name: str, is_directory: bool) -> bool:
    """Return whether an entry of a prefix counts: not its Python, and nothing that is in its top by chance."""
    if not above:
        return is_directory and name in _PREFIX_DIRECTORIES
    if above == "lib/" and name.startswith(("python", "pypy")):
        return False
    return name != "__pycache__" and not name.endswith(BYTECODE)


def keep_for(area: Area) -> Keep:
    """Return which entries count in an area of a library."""
    return keep_prefix if area.kind == "prefix" else keep_all


def survey(
    description: Description,
    look_at: Callable[[str, int], None] = lambda name, files: None,
    again: Callable[[Spot], SurveyedRoot | None] = lambda spot: None,
) -> Survey:
    """Look at everything an interpreter imports from.

    Args:
        description: the interpreter.
        look_at: told of each directory that was looked at, and the number of its files.
        again: returns the interpreter's own library, or None to have all of it looked at.

    Raises:
        EnvironmentUnsupported: something cannot be captured; says what.
        EnvironmentTooLarge: a project's directory is larger than a project may be.
    """
    spots = find_spots(description)
    parts: dict[int, SurveyedRoot] = {}
    # By depth: whether a spot lies in another is known when the outer one was walked. Code comes last.
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


def _look(spot: Spot, spots: Spots, description: Description) -> SurveyedRoot:
    if spot.kind == "code":
        return _look_at_code(spot, spots, description)
    if spot.kind == "archive":
        path = os.path.join(spot.directory, spot.archive)
        file = read_file(path)
        return SurveyedRoot(spot=spot, files={f"site/{spot.archive}": file} if file else {}, watched=(path,))
    return _look_at_library(spot)


def _look_at_library(spot: Spot) -> SurveyedRoot:
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


def check_names(spot: Spot, files: Iterable[str]) -> None:
    """Refuse names that cannot travel.

    Raises:
        EnvironmentUnsupported: names the file.
    """
    for path in files:
        if not is_plain(path):
            raise EnvironmentUnsupported(
                f"{show(spot.directory)} holds {show(path)}: its name has control characters, or is not UTF-8",
                hint="rename or remove it",
            )


def _add_claimed(spot: Spot, distributions: tuple[Distribution, ...], files: dict[str, ListedFile]) -> None:
    """Add what distributions own in a prefix that is not walked, because others live there, too."""
    for distribution in distributions:
        for claim in distribution.claims:
            path = row_path(claim.path, spot.site, spot.prefix)
            if path is None or not path.startswith("prefix/") or path in files or path.endswith(BYTECODE):
                continue
            found = read_file(os.path.join(spot.prefix, path[len("prefix/") :]))
            if found is not None:
                files[path] = found


def _look_at_code(spot: Spot, spots: Spots, description: Description) -> SurveyedRoot:
    libraries = [one for one in spots.spots if one.kind in ("own", "library")]
    others = [description.stdlib, description.platstdlib, description.own_home]
    others += [directory for one in libraries for directory in (one.directory, one.real)]
    if spot.shallow:
        others += [one.directory for one in spots.spots if one.kind == "code"]
        others += temporary_directories()  # below `/`, an `__init__.py` that somebody left there makes them no package
    out = tuple(sorted({path for path in others if path and path != spot.directory}))
    wanted = wanted_files(spot.directory, description.loaded, out)
    place = CodePlace(directory=spot.directory, shallow=spot.shallow, out=out, wanted=wanted)
    code = list_code(place, ask=True)
    files = {f"site/{path}": file for path, file in code.listing.files.items() if is_plain(path)}
    for path in code.listing.files.keys() - {path[5:] for path in files}:
        code.listing.odd[path] = "its name has control characters, or bytes that are not UTF-8"
    place = msgspec.structs.replace(code.place, wanted=tuple(path for path in wanted if path in code.listing.files))
    area = Area("code", spot.directory, place)
    return SurveyedRoot(spot=spot, files=files, areas=((area, code.listing),), watched=code.watched)


def _say_odd(part: SurveyedRoot) -> list[str]:
    sentences = []
    for area, listing in part.areas:
        for path, reason in listing.odd.items():
            file = os.path.join(listing.top, path)
            # A library with a device in it is not what anybody installed; a link that leads out is a matter of taste.
            if area.kind != "code" and not os.path.islink(file):
                raise EnvironmentUnsupported(f"{show(file)} cannot be captured: {reason}", hint="remove it")
            sentences.append(f"{show(file)}: {reason}")
    return sentences
