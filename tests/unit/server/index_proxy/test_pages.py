"""Project pages through the index proxy: what clients need stays, and nothing else does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.index_proxy import pages
from serverless_gpu.server.index_proxy.definition import checked

SIGN = Keys(b"k" * 32).link_signature
INDEX = checked("main", "https://index.example/simple/", file_hosts=("files.example",))
URL = "https://index.example/simple/x/"
SHA = "0123456789abcdef" * 4


def rewritten(data: str, kind: str = "text/html") -> pages.Rewritten:
    return pages.rewrite(INDEX, kind, data.encode(), url=URL, project="x", sign=SIGN)


def page(*files: object, **more: object) -> str:
    return json.dumps({"meta": {"api-version": "1.1"}, "name": "x", "files": files, **more})


def test_html_keeps_hashes_metadata_yanks_and_required_pythons() -> None:
    found = rewritten(
        f"""<html><head><meta name="pypi:repository-version" content="1.3"><base href="https://files.example/a/"></head>
        <a href="x-1.whl#sha256={SHA}" data-requires-python="&gt;=3.9" data-core-metadata="sha256=ab"
           data-dist-info-metadata="sha256=ab" data-yanked="bad &quot;&lt;b&gt;" onclick="evil()">x-1.whl</a>
        <script>alert(1)</script></html>"""
    )
    text = found.body.decode()
    assert found.files == 1 and found.content_type.startswith("text/html")
    assert re.search(rf'href="\.\./\.\./files/[^"]+/{SHA}/https/files\.example/a/x-1\.whl#sha256={SHA}"', text)
    for kept in ('data-requires-python="&gt;=3.9"', 'data-core-metadata="sha256=ab"', 'content="1.3"', ">x-1.whl</a>"):
        assert kept in text
    assert "alert" not in text and "onclick" not in text and "<b>" not in text


def test_json_keeps_what_clients_read() -> None:
    file: dict[str, Any] = {
        "filename": "x-1.whl",
        "url": "https://files.example/a/x-1.whl",
        "hashes": {"sha256": SHA},
        "requires-python": ">=3.9",
        "core-metadata": {"sha256": "ab"},
        "yanked": "bad",
        "size": 7,
        "upload-time": "2026-11-30T00:00:00Z",
    }
    found = rewritten(page({**file, "gpg-sig": True, "provenance": "https://evil.example"}, versions=["1"]), pages.JSON)
    made = json.loads(found.body)
    (one,) = made["files"]
    assert one.pop("url").endswith(f"/{SHA}/https/files.example/a/x-1.whl")
    file.pop("url")
    assert one == file
    assert (made["name"], made["versions"], made["meta"]) == ("x", ["1"], {"api-version": "1.1"})


def test_foreign_links_are_left_out_and_named() -> None:
    found = rewritten('<a href="https://evil.example/x-1.whl">x</a><a href="https://files.example/x-2.whl">x-2.whl</a>')
    assert (found.files, found.left_out) == (1, ("https://evil.example",))
    assert b"evil" not in found.body
    found = rewritten(page({"filename": "x-1.whl", "url": "http://169.254.169.254/x-1.whl"}), pages.JSON)
    assert (found.files, found.left_out) == (0, ("http://169.254.169.254",))
    found = rewritten(page({"filename": "../x-1.whl", "url": "https://files.example/x-1.whl"}), pages.JSON)
    assert found.files == 0 and found.left_out


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("application/json", "{}"),
        ("", "<a>"),
        (pages.JSON, "{"),
        (pages.JSON, "[]"),
        (pages.JSON, "{}"),
        (pages.JSON, page(7)),
        (pages.JSON, page({"filename": "x-1.whl"})),
        (pages.JSON, page().replace("1.1", "2.0")),
        ("text/html", '<meta name="pypi:repository-version" content="2.0">'),
        ("text/html", '<base href="https://[x"><a href="y">y</a>'),
    ],
)
def test_another_page_is_refused(kind: str, data: str) -> None:
    with pytest.raises(pages.InvalidPage):
        rewritten(data, kind)


def test_a_hostile_page_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FILES_MAX", 3)
    with pytest.raises(pages.InvalidPage):
        rewritten('<a href="y-1.whl">y</a>' * 5)
    monkeypatch.setattr(pages, "PARSE_S", -1.0)
    with pytest.raises(pages.InvalidPage):
        rewritten("<!--" * 10)


@given(st.text())
def test_any_html_is_a_page_or_refused(data: str) -> None:
    try:
        found = rewritten(data)
    except pages.InvalidPage:
        return
    assert found.body.decode().count("<a ") == found.files
