"""Builds the documentation site: `python -m scripts.site` (`make site`).

    docs/*.md + code ──Sphinx -W──▶ build/site/<version>/   the pages of this version, with a search that works offline
                                    build/site/versions.js   all versions there, for the menu in the sidebar
                                    build/site/index.html    leads to this version

A version stays in build/site until it is deleted, so building each release there makes one site of all of them. Sphinx
fails for a broken link inside the site. For links to other sites, this module checks that they can be parsed.
"""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from serverless_gpu.version import __version__

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
_DOCTREES = SITE.parent / "site-doctrees"


class _Links(html.parser.HTMLParser):
    """Collects the addresses of a page's links to other sites, and the scripts that the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Store the address of a link."""
        for name, value in attrs:
            if name == "href" and value and ":" in value.partition("/")[0]:
                self.external.append(value)
            elif (tag, name) == ("script", "src") and value:
                self.scripts.append(value)


def bad_links(page: Path) -> list[str]:
    """Return the links of an HTML page that are not valid web or mail addresses, and its missing scripts."""
    parser = _Links()
    parser.feed(page.read_text(encoding="utf-8"))
    missing = [script for script in parser.scripts if not (page.parent / script.partition("?")[0]).is_file()]
    return [*(link for link in parser.external if not _is_address(link)), *missing]


def _is_address(link: str) -> bool:
    try:
        parts = urlsplit(link)
    except ValueError:
        return False
    return bool(parts.netloc) if parts.scheme in ("http", "https") else parts.scheme == "mailto"


def main() -> int:
    """Build the site. Return the exit status."""
    target = SITE / __version__
    shutil.rmtree(target, ignore_errors=True)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(_DOCTREES), "docs", str(target)],
        cwd=ROOT,
        check=False,
    )
    if built.returncode:
        return built.returncode
    versions = [each.name for each in SITE.iterdir() if (each / "index.html").is_file()]
    versions.sort(key=lambda version: [int(number) for number in re.findall(r"\d+", version)], reverse=True)
    (SITE / "versions.js").write_text(f"window.SITE_VERSIONS = {json.dumps(versions)};\n", encoding="utf-8")
    broken = [
        f"{page.relative_to(target)}: {link}" for page in sorted(target.rglob("*.html")) for link in bad_links(page)
    ]
    for each in broken:
        print(f"error: not a valid address or script: {each}", file=sys.stderr)
    redirect = f'<!doctype html><meta http-equiv="refresh" content="0; url={__version__}/index.html">\n'
    (SITE / "index.html").write_text(redirect, encoding="utf-8")
    print(f"built {target.relative_to(ROOT) / 'index.html'}: open it in a browser")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
