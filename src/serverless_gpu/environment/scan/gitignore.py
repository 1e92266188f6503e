"""Reads which files of a directory git ignores and tracks, without running git.

Git evaluates its patterns for each entry separately, from the top directory down. The last pattern that matches an
entry's own path applies, and a deeper `.gitignore` takes precedence. Git never reads an ignored directory. `pathspec`
instead matches a path together with all directories above the path. The results differ if one pattern ignores a
directory and a later pattern includes the directory again. The module therefore trims the expressions of `pathspec` to
match only the path itself. `.sgpuignore` has the same syntax and overrides every `.gitignore`: `!name` includes files
that git ignores.

A user's patterns for all repositories are in `core.excludesFile`, or else at git's default path. The module reads git's
system settings and user settings. The module does not read a repository's own settings, included files or
`GIT_CONFIG_*` variables.

The patterns never ignore tracked files (`git add -f`). The module reads the tracked files from `.git/index`, versions 2
to 4. If the module cannot read the index (another version, SHA-256 names, a split index), it reports the problem and
uses only the patterns.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from pathspec.patterns.gitignore import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

SYSTEM = "/etc/gitconfig"
_SETTINGS_BYTES_MAX = 1024 * 1024
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)\s*("(?:[^"\\]|\\.)*")?\s*\]')
_EXCLUDES = re.compile(r"\s*excludesfile\s*=(.*)", re.IGNORECASE)
_PIECE = re.compile(r'\\(.)|(")|([#;])|([^\\"#;]+)')
_ESCAPED = {"n": "\n", "t": "\t", "b": "\b"}
GIT = ".gitignore"
OURS = ".sgpuignore"
_PATTERNS_BYTES_MAX = 1024 * 1024
_HEADER = struct.Struct(">4sII")
_INDEX_BYTES_MAX = 256 * 1024 * 1024
_FIXED = 62  # Length of the fixed part of an index entry: times, ids, mode, size, SHA-1 and flags. The path follows.
_MODE = 24
_EXTENDED = 0x40


class IgnorePatterns(msgspec.Struct, frozen=True):
    """The ignore patterns of one file."""

    # Directory that the paths start from, relative to the top: "" or ending in ``/``. If this directory lies above the
    # top, `above` is the start of each path.
    base: str
    above: str  # For example ``src/``, if the pattern file lies in the directory above the top ``src``.
    # Expressions, each with True if git ignores the matching paths. The last rule is the first entry.
    rules: tuple[tuple[re.Pattern[str], bool], ...]
    any: re.Pattern[str]  # Combined expression, which matches if any rule may match.

    def decide(self, path: str) -> bool | None:
        """Return True if the patterns ignore a path, False if they include the path, and None without a match.

        The path of a directory ends in ``/``.
        """
        return self.match(self.above + path[len(self.base) :])

    def match(self, own: str) -> bool | None:
        """Return the result of `decide` for a path relative to the directory of the patterns."""
        if self.any.match(own) is None:
            return None
        for expression, ignores in self.rules:
            if expression.match(own) is not None:
                return ignores
        return None


class IgnoreRules(msgspec.Struct, frozen=True):
    """The pattern files that apply in a directory, from the outermost file to the directory's own file."""

    git: tuple[IgnorePatterns, ...] = ()
    ours: tuple[IgnorePatterns, ...] = ()
    all: bool = False  # True if git ignores the directory itself, and so every untracked entry in the directory

    def by_ours(self, path: str) -> bool | None:
        """Return the decision of `.sgpuignore` for an entry. Paths of directories end in ``/``."""
        return _decide(self.ours, path)

    def by_git(self, path: str) -> bool:
        """Return True if git's patterns ignore an entry of this directory."""
        return self.all or bool(_decide(self.git, path))

    def below(self, directory: str, base: str, *, begins: bool = False) -> IgnoreRules:
        """Return the rules for a subdirectory, with its own pattern files.

        Where another repository begins, git's outer rules no longer apply. `base` is the path relative to the top,
        ending in ``/``, or "".
        """
        own, ours = read_patterns(f"{directory}/{GIT}", base), read_patterns(f"{directory}/{OURS}", base)
        if own is None and ours is None and not begins:
            return self
        git = () if begins else self.git
        git, mine = git + ((own,) if own else ()), self.ours + ((ours,) if ours else ())
        return IgnoreRules(git, mine, self.all and not begins)


