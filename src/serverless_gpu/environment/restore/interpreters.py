"""Finds interpreters for environments, and checks if a running interpreter fits another environment.

`find_python` requires the same implementation, version and ABI. The interpreter search tries these places in order:

    the caller's path · our own · pythonX.Y on PATH · /usr/bin, /usr/local/bin · uv's · pyenv's

The search runs each candidate interpreter once per boot of the machine to get its description. The search returns the
first interpreter with the exact version, or otherwise the first compatible interpreter. The search runs an interpreter
path from a snapshot only if no user except root and the current user could have replaced the file.

`fits` compares two snapshots without reading files. `UnitFindings` describes how the environment uses the units that
only one of the snapshots contains.

    loaded: names, files ─┐
    old snapshot ─────────┼─▶ fits(…) ─▶ "" (yes: mount the new one over the old) or the reason why not
    new snapshot ─────────┘

A running interpreter keeps every module that it has imported. A running interpreter therefore fits another environment
only if every imported file is identical in that environment. In the new environment, no other unit may provide a module
that the interpreter has imported. Both environments must run the same code at interpreter start-up. Modules that the
interpreter has not imported may differ, because Python looks up modules and metadata on demand.

A snapshot also lists the names and modules of its units for human readers. Unit addresses do not depend on names and
modules.

Failure cases: If no interpreter fits, the search raises EnvironmentUnsupported, which lists the candidates. The search
skips a candidate interpreter that does not answer in time.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import Interpreter, Root, Snapshot, SnapshotMember
from serverless_gpu.environment.restore.cache.cache_directory import read_document, write_document
from serverless_gpu.environment.restore.tree_plan import library_name
from serverless_gpu.errors import EnvironmentUnsupported

_ANSWER_S_MAX = 10.0
_CANDIDATES_MAX = 32
_NAME = re.compile(r"python[0-9.]*t?")
_MINOR = re.compile(r"python(3\.[0-9]+)")
# The script prints the base interpreter's path, because the candidate may be a wrapper or belong to a virtual
# environment.
_QUESTION = """
import json, sys, sysconfig
print(json.dumps([sys.implementation.name, "%d.%d.%d" % sys.version_info[:3], sysconfig.get_config_var("SOABI") or "",
                  sysconfig.get_platform(), sys.implementation.cache_tag or "",
                  getattr(sys, "_base_executable", None) or sys.executable]))
"""
_answers: dict[tuple[str, int, int], Python | None] = {}


class Python(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter on this machine, outside of any virtual environment."""

    path: str  # absolute
    implementation: str
    version: str  # Python version number, for example ``3.11.2``
    abi: str
    platform: str
    tag: str
    note: str = ""  # difference from the captured interpreter as a message, or ""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Interpreter descriptions from one boot, by the interpreter file's real path, time and size."""

    boot: str
    answers: list[tuple[str, int, int, Python]]


