"""Run our lints over the current directory: `python -m scripts.lints`. Exit status 1 when anything is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from scripts.lints import (
    broad_excepts,
    clock,
    inner_imports,
    inside_room,
    names,
    sentences,
    transactions,
    type_ignores,
    unpickling,
)
from scripts.lints.source import Finding, Source, collect

LINTS: tuple[ModuleType, ...] = (
    broad_excepts,
    clock,
    inner_imports,
    inside_room,
    names,
    transactions,
    type_ignores,
    unpickling,
)


def findings(sources: Sequence[Source]) -> Iterator[Finding]:
    """Yield everything our lints have to say about these files, file by file."""
    for source in sources:
        for lint in LINTS:
            if source.area in lint.AREAS:
                yield from lint.check(source)


def main() -> int:
    """Check the tree in the current directory; return the exit status."""
    sources = collect(Path.cwd())
    found = list(findings(sources))
    for finding in found:
        print(finding)
    broad = broad_excepts.per_1000_lines(sources)
    too_many = broad > broad_excepts.PER_1000_LINES_MAX
    literal = sentences.literals(sources)
    if len(literal) > sentences.SENTENCES_MAX:
        print(
            *(f"{path}:{line}: sentence in an assertion: name it in tests/golden" for path, line in literal), sep="\n"
        )
    limit = f"{broad:.1f} broad excepts per 1,000 lines of src (limit {broad_excepts.PER_1000_LINES_MAX:.1f})"
    print(f"lints: {len(sources)} files, {len(found)} findings, {limit}{': too many' if too_many else ''}")
    return 1 if found or too_many or len(literal) > sentences.SENTENCES_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
