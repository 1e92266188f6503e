"""Requires a reason for each broad `except`, and limits their number.

`except Exception` in the middle of a program hides every bug. It is right where a loop or foreign code must not end the
process. Such a line has a short reason: `except Exception as error: # noqa: BLE001 - user code may raise anything`. The
lints print the number per 1,000 lines of src on every run, and fail above a limit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from scripts.lints.source import Finding, Source

AREAS = ("src", "scripts")
# The goal is 1 per 1,000 lines. A small tree has many boundaries, so the limit starts here and falls as the tree grows.
PER_1000_LINES_MAX = 3.0
REASON_WORDS_MIN = 2
_DIRECTIVE = re.compile(r"#\s*noqa(?::\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?|#\s*pragma:[^#]*")


def check(source: Source) -> Iterator[Finding]:
    """Yield each broad except without a reason on its line."""
    comments = dict(source.comments)
    for handler in broad_handlers(source):
        if len(re.findall(r"\w+", _DIRECTIVE.sub("", comments.get(handler.lineno, "")))) < REASON_WORDS_MIN:
            message = "a broad except needs its reason on the same line: # noqa: BLE001 - why; or name the exceptions"
            yield source.finding(handler.lineno, "broad-except", message)


def broad_handlers(source: Source) -> list[ast.ExceptHandler]:
    """Return the handlers that swallow every exception. A handler that ends in `raise` does not count."""
    handlers = (node for node in source.nodes if isinstance(node, ast.ExceptHandler))
    return [handler for handler in handlers if _is_broad(handler.type) and not _raises_again(handler)]


def per_1000_lines(sources: Sequence[Source]) -> float:
    """Return the broad excepts per 1,000 lines of src. A tree with fewer lines counts as 1,000 lines."""
    ours = [source for source in sources if source.area == "src"]
    lines = sum(source.line_count for source in ours)
    return 1000 * sum(len(broad_handlers(source)) for source in ours) / max(lines, 1000)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(item) for item in caught.elts)
    return isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")
