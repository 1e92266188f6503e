"""The code of the documentation as scripts that can be run: what a reader would copy, in the order he would.

    page ── ```python blocks ──▶ scripts      each block one script, unless it continues the one before
         └─ ```ipython blocks ─▶ notebooks    the same, each block one cell

A comment right above a block says how it differs from "put it into a file and run it":

    <!-- test: skip because it needs pyspark -->    never run; the reason is needed
    <!-- test: heavy -->                            run by `make test-all` only
    <!-- test: continues -->                        goes on where the block before it ended
    <!-- test: named train.py -->                   the file's name, so that later blocks can import it
    <!-- test: alone -->                            run as rank 0 of 1, with the variables torchrun would set
    <!-- test: server -->                           run with `sgpu up` running in the reader's home
    <!-- test: ray -->                              run where Ray is installed, by `make test-all` only
    <!-- test: fake H100:8 -->                      run with these declared GPUs
    <!-- test: raises CollectiveHang -->            ends with this exception

Several are separated by commas. A comment after a `print(...)` is the line it prints, `...` stands for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.support.paths import REPOSITORY

PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<directive>[^\n]*?) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^<!-- *test\b", re.MULTILINE)
_INDENTED = re.compile(r"^ +```(?:i?python|console)", re.MULTILINE)
_PROMPT = re.compile(r"^\$ (.+)$", re.MULTILINE)
_VALUES = ("named", "fake", "raises")
_FLAGS = ("heavy", "continues", "alone", "server", "ray")


class DirectiveError(Exception):
    """A comment above a block says something this module does not know."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One script of a page.

    Attributes:
        page: the page's path in the repository.
        line: where its first block begins.
        blocks: its parts; cells, when it is a notebook.
        notebook: whether it runs in IPython.
        name: its file name, when the page gives one.
        skip: why it is not run, "" when it is.
        fake: the declared GPUs it runs with, "" for none.
        raises: the exception it ends with, "" when it ends well.
        heavy: whether it needs the extra `examples`.
        alone: whether it runs as rank 0 of 1.
        server: whether a server runs in the reader's home.
        ray: whether it runs in an environment with Ray.
    """

    page: str
    line: int
    blocks: tuple[str, ...]
    notebook: bool = False
    name: str = ""
    skip: str = ""
    fake: str = ""
    raises: str = ""
    heavy: bool = False
    alone: bool = False
    server: bool = False
    ray: bool = False

    @property
    def text(self) -> str:
        """Return the whole script."""
        return "\n\n".join(self.blocks)

    def expected(self) -> list[str]:
        """Return the lines it says it prints, as patterns."""
        return [".*".join(map(re.escape, said.split("..."))) for said in _PRINTED.findall(self.text)]


def pages() -> list[Path]:
    """Return every page whose code is run."""
    return sorted(path for pattern in PAGES for path in REPOSITORY.glob(pattern))


def scripts(page: str, text: str) -> list[Script]:
    """Return the scripts of a page.

    Raises:
        DirectiveError: a comment cannot be read.
    """
    if lost := len(_DIRECTIVE.findall(text)) - sum(match["directive"] is not None for match in _BLOCK.finditer(text)):
        raise DirectiveError(f"{page}: {lost} comments are not right above a block")
    if _INDENTED.search(text):
        raise DirectiveError(f"{page}: code inside a list is not found; put it at the beginning of the line")
    found: list[Script] = []
    for match in _BLOCK.finditer(text):
        if match["language"] not in ("python", "ipython"):
            if match["directive"] is not None:
                raise DirectiveError(f"{page}: a {match['language']} block is not run: {match['directive']}")
            continue
        notebook = match["language"] == "ipython"
        line = text.count("\n", 0, match.start("code"))
        given = _read(f"{page}:{line}", match["directive"] or "")
        if given.pop("continues", False):
            if not found or given or found[-1].notebook != notebook:
                raise DirectiveError(f"{page}:{line}: continues what, and what else?")
            found[-1] = msgspec.structs.replace(found[-1], blocks=(*found[-1].blocks, match["code"]))
        else:
            fields = {"page": page, "line": line, "blocks": (match["code"],), "notebook": notebook, **given}
            found.append(msgspec.convert(fields, Script))
    return found


def commands(text: str) -> Iterator[str]:
    """Yield every command of the ```console blocks of a page."""
    for match in _BLOCK.finditer(text):
        if match["language"] == "console":
            yield from _PROMPT.findall(match["code"])


def _read(where: str, directive: str) -> dict[str, object]:
    if directive.startswith("skip"):
        reason = directive.removeprefix("skip because ")
        if reason == directive or not reason.strip():
            raise DirectiveError(f"{where}: skip needs a reason: `skip because ...`")
        return {"skip": reason}
    given: dict[str, object] = {}
    for entry in filter(None, directive.split(",")):
        word, _, value = entry.strip().partition(" ")
        if word in _FLAGS and not value:
            given[word] = True
        elif word in _VALUES and value:
            given["name" if word == "named" else word] = value
        else:
            raise DirectiveError(f"{where}: {entry.strip()!r} is no directive")
    return given
