"""Why a run waits, as it travels: nothing is lost on the way, and what is new there ends no older client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.model.scheduling.values import DeviceHolder, GangPart, StartEstimate, Wait, WaitReason
from serverless_gpu.wire.queue import HOLDERS_MAX, HolderView, WaitView, wait_of, wait_view
from serverless_gpu.wire.runs import EstimateView, estimate_of, estimate_view

VALUES: dict[str, Any] = {
    "reason": WaitReason.RESERVED,
    "count": 8,
    "gpu_type": "H100",
    "one_node": False,
    "whole": True,
    "node": "n3",
    "free": 5,
    "outside": 1,
    "holders": (
        DeviceHolder(title="alice/bert-ft", count=3, until_ns=14, is_bound=True, is_leaving=True, asked_ns=12),
    ),
    "ahead": "bob/sweep",
    "kept_ns": 13,
    "spare_s": 12.5,
    "place": 2,
    "at_ns": 15,
    "likely_ns": 14,
    "is_bound": True,
    "owner": "carol",
    "turns_ns": 16,
    "ends_ns": 17,
    "words": "or so",
    "nodes": (GangPart(node="n3", count=8, free=5), GangPart(node="n4", count=4, free=0)),
}


def travelled(wait: Wait) -> WaitView:
    return msgspec.json.decode(msgspec.json.encode(wait_view(wait)), type=WaitView)


def test_every_part_of_a_wait_arrives() -> None:
    wait = Wait(run_id="r1", **VALUES)
    assert set(VALUES) == set(Wait.__struct_fields__) - {"run_id"}
    assert wait_of(travelled(wait), "r1") == wait


def test_a_view_has_what_the_value_has() -> None:
    assert set(WaitView.__struct_fields__) - {"others"} == set(Wait.__struct_fields__) - {"run_id"}
    assert HolderView.__struct_fields__ == DeviceHolder.__struct_fields__
    beyond_the_queue = {"cost", "policy", "budgets"}
    view = set(EstimateView.__struct_fields__) - {"now_ns", "waiting"} - beyond_the_queue
    assert view == set(StartEstimate.__struct_fields__) - {"wait"}


@pytest.mark.parametrize("reason", WaitReason)
def test_every_reason_arrives(reason: WaitReason) -> None:
    assert wait_of(travelled(Wait(run_id="r1", reason=reason)), "r1") == Wait(run_id="r1", reason=reason)


def test_a_reason_of_a_newer_server_is_none_that_is_known() -> None:
    view = msgspec.json.decode(b'{"reason": "moonlight", "tide": 3}', type=WaitView)
    assert wait_of(view, "r1") is None


def test_of_many_holders_some_are_named_and_the_others_counted() -> None:
    holders = tuple(DeviceHolder(title=f"u/{number}", count=2) for number in range(HOLDERS_MAX + 3))
    view = travelled(Wait(run_id="r1", reason=WaitReason.CAPACITY, holders=holders))
    assert (len(view.holders), view.others) == (HOLDERS_MAX, 6)
    back = wait_of(view, "r1")
    assert back is not None and back.holders == (*holders[:HOLDERS_MAX], DeviceHolder(title="others", count=6))


def test_an_estimate_arrives_with_what_would_be_waited_for() -> None:
    wait = Wait(run_id="", **VALUES)
    estimate = StartEstimate(at_ns=20, is_bound=True, node="n1", basis="why", place=2, impossible=True, wait=wait)
    view = msgspec.json.decode(msgspec.json.encode(estimate_view(estimate, 7)), type=EstimateView)
    assert estimate_of(view) == estimate


def test_an_estimate_travels_with_the_time_it_was_made_at() -> None:
    view = estimate_view(StartEstimate(at_ns=20, is_bound=True, node="n1", basis="why", place=2, impossible=False), 7)
    assert view == EstimateView(at_ns=20, is_bound=True, node="n1", basis="why", place=2, impossible=False, now_ns=7)
