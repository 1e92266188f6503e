"""Translates between file URLs of an index and links of the proxy. Pure, except for the signing key.

    https://files.pythonhosted.org/packages/ab/cd/x-1-py3-none-any.whl#sha256=…
      ─▶ files/<signature>/<sha256>/https/files.pythonhosted.org/packages/ab/cd/x-1-py3-none-any.whl#sha256=…

The proxy fetches only URLs that a page of the index contained, because each link has a signature of the server. Without
signatures, a client could use the credentials of a private index for any request to the index's host. Links do not
change at a restart, and the proxy stores none of them.

Clients quote paths in their own ways. The signature is therefore over a canonical path, in which all characters are
quoted except letters, digits and `_.-~`. The metadata of a wheel (PEP 658) has the wheel's link with the ending
`.metadata`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

import msgspec

from serverless_gpu.server.index_proxy.definition import IndexDefinition, authority_of

FILES = "files"
METADATA_SUFFIX = ".metadata"
URL_CHARACTERS_MAX = 2_000
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!~-]{0,254}")
NO_HASH = "-"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"https?")
_PLAIN = re.compile(r"(/(?!\.\.?(/|$))[A-Za-z0-9_.~-]+)+")
_UNSAFE = re.compile(rb"[\x00-\x1f\x7f\\]")
_FRAGMENT = re.compile(r"[A-Za-z0-9=&._+-]{0,300}")

Signer = Callable[[str], str]


class FileLink(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an index, as a link of the proxy names it.

    Attributes:
        url: URL at the index, without credentials and fragment.
        sha256: expected hash of the file in hexadecimal; "" if the page contained none, and for metadata.
        file: name of the file.
        is_metadata: True for the metadata of a wheel.
    """

    url: str
    sha256: str
    file: str
    is_metadata: bool = False


class ForeignLink(ValueError):
    """A link of a page that the proxy does not serve. The message names the host or the fault."""


def to_proxy(index: IndexDefinition, base: str, href: str, sign: Signer, *, sha256: str = "") -> str:
    """Return a file URL of a page as a link relative to the index's root. Raises ForeignLink.

    Args:
        index: the definition of the index.
        base: URL of the page.
        href: URL in the page, which may be relative.
        sign: returns the signature of a text.
        sha256: hash of the file, for pages that do not write it into the fragment.
    """
    try:
        url = href.strip()
        url = url if url.startswith(("https://", "http://")) else urljoin(base, url)
        parts = urlsplit(url)
        host = authority_of(parts)
    except ValueError:
        raise ForeignLink("invalid URL") from None
    if len(url) > URL_CHARACTERS_MAX:
        raise ForeignLink("URL too long")
    if not index.has_host(parts.scheme, host):
        raise ForeignLink(f"{parts.scheme}://{host}"[:100])
    path = _canonical(parts.path)
    if not FILE_NAME.fullmatch(_file_name(path)):
        raise ForeignLink("invalid file name")
    query = parts.query
    if not query.isascii() or not query.isprintable() or any(letter in query for letter in ' "<>'):
        raise ForeignLink("invalid URL")
    fragment = parts.fragment if _FRAGMENT.fullmatch(parts.fragment) else ""
    sha256 = sha256 or _hash_in(fragment)
    sha256 = sha256.lower() if _SHA256.fullmatch(sha256.lower()) else NO_HASH
    signature = sign(_signed(index.name, sha256, parts.scheme, host, path, query))
    link = f"{FILES}/{signature}/{sha256}/{parts.scheme}/{host}{path}"
    return link + (f"?{query}" if query else "") + (f"#{fragment}" if fragment else "")


def from_proxy(index: IndexDefinition, rest: str, query: str, sign: Signer) -> FileLink | None:
    """Return the file of a link, or None for a link that the proxy did not write for this index.

    `rest` is the quoted path after `files/`.
    """
    parts = rest.split("/", 4)
    if len(parts) != 5:
        return None
    signature, sha256, scheme = parts[:3]
    host = unquote_to_bytes(parts[3]).decode("ascii", "replace")
    if not (sha256 == NO_HASH or _SHA256.fullmatch(sha256)) or not _SCHEME.fullmatch(scheme):
        return None
    if not index.has_host(scheme, host):  # The definition may have changed since the page.
        return None
    try:
        path = _canonical(f"/{parts[4]}")
    except ForeignLink:
        return None
    whole = path.removesuffix(METADATA_SUFFIX)
    for signed in dict.fromkeys((path, whole)):
        expected = sign(_signed(index.name, sha256, scheme, host, signed, query))
        if signature.isascii() and hmac.compare_digest(signature, expected):
            is_metadata = signed != path
            return FileLink(
                url=f"{scheme}://{host}{path}" + (f"?{query}" if query else ""),
                sha256="" if is_metadata or sha256 == NO_HASH else sha256,
                file=_file_name(path),
                is_metadata=is_metadata,
            )
    return None


def _signed(*parts: str) -> str:
    return "\n".join(parts)


def _canonical(path: str) -> str:
    """Return a path with one way of quoting. Raises ForeignLink."""
    if _PLAIN.fullmatch(path):  # Most paths. A page can contain 100,000 of them.
        return path
    segments = [unquote_to_bytes(segment) for segment in path.split("/")[1:]]
    if not segments or any(segment in (b"", b".", b"..") or _UNSAFE.search(segment) for segment in segments):
        raise ForeignLink("invalid path")
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)


def _file_name(path: str) -> str:
    return unquote_to_bytes(path.rpartition("/")[2]).decode("utf-8", "replace")


def _hash_in(fragment: str) -> str:
    return next((part[len("sha256=") :] for part in fragment.split("&") if part.startswith("sha256=")), "")
