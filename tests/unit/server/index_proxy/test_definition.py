"""Definitions of package indexes, and the addresses to which the index proxy connects."""

from __future__ import annotations

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.index_proxy.definition import checked, is_open_address, normalized


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("https://PyPI.org/simple", "https://pypi.org/simple/"),
        ("https://pypi.org:443/simple//", "https://pypi.org/simple/"),
        ("http://pypi.example:8081/a/b/", "http://pypi.example:8081/a/b/"),
        ("https://[2001:4860::1]:8443/simple", "https://[2001:4860::1]:8443/simple/"),
        ("https://pypi.org", "https://pypi.org/"),
    ],
)
def test_a_url_has_one_form(url: str, canonical: str) -> None:
    assert checked("a", url).url == canonical


@pytest.mark.parametrize(
    "url",
    [
        "pypi.org/simple",
        "ftp://pypi.org/simple/",
        "file:///etc/passwd",
        "https://user:hunter2@pypi.org/simple/",
        "https://hunter2@pypi.org/simple/",
        "https://pypi.org/simple/?key=hunter2",
        "https://pypi.org/simple/#hunter2",
        "https:///simple/",
        "https://pypi.org:99999/simple/",
        "https://pypi.org/sim ple/",
        "https://pypi.org\\@evil.example/simple/",
        "https://[::1/simple/",
        "https://10.0.0.0.1/simple/",
        "https://169.254.169.254/simple/",
        "https://127.0.0.1/simple/",
        "https://10.0.0.7/simple/",
        "https://pypi.org/" + "a" * 1_000,
    ],
)
def test_an_unusable_url_is_refused_and_no_credentials_are_shown(url: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        checked("a", url)
    assert "hunter2" not in str(refused.value).replace("key=hunter2", "").replace("#hunter2", "")


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a" * 33, "-a", "a_b", "ä"])
def test_a_name_is_a_part_of_a_url(name: str) -> None:
    with pytest.raises(InvalidValue):
        checked(name, "https://pypi.org/simple/")


def test_file_hosts_are_those_of_a_public_index_unless_given() -> None:
    assert checked("a", "https://pypi.org/simple/").file_hosts == ("files.pythonhosted.org",)
    assert checked("a", "https://pypi.org/simple/", file_hosts=()).file_hosts == ()
    assert checked(
        "a", "https://a.example/", file_hosts=("B.example:443", "b.example", "c.example:8443")
    ).file_hosts == (
        "b.example",
        "c.example:8443",
    )
    for host in ("https://b.example", "b.example/x", "10.0.0.0/8", "a@b", "b.example:1-2", "169.254.169.254"):
        with pytest.raises(InvalidValue):
            checked("a", "https://a.example/", file_hosts=(host,), private=True)


def test_hosts_are_compared_with_scheme_and_port() -> None:
    index = checked("a", "https://a.example/", file_hosts=("b.example:8443",))
    assert index.has_host("https", "a.example") and index.has_host("https", "b.example:8443")
    for scheme, host in (
        ("http", "a.example"),
        ("https", "a.example:8443"),
        ("https", "b.example"),
        ("ftp", "a.example"),
    ):
        assert not index.has_host(scheme, host)
    assert checked("a", "http://a.example/").has_host("https", "a.example")


@pytest.mark.parametrize(
    ("address", "is_open", "is_open_private"),
    [
        ("151.101.0.223", True, True),
        ("2a04:4e42::223", True, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("10.1.2.3", False, True),
        ("100.64.0.1", False, True),
        ("fd12::1", False, True),
        ("::ffff:10.1.2.3", False, True),
        ("64:ff9b::a01:203", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:a9fe:a9fe::1", False, False),
        ("fe80::1%eth0", False, False),
        ("fd00:ec2::254", False, False),
        ("100.100.100.200", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("no address", False, False),
    ],
)
def test_private_addresses_need_permission_and_metadata_services_stay_closed(
    address: str, is_open: bool, is_open_private: bool
) -> None:
    assert is_open_address(address, private=False) is is_open
    assert is_open_address(address, private=True) is is_open_private


def test_names_of_projects_are_normalized() -> None:
    assert normalized("Foo._-Bar") == "foo-bar"
    for name in ("", ".", "..", "a/b", "a%2fb", "-a", "a-", "ä", "a" * 129, "a\n", "a b"):
        assert normalized(name) is None
