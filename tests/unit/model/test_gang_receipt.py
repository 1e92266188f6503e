"""One receipt for a run on several nodes: sums of what each was charged, and what is said of one has its name."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.ledger import Charge
from serverless_gpu.model.gang_receipt import CrewAccount, GangOutcome, restated, together
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.receipt import DeviceUse, Receipt, Segments, nodes_text
from tests.support.golden import golden

FREE = "2 GPUs verified free: no process, 0 MiB used (baseline 0 MiB)"
FAILED = GangOutcome(state="FAILED", reason=Reason.RANK_RAISED)


def receipt(node: str, **other: object) -> Receipt:
    made = Receipt(
        run_id="r",
        fence=1,
        state="FAILED",
        reason="peer_failed",
        gpu_type="H100",
        gpus=(f"GPU-{node}-0", f"GPU-{node}-1"),
        kind=DeviceKind.GPU,
        segments=Segments(queued_ms=4, environment_ms=100, start_ms=20, first_line_ms=300, run_ms=50, stop_ms=7),
        gpu_ms=1,
        micros=0,
        currency="USD",
        peak_memory_bytes=1000,
        warm=True,
        warm_reason="",
        gate=FREE,
        quarantined=(),
        tags={"a": "b"},
        facts=7,
        world_size=2,
        environment="live",
        uses=(DeviceUse(uuid=f"GPU-{node}-0", samples=3),),
    )
    return msgspec.structs.replace(made, **other)


def account(number: int, told: Receipt | None, **used: int) -> CrewAccount:
    charge = msgspec.structs.replace(Charge(gpu_ms=100, billed_ms=100, micros=84), **used)
    return CrewAccount(node=f"n{number + 1}", receipt=told, used=charge, gpus=2)


def test_one_receipt_has_the_devices_of_all_and_the_times_of_the_slowest() -> None:
    slow = Segments(queued_ms=9, environment_ms=2_000, start_ms=10, first_line_ms=200, run_ms=60, gate_ms=3)
    second = receipt("n2", segments=slow, peak_memory_bytes=3_000, tracked="http://x", facts=8)
    one = together([account(0, receipt("n1")), account(1, second, gpu_ms=50, billed_ms=40, micros=42)], FAILED)
    assert one is not None
    assert (one.state, one.reason, one.nodes) == ("FAILED", "rank_raised", ("n1", "n2"))
    assert one.gpus == ("GPU-n1-0", "GPU-n1-1", "GPU-n2-0", "GPU-n2-1")
    assert [use.uuid for use in one.uses] == ["GPU-n1-0", "GPU-n2-0"]
    assert (one.gpu_ms, one.micros, one.world_size, one.facts) == (150, 126, 4, 15)
    assert one.segments == Segments(
        queued_ms=9, environment_ms=2_000, start_ms=20, first_line_ms=200, run_ms=60, stop_ms=7, gate_ms=3
    )
    assert (one.peak_memory_bytes, one.tracked, one.tags, one.environment) == (3_000, "http://x", {"a": "b"}, "live")
    assert one.bill is not None and one.bill.billed_ms == 140
    assert one.gate == golden("model.gang_receipt.each-nodes", FREE=FREE)
    assert golden("model.gang_receipt.h100-ranks-n1") in one.text()


def test_why_it_is_not_billed_is_the_reason_of_the_whole_also_where_a_node_says_otherwise() -> None:
    lost = GangOutcome(state="FAILED", reason=Reason.GPU_LOST)
    both = [account(number, receipt("n1"), billed_ms=0, micros=0) for number in range(2)]
    one = together(both, lost)
    assert one is not None and one.unbilled_text() == golden("model.gang_receipt.gpu-seconds-gpu")
    own = restated(account(1, receipt("n2")), FAILED)
    assert own is not None and (own.gpu_ms, own.micros, own.unbilled_text()) == (100, 84, "")
    assert restated(account(1, None), FAILED) is None


def test_devices_are_free_only_when_all_nodes_say_so() -> None:
    bad = receipt("n2", gate="1 of 2 GPUs not free: GPU-n2-1: pid 7 holds 80 GiB", quarantined=("GPU-n2-1",))
    one = together([account(0, receipt("n1")), account(1, bad)], FAILED)
    assert one is not None and one.quarantined == ("GPU-n2-1",)
    assert one.gate == golden("model.gang_receipt.n2-n1", gate=bad.gate, FREE=FREE)
    gone = together([account(0, receipt("n1")), account(1, None, gpu_ms=30, billed_ms=30, micros=20)], FAILED)
    assert gone is not None and gone.gate == golden("model.gang_receipt.nothing-known-devices", FREE=FREE)
    assert (gone.gpu_ms, gone.micros, gone.nodes) == (130, 104, ("n1", "n2"))
    assert gone.notes == (golden("model.gang_receipt.n2-sent-receipt"),)
    assert together([account(0, None), account(1, None)], FAILED) is None


def test_what_all_say_is_said_once_and_the_rest_with_the_name_of_its_node() -> None:
    hung = "hang-1-1.txt has the stacks of all ranks: no output for 9 s"
    first = receipt("n1", notes=("a secret is old",), environment="14 units", warm_reason="x")
    second = receipt("n2", notes=("a secret is old", hung), environment="14 units, 3 fetched", warm=False)
    one = together([account(0, first), account(1, second)], FAILED)
    assert one is not None
    assert one.notes == (golden("model.gang_receipt.secret-old"), f"n2: {hung}")
    assert one.environment == golden("model.gang_receipt.n1-14-units")
    assert (one.warm, one.warm_reason) == (False, "n1: x")


def test_27_masked_secrets_of_all_nodes_are_added() -> None:
    counts: tuple[dict[str, int], ...] = ({"A": 1}, {"A": 2, "B": 1}, {"C": 2})
    one = together(
        [account(number, receipt(f"n{number}", redacted=each)) for number, each in enumerate(counts)], FAILED
    )
    assert one is not None and one.redacted == {"A": 3, "B": 1, "C": 2}
    assert (
        "redacted: A 3 times, B once, C twice" in one.text() and one.rows()["redacted"] == "A 3 times, B once, C twice"
    )
    assert "redacted" not in receipt("n1").text()


def test_many_nodes_are_counted() -> None:
    assert nodes_text(["n1", "n2"]) == "n1, n2"
    assert nodes_text([f"n{number}" for number in range(8)]) == "8 nodes"


@given(st.lists(st.tuples(st.integers(0, 10**9), st.one_of(st.none(), st.integers(0, 10**9))), min_size=2, max_size=9))
def test_the_receipt_is_the_sum_of_the_ledger(used: list[tuple[int, int | None]]) -> None:
    accounts = [
        CrewAccount(
            node=f"n{number}",
            receipt=receipt("n") if number % 2 == 0 else None,
            used=Charge(gpu_ms=ms, billed_ms=ms, micros=micros),
        )
        for number, (ms, micros) in enumerate(used)
    ]
    one = together(accounts, FAILED)
    assert one is not None and one.gpu_ms == sum(ms for ms, _ in used)
    priced = [micros for _, micros in used if micros is not None]
    assert one.micros == (sum(priced) if priced else None)
