"""Checks the prose that people read: docstrings, comments and messages of `src`, and the pages.

CONTRIBUTING.md, "Prose", lists the rules. The lint checks those that a regular expression can check:

    phrase     a turn of phrase that hides the actor ("nobody", "is told", "of which")
    opening    a docstring that opens with What, Who, Whether, That, How, Where, When or Which
    summary    a first line of a docstring of over 100 characters
    sentence   a sentence of over 25 words; code counts as one word, pictures, tables and examples do not count
    width      a line of a page of over 120 characters

Records of decisions keep their original wording, so the lint checks only their width.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.lints.source import Finding, Source

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

AREAS = ("src",)
WORDS_MAX = 25
SUMMARY_MAX = 100
WIDTH_MAX = 120

_PHRASE = re.compile(
    r"\b(whoever|whatever it was|nobody(?!-)|somebody|anew|likewise|of which|of whom"
    r"|(?:is|are|was|were|be|been|being) (?:said|told)|has it that|there (?:is|are) (?:none|nobody)"
    r"|is no (?:kind|identifier|name)|what (?:is|was) there|who is there|what (?:comes|came|becomes) of"
    r"|as it was heard|what there is to|the others'(?= )|to be had)",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(What|Who|Whose|Whom|Whether|That|How|Where|When|Which)\b")
_CODE = re.compile(r"!\[[^\]]*\]\([^)]*\)|``.*?``|`[^`]*`|https?://\S+|\([^()]*\.\w+\)")
_END = re.compile(r"(?<=[.!?:])[\"')*_”]*\s+(?=[\"'(*_`“\[A-Z0-9])|\n\s*\n")
_FENCE = re.compile(r"^\s*(```|~~~)")
_TABLE = re.compile(r"^\s*(\||[-=+ ]+$)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>|:|!!!)\s")


def check(source: Source) -> Iterator[Finding]:
    """Yield what the prose of one Python file breaks."""
    for number, text in _texts(source):
        for match in _PHRASE.finditer(text):
            yield source.finding(number, "voice", f"'{match[0]}' hides who acts: name the actor")
    for node in documented(source.nodes):
        for message in _summary(ast.get_docstring(node) or ""):
            yield source.finding(node.body[0].lineno, "voice", message)
    for line, text in prose(source):
        yield from (source.finding(line, "voice", message) for message in long_sentences(text))


def documented(nodes: Iterable[ast.AST]) -> Iterator[Documented]:
    """Yield the module, classes and functions that have a docstring."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            yield node


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, without pictures and examples, and of every block of comments."""
    for node in documented(source.nodes):
        text = (ast.get_docstring(node) or "").splitlines()
        # Indented lines are pictures, tables or the entries of `Args:`, which are phrases.
        yield node.body[0].lineno, "\n".join("" if line.startswith("    ") else line for line in text)
    block: list[str] = []
    begin = last = 0
    for number, comment in source.comments:
        if number != last + 1:
            if block:
                yield begin, "\n".join(block)
            block, begin = [], number
        block.append(comment.lstrip("#").strip())
        last = number
    if block:
        yield begin, "\n".join(block)


def check_page(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in a page. For a record of a decision, check only the width."""

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
        for number, paragraph in paragraphs(text):
            yield from (found(number, message) for message in long_sentences(paragraph))


def pages(root: Path) -> list[Path]:
    """Return the pages of the repository that people read."""
    top = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [page for page in (*top, *sorted((root / "docs").rglob("*.md"))) if page.is_file()]


def page_findings(root: Path) -> Iterator[Finding]:
    """Yield what the pages of the repository break."""
    for page in pages(root):
        yield from check_page(page.relative_to(root).as_posix(), page.read_text(encoding="utf-8"))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text; a colon before a capital ends one, too."""
    return [sentence for sentence in _END.split(text) if sentence]


def long_sentences(text: str) -> Iterator[str]:
    """Yield a message for each sentence that has too many words."""
    for sentence in split_sentences(text):
        words = re.findall(r"[^\W_][\w'’.,%/+-]*", _CODE.sub(" x ", sentence))
        if len(words) > WORDS_MAX:
            yield f"a sentence of {len(words)} words (at most {WORDS_MAX}): '{' '.join(sentence.split())[:60]}…'"


def _texts(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment and every string."""
    yield from source.comments
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _summary(docstring: str) -> Iterator[str]:
    summary = docstring.split("\n", 1)[0]
    if _OPENING.match(summary):
        yield f"a docstring opens with a verb phrase or a noun, not with '{summary.split()[0]}'"
    if len(summary) > SUMMARY_MAX:
        yield f"a summary of {len(summary)} characters (at most {SUMMARY_MAX})"


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of a page with their line numbers, without code and tables."""
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