def find_python(
    interpreter: Interpreter, hints: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Python:
    """Return an interpreter of this machine that fits an environment.

    `hints` lists interpreter paths that the search tries first. `environ` contains the environment variables that
    determine the directories to search. By default, `environ` contains the environment variables of this process.
    """
    looked: list[str] = []
    fitting: list[Python] = []
    seen: set[str] = set()
    wanted = (interpreter.implementation, interpreter.abi, interpreter.minor.split("."))
    for path in candidates(interpreter, hints, os.environ if environ is None else environ):
        real = os.path.realpath(path)
        if real in seen or len(seen) >= _CANDIDATES_MAX or not os.access(path, os.X_OK):
            continue
        seen.add(real)
        looked.append(path)
        python = ask(path)
        if python is not None and (python.implementation, python.abi, python.version.split(".")[:2]) == wanted:
            if python.version == interpreter.version:
                return python
            fitting.append(python)
    if fitting:
        note = f"Python {fitting[0].version} is used instead of {interpreter.version}"
        return msgspec.structs.replace(fitting[0], note=note)
    where = ", ".join(looked) or "no interpreter found"
    raise EnvironmentUnsupported(
        f"This machine has no Python {interpreter.minor} ({interpreter.abi}) for the environment; searched: {where}.",
        hint=f"install this Python version, for example with `uv python install {interpreter.minor}`",
    )


def candidates(interpreter: Interpreter, hints: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield candidate paths of the interpreter, the most likely path first."""
    name = f"python{interpreter.minor}"
    uv, pyenv = _installers(environ)
    yield from hints
    yield getattr(sys, "_base_executable", None) or sys.executable
    yield from (f"{directory}/{name}" for directory in _directories(environ))
    yield from sorted(glob.glob(f"{uv}/cpython-{interpreter.minor}.*/bin/{name}"), reverse=True)
    yield from sorted(glob.glob(f"{pyenv}/versions/{interpreter.minor}.*/bin/{name}"), reverse=True)


def minors(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the Python versions on this machine, for example ``("3.11", "3.13")``, without running them.

    `find_python` also finds an interpreter at the path that a snapshot names.
    """
    uv, pyenv = _installers(environ)
    patterns = [f"{glob.escape(directory)}/python3.*" for directory in _directories(environ)]
    patterns += [f"{uv}/cpython-3.*/bin/python3.*", f"{pyenv}/versions/3.*/bin/python3.*"]
    found = {f"{sys.version_info.major}.{sys.version_info.minor}"}
    for path in (path for pattern in patterns for path in glob.glob(pattern)):
        minor = _MINOR.fullmatch(os.path.basename(path))
        if minor and os.access(path, os.X_OK):
            found.add(minor[1])
    return tuple(sorted(found, key=lambda minor: int(minor.partition(".")[2])))


def _directories(environ: Mapping[str, str]) -> list[str]:
    everywhere = (*environ.get("PATH", "").split(":"), "/usr/bin", "/usr/local/bin")
    return [directory for directory in dict.fromkeys(everywhere) if directory.startswith("/")]


def _installers(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the interpreter directories of uv and pyenv, escaped for glob patterns."""
    home = environ.get("HOME", "")
    uv = environ.get("UV_PYTHON_INSTALL_DIR") or f"{environ.get('XDG_DATA_HOME') or home + '/.local/share'}/uv/python"
    pyenv = environ.get("PYENV_ROOT") or f"{home}/.pyenv"
    return glob.escape(uv), glob.escape(pyenv)


def ask(path: str) -> Python | None:
    """Run an interpreter, and return its description or None after a time-out.

    The function runs the interpreter again only after its file has changed.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    key = os.path.realpath(path), status.st_mtime_ns, status.st_size
    if key not in _answers:
        _answers[key] = _run(path)
    return _answers[key]


def recall(file: Path, boot: str) -> None:
    """Load the interpreter descriptions that another process recorded since the last boot."""
    kept = read_document(file, _Kept)
    if kept is not None and kept.boot == boot:
        for path, mtime_ns, size, python in kept.answers:
            _answers.setdefault((path, mtime_ns, size), python)


def keep(file: Path, boot: str) -> None:
    """Record interpreter descriptions, which `recall` loads later."""
    answers = [(*key, python) for key, python in _answers.items() if python is not None]
    kept = read_document(file, _Kept)
    if kept is None or kept.boot != boot or len(answers) > len(kept.answers):
        with contextlib.suppress(OSError):  # If the record is missing, later processes run the interpreters again.
            write_document(file, _Kept(boot=boot, answers=answers))


def trusted(path: str) -> bool:
    """Return True if no other user could have replaced the interpreter at a snapshot's path."""
    real = Path(os.path.realpath(path))
    if not (path.startswith("/") and _NAME.fullmatch(os.path.basename(path)) and _NAME.fullmatch(real.name)):
        return False
    try:
        return all(_only_ours(place) for way in (Path(path).parent, real) for place in (way, *way.parents))
    except OSError:
        return False


def _only_ours(place: Path) -> bool:
    status = place.stat()
    sticky_directory = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and (not status.st_mode & 0o022 or bool(sticky_directory))


def _run(path: str) -> Python | None:
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", _QUESTION],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_ANSWER_S_MAX,
            check=False,
            cwd="/",
        )
        implementation, version, abi, platform, tag, base = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Python(path=str(base), implementation=implementation, version=version, abi=abi, platform=platform, tag=tag)


class LoadedModules(msgspec.Struct, frozen=True, kw_only=True):
    """The modules and libraries that an interpreter has loaded from its environment."""

    names: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()  # Absolute paths of the loaded modules and shared libraries.
    libraries_known: bool = True  # False if the operating system does not list the loaded libraries.


class UnitFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the units that only one of two environments contains, by unit address."""

    used: Collection[str] = ()
    # units whose code runs at start-up or import, each with the occasion
    hooks: Mapping[str, str] = {}
    names: Mapping[str, Collection[str]] = {}


def fits(loaded: LoadedModules, old: Snapshot, new: Snapshot, units: UnitFindings) -> str:
    """Return the reason why an interpreter does not fit another environment, or "" if it fits."""
    mine, theirs = old.interpreter, new.interpreter
    if (mine.implementation, mine.abi, mine.platform, mine.minor) != (
        theirs.implementation,
        theirs.abi,
        theirs.platform,
        theirs.minor,
    ):
        return (
            f"the environment needs {theirs.implementation} {theirs.version}, but the warm interpreter is "
            f"{mine.version}"
        )
    if not loaded.libraries_known:
        return "the warm interpreter's loaded libraries are not known"
    if [_shape(root) for root in old.roots] != [_shape(root) for root in new.roots]:
        return "sys.path of the new environment has different directories"
    for before, after in zip(old.roots, new.roots, strict=True):
        problem = _root_problem(loaded, before, after, units)
        if problem:
            return problem
    return ""


def changed_units(old: Snapshot, new: Snapshot) -> frozenset[str]:
    """Return the addresses of the units that differ between two environments, compared root by root."""
    changed: set[str] = set()
    for before, after in zip(old.roots, new.roots, strict=False):
        gone, come = _difference(before, after)
        changed |= {member.address for member in (*gone, *come)}
    return frozenset(changed)


def row_of(snapshot: Snapshot, tree: str, file: str) -> tuple[int, str] | None:
    """Return the root number and row path of a restored file, or None for a file outside of all units."""
    if not file.startswith(f"{tree}/"):
        return None
    library = f"lib/{library_name(snapshot.interpreter)}/site-packages/"
    inner = file[len(tree) + 1 :]
    first, _, rest = inner.partition("/")
    number, _, below = rest.partition("/")
    if first == "code" and number.isdigit():
        return int(number), f"site/{below}"
    root = 0
    if first == "roots" and number.isdigit():
        root, inner = int(number), below
    if inner.startswith(library):
        return root, f"site/{inner[len(library) :]}"
    return root, f"prefix/{inner}"


def _shape(root: Root) -> tuple[str, bool]:
    return root.kind, root.before


def _root_problem(loaded: LoadedModules, old: Root, new: Root, units: UnitFindings) -> str:
    gone, come = _difference(old, new)
    if old.generated != new.generated:
        names = sorted({file.path for file in set(old.generated) ^ set(new.generated)})
        return f"{names[0].partition('/')[2]} has changed"
    for member in gone:
        if member.address in units.used:
            return f"{_text(member)}, which the warm interpreter has loaded, {_fate(member, come)}"
    for member in (*gone, *come):
        if member.address in units.hooks:
            return f"{_text(member)} runs code when {units.hooks[member.address]}"
    for member in come:
        # The comparison covers project code by file, because `loaded` lists project files individually.
        taken = sorted(loaded.names.intersection(units.names[member.address])) if new.kind != "code" else []
        if taken:
            return f"{_text(member)} provides {taken[0]}, which the warm interpreter has loaded from elsewhere"
    return ""


def _difference(old: Root, new: Root) -> tuple[tuple[SnapshotMember, ...], tuple[SnapshotMember, ...]]:
    """Return the units that only the old root contains, and the units that only the new root contains."""
    return _without(old.members, new.members), _without(new.members, old.members)


def _without(members: Iterable[SnapshotMember], others: Iterable[SnapshotMember]) -> tuple[SnapshotMember, ...]:
    addresses = {member.address for member in others}
    return tuple(member for member in members if member.address not in addresses)


def _text(member: SnapshotMember) -> str:
    if member.kind == "code":
        return f"the code in {member.name}"
    if member.kind == "unowned":
        return "the environment's unit of unowned files"
    return f"{member.name} {member.version}".strip()


def _fate(member: SnapshotMember, come: Iterable[SnapshotMember]) -> str:
    for other in come:
        if (other.kind, other.name) == (member.kind, member.name):
            return "has changed" if other.version == member.version else f"is {other.version} now"
    return "is missing now"
