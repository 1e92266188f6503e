"""The text of the nftables rules."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.egress import EGRESS, METADATA, Destination, Egress, destination
from serverless_gpu.node.isolation.egress_rules import EgressRules, admission, removal, ruleset
from tests.support.golden import golden

PRINCIPALS = ((1_900_000_000, 1_900_065_535),)
PLACES = st.sampled_from(
    ("10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "10.1.2.3:443", "10.1.0.0/16:443", "0.0.0.0/0:80-90", "[::/0]:80-90",
     "2001:db8::/32", "2001:db8::1", "[2001:db8::1]:443")
).map(destination)  # fmt: skip
RULES = st.builds(
    EgressRules,
    uids=st.just(PRINCIPALS),
    mode=st.sampled_from(EGRESS),
    endpoints=st.lists(PLACES.filter(lambda place: place.is_endpoint), max_size=3).map(tuple),
    allowed=st.lists(PLACES, max_size=5).map(tuple),
    closed=st.lists(PLACES, max_size=5).map(tuple),
    resolvers=st.lists(st.sampled_from(("127.0.0.53", "10.0.0.53", "fd00::53")), unique=True).map(tuple),
)


def chain(text: str, name: str) -> list[str]:
    """Return the rules of a chain."""
    found = re.search(rf"  chain {name} {{\n(.*?)\n  }}", text, re.DOTALL)
    assert found is not None
    return [line.strip() for line in found[1].splitlines()]


def judged(rules: list[str], address: str, port: int) -> str:
    """Return the verdict of a chain about a TCP connection to an address; of rules about sets, none matches."""
    ip = ipaddress.ip_address(address)
    for rule in rules:
        matched = re.fullmatch(
            r"(ip6?) daddr { (.*?) } (?:meta l4proto { tcp, udp } th dport (\d+)(?:-(\d+))? )?(\w+)", rule
        )
        if matched is None:
            if rule in ("accept", "reject"):
                return rule
            continue
        version, networks, first, last, verdict = matched.groups()
        if version != ("ip" if ip.version == 4 else "ip6"):
            continue
        inside = any(ip in ipaddress.ip_network(network) for network in networks.split(", "))
        if inside and (first is None or int(first) <= port <= int(last or first)):
            return verdict
    raise AssertionError("a chain ends with a verdict")


def is_in(places: tuple[Destination, ...], address: str, port: int) -> bool:
    """Return whether a connection goes to one of the places."""
    ip = ipaddress.ip_address(address)
    networks = [(place.network, place.first, place.last) for place in places]
    return any(network and ip in network and (not first or first <= port <= last) for network, first, last in networks)


@given(
    RULES,
    st.sampled_from(
        ("10.1.2.3", "10.1.9.9", "10.9.9.9", "8.8.8.8", "10.0.0.53", "2001:db8::1", "2001:db8::2", "fd00::53")
    ),
    st.sampled_from((22, 53, 80, 443)),
)
def test_27_a_connection_beyond_the_node_is_judged_by_the_policy(rules: EgressRules, address: str, port: int) -> None:
    """The specification, in the order of its precedence."""
    if is_in(rules.endpoints, address, port) or (rules.mode != "none" and address in rules.resolvers and port == 53):
        wanted = "accept"
    elif is_in(rules.closed, address, port):
        wanted = "reject"
    else:
        opened = rules.mode == "open" or (rules.mode == "pool" and is_in(rules.allowed, address, port))
        wanted = "accept" if opened else "reject"
    assert judged(chain(ruleset(rules), "principal"), address, port) == wanted


@given(RULES, st.sampled_from(METADATA))
def test_27_metadata_is_closed_whatever_a_policy_allows(rules: EgressRules, network: str) -> None:
    everywhere = Destination("::/0" if ":" in network else "0.0.0.0/0")
    address = str(ipaddress.ip_network(network).network_address)
    open_to_all = EgressRules(
        uids=rules.uids,
        mode=rules.mode,
        endpoints=(Destination(address, 80, 80), *rules.endpoints),
        allowed=(everywhere, *rules.allowed),
    )
    assert judged(chain(ruleset(open_to_all), "principal"), address, 80) == "reject"
    assert "accept" not in [
        rule.rsplit(" ", 1)[-1] for rule in chain(ruleset(open_to_all), "local")[:2] if address in rule
    ]


@pytest.mark.parametrize("mode", EGRESS)
def test_services_of_other_users_of_the_node_are_closed_in_each_mode(mode: Egress) -> None:
    text = ruleset(EgressRules(uids=PRINCIPALS, mode=mode))
    build, here = chain(text, "principal")[:2]
    assert build.endswith("goto build") and here == 'oifname "lo" goto local'
    local = chain(text, "local")
    dials = [number for number, rule in enumerate(local) if rule.endswith(("goto dial4", "goto dial6"))]
    (data,) = [number for number, rule in enumerate(local) if "option 34 exists" in rule]
    assert len(dials) == 2 and data < dials[0], "a first packet with data would reach its listener at once"
    assert chain(text, "output")[-1] == golden("node.egress.principals-chain")


def test_rules_are_the_same_for_the_same_policy_and_replace_no_other_table() -> None:
    rules = EgressRules(
        uids=((5, 9), (1, 4), (20, 20)), allowed=(destination("10.0.0.0/8"), destination("10.1.0.0/16"))
    )
    text = ruleset(rules)
    assert text == ruleset(rules)
    assert "elements = { 1-9, 20 }" in text, "nft refuses ranges that overlap"
    assert "ip daddr { 10.0.0.0/8 } accept" not in text, "an open pool needs no list"
    assert text.startswith(golden("node.egress.first-lines"))
    assert ruleset(rules, afresh=True).splitlines()[1] == golden("node.egress.afresh")
    assert {line.split()[2:4][0] for line in removal().splitlines()} == {"inet"}


def test_an_admission_names_the_uid_and_the_version_of_each_address() -> None:
    lines = admission(7, ("10.0.0.2", "fd00::2")).splitlines()
    assert [line for line in lines if "timeout" in line] == [
        golden(f"node.egress.admit-{version}", uid=7) for version in (4, 6)
    ]
    assert admission(7, ()) == ""
