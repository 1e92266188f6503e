"""Determines the files of a directory that git ignores and tracks, without running git.

Git evaluates its patterns separately for each entry, from the top directory down. The last pattern that matches an
entry's path applies, and patterns in deeper `.gitignore` files take precedence. Git never reads the content of an
ignored directory. Unlike git, `pathspec` matches a path together with all of its parent directories. The results of git
and `pathspec` differ if one pattern ignores a directory and a later pattern includes it again. The module therefore
trims the regular expressions of `pathspec` to match only the path itself. A `.sgpuignore` file has the syntax of
`.gitignore` and overrides every `.gitignore`: The pattern `!name` includes files that git ignores.

The user's global patterns are in the file named by `core.excludesFile`, or at git's default path. The module reads
git's system and user settings to find the global patterns. The module does not read a repository's own settings,
included files or `GIT_CONFIG_*` variables.

Ignore patterns never apply to tracked files (`git add -f`). The module reads the tracked files from `.git/index`,
versions 2 to 4. If git's index is not readable (another version, SHA-256 names, a split index), the module reports the
problem and uses only patterns.
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
# Length in bytes of an index entry's fixed part: times, ids, mode, size, SHA-1 and flags. The path follows.
_FIXED = 62
_MODE = 24
_EXTENDED = 0x40


class IgnorePatterns(msgspec.Struct, frozen=True):
    """The ignore patterns of one pattern file."""

    # Directory of the pattern file relative to the top, "" or ending in ``/``. If the pattern file is above the top,
    # matching adds `above` in front of each path.
    base: str
    above: str  # Path of the top below the pattern file's directory, for example ``src/``.
    # Pattern expressions, each with True if git ignores the matching paths. The list starts with the file's last
    # pattern.
    rules: tuple[tuple[re.Pattern[str], bool], ...]
    any: re.Pattern[str]  # Combined expression that matches if any of the patterns may match.

    def decide(self, path: str) -> bool | None:
        """Return True if the patterns ignore a path, False if they include it, and None if no pattern matches.

        A directory's path must end in ``/``.
        """
        return self.match(self.above + path[len(self.base) :])

    def match(self, own: str) -> bool | None:
        """Return the result of `decide` for a path relative to the pattern file's directory."""
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
    all: bool = False  # True if git ignores the directory itself, and therefore all of its untracked entries

    def by_ours(self, path: str) -> bool | None:
        """Return the decision of `.sgpuignore` for an entry. A directory's path must end in ``/``."""
        return _decide(self.ours, path)

    def by_git(self, path: str) -> bool:
        """Return True if git's patterns ignore an entry of this directory."""
        return self.all or bool(_decide(self.git, path))

    def below(self, directory: str, base: str, *, begins: bool = False) -> IgnoreRules:
        """Return the ignore rules for a subdirectory, including its own pattern files.

        If the subdirectory is another repository, git's outer rules do not apply. `base` is the subdirectory's path
        relative to the top, ending in ``/``, or "".
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
    """Return the patterns in a file, or None if the file contains no patterns."""
    try:
        with open(file, "rb") as opened:
            text = opened.read(_PATTERNS_BYTES_MAX).decode("utf-8-sig", errors="surrogateescape")
    except OSError:  # Most directories do not contain a pattern file. Git also skips pattern files that it cannot read.
        return None
    return parse_patterns(text, base, above)


def parse_patterns(text: str, base: str = "", above: str = "") -> IgnorePatterns | None:
    """Parse a text in git's pattern syntax, and return its patterns or None if there are no patterns."""
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
    """Return the ignore rules of a directory's parents in its repository, and the rules' files.

    If the repository ignores the whole directory, no outer rule applies, because the user runs code in the directory.
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
    """Return a `pathspec` expression that matches a path but not the paths below it."""
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
    """Yield git's pattern files above a directory, lowest precedence first, with path prefixes."""
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
    """Return a directory's parents in its repository, outermost first, with the relative paths."""
    if repository is None:
        return []
    between = [str(path) for path in Path(top).parents if str(path) == repository or _relative(str(path), repository)]
    return [(path, _relative(top, path)) for path in reversed(between)]


def _is_ignored(inside: str, git: Sequence[IgnorePatterns]) -> bool:
    """Return True if a repository ignores a directory (a path ending in ``/``) or one of its parents."""
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
    """Return a path relative to `above`, ending in ``/``, or "" for a path outside of `above`."""
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
    """Return the git directory of a repository, or of a worktree whose `.git` file names the directory."""
    git = f"{repository}/.git"
    try:
        with open(git, encoding="utf-8", errors="surrogateescape") as file:
            return os.path.join(repository, file.read(4096).strip().removeprefix("gitdir:").strip())
    except OSError:
        return git


def user_patterns() -> tuple[str, tuple[str, ...]]:
    """Return the path of the user's pattern file or "", and the settings files that may set this path."""
    configured = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    settings = (SYSTEM, os.path.join(configured, "git", "config"), os.path.join(os.path.expanduser("~"), ".gitconfig"))
    found = os.path.join(configured, "git", "ignore")
    for file in settings:
        try:
            with open(file, "rb") as opened:
                said = excludes_file(opened.read(_SETTINGS_BYTES_MAX).decode(errors="surrogateescape"))
        except OSError:  # Most of git's possible settings files do not exist.
            continue
        found = found if said is None else said
    return found, settings


def excludes_file(text: str) -> str | None:
    """Return the last `core.excludesFile` value in a settings file's text, or None."""
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
    """Return the value of a git setting without quotes, escapes and trailing comment."""
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

    `inside` is the directory's path relative to the repository, ending in ``/``, or "". All returned paths are relative
    to the directory.
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
    """Return the modification time of git's index in nanoseconds, or 0 if the index is missing."""
    try:
        return os.stat(index).st_mtime_ns
    except OSError:
        return 0


def _paths(data: bytes) -> Iterator[bytes]:
    """Yield the paths of all files, links and submodules in a git index.

    Raises ValueError, IndexError: the data are not a git index of a known version.
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
        # This function skips the directories that a sparse index lists.
        if kind in (0b1000, 0b1010, 0b1110):
            yield path
    if data[at : at + 4] == b"link":
        raise ValueError("this index file lacks entries, because git's index is split")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Decode a variable-length number, and return it with the position of the next byte."""
    byte = data[at]
    value = byte & 127
    while byte & 128:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 127)
    return value, at + 1