def _decide(chain: Sequence[IgnorePatterns], path: str) -> bool | None:
    for patterns in reversed(chain):
        decided = patterns.decide(path)
        if decided is not None:
            return decided
    return None


def read_patterns(file: str, base: str = "", above: str = "") -> IgnorePatterns | None:
    """Return the patterns of a file, or None if the file has no patterns."""
    try:
        with open(file, "rb") as opened:
            text = opened.read(_PATTERNS_BYTES_MAX).decode("utf-8-sig", errors="surrogateescape")
    except OSError:  # Most directories have no pattern file. Git also ignores an unreadable pattern file.
        return None
    return parse_patterns(text, base, above)


def parse_patterns(text: str, base: str = "", above: str = "") -> IgnorePatterns | None:
    """Return the parsed patterns of a text in git's syntax, or None without any patterns."""
    rules = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        try:
            expression, ignores = GitIgnoreSpecPattern.pattern_to_regex(line)
        except GitIgnorePatternError:
            continue
        if expression is not None and ignores is not None:
            rules.append((_own(expression, line), ignores))
    if not rules:
        return None
    rules.reverse()
    anything = re.compile("|".join(f"(?:{expression})" for expression, _ in rules), re.DOTALL)
    return IgnorePatterns(
        base, above, tuple((re.compile(text, re.DOTALL), ignores) for text, ignores in rules), anything
    )


def git_index(top: str) -> tuple[str, str] | None:
    """Return the path of git's index for a directory, and the directory's path prefix in the index."""
    repository = next((path for path in (top, *map(str, Path(top).parents)) if os.path.lexists(f"{path}/.git")), None)
    if repository is None:
        return None
    return os.path.join(_own_git_directory(repository), "index"), _relative(top, repository)


def outer_ignoring(top: str) -> tuple[IgnoreRules, tuple[str, ...]]:
    """Return the ignore rules from above a directory in its repository, and the files that define them.

    If the repository ignores the directory itself, no outer rule applies, because the user runs code in the directory.
    """
    repository = next((path for path in (top, *map(str, Path(top).parents)) if os.path.lexists(f"{path}/.git")), None)
    places = list(_outer_files(top, repository))
    git = [found for file, above in places if (found := read_patterns(file, above=above)) is not None]
    ours = [
        found for above in _parents(top, repository) if (found := read_patterns(f"{above[0]}/{OURS}", above=above[1]))
    ]
    settings = user_patterns()[1] if repository is not None else ()
    watched = (*settings, *(file for file, _ in places))
    watched += tuple(f"{above}/{OURS}" for above, _ in _parents(top, repository))
    if repository is not None and _is_ignored(_relative(top, repository), git):
        return IgnoreRules(), watched
    return IgnoreRules(tuple(git), tuple(ours)), watched


def _own(expression: str, line: str) -> str:
    """Return a `pathspec` expression that matches only the path itself, not the paths below it."""
    expression = expression.replace("(?P<ps_d>/)", "/")
    if expression == ".":
        return ""
    if expression == "/":
        return r".*/\Z"
    if line.rstrip().endswith("/**"):
        return expression + "."
    if line.rstrip().endswith("/**/"):
        return expression + r".*/\Z"
    return expression + r"\Z"


def _outer_files(top: str, repository: str | None) -> Iterator[tuple[str, str]]:
    """Yield git's pattern files above a directory, weakest first, each with the prefix for its paths."""
    if repository is None:
        return
    inside = _relative(top, repository)
    mine, _ = user_patterns()
    if mine:
        yield mine, inside
    yield os.path.join(_git_directory(repository), "info", "exclude"), inside
    for directory, above in _parents(top, repository):
        yield f"{directory}/{GIT}", above


def _parents(top: str, repository: str | None) -> list[tuple[str, str]]:
    """Return the parents of a directory in its repository, outermost first, with the path between."""
    if repository is None:
        return []
    between = [str(path) for path in Path(top).parents if str(path) == repository or _relative(str(path), repository)]
    return [(path, _relative(top, path)) for path in reversed(between)]


def _is_ignored(inside: str, git: Sequence[IgnorePatterns]) -> bool:
    """Return True if a repository ignores a directory or one above. Directory paths end in ``/``."""
    for end in (index + 1 for index, letter in enumerate(inside) if letter == "/"):
        for patterns in reversed(git):
            start = len(inside) - len(patterns.above)
            decided = patterns.match(inside[start:end]) if start < end else None
            if decided:
                return True
            if decided is not None:
                break
    return False


