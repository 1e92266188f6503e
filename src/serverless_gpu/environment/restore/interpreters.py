"""Finds interpreters for environments, and decides if a running interpreter fits another environment.

`find_python` requires the same implementation, version and ABI. The search tries these places in order:

    the caller's path · our own · pythonX.Y on PATH · /usr/bin, /usr/local/bin · uv's · pyenv's

The search runs each candidate once per boot of the machine, without any environment, to get its description. The search
returns the first interpreter with the exact version, else the first interpreter that fits. The search runs a path from
a snapshot only if no user except root and the current user could have replaced the file.

`fits` compares two snapshots and reads no files. `UnitFindings` holds facts about the files of their units.

    loaded: names, files ─┐
    old snapshot ─────────┼─▶ fits(…) ─▶ "" (yes: mount the new one over the old) or the reason why not
    new snapshot ─────────┘

An interpreter keeps the modules that it has imported. An interpreter therefore fits another environment only if the
environments agree in all files that the interpreter imported. No other unit may provide a name that the interpreter
imported. The old and the new environment must run the same code at start-up. Modules that the interpreter never
imported may change, because Python looks up modules and metadata on demand.

A snapshot also lists names and modules of its units, for people to read. The addresses of units do not cover names and
modules.

Failure cases: If no interpreter fits, the search raises EnvironmentUnsupported, which lists the candidates. The search
skips a candidate that does not answer.
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
# The script prints the base interpreter, because the candidate may belong to an environment or be a wrapper.
_QUESTION = """
import json, sys, sysconfig
print(json.dumps([sys.implementation.name, "%d.%d.%d" % sys.version_info[:3], sysconfig.get_config_var("SOABI") or "",
                  sysconfig.get_platform(), sys.implementation.cache_tag or "",
                  getattr(sys, "_base_executable", None) or sys.executable]))
"""
_answers: dict[tuple[str, int, int], Python | None] = {}


class Python(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter on this machine, without any environment."""

    path: str  # absolute
    implementation: str
    version: str  # version number, for example ``3.11.2``
    abi: str
    platform: str
    tag: str
    note: str = ""  # difference from the captured interpreter as text, or ""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptions of interpreters from one boot, by real path, time and size of their files."""

    boot: str
    answers: list[tuple[str, int, int, Python]]


def find_python(
    interpreter: Interpreter, hints: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Python:
    """Return an interpreter of this machine that fits an environment.

    `hints` are paths of interpreters that the search runs first. `environ` contains the variables that determine the
    directories to search. The default is the environment of this process.
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
    where = ", ".join(looked) or "no interpreter at all"
    raise EnvironmentUnsupported(
        f"This machine has no Python {interpreter.minor} ({interpreter.abi}) for the environment; searched: {where}.",
        hint=f"install this version, for example with `uv python install {interpreter.minor}`",
    )


def candidates(interpreter: Interpreter, hints: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield paths where the interpreter may be, the most likely path first."""
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
    """Run an interpreter and return its description, or None if it does not answer in time.

    The interpreter runs without any environment, and only once while its file does not change.
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
    """Load the descriptions of interpreters that another process of this boot recorded."""
    kept = read_document(file, _Kept)
    if kept is not None and kept.boot == boot:
        for path, mtime_ns, size, python in kept.answers:
            _answers.setdefault((path, mtime_ns, size), python)


def keep(file: Path, boot: str) -> None:
    """Record the descriptions of interpreters for `recall`."""
    answers = [(*key, python) for key, python in _answers.items() if python is not None]
    kept = read_document(file, _Kept)
    if kept is None or kept.boot != boot or len(answers) > len(kept.answers):
        with contextlib.suppress(OSError):  # Without the record, later processes run the interpreters again.
            write_document(file, _Kept(boot=boot, answers=answers))


def trusted(path: str) -> bool:
    """Return True if a path from a snapshot is an interpreter that no other user could have replaced."""
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
    files: frozenset[str] = frozenset()  # absolute paths of the loaded modules and libraries
    libraries_known: bool = True  # False if the system does not list loaded libraries


class UnitFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about units that only one of two environments contains, by unit address."""

    used: Collection[str] = ()
    # units whose code runs at start-up or on an import, and the occasion on which the code runs
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
            f"the environment needs {theirs.implementation} {theirs.version}, and the warm interpreter is "
            f"{mine.version}"
        )
    if not loaded.libraries_known:
        return "the libraries that the warm interpreter has loaded are not known"
    if [_shape(root) for root in old.roots] != [_shape(root) for root in new.roots]:
        return "sys.path of the environment has other directories"
    for before, after in zip(old.roots, new.roots, strict=True):
        problem = _root_problem(loaded, before, after, units)
        if problem:
            return problem
    return ""


def changed_units(old: Snapshot, new: Snapshot) -> frozenset[str]:
    """Return the addresses of units that only one of two environments has in the same root."""
    changed: set[str] = set()
    for before, after in zip(old.roots, new.roots, strict=False):
        gone, come = _difference(before, after)
        changed |= {member.address for member in (*gone, *come)}
    return frozenset(changed)


def row_of(snapshot: Snapshot, tree: str, file: str) -> tuple[int, str] | None:
    """Return the root and row path of a file in a restored environment, or None outside of all units."""
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
        # `loaded` lists project files one by one, so project code is compared by file instead.
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
        return "the unit of unowned files"
    return f"{member.name} {member.version}".strip()


def _fate(member: SnapshotMember, come: Iterable[SnapshotMember]) -> str:
    for other in come:
        if (other.kind, other.name) == (member.kind, member.name):
            return "has changed" if other.version == member.version else f"is {other.version} now"
    return "is missing now"
