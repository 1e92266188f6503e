"""Links of the index proxy: what a client asks for is what a page contained, and nothing else."""

from __future__ import annotations

from urllib.parse import quote, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.index_proxy import links
from serverless_gpu.server.index_proxy.definition import checked
from serverless_gpu.server.index_proxy.links import ForeignLink, from_proxy, to_proxy

SIGN = Keys(b"k" * 32).link_signature
INDEX = checked("main", "https://index.example/simple/", file_hosts=("files.example", "files.example:8443"))
BASE = "https://index.example/simple/x/"
SHA = "0123456789abcdef" * 4
FILE = f"https://files.example/a/x-1.0+cu118-py3-none-any.whl#sha256={SHA}"


def found(link: str, index: object = INDEX) -> links.FileLink | None:
    """Return what the proxy fetches for a link."""
    parts = urlsplit(link)
    return from_proxy(index, parts.path.removeprefix("files/"), parts.query, SIGN)  # type: ignore[arg-type] # a definition


def test_a_link_leads_to_its_file_and_to_its_metadata() -> None:
    link = to_proxy(INDEX, BASE, FILE, SIGN)
    file = found(link)
    assert file is not None
    assert (file.url, file.sha256) == ("https://files.example/a/x-1.0%2Bcu118-py3-none-any.whl", SHA)
    assert file.file == "x-1.0+cu118-py3-none-any.whl"
    assert urlsplit(link).fragment == f"sha256={SHA}"
    metadata = found(link.partition("#")[0] + ".metadata")
    assert metadata is not None and metadata.is_metadata and not metadata.sha256
    assert metadata.url == file.url + ".metadata"


@pytest.mark.parametrize("requote", [lambda path: path, unquote, lambda path: quote(unquote(path), safe="/")])
def test_a_client_may_quote_a_path_in_its_own_way(requote: object) -> None:
    link = to_proxy(INDEX, BASE, "https://files.example:8443/a%20b/~c/x-1%2Bl.whl?sig=a%2Fb", SIGN)
    path, _, query = link.partition("?")
    file = found(f"{requote(path)}?{query}")  # type: ignore[operator] # a function
    assert file is not None and file.url == "https://files.example:8443/a%20b/~c/x-1%2Bl.whl?sig=a%2Fb"


@pytest.mark.parametrize(
    "href",
    [
        "https://evil.example/x-1.whl",
        "http://files.example/x-1.whl",
        "https://files.example:444/x-1.whl",
        "https://files.example@evil.example/x-1.whl",
        "//evil.example/x-1.whl",
        "\\\\evil.example/x-1.whl",
        "file:///etc/passwd",
        "https://169.254.169.254/latest/x-1.whl",
        "https://files.example/a/../../x-1.whl/%2e%2e/x",
        "https://files.example/%2e%2e/x-1.whl",
        "https://files.example/a//x-1.whl",
        "https://files.example/a/",
        "https://files.example/a/%00x-1.whl",
        "https://files.example/a/x%2Fy-1.whl",
        "https://files.example/x-1.whl?a=<b>",
        "https://[files.example/x-1.whl",
        "https://files.example:port/x-1.whl",
        "javascript:alert(1)",
        "https://files.example/" + "a" * 2_000,
    ],
)
def test_a_page_cannot_name_what_its_definition_does_not(href: str) -> None:
    with pytest.raises(ForeignLink):
        to_proxy(INDEX, BASE, href, SIGN)


def test_credentials_in_a_link_are_left_out() -> None:
    assert "hunter2" not in to_proxy(INDEX, BASE, "https://user:hunter2@files.example/x-1.whl", SIGN)


def test_a_changed_link_is_refused() -> None:
    link = to_proxy(INDEX, BASE, FILE, SIGN).partition("#")[0]
    assert found(link) is not None
    other = checked("other", "https://index.example/simple/", file_hosts=("files.example",))
    narrower = checked("main", "https://index.example/simple/", file_hosts=())
    assert found(link, other) is None and found(link, narrower) is None
    for before, after in (
        (SHA, "-"),
        ("/https/", "/http/"),
        ("files.example", "index.example"),
        ("/a/", "/b/"),
        ("/a/", "/a/../a/"),
        ("x-1.0", "y-1.0"),
        (".whl", ".whl?x=1"),
        (".whl", ".whl.metadata.metadata"),
        ("files/", "files/x"),
    ):
        assert before in link
        assert found(link.replace(before, after, 1)) is None, after
    for rest in ("", "/", "a/b/c/d", "a/-/https/files.example/x", "////", "é/-/https/files.example/x"):
        assert from_proxy(INDEX, rest, "", SIGN) is None


@given(st.text(max_size=30), st.text(max_size=10))
def test_any_link_is_refused_or_leads_to_a_host_of_the_definition(path: str, query: str) -> None:
    try:
        link = to_proxy(INDEX, BASE, f"https://files.example/{path}?{query}", SIGN)
    except ForeignLink:
        return
    file = found(link)
    assert file is not None
    assert urlsplit(file.url).netloc == "files.example"
