"""Checks that relative links in Markdown files lead to existing files and headings.

A moved page breaks links in other pages. A changed heading breaks the links to it. Run it as
`python -m scripts.lints.links`. It does not check addresses on the network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from scripts.lints.source import Finding

_LINK = re.compile(r"\]\(\s*<?([^)<>\s]+)>?(?:\s+[\"'][^)]*)?\)|^\s{0,3}\[[^\]^]+\]:\s+<?(\S+?)>?(?:\s|$)")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//")
_FENCE = re.compile(r"^\s*(```|~~~)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
_LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_DROPPED = re.compile(r"[^\w\- ]")
_NAMED = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']")
_NOT_OURS = frozenset({"node_modules", "build", "dist", "vendor"})


def check(root: Path) -> Iterator[Finding]:
    """Yield each relative link of a Markdown file under `root` whose target or heading does not exist."""
    for page in sorted(_pages(root)):
        for line, target in _links(page.read_text(encoding="utf-8")):
            if problem := _problem(root, page, target):
                message = f"link to {target}, {problem}"
                yield Finding(path=page.relative_to(root).as_posix(), line=line, rule="broken-link", message=message)


def main() -> int:
    """Check the Markdown files under the current directory. Return the exit status."""
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


def _problem(root: Path, page: Path, target: str) -> str:
    """Return the problem of a link, or "" if its target exists."""
    path, _, anchor = target.partition("#")
    path = unquote(path.partition("?")[0])
    base = root if path.startswith("/") else page.parent
    leads_to = base / path.lstrip("/") if path else page
    if not leads_to.exists():
        return "which does not exist"
    if anchor and leads_to.suffix == ".md" and unquote(anchor) not in _anchors(leads_to.read_text(encoding="utf-8")):
        return "where no heading has this anchor"
    return ""


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page: those that GitHub makes from headings, and explicit ones."""
    found: set[str] = set(_NAMED.findall(text))
    fence = ""
    for line in text.splitlines():
        if mark := _FENCE.match(line):
            fence = "" if fence == mark[1] else fence or mark[1]
        elif not fence and (heading := _HEADING.match(line)):
            words = _LINKED.sub(r"\1", heading[1]).strip().lower()
            anchor = first = _DROPPED.sub("", words).replace(" ", "-")
            count = 0
            while anchor in found:
                count += 1
                anchor = f"{first}-{count}"
            found.add(anchor)
    return found


def _links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and target of each relative link outside of code."""
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
