"""Rewrites project pages of an index in HTML (PEP 503) and JSON (PEP 691). Pure but for a time limit.

The proxy writes each page again from the parts that it knows. These are files with their links, hashes, required
Python, metadata (PEP 658, PEP 714), yanks, sizes and times. Scripts, signatures and other parts of a page are left out.
A link to a host outside the definition is left out too, and the request log names the host.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.server.index_proxy import links
from serverless_gpu.server.index_proxy.definition import IndexDefinition
from serverless_gpu.server.index_proxy.links import ForeignLink, Signer

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
PLAIN_HTML = "text/html"
TYPES = (JSON, HTML, PLAIN_HTML)
FILES_MAX = 200_000
TEXT_CHARACTERS_MAX = 500
PARSE_S = 20.0
"""Maximum seconds for one page, because a hostile page could keep the parser busy."""
_PIECE = 64 << 10
_ATTRIBUTES = ("data-requires-python", "data-core-metadata", "data-dist-info-metadata", "data-yanked")
_FILE_KEYS: dict[str, type | tuple[type, ...]] = {
    "hashes": dict,
    "requires-python": str,
    "core-metadata": (bool, dict),
    "dist-info-metadata": (bool, dict),
    "yanked": (bool, str),
    "size": int,
    "upload-time": str,
}
_VERSION = re.compile(r"1\.[0-9]{1,3}")


class InvalidPage(ValueError):
    """A page that is not a page of a simple repository."""


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the proxy.

    Attributes:
        content_type: media type of the page.
        body: the page.
        files: number of files.
        left_out: hosts or faults of links that the page does not contain, at most ten.
    """

    content_type: str
    body: bytes
    files: int
    left_out: tuple[str, ...] = ()


class _Rewriter:
    """Rewrites the links of one page."""

    def __init__(self, index: IndexDefinition, base: str, sign: Signer) -> None:
        self.base = base
        self.left_out: dict[str, None] = {}
        self.files = 0
        self._index = index
        self._sign = sign

    def link(self, href: str, sha256: str = "") -> str | None:
        """Return the proxy's link, or None for a link that the page must not contain."""
        if self.files >= FILES_MAX:
            raise InvalidPage(f"the page has more than {FILES_MAX} files")
        try:
            # A page is at /<index>/simple/<project>/, two levels below the index's root.
            link = "../../" + links.to_proxy(self._index, self.base, href, self._sign, sha256=sha256)
        except ForeignLink as error:
            if len(self.left_out) < 10:
                self.left_out[str(error)] = None
            return None
        self.files += 1
        return link


def rewrite(
    index: IndexDefinition, content_type: str, data: bytes, *, url: str, project: str, sign: Signer
) -> Rewritten:
    """Return a page whose links lead to the proxy. Raises InvalidPage.

    Args:
        index: the definition of the index.
        content_type: the `Content-Type` header of the index.
        data: the page.
        url: URL of the page at the index.
        project: normalized name of the project.
        sign: returns the signature of a text.
    """
    kind = content_type.partition(";")[0].strip().lower()
    rewriter = _Rewriter(index, url, sign)
    if kind == JSON:
        body = _rewritten_json(data, rewriter, project)
    elif kind in (HTML, PLAIN_HTML):
        body = _rewritten_html(data, rewriter, project)
        kind = f"{kind}; charset=utf-8" if kind == PLAIN_HTML else kind
    else:
        raise InvalidPage(f"the index answered with the type {kind[:60]!r}")
    return Rewritten(content_type=kind, body=body, files=rewriter.files, left_out=tuple(rewriter.left_out))


def _rewritten_json(data: bytes, rewriter: _Rewriter, project: str) -> bytes:
    try:
        page = from_json(data, dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidPage(f"the page is not valid JSON: {str(error)[:100]}") from None
    found, meta = page.get("files"), page.get("meta")
    version = str(meta.get("api-version", "")) if isinstance(meta, Mapping) else ""
    if not isinstance(found, list) or not _VERSION.fullmatch(version):
        raise InvalidPage("the page is not a project page of the simple API 1.x")
    files = []
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("url"), str):
            raise InvalidPage("a file of the page has no URL")
        name, hashes = one.get("filename"), one.get("hashes")
        if not isinstance(name, str) or not links.FILE_NAME.fullmatch(name):
            rewriter.left_out["invalid file name"] = None
            continue
        sha256 = hashes.get("sha256", "") if isinstance(hashes, dict) else ""
        link = rewriter.link(one["url"], sha256 if isinstance(sha256, str) else "")
        if link is not None:
            kept = {key: one[key] for key, kind in _FILE_KEYS.items() if isinstance(one.get(key), kind)}
            files.append({"filename": name, "url": link, "hashes": {}, **kept})
    made: dict[str, Any] = {"meta": {"api-version": version}, "name": project, "files": files}
    versions = page.get("versions")
    if isinstance(versions, list):
        made["versions"] = [text for text in versions if isinstance(text, str)]
    return msgspec.json.encode(made)


class _Anchors(HTMLParser):
    """Collects the links of a page, with the attributes and the text of each link."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.base: str | None = None
        self.version = "1.0"
        self.found: list[tuple[dict[str, str], list[str]]] = []
        self._is_open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in values:
            if len(self.found) >= FILES_MAX:
                raise InvalidPage(f"the page has more than {FILES_MAX} files")
            self.found.append((values, []))
            self._is_open = True
        elif tag == "base" and self.base is None and "href" in values:
            self.base = values["href"]
        elif tag == "meta" and values.get("name") == "pypi:repository-version":
            self.version = values.get("content", "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            text = self.found[-1][1]
            if len(text) < TEXT_CHARACTERS_MAX:
                text.append(data[:TEXT_CHARACTERS_MAX])


def _rewritten_html(data: bytes, rewriter: _Rewriter, project: str) -> bytes:
    anchors = _Anchors()
    until = time.monotonic() + PARSE_S
    text = data.decode("utf-8", "replace")
    for start in range(0, len(text), _PIECE):
        anchors.feed(text[start : start + _PIECE])
        if time.monotonic() > until:
            raise InvalidPage(f"the page took longer than {PARSE_S:.0f} s to read")
    anchors.close()
    if not _VERSION.fullmatch(anchors.version):
        raise InvalidPage(f"the page has the unknown version {anchors.version[:20]!r}")
    if anchors.base is not None:
        try:
            rewriter.base = urljoin(rewriter.base, anchors.base)
        except ValueError:
            raise InvalidPage("the page has an invalid base URL") from None
    lines = []
    for values, texts in anchors.found:
        link = rewriter.link(values["href"])
        if link is None:
            continue
        more = "".join(
            f' {name}="{html.escape(values[name][:TEXT_CHARACTERS_MAX])}"' for name in _ATTRIBUTES if name in values
        )
        shown = "".join(texts).strip()[:TEXT_CHARACTERS_MAX]
        lines.append(f'<a href="{html.escape(link)}"{more}>{html.escape(shown)}</a><br>')
    head = f'<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="{anchors.version}">'
    title = f"<title>Links for {html.escape(project)}</title></head><body>"
    return "\n".join((head + title, *lines, "</body></html>", "")).encode()
