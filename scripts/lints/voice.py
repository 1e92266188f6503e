"""Prose that people read: docstrings, comments and messages of `src`, and the pages.

The rules are those of CONTRIBUTING.md, "Prose". The lint finds what a regular expression can find:

    phrase     a turn of phrase that hides the actor ("nobody", "is told", "of which")
    opening    a docstring that opens with What, Who, Whether, That, How, Where, When or Which
    summary    a first line of a docstring of over 100 characters
    sentence   a sentence of over 25 words; code counts as one word, pictures, tables and examples do not count
    width      a line of a page of over 120 characters

Records of decisions keep the words of their day: only their width counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.lints.source import Finding, Source, parse

AREAS = ("src",)
WORDS_MAX = 25
SUMMARY_MAX = 100
WIDTH_MAX = 120

_PHRASE = re.compile(
    r"\b(whoever|whatever it was|nobody(?!-)|somebody|anybody|anew|likewise|of which|of whom"
    r"|(?:is|are|was|were|be|been|being) (?:said|told)|has it that|there (?:is|are) (?:none|nobody)"
    r"|is no (?:kind|identifier|name)|what (?:is|was) there|who is there|what (?:comes|came|becomes) of"
    r"|as it was heard|what there is to|the others'(?= )|to be had)",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(What|Who|Whose|Whom|Whether|That|How|Where|When|Which)\b")
_CODE = re.compile(r"!\[[^\]]*\]\([^)]*\)|``.*?``|`[^`]*`|https?://\S+|\([^()]*\.\w+\)")
_PICTURE = re.compile(r"[─│└┌├▶◀┐┘▼▲═╌]")
_END = re.compile(r"(?<=[.!?:])[\"')*_”]*\s+(?=[\"'(*_`“\[A-Z0-9])|\n\s*\n")
_FENCE = re.compile(r"^\s*(```|~~~)")
_TABLE = re.compile(r"^\s*(\||[-=+ ]+$)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>|:|!!!)\s")


def check(source: Source) -> Iterator[Finding]:
    """Yield what the prose of one Python file breaks."""
    for number, text in _texts(source):
        for match in _PHRASE.finditer(text):
            yield source.finding(number, "voice", f"'{match[0]}' hides who acts: name the actor")
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                for message in _docstring(docstring):
                    yield source.finding(node.body[0].lineno, "voice", message)
    block: list[str] = []
    begin = last = 0
    for number, comment in source.comments():
        if number != last + 1:
            yield from (source.finding(begin, "voice", message) for message in long_sentences("\n".join(block)))
            block, begin = [], number
        block.append(comment.lstrip("#").strip())
        last = number
    yield from (source.finding(begin, "voice", message) for message in long_sentences("\n".join(block)))


def check_page(path: str, text: str) -> Iterator[Finding]:
    """Yield what a page breaks; of a record of a decision, its width."""

    def found(line: int, message: str) -> Finding:
        return Finding(path=path, line=line, rule="voice", message=message)

    decision = "docs/decisions/" in path
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > WIDTH_MAX and not re.match(r"\S*https?://\S+$", line.strip()):
            yield found(number, f"{len(line)} characters: wrap pages at {WIDTH_MAX}")
        if not decision:
            for match in _PHRASE.finditer(line):
                yield found(number, f"'{match[0]}' hides who acts: name the actor")
    if not decision:
        for number, paragraph in _paragraphs(text):
            yield from (found(number, message) for message in long_sentences(paragraph))


def pages(root: Path) -> list[Path]:
    """Return the pages of the repository that people read."""
    top = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted((root / "docs").rglob("*.md"))]


def check_path(path: Path) -> list[Finding]:
    """Return the findings of one file, Python or Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(check_page(path.as_posix(), text))
    return list(check(parse(path.as_posix(), text)))


def long_sentences(text: str) -> Iterator[str]:
    """Yield a message for each sentence that has too many words; pictures and indented examples are no sentences."""
    for sentence in _END.split(text):
        plain = _CODE.sub(" x ", sentence)
        words = re.findall(r"[^\W_][\w'’.,%/+-]*", plain)
        if len(words) > WORDS_MAX:
            yield f"a sentence of {len(words)} words (at most {WORDS_MAX}): '{' '.join(sentence.split())[:60]}…'"


def _texts(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment and every string: code is no prose."""
    yield from source.comments()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _docstring(docstring: str) -> Iterator[str]:
    summary = docstring.split("\n", 1)[0]
    if _OPENING.match(summary):
        yield f"a docstring opens with a verb phrase or a noun, not with '{summary.split()[0]}'"
    if len(summary) > SUMMARY_MAX:
        yield f"a summary of {len(summary)} characters (at most {SUMMARY_MAX})"
    kept: list[str] = []
    for line in docstring.splitlines():
        # Indented lines are pictures, tables or `Args:` whose entries are phrases: they are not counted.
        kept.append("" if line.startswith("    ") and _PICTURE.search(line) else line)
    prose = "\n".join("" if line.startswith("    ") else line for line in kept)
    yield from long_sentences(prose)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of a page with their line, without code and tables."""
    fenced = False
    begin, block = 1, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        apart = fenced or not line.strip() or bool(_FENCE.match(line) or _TABLE.match(line))
        if apart or _ITEM.match(line):
            if block:
                yield begin, "\n".join(block)
            begin, block = number, []
        if not apart:
            block.append(_ITEM.sub("", line))
            begin = begin if len(block) > 1 else number
    if block:
        yield begin, "\n".join(block)
