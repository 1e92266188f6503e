"""Runs the lints over the current directory: `python -m scripts.lints`.

The exit status is 1 if a lint has findings.
"""

from __future__ import annotations

import gc
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
    voice,
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
    voice,
)


def findings(sources: Sequence[Source]) -> Iterator[Finding]:
    """Yield the findings of all lints, file by file."""
    for source in sources:
        for lint in LINTS:
            if source.area in lint.AREAS:
                yield from lint.check(source)


def main() -> int:
    """Check the tree in the current directory. Return the exit status."""
    gc.disable()  # the trees live until the end, and looking through them for garbage takes seconds
    root = Path.cwd()
    sources = collect(root)
    found = [*findings(sources), *voice.page_findings(root)]
    for finding in found:
        print(finding)
    broad = broad_excepts.per_1000_lines(sources)
    too_many = broad > broad_excepts.PER_1000_LINES_MAX
    literal = sentences.literals(sources)
    if len(literal) > sentences.SENTENCES_MAX:
        print(
            *(
                f"{path}:{line}: sentence in an assertion: move it to tests/golden and name its key"
                for path, line in literal
            ),
            sep="\n",
        )
    limit = f"{broad:.1f} broad excepts per 1,000 lines of src (limit {broad_excepts.PER_1000_LINES_MAX:.1f})"
    print(f"lints: {len(sources)} files, {len(found)} findings, {limit}{': too many' if too_many else ''}")
    return 1 if found or too_many or len(literal) > sentences.SENTENCES_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
