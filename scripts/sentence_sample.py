"""Print sentences of the repository at random: `python -m scripts.sentence_sample SEED [COUNT]`.

A reader who has only these sentences and the rules of CONTRIBUTING.md, "Prose", judges the sample. The seed is the hash
of the last commit, so a sample cannot be chosen.

    src     docstrings, comments, and strings of four words or more
    pages   paragraphs and list items, without code and tables

Each file counts by its number of sentences. Pictures, code and tables are no sentences.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.lints import voice
from scripts.lints.source import Source, collect

ROOT = Path(__file__).parents[1]
WORDS_MIN = 4
# A query, a regular expression, HTML.
_CODE = re.compile(r"^(SELECT|INSERT|UPDATE|DELETE|CREATE|LOCK|PRAGMA|WITH)\b|\(\?|\[\^|\\[dsw]|</?[a-z]+[ >]")


def sentences(root: Path) -> list[str]:
    """Return every sentence of src and of the pages, with its file and line."""
    found = [
        f"{source.path}:{line}: {text}"
        for source in collect(root)
        if source.area == "src"
        for line, text in _of_source(source)
    ]
    for page in voice.pages(root):
        name = page.relative_to(root).as_posix()
        if "/decisions/" not in name:
            found += [f"{name}:{line}: {text}" for line, text in _of_page(page.read_text(encoding="utf-8"))]
    return found


def _of_source(source: Source) -> Iterator[tuple[int, str]]:
    for line, text in voice.prose(source):
        yield from ((line, each) for each in _split(text))
    docstrings = {id(part) for node in voice.documented(source.nodes) for part in ast.walk(node.body[0])}
    for node in source.nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)
            docstrings |= {id(part) for part in node.values}
            yield from ((node.lineno, each) for each in _split("".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from ((node.lineno, each) for each in _split(node.value))


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    for line, paragraph in voice.paragraphs(text):
        yield from ((line, each) for each in _split(paragraph))


def _split(text: str) -> Iterator[str]:
    for sentence in voice.split_sentences(text):
        plain = " ".join(sentence.split())
        if len(re.findall(r"\b[A-Za-z]{2,}\b", plain)) >= WORDS_MIN and not _CODE.search(plain):
            yield plain


def main() -> int:
    """Print the sample; return the exit status."""
    if len(sys.argv) < 2:
        print("usage: python -m scripts.sentence_sample SEED [COUNT]", file=sys.stderr)
        return 2
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    for sentence in random.Random(sys.argv[1]).sample(sentences(ROOT), count):
        print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