def _relative(path: str, above: str) -> str:
    """Return a path relative to the directory `above`, ending in ``/``, or "" for a path outside."""
    start = above.rstrip("/") + "/"
    return path[len(start) :].rstrip("/") + "/" if path.startswith(start) and path != above else ""


def _git_directory(repository: str) -> str:
    """Return the git directory that all worktrees of a repository share."""
    own = _own_git_directory(repository)
    common = os.path.join(own, "commondir")
    try:
        with open(common, encoding="utf-8", errors="surrogateescape") as file:
            return os.path.normpath(os.path.join(own, file.read(4096).strip()))
    except OSError:
        return own


def _own_git_directory(repository: str) -> str:
    """Return the git directory of a repository, or of a worktree, whose `.git` file names the directory."""
    git = f"{repository}/.git"
    try:
        with open(git, encoding="utf-8", errors="surrogateescape") as file:
            return os.path.join(repository, file.read(4096).strip().removeprefix("gitdir:").strip())
    except OSError:
        return git


def user_patterns() -> tuple[str, tuple[str, ...]]:
    """Return the path of the user's pattern file ("" for none), and the settings files that may name it."""
    configured = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    settings = (SYSTEM, os.path.join(configured, "git", "config"), os.path.join(os.path.expanduser("~"), ".gitconfig"))
    found = os.path.join(configured, "git", "ignore")
    for file in settings:
        try:
            with open(file, "rb") as opened:
                said = excludes_file(opened.read(_SETTINGS_BYTES_MAX).decode(errors="surrogateescape"))
        except OSError:  # Most of these settings files do not exist.
            continue
        found = found if said is None else said
    return found, settings


def excludes_file(text: str) -> str | None:
    """Return the last `core.excludesFile` in the text of a settings file, or None."""
    found, in_core = None, False
    for line in text.replace("\r\n", "\n").replace("\\\n", "").split("\n"):
        section = _SECTION.match(line)
        if section is not None:
            in_core = section[1].lower() == "core" and section[2] is None
            line = line[section.end() :]
        setting = _EXCLUDES.match(line) if in_core else None
        if setting is not None:
            found = os.path.expanduser(_value(setting[1]))
    return found


def _value(text: str) -> str:
    """Return a setting's value without quotes, escapes and trailing comment."""
    value, quoted = "", False
    for escaped, quote, comment, plain in _PIECE.findall(text.strip()):
        if quote:
            quoted = not quoted
        elif comment and not quoted:
            return value.rstrip()
        else:
            value += _ESCAPED.get(escaped, escaped) or comment or plain
    return value


def tracked_files(index: str, inside: str) -> list[str] | None:
    """Return the tracked files and submodules below a directory, or None if git's index is unreadable.

    `inside` is the directory relative to the repository, ending in ``/``, or "". The returned paths are relative to the
    directory.
    """
    start = os.fsencode(inside)
    try:
        with open(index, "rb") as file:
            data = file.read(_INDEX_BYTES_MAX)
        return [os.fsdecode(path[len(start) :]) for path in _paths(data) if path.startswith(start)]
    except FileNotFoundError:
        return []
    except (OSError, struct.error, ValueError, IndexError):
        return None


def index_mtime(index: str) -> int:
    """Return the time of the last write to git's index in nanoseconds, or 0 if the index is missing."""
    try:
        return os.stat(index).st_mtime_ns
    except OSError:
        return 0


def _paths(data: bytes) -> Iterator[bytes]:
    """Yield the paths of all files, links and submodules in a git index.

    Raises ValueError, IndexError: the data is not an index of a known version.
    """
    magic, version, count = _HEADER.unpack_from(data)
    if magic != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("no index")
    at, path = _HEADER.size, b""
    for _ in range(count):
        name = at + _FIXED + (2 if data[at + _FIXED - 2] & _EXTENDED else 0)
        kept = 0
        if version == 4:
            cut, name = _number(data, name)
            kept = len(path) - cut
        end = data.index(b"\0", name)
        path = path[:kept] + data[name:end]
        kind = data[at + _MODE + 2] >> 4
        at = end + 1 if version == 4 else end + 8 - (end - at) % 8
        if kind in (0b1000, 0b1010, 0b1110):  # A sparse index also lists directories, which this function skips.
            yield path
    if data[at : at + 4] == b"link":
        raise ValueError("git's index is split, and another file has the other entries")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of variable length, and return it with the position after it."""
    byte = data[at]
    value = byte & 127
    while byte & 128:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 127)
    return value, at + 1
