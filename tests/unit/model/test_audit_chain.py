"""The chain through the audit: every change of any entry is seen, and named."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, digest, follow


def chained(count: int) -> list[ChainedEntry]:
    found: list[ChainedEntry] = []
    head = ChainHead()
    for number in range(1, count + 1):
        link = ChainedEntry(
            number=number,
            seq=number * 2,
            at_ns=10**18 + number,
            principal="ada",
            action="run.create",
            subject=f"run-{number}",
            detail={"b": number, "a": "x"},
            token="t",
        )
        head = ChainHead(number, digest(head.sha256, link))
        found.append(msgspec.structs.replace(link, sha256=head.sha256))
    return found


def test_a_chain_is_followed_to_its_end_in_one_go_or_in_pages() -> None:
    links = chained(7)
    end = ChainHead(7, links[-1].sha256)
    assert follow(links, after=ChainHead()) == (end, "")
    middle, problem = follow(links[:3], after=ChainHead())
    assert (middle.number, problem) == (3, "")
    assert follow(links[3:], after=middle) == (end, "")
    assert follow([], after=end) == (end, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 99),
        ("at_ns", 1),
        ("principal", "eve"),
        ("action", "run.stop"),
        ("subject", "run-9"),
        ("detail", {"a": "x", "b": 99}),
        ("token", ""),
        ("sha256", "f" * 64),
    ],
)
@given(position=st.integers(0, 4))
def test_whatever_is_changed_is_named(field: str, value: Any, position: int) -> None:
    links = chained(5)
    links[position] = msgspec.structs.replace(links[position], **{field: value})
    head, problem = follow(links, after=ChainHead())
    assert head.number == position
    assert f"entry {position + 1} " in problem


@given(position=st.integers(0, 3))
def test_what_is_removed_or_moved_is_named(position: int) -> None:
    links = chained(5)
    without = links[:position] + links[position + 1 :]
    assert follow(without, after=ChainHead())[1].startswith(f"entry {position + 1} is missing")
    swapped = [*links]
    swapped[position], swapped[position + 1] = swapped[position + 1], swapped[position]
    assert follow(swapped, after=ChainHead())[0].number == position


def test_an_entry_that_was_changed_with_its_digest_breaks_the_next() -> None:
    links = chained(3)
    changed = msgspec.structs.replace(links[1], principal="eve")
    links[1] = msgspec.structs.replace(changed, sha256=digest(links[0].sha256, changed))
    head, problem = follow(links, after=ChainHead())
    assert (head.number, "entry 3 " in problem) == (2, True)


def test_the_order_of_the_details_does_not_matter() -> None:
    (link,) = chained(1)
    other = msgspec.structs.replace(link, detail=dict(reversed(link.detail.items())))
    assert digest("x", link) == digest("x", other)
