"""Keys of nodes: the texts that a node signs, and who may have a name or another machine."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.access_control import (
    HelloDecision,
    HelloRefused,
    MachineTraits,
    NodeIdentity,
    TokenBinding,
    is_same_machine,
    judge_hello,
    may_take_name,
)
from serverless_gpu.model.node_keys import NodeKeys, order_text, rotation_text, session_text

KEYS, OTHER = (NodeKeys(signing=bytes([one]) * 32, sealing=bytes([one]) * 32) for one in (1, 2))
HOME = NodeIdentity(name="n1", machine="m1", instance="i1", key="k1")
text = st.text(max_size=6)


@given(st.lists(st.tuples(text, text, st.sampled_from([KEYS, OTHER])), min_size=2, max_size=2, unique=True))
def test_27_7_two_signed_texts_are_equal_only_if_they_say_the_same(said: list[tuple[str, str, NodeKeys]]) -> None:
    first, second = said
    assert session_text(*first) != session_text(*second)
    assert rotation_text(*first) != rotation_text(*second)
    assert session_text(*first) != rotation_text(*first)


def test_27_7_an_order_is_bound_to_one_node_of_one_attempt() -> None:
    said = [order_text(run, fence, crew) for run in ("r", "r1") for fence in (1, 11) for crew in (0, 1)]
    assert len(set(said)) == len(said)


def test_27_7_a_fingerprint_names_both_keys() -> None:
    mixed = [NodeKeys(signing=one, sealing=other) for one, other in itertools.product((b"a" * 32, b"b" * 32), repeat=2)]
    assert len({keys.fingerprint for keys in mixed}) == 4
    assert all(len(keys.fingerprint) == 32 for keys in mixed)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_27_7_a_key_has_one_length(length: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"signing": bytes(length), "sealing": bytes(32)}, NodeKeys)


@pytest.mark.parametrize(
    ("bound", "said", "is_here", "answer"),
    [
        (HOME, {}, True, HelloDecision.ADMITTED),
        (HOME, {}, False, HelloDecision.ADMITTED),
        (HOME, {"key": "k2"}, True, None),
        (HOME, {"key": ""}, True, None),
        (HOME, {"machine": "m2"}, True, HelloDecision.MOVED),  # a container that was restarted
        (HOME, {"machine": "m2"}, False, HelloDecision.ELSEWHERE),
        (HOME, {"machine": "m2", "key": "k2"}, False, None),
        (HOME, {"instance": "i2"}, True, None),
        (HOME, {"name": "n2"}, True, None),
        (msgspec.structs.replace(HOME, key=""), {}, True, HelloDecision.BOUND),  # a node of an earlier version
        (msgspec.structs.replace(HOME, key=""), {"machine": "m2"}, False, HelloDecision.ELSEWHERE),
        (msgspec.structs.replace(HOME, key=""), {"machine": "m2", "key": ""}, False, HelloDecision.MOVED),
        (msgspec.structs.replace(HOME, name=""), {"key": "k2"}, True, None),
        (msgspec.structs.replace(HOME, name="", key=""), {}, True, HelloDecision.BOUND),
    ],
)
def test_27_7_a_token_is_good_for_one_key_and_one_machine(
    bound: NodeIdentity, said: dict[str, str], is_here: bool, answer: HelloDecision | None
) -> None:
    found = judge_hello(TokenBinding(node=bound, approved=True), msgspec.structs.replace(HOME, **said), is_here=is_here)
    assert found is answer or (answer is None and isinstance(found, HelloRefused))


@pytest.mark.parametrize(
    ("before", "said", "same"),
    [
        (("b1", "h1"), ("b1", "h1"), True),
        (("b1", "h1"), ("b2", "h1"), True),  # the machine has restarted
        (("b1", ""), ("b1", "h2"), True),  # a restarted container
        (("b1", "h1"), ("b2", "h2"), False),
        (("b1", ""), ("b2", ""), False),
        (("", ""), ("", ""), False),
    ],
)
def test_27_7_boot_or_system_show_that_a_machine_is_the_same(
    before: tuple[str, str], said: tuple[str, str], same: bool
) -> None:
    one, other = (MachineTraits(boot_id=boot, host=host) for boot, host in (before, said))
    assert is_same_machine(one, other) is is_same_machine(other, one) is same


@pytest.mark.parametrize(
    ("held", "said", "may"),
    [
        ({}, {}, True),
        ({}, {"instance": "i2"}, True),
        ({}, {"key": "k2"}, False),
        ({}, {"key": ""}, False),
        ({"key": ""}, {"key": "k2"}, True),
        ({"key": ""}, {"instance": "i2"}, False),
    ],
)
def test_27_7_a_name_belongs_to_a_key_or_else_to_a_home(held: dict[str, str], said: dict[str, str], may: bool) -> None:
    replace = msgspec.structs.replace
    assert may_take_name(replace(HOME, **held), replace(HOME, **said)) is may
