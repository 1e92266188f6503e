"""Destinations of a network policy: their notation, and what an allow-list may contain."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.egress import (
    ALLOWED_MAX,
    EGRESS,
    METADATA,
    Destination,
    EgressPolicy,
    check_allowed,
    destination,
    digest_of,
    is_opened,
    merged,
)

NETWORKS = st.one_of(st.ip_addresses(), st.ip_addresses(network="10.0.0.0/8")).flatmap(
    lambda address: st.integers(0, address.max_prefixlen).map(
        lambda prefix: str(ipaddress.ip_network((address, prefix), strict=False))
    )
)
PORTS = st.one_of(
    st.just((0, 0)), st.tuples(st.integers(1, 65_535), st.integers(1, 65_535)).map(lambda pair: (min(pair), max(pair)))
)
POLICIES = st.builds(
    EgressPolicy,
    mode=st.sampled_from(EGRESS),
    allow=st.lists(st.sampled_from("abcd"), unique=True).map(tuple),
    closed=st.lists(st.sampled_from("xyz"), unique=True).map(tuple),
)


@pytest.mark.parametrize(
    ("text", "host", "first", "last"),
    [
        ("pypi.org", "pypi.org", 0, 0),
        ("PyPI.org.:443", "pypi.org", 443, 443),
        ("10.1.2.3", "10.1.2.3/32", 0, 0),
        ("10.1.0.0/16:8000-8010", "10.1.0.0/16", 8000, 8010),
        ("2001:db8::1", "2001:db8::1/128", 0, 0),
        ("[2001:DB8::1]:443", "2001:db8::1/128", 443, 443),
        ("[2001:db8::/32]:1-65535", "2001:db8::/32", 1, 65_535),
        ("localhost", "localhost", 0, 0),
    ],
)
def test_a_destination_is_a_name_an_address_or_a_network_with_ports(
    text: str, host: str, first: int, last: int
) -> None:
    assert destination(text) == Destination(host, first, last)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            ":",
            ":443",
            "*.pypi.org",
            "pypi.org:",
            "pypi.org:0",
            "pypi.org:65536",
            "pypi.org:5-4",
            "pypi.org:x",
        ),
        *("https://pypi.org", "pypi.org/simple", "a b", "10.1.2", "10.1.2.256", "300.1.1.1:80", "10.1.2.3/33"),
        *(
            "10.1.2.3/16",
            "[2001:db8::1",
            "[::1]443",
            "2001:db8::1:zz",
            "-a.example",
            "a\nb",
            "a" * 254,
        ),
        *("{ 0.0.0.0/0 }", "1.2.3.4;accept", "pypi.org:443 accept", "pypi.org:٤٤٣"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        destination(text)


@given(host=NETWORKS, ports=PORTS)
def test_a_destination_survives_its_own_notation(host: str, ports: tuple[int, int]) -> None:
    each = Destination(host, *ports)
    assert destination(each.text) == each


@pytest.mark.parametrize("network", METADATA)
def test_no_entry_opens_a_metadata_service(network: str) -> None:
    address = str(ipaddress.ip_network(network).network_address)
    for text in (network, address, f"[{address}]:80" if ":" in address else f"{address}:80"):
        with pytest.raises(InvalidValue, match="metadata"):
            check_allowed([text])


def test_an_allow_list_is_short_and_without_duplicates() -> None:
    assert check_allowed(["PyPI.org:443", "pypi.org:443", "10.0.0.1/32"]) == ("pypi.org:443", "10.0.0.1")
    with pytest.raises(InvalidValue, match="at most"):
        check_allowed([f"host{number}.example" for number in range(ALLOWED_MAX + 1)])


@given(st.lists(POLICIES, min_size=1, max_size=4))
def test_the_policy_of_a_machine_is_as_strict_as_each_nodes(policies: list[EgressPolicy]) -> None:
    found = merged(policies)
    for policy in policies:
        assert EGRESS.index(found.mode) >= EGRESS.index(policy.mode)
        assert set(found.allow) <= set(policy.allow)
        assert set(found.closed) >= set(policy.closed)
    assert found.mode in {policy.mode for policy in policies}
    assert merged([found, *policies]) == found


def test_a_digest_tells_policies_apart() -> None:
    policies = [EgressPolicy(), EgressPolicy(mode="none"), EgressPolicy(allow=("a",)), EgressPolicy(closed=("a",))]
    assert len({digest_of(policy) for policy in policies}) == len(policies)


def test_27_builds_reach_an_index_proxy_that_all_nodes_of_a_machine_name() -> None:
    one, other = (
        EgressPolicy(index_proxy=("10.0.0.5:7880", "10.0.0.6:7880")),
        EgressPolicy(index_proxy=("10.0.0.5:7880",)),
    )
    assert merged([one, other]).index_proxy == ("10.0.0.5:7880",)
    assert merged([one, EgressPolicy()]).index_proxy == ()
    assert len({digest_of(one), digest_of(other), digest_of(EgressPolicy())}) == 3


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("127.0.0.1:5000", True),
        ("127.0.0.1:5000-5010", True),
        ("127.0.0.1:5005", True),
        ("127.0.0.1:5010-5011", False),
        ("127.0.0.1:4999", False),
        ("127.0.0.2:5000", False),
        ("[::1]:80", True),
        ("[::1]:81", False),
    ],
)
def test_27_a_service_is_opened_by_its_address_and_port(text: str, opened: bool) -> None:
    services = [destination("127.0.0.1:5000-5010"), destination("[::1]:80")]
    assert is_opened(destination(text), services) is opened
