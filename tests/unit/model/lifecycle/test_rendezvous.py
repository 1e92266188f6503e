"""How crews find each other: which addresses are chosen, and who is named when there is none."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.lifecycle.rendezvous import (
    Address,
    Apart,
    Chosen,
    CrewReach,
    Offer,
    Tried,
    choose,
    kind_of,
    variables,
    word,
)
from tests.support.golden import golden

ETH, IB, LO, DOCKER = "eth0", "ib0", "lo", "docker0"


def _offer(crew: int, *addresses: tuple[str, str]) -> Offer:
    named = tuple(Address(interface=interface, address=address) for interface, address in addresses)
    return Offer(crew=crew, port=4000 + crew, rendezvous_port=0 if crew else 29500, addresses=named)


def _reach(crew: int, *tried: tuple[int, str, int | None]) -> CrewReach:
    return CrewReach(
        crew=crew,
        tried=tuple(
            Tried(crew=other, address=address, microseconds=us, problem="" if us is not None else "timed out")
            for other, address, us in tried
        ),
    )


def test_the_first_address_of_each_node_that_all_others_reach_is_taken() -> None:
    """In the node's own order: microseconds say nothing of bandwidth. Interfaces may have other names elsewhere."""
    offers = [
        _offer(0, (IB, "192.168.0.1"), (ETH, "10.0.0.1")),
        _offer(1, ("ib1", "192.168.0.2"), (ETH, "10.0.0.2")),
        _offer(2, (IB, "192.168.0.3"), (ETH, "10.0.0.3")),
    ]
    reaches = [
        _reach(
            me,
            *(
                (other, f"{net}{other + 1}", us)
                for other in range(3)
                if other != me
                for net, us in (("10.0.0.", 119), ("192.168.0.", 120))
            ),
        )
        for me in range(3)
    ]
    chosen = choose(offers, reaches, ["n1", "n2", "n3"])
    assert chosen == Chosen(
        master=("192.168.0.1", 29500),
        interfaces=(IB, "ib1", IB),
        addresses=("192.168.0.1", "192.168.0.2", "192.168.0.3"),
    )
    told = {"NCCL_SOCKET_IFNAME": "=ib1", "GLOO_SOCKET_IFNAME": "ib1", "SGPU_RESUME_FENCE": "0"}
    assert variables(chosen, 1) == told
    assert choose(offers[::-1], reaches[::-1], ["n1", "n2", "n3"]) == chosen


