"""Relative links in Markdown files lead to files that exist.

A moved page breaks links in pages nobody opens during the move. Run as `python -m scripts.lints.links`; anchors and
addresses on the network are not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from scripts.lints.source import Finding

_LINK = re.compile(r"\]\(\s*<?([^)<>\s]+)>?(?:\s+[\"'][^)]*)?\)|^\s{0,3}\[[^\]^]+\]:\s+<?(\S+?)>?(?:\s|$)")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//|#")
_FENCE = re.compile(r"^\s*(```|~~~)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_NOT_OURS = frozenset({"node_modules", "build", "dist", "vendor"})


def check(root: Path) -> Iterator[Finding]:
    """Yield every relative link of a Markdown file under `root` whose target is not there."""
    for page in sorted(_pages(root)):
        for line, target in _links(page.read_text(encoding="utf-8")):
            path = unquote(target.partition("#")[0].partition("?")[0])
            base = root if path.startswith("/") else page.parent
            if not (base / path.lstrip("/")).exists():
                message = f"link to {target}, which does not exist"
                yield Finding(path=page.relative_to(root).as_posix(), line=line, rule="broken-link", message=message)


def main() -> int:
    """Check the Markdown files under the current directory; return the exit status."""
    findings = list(check(Path.cwd()))
    for finding in findings:
        print(finding)
    print(f"links: {len(findings)} broken")
    return 1 if findings else 0


def _pages(root: Path) -> Iterator[Path]:
    for entry in root.iterdir():
        if entry.name.startswith(".") or entry.name in _NOT_OURS or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _pages(entry)
        elif entry.suffix == ".md":
            yield entry


def _links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and target of relative links outside of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if mark := _FENCE.match(line):
            fence = "" if fence == mark[1] else fence or mark[1]
        elif not fence:
            for match in _LINK.finditer(_CODE_SPAN.sub("", line)):
                target = match[1] or match[2]
                if not _SCHEME.match(target):
                    yield number, target


if __name__ == "__main__":
    sys.exit(main())
