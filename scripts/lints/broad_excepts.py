"""A broad `except` stands at a true boundary, says why on its line, and is rare.

`except Exception` in the middle of a program turns every bug into silence. Where a loop or foreign code must not take
us down it is right, and then the reason is one short comment: `except Exception as error: # noqa: BLE001 - user code
may raise anything`. The number per 1,000 lines of src is printed on every run and bounded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from scripts.lints.source import Finding, Source

AREAS = ("src", "scripts")
# The aim is 1 per 1,000; a small tree is mostly boundary, so the gate starts here and is lowered as it grows.
PER_1000_LINES_MAX = 3.0
REASON_WORDS_MIN = 2
_DIRECTIVE = re.compile(r"#\s*noqa(?::\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?|#\s*pragma:[^#]*")


def check(source: Source) -> Iterator[Finding]:
    """Yield broad excepts without a reason on their line."""
    comments = dict(source.comments())
    for handler in broad_handlers(source):
        if len(re.findall(r"\w+", _DIRECTIVE.sub("", comments.get(handler.lineno, "")))) < REASON_WORDS_MIN:
            message = "a broad except needs its reason on the same line: # noqa: BLE001 - why; or name the exceptions"
            yield source.finding(handler.lineno, "broad-except", message)


def broad_handlers(source: Source) -> list[ast.ExceptHandler]:
    """Return the handlers of this file that swallow everything; one that ends in `raise` only tidies up."""
    handlers = (node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler))
    return [handler for handler in handlers if _is_broad(handler.type) and not _raises_again(handler)]


def per_1000_lines(sources: Sequence[Source]) -> float:
    """Return broad excepts per 1,000 lines of src; a tree of fewer than 1,000 lines counts as 1,000."""
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