def test_one_that_is_far_away_is_passed_over_where_another_is_near() -> None:
    """A VPN that comes first answers, too."""
    offers = [_offer(0, ("tun0", "10.8.0.1"), (ETH, "10.0.0.1")), _offer(1, (ETH, "10.0.0.2"))]
    reaches = [_reach(0, (1, "10.0.0.2", 300)), _reach(1, (0, "10.8.0.1", 40_000), (0, "10.0.0.1", 300))]
    chosen = choose(offers, reaches, ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.addresses == ("10.0.0.1", "10.0.0.2")


def test_all_have_addresses_of_one_kind() -> None:
    """NCCL and Gloo take one family for a gang; loopback is shared by all or nobody."""
    offers = [_offer(0, (ETH, "fd00::1"), (ETH, "10.0.0.1")), _offer(1, (ETH, "fd00::2"), (ETH, "10.0.0.2"))]
    both = [
        _reach(0, (1, "fd00::2", 5), (1, "10.0.0.2", 5)),
        _reach(1, (0, "fd00::1", 5), (0, "10.0.0.1", 5)),
    ]
    chosen = choose(offers, both, ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.addresses == ("10.0.0.1", "10.0.0.2")
    six = [_reach(0, (1, "fd00::2", 5)), _reach(1, (0, "fd00::1", 5), (0, "10.0.0.1", 5))]
    chosen = choose(offers, six, ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.addresses == ("fd00::1", "fd00::2")
    neither = [_reach(0, (1, "fd00::2", 5)), _reach(1, (0, "10.0.0.1", 5))]
    assert isinstance(choose(offers, neither, ["n1", "n2"]), Apart)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("10.0.0.1", "IPv4"),
        ("fd00::1", "IPv6"),
        ("127.0.0.1", "loopback IPv4"),
        ("::1", "loopback IPv6"),
        ("::ffff:127.0.0.1", "loopback IPv4"),
        ("fe80::1", ""),
        ("fd00::1%eth0", ""),
        ("169.254.1.1", ""),
        ("0.0.0.0", ""),
        ("n1", ""),
    ],
)
def test_kinds_of_addresses(address: str, kind: str) -> None:
    """What only its own node understands is none."""
    assert kind_of(address) == kind


def test_offers_that_cannot_be_are_refused() -> None:
    """A crew that is missing, comes twice, or has no port."""
    one, two = _offer(0, (ETH, "10.0.0.1")), _offer(1, (ETH, "10.0.0.2"))
    no_port = Offer(crew=0, port=1, rendezvous_port=0, addresses=one.addresses)
    for offers in ([one], [one, one], [no_port, two], [two, Offer(crew=0, port=70_000, addresses=())]):
        with pytest.raises(ValueError, match="node"):
            choose(offers, [], ["n1", "n2"])


def test_an_address_that_one_of_them_does_not_reach_is_not_taken() -> None:
    """A bridge of Docker has the same address everywhere; who answers there does not know the word."""
    offers = [
        _offer(0, (DOCKER, "172.17.0.1"), (ETH, "10.0.0.1")),
        _offer(1, (DOCKER, "172.17.0.1"), (ETH, "10.0.0.2")),
    ]
    reaches = [
        _reach(0, (1, "172.17.0.1", None), (1, "10.0.0.2", 500)),
        _reach(1, (0, "172.17.0.1", None), (0, "10.0.0.1", 500)),
    ]
    chosen = choose(offers, reaches, ["n1", "n2"])
    assert isinstance(chosen, Chosen)
    assert chosen.addresses == ("10.0.0.1", "10.0.0.2")


def test_loopback_is_taken_only_where_nothing_else_will_do() -> None:
    """Two homes of one machine meet over it, however fast it is; it is never preferred to a network."""
    both = [_offer(0, (ETH, "10.0.0.1"), (LO, "127.0.0.1")), _offer(1, (ETH, "10.0.0.1"), (LO, "127.0.0.1"))]
    reaches = [
        _reach(0, (1, "10.0.0.1", 80), (1, "127.0.0.1", 20)),
        _reach(1, (0, "10.0.0.1", 80), (0, "127.0.0.1", 20)),
    ]
    chosen = choose(both, reaches, ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.interfaces == (ETH, ETH)
    alone = [_offer(0, (LO, "127.0.0.1")), _offer(1, (LO, "127.0.0.1"))]
    chosen = choose(alone, [_reach(0, (1, "127.0.0.1", 20)), _reach(1, (0, "127.0.0.1", 20))], ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.master == ("127.0.0.1", 29500)


def test_who_does_not_reach_whom_is_named_with_what_was_tried() -> None:
    """The pair, the addresses, and what came of each."""
    offers = [_offer(0, (ETH, "10.0.0.1")), _offer(1, (ETH, "10.0.0.2")), _offer(2, (ETH, "10.9.0.3"))]
    reaches = [
        _reach(0, (1, "10.0.0.2", 500), (2, "10.9.0.3", 700)),
        _reach(1, (0, "10.0.0.1", 500), (2, "10.9.0.3", None)),
        _reach(2, (0, "10.0.0.1", 600), (1, "10.0.0.2", 600)),
    ]
    apart = choose(offers, reaches, ["n1", "n2", "n3"])
    assert isinstance(apart, Apart)
    assert apart.pair == (1, 2)
    assert apart.sentence == golden("model.meeting.n2-does-reach")


def test_what_was_not_tried_was_not_reached() -> None:
    """A crew that answered too early, or left one out, is not believed to have reached it."""
    offers = [_offer(0, (ETH, "10.0.0.1")), _offer(1, (ETH, "10.0.0.2"))]
    apart = choose(offers, [_reach(0, (1, "10.0.0.2", 5)), _reach(1)], ["n1", "n2"])
    assert isinstance(apart, Apart) and "10.0.0.1 (not tried)" in apart.sentence
    nowhere = choose([_offer(0), _offer(1, (ETH, "10.0.0.2"))], [_reach(0, (1, "10.0.0.2", 5)), _reach(1)], ["a", "b"])
    assert isinstance(nowhere, Apart) and nowhere.sentence == golden("model.meeting.address-could-reached")


@given(st.data())
def test_whatever_is_chosen_was_reached_by_everybody(data: st.DataObject) -> None:
    """Property: a choice is of addresses that all others reached; an Apart names a pair that really failed."""
    count = data.draw(st.integers(2, 4))
    offers = [
        _offer(crew, *((f"if{n}", f"10.{n}.0.{crew}") for n in range(data.draw(st.integers(0, 3)))))
        for crew in range(count)
    ]
    times = st.one_of(st.none(), st.integers(1, 10_000))
    reaches = [
        _reach(
            me,
            *(
                (other.crew, a.address, data.draw(times))
                for other in offers
                if other.crew != me
                for a in other.addresses
            ),
        )
        for me in range(count)
    ]
    us = {(reach.crew, one.address): one.microseconds for reach in reaches for one in reach.tried}
    names = [f"n{crew}" for crew in range(count)]
    match choose(offers, reaches, names):
        case Chosen(addresses=addresses):
            for crew, address in enumerate(addresses):
                assert all(us[other, address] is not None for other in range(count) if other != crew)
        case Apart(pair=(frm, to)):
            assert frm != to
            taken = offers[to].addresses
            assert not any(all(us[o, a.address] is not None for o in range(count) if o != to) for a in taken)


def test_the_word_of_a_direction_is_nobody_elses() -> None:
    """Neither the answer, nor another pair, nor another gang says the same."""
    words = {word(nonce, frm=frm, to=to) for nonce in ("a", "b") for frm in range(3) for to in range(3) if frm != to}
    assert len(words) == 12
    assert all(len(one) == 32 for one in words)


@pytest.mark.parametrize(
    ("first", "second", "resume"),
    [((), (), 0), ((3, 1), (), 0), ((3, 1), (1,), 1), ((4, 2), (3,), 0), ((5, 4), (5, 4), 5)],
)
def test_all_nodes_go_on_from_the_newest_attempt_of_which_each_sees_checkpoints(
    first: tuple[int, ...], second: tuple[int, ...], resume: int
) -> None:
    offers = [
        msgspec.structs.replace(_offer(number, (ETH, f"10.0.0.{number + 1}")), saved=saved)
        for number, saved in enumerate((first, second))
    ]
    reaches = [_reach(me, (1 - me, f"10.0.0.{2 - me}", 100)) for me in (0, 1)]
    chosen = choose(offers, reaches, ["n1", "n2"])
    assert isinstance(chosen, Chosen) and chosen.resume == resume
    assert variables(chosen, 0)["SGPU_RESUME_FENCE"] == str(resume)
