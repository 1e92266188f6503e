"""The same facts give the same charge, however they arrive; a charge never exceeds what was held."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidOption, InvalidValue, UsageError
from serverless_gpu.model.billing.ledger import Charge, charge
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff, parse_prices
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.model.receipt import DeviceUse, Receipt, Segments
from tests.support.golden import golden
from tests.support.model.ledger import FULL, GPUS

PRICE = Tariff(gpu_micros_per_hour=3_000_000)
PRICE_HINT = 'hint: write the price of one GPU-hour in USD, for example {"H100": 2.99}'


def fact(
    seq: int,
    kind: str,
    at_ms: float,
    *,
    boot_id: str = "boot-1",
    attempt: str = "run1:1",
    gpus: tuple[str, ...] = GPUS,
) -> Fact:
    return Fact(
        attempt=attempt,
        seq=seq,
        kind=FactKind(kind),
        boot_id=boot_id,
        boottime_ns=round(at_ms * 1_000_000),
        wall_ns=1_760_000_000_000_000_000 - seq,
        gpus=gpus,
        cpus=0,
        memory_bytes=0,
    )


def charged(gpu_ms: int, micros: int | None, gpus: int = 2) -> Charge:
    return Charge(attempt="run1:1", gpu_type="H100", gpus=gpus, gpu_ms=gpu_ms, billed_ms=gpu_ms, micros=micros)


WHOLE = (
    fact(0, "reserved", 1_000),
    fact(1, "hydrating", 1_500),
    fact(2, "exec", 2_000),
    fact(3, "alive", 7_000),
    fact(4, "alive", 12_000),
    fact(5, "exited", 12_500),
    fact(6, "freed", 13_000),
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (WHOLE, charged(22_000, 18_334)),
        # Provisional: nothing has been freed yet.
        (WHOLE[:6], charged(21_000, 17_500)),
        (WHOLE[:5], charged(20_000, 16_667)),
        (WHOLE[:4], charged(10_000, 8_334)),
        (WHOLE[:3], charged(0, 0)),
        # No user code ran.
        (WHOLE[:2], charged(0, 0)),
        ((*WHOLE[:2], fact(2, "freed", 9_000)), charged(0, 0)),
        # Signs of life after the hand-back are not billed; the first hand-back counts.
        ((*WHOLE, fact(7, "alive", 90_000), fact(8, "freed", 99_000)), charged(22_000, 18_334)),
        # A fact went missing on the way: the rest still adds up.
        ((WHOLE[2], WHOLE[6]), charged(22_000, 18_334)),
        # The first start counts.
        ((fact(0, "exec", 0), fact(1, "exec", 500), fact(2, "freed", 1_000)), charged(2_000, 1_667)),
        # A hand-back from before the start ends nothing.
        ((fact(0, "freed", 1_000), *WHOLE[2:4]), charged(10_000, 8_334)),
        # Whole milliseconds, in the user's favour.
        ((fact(0, "exec", 0), fact(1, "freed", 1.999)), charged(2, 2)),
        # One device listed twice is one device.
        (
            (fact(0, "exec", 0, gpus=("GPU-a", "GPU-a")), fact(1, "freed", 5_000)),
            charged(5_000, 4_167, gpus=1),
        ),
        # A clock that ran backwards never gives money back.
        ((fact(0, "exec", 5_000), fact(1, "freed", 4_000)), charged(0, 0)),
        ((), Charge(attempt="", gpu_type="H100", gpus=0, gpu_ms=0, billed_ms=0, micros=0)),
    ],
)
def test_billable_time_goes_from_exec_to_freed(facts: Sequence[Fact], expected: Charge) -> None:
    assert charge(facts, gpu_type="H100", tariff=PRICE) == expected


def test_a_session_is_billed_for_devices_while_no_run_has_them() -> None:
    one = ("GPU-a",)
    facts = (
        fact(0, "reserved", 0),
        fact(1, "held", 1_000),  # both idle
        fact(2, "freed", 3_000),
        fact(3, "held", 3_000, gpus=one),  # a run has the other
        fact(4, "alive", 4_000, gpus=one),
        fact(5, "freed", 5_000, gpus=one),
        fact(6, "held", 9_000),  # a run had both meanwhile
        fact(7, "freed", 10_000),
    )
    assert charge(facts, gpu_type="H100", tariff=PRICE) == charged(4_000 + 2_000 + 2_000, 6_667)
    assert charge(reversed(facts), gpu_type="H100", tariff=PRICE) == charged(8_000, 6_667)
    # Killed: the open interval ends with its last sign of life.
    assert charge(facts[:5], gpu_type="H100", tariff=PRICE) == charged(4_000 + 1_000, 4_167)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ((), charged(10_000, 8_334)),
        ((fact(4, "freed", 10, boot_id="boot-2"),), charged(10_000, 8_334)),
        (
            (fact(4, "exited", 10**9, boot_id="boot-2"), fact(5, "freed", 10**9, boot_id="boot-2")),
            charged(10_000, 8_334),
        ),
    ],
)
def test_F21_a_reboot_ends_the_time_at_the_last_sign_of_life(later: tuple[Fact, ...], expected: Charge) -> None:
    assert charge((*WHOLE[:4], *later), gpu_type="H100", tariff=PRICE) == expected


def test_F17_late_facts_make_a_provisional_charge_final() -> None:
    provisional = charge(WHOLE[:4], gpu_type="H100", tariff=PRICE)
    final = charge((*WHOLE[4:], *WHOLE[:4]), gpu_type="H100", tariff=PRICE)
    assert (provisional, final) == (charged(10_000, 8_334), charged(22_000, 18_334))


def test_F14_a_gang_that_never_started_costs_nothing() -> None:
    facts = (fact(0, "reserved", 0), fact(1, "hydrating", 10), fact(2, "alive", 300_000), fact(3, "freed", 300_100))
    assert charge(facts, gpu_type="H100", tariff=PRICE) == charged(0, 0)


def test_without_a_price_time_is_counted_and_money_is_not_known() -> None:
    assert charge(WHOLE, gpu_type="H100", tariff=UNPRICED) == charged(22_000, None)


def test_facts_of_several_attempts_are_refused() -> None:
    with pytest.raises(InvalidValue) as refused:
        charge([*WHOLE, fact(2, "freed", 9, attempt="run1:2")], gpu_type="H100", tariff=PRICE)
    assert str(refused.value) == golden("model.ledger.charge-one-attempt")


def test_two_different_facts_under_one_number_are_refused_in_any_order() -> None:
    facts = [*WHOLE, fact(6, "freed", 13_001)]
    for order in (facts, facts[::-1]):
        with pytest.raises(InvalidValue) as refused:
            charge(order, gpu_type="H100", tariff=PRICE)
        assert str(refused.value) == golden("model.ledger.two-different-facts")


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Return the facts of an attempt as a node would write them: numbers and boottimes grow, a boot may be between."""
    gpus = tuple(f"GPU-{number}" for number in range(draw(st.integers(0, 8))))
    middle = draw(st.lists(st.sampled_from(["alive", "exited"]), max_size=6))
    kinds = ["reserved", "hydrating", "exec", *middle, "freed"][: draw(st.integers(1, 10))]
    reboot_at = draw(st.one_of(st.none(), st.integers(0, 10)))
    at_ms, boot, facts = 0.0, 1, []
    for seq, kind in enumerate(kinds):
        if seq == reboot_at:
            at_ms, boot = 0.0, 2
        at_ms += draw(st.integers(0, 10**13)) / 1_000_000
        facts.append(fact(seq, kind, at_ms, boot_id=f"boot-{boot}", gpus=gpus))
    return facts


PRICES = st.one_of(
    st.just(UNPRICED),
    st.integers(0, 10**9).map(lambda micros: Tariff(gpu_micros_per_hour=micros)),
)


@given(histories(), PRICES, st.data())
def test_F34_any_order_and_any_repetition_give_the_same_charge(
    facts: list[Fact], price: Tariff, data: st.DataObject
) -> None:
    repeated = data.draw(st.lists(st.sampled_from(facts), max_size=10))
    shuffled = data.draw(st.permutations([*facts, *repeated]))
    expected = charge(facts, gpu_type="H100", tariff=price)
    assert charge(iter(shuffled), gpu_type="H100", tariff=price) == expected


@given(histories(), PRICES)
def test_a_charge_is_at_most_the_time_held_and_money_is_rounded_up_once(facts: list[Fact], price: Tariff) -> None:
    cost = charge(facts, gpu_type="H100", tariff=price)
    held_ns = sum(
        max(each.boottime_ns for each in boot) - min(each.boottime_ns for each in boot)
        for boot_id in {each.boot_id for each in facts}
        if (boot := [each for each in facts if each.boot_id == boot_id])
    )
    assert 0 <= cost.gpu_ms * 1_000_000 <= held_ns * len(facts[0].gpus)
    assert type(cost.gpu_ms) is int
    if price.gpu_micros_per_hour is None:
        assert cost.micros is None
    else:
        assert type(cost.micros) is int
        assert cost.micros == math.ceil(Fraction(cost.gpu_ms * price.gpu_micros_per_hour, 3_600_000))


@given(histories(), st.data())
def test_more_facts_of_one_boot_never_lower_a_charge_until_it_is_final(facts: list[Fact], data: st.DataObject) -> None:
    known = facts[: data.draw(st.integers(0, len(facts)))]
    earlier = charge(known, gpu_type="H100", tariff=PRICE)
    later = charge(facts, gpu_type="H100", tariff=PRICE)
    assert earlier.gpu_ms <= later.gpu_ms


def test_a_fact_round_trips_through_json() -> None:
    assert [msgspec.json.decode(msgspec.json.encode(each), type=Fact) for each in WHOLE] == list(WHOLE)


def test_prices_are_read_by_any_spelling_and_kept_as_integers() -> None:
    assert parse_prices({"h100": 2.99, "Tesla K80": 0, "CPU": 0.0125, "L4": 4.1}) == {
        "H100": Tariff(gpu_micros_per_hour=2_990_000),
        "Tesla K80": Tariff(gpu_micros_per_hour=0),
        "CPU": Tariff(gpu_micros_per_hour=12_500),
        "L4": Tariff(gpu_micros_per_hour=4_100_000),
    }
    assert parse_prices({}) == {}


@pytest.mark.parametrize("table", [{"A100": 1.5, "A100-80": 2}, {"A100-80": 2, "A100": 1.5}])
def test_a_familys_price_holds_for_members_without_one(table: dict[str, float]) -> None:
    assert parse_prices(table) == {
        "A100": Tariff(gpu_micros_per_hour=1_500_000),
        "A100-40": Tariff(gpu_micros_per_hour=1_500_000),
        "A100-80": Tariff(gpu_micros_per_hour=2_000_000),
    }


@pytest.mark.parametrize(
    ("written", "error", "text"),
    [
        ('{"H100": -1}', InvalidValue, "the price of H100 is -1, not between 0 and 100000"),
        ('{"H100": 100001}', InvalidValue, "the price of H100 is 100001, not between 0 and 100000"),
        ('{"H100": 1, "h100": 2}', InvalidValue, "the price table contains H100 twice"),
        ('{"h100": "2.99"}', InvalidOption, "the price of H100 is '2.99', not a number"),
        ('{"H100": true}', InvalidOption, "the price of H100 is True, not a number"),
        ('{"H100": null}', InvalidOption, "the price of H100 is None, not a number"),
    ],
)
def test_a_price_that_cannot_be_is_refused(written: str, error: type[UsageError], text: str) -> None:
    with pytest.raises(error) as refused:
        parse_prices(msgspec.json.decode(written))
    assert str(refused.value) == f"{text}\n{PRICE_HINT}"


@pytest.mark.parametrize(("amount", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_a_price_that_is_not_finite_is_refused(amount: float, text: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_prices({"H100": amount})
    assert str(refused.value) == golden("model.ledger.price-h100-between", text=text, PRICE_HINT=PRICE_HINT)


BARE = Receipt(
    run_id="01jabc",
    fence=1,
    state="SUCCEEDED",
    reason=None,
    gpu_type="CPU",
    gpus=("CPU-0",),
    kind=DeviceKind.CPU,
    segments=Segments(),
    gpu_ms=40,
    micros=None,
    currency="USD",
    peak_memory_bytes=None,
    warm=False,
    warm_reason="torch is not installed",
    gate="",
    quarantined=(),
    tags={},
    facts=0,
    world_size=1,
)


def test_a_receipt_tells_all_in_eight_lines() -> None:
    assert FULL.text().splitlines() == [
        golden("model.ledger.run-01jabc-attempt"),
        golden("model.ledger.h100-ranks-371"),
        golden("model.ledger.queued-ms-environment"),
        golden("model.ledger.warm-start-host"),
        golden("model.ledger.gate-gpus-verified"),
        "quarantined: GPU-b",
        "tags: job=nightly, team=search",
        golden("model.ledger.notes-rank-failed"),
    ]


def test_a_receipt_leaves_out_what_is_not_known_and_says_unpriced() -> None:
    assert BARE.text().splitlines() == [
        golden("model.ledger.run-01jabc-attempt-succeeded"),
        golden("model.ledger.cpu-slot-rank"),
        golden("model.ledger.cold-start-torch"),
    ]


def test_23B7_a_call_that_went_well_is_one_line() -> None:
    receipt = msgspec.structs.replace(
        BARE,
        kind=DeviceKind.GPU,
        gpu_type="H100",
        gpus=GPUS,
        segments=Segments(run_ms=41_000, gate_ms=21),
        micros=20_000,
        gate="2 GPUs verified free: no process, memory at baseline",
        warm=True,
        warm_reason="",
        peak_memory_bytes=10**9,
        tags={"team": "search"},
        uses=(use(91.2, peak_memory_bytes=61_300_000_000),),
    )
    assert receipt.brief() == (golden("model.ledger.h100-41-02"),)
    fake = msgspec.structs.replace(receipt, kind=DeviceKind.FAKE, micros=None, nodes=("n1", "n2"))
    assert fake.brief() == (golden("model.ledger.h100-fake-n1"),)
    slots = msgspec.structs.replace(
        receipt, kind=DeviceKind.CPU, gate="2 CPU slots free: no process of the run is left"
    )
    assert slots.brief() == (golden("model.ledger.cpu-slots-41"),)


def test_23B7_what_a_user_must_see_has_a_line_of_its_own() -> None:
    why = "first run with this interpreter"
    first = Segments(first_line_ms=5_000, run_ms=700, gate_ms=1)
    receipt = msgspec.structs.replace(FULL, segments=first, warm=False, warm_reason=why)
    assert receipt.brief() == (
        golden("model.ledger.run-01jabc-failed"),
        golden("model.ledger.devices-verified-free"),
        "quarantined: GPU-b",
        golden("model.ledger.cold-start-your", why=why),
        golden("model.ledger.rank-failed-consequence"),
        "12 lines dropped",
    )
    page = receipt.brief_html()
    assert page.index("<summary") < page.index("<table") < page.index("quarantined: GPU-b</div>")


@pytest.mark.parametrize(
    "gate",
    [
        "1 of 2 GPUs not free: GPU-b: pid 4 holds 2.0 GiB",
        "not known: the run's supervisor ended before it could check",
        "n1: 2 GPUs verified free: no process; n2: not known: the run's supervisor ended before it could check",
        "the state of the 2 devices on n2 is not known; n1: 2 GPUs verified free: no process",
    ],
)
def test_23B7_devices_of_which_nothing_is_known_are_not_called_free(gate: str) -> None:
    first, *others = msgspec.structs.replace(FULL, gate=gate, quarantined=()).brief()
    assert "free" not in first and others[0] == golden("model.ledger.devices-verified-free-2", gate=gate)


def test_23B7_there_is_one_figure_for_host_memory() -> None:
    uses = (use(35.0, peak_memory_bytes=10**9),)
    receipt = msgspec.structs.replace(BARE, uses=uses, peak_memory_bytes=1_234_567_890)
    assert receipt.text().count("GB") == 1 and golden("model.ledger.host-memory-peak") in receipt.text()


def test_printing_a_receipt_is_reading_it() -> None:
    assert str(FULL) == f"{FULL}" == FULL.text()
    assert repr(FULL).startswith("Receipt(run_id='01jabc', ")


def test_the_receipt_of_a_session_speaks_of_a_session() -> None:
    receipt = msgspec.structs.replace(BARE, runs=3, world_size=0)
    assert receipt.text().splitlines() == [
        "session 01jabc · SUCCEEDED",
        golden("model.ledger.cpu-slot-runs"),
    ]
    page = receipt.html()
    assert "session 01jabc<" in page and "1 CPU slot · 3 runs<" in page and " idle, unpriced<" in page
    assert not any(word in page for word in ("attempt", "0 ranks", "start"))


@pytest.mark.parametrize(
    ("kind", "gpus", "text"),
    [
        (DeviceKind.GPU, GPUS, "2 H100 · 1 rank · 0.040 GPU-seconds, unpriced"),
        (DeviceKind.FAKE, GPUS, "2 H100 (fake) · 1 rank · 0.040 GPU-seconds, unpriced"),
        (DeviceKind.CPU, GPUS, "2 CPU slots · 1 rank · 0.040 CPU slot-seconds, unpriced"),
    ],
)
def test_a_receipt_says_what_the_devices_were(kind: DeviceKind, gpus: tuple[str, ...], text: str) -> None:
    receipt = msgspec.structs.replace(BARE, kind=kind, gpus=gpus, gpu_type="H100")
    assert receipt.text().splitlines()[1] == text


LINK = "http://127.0.0.1:5000/#/experiments/1/runs/8f14e45fceea167a5a36dedd4bea2543"


def use(busy: float | None = None, **values: float | int | None) -> DeviceUse:
    return msgspec.structs.replace(DeviceUse(uuid="GPU-a", samples=60, busy_percent=busy), **values)


def test_a_receipt_says_what_devices_did_and_where_the_run_is_tracked() -> None:
    uses = (
        use(91.2, peak_memory_bytes=61_300_000_000, energy_joules=700_000.0, throttled_s=0.4),
        use(82.8, peak_memory_bytes=50_000_000_000, energy_joules=812_000.0, throttled_s=0.0),
    )
    receipt = msgspec.structs.replace(FULL, uses=uses, tracked=LINK)
    lines = receipt.text().splitlines()
    assert lines[1] == golden("model.ledger.h100-ranks-371-gpu")
    assert lines[6:] == [
        golden("model.ledger.tracked-tags-job", LINK=LINK),
        golden("model.ledger.notes-rank-failed"),
    ]
    assert receipt.rows()["use"] == golden("model.ledger.gpu-87-busy")
    assert f'<a href="{LINK}"' in receipt.html()


@pytest.mark.parametrize(
    ("uses", "kind", "text"),
    [
        ((), DeviceKind.GPU, None),
        ((use(),), DeviceKind.GPU, None),
        ((use(35.0),), DeviceKind.CPU, "CPU 35 % busy"),
        ((use(80.0), use(0.0), use(0.2)), DeviceKind.GPU, "GPU 27 % busy · 2 of 3 devices did nothing"),
        ((use(80.0), use(0.0, samples=2)), DeviceKind.GPU, "GPU 77 % busy"),
        ((use(0.0), use(0.0)), DeviceKind.FAKE, "GPU 0 % busy"),
        ((use(99.0, throttled_s=185.0),), DeviceKind.GPU, "GPU 99 % busy · throttled for 3 min 05 s"),
        ((use(None, peak_memory_bytes=0),), DeviceKind.GPU, None),
    ],
)
def test_what_is_not_known_of_devices_is_left_out(
    uses: tuple[DeviceUse, ...], kind: DeviceKind, text: str | None
) -> None:
    assert msgspec.structs.replace(BARE, uses=uses, kind=kind).rows().get("use") == text


@pytest.mark.parametrize("address", ["javascript:alert(1)", 'http://x/"onload="y', "see http://x/", "http://x/ y"])
def test_what_is_no_web_address_is_no_link(address: str) -> None:
    assert "<a " not in msgspec.structs.replace(BARE, tracked=address).html()


HOSTILE = "<script>alert(\"x\")</script> & 'y'"
ESCAPED = "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &#x27;y&#x27;"


def test_the_html_of_a_receipt_has_every_row_and_escapes_what_users_wrote() -> None:
    receipt = msgspec.structs.replace(FULL, tags={HOSTILE: "v"}, gate=HOSTILE, notes=(HOSTILE,), reason=HOSTILE)
    page = receipt.html()
    assert page.count(ESCAPED) == 4
    assert "<script" not in page and "http" not in page
    rows = re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", page)
    assert [label for label, _ in rows] == [
        "devices", "cost", "time", "start", "host memory peak", "gate", "quarantined", "tags", "notes",
    ]  # fmt: skip
    assert dict(rows)["cost"] == "371.0 GPU-seconds, 0.31 USD"


def test_a_notebook_shows_a_receipt_as_table_and_as_text() -> None:
    class Printer:
        written = ""

        def text(self, text: str) -> None:
            self.written += text

    printer = Printer()
    BARE._repr_pretty_(printer, False)
    assert printer.written == BARE.text()
    assert BARE._repr_html_() == BARE.html()
    assert [label for label in ("host memory peak", "gate", "tags") if f">{label}<" in BARE.html()] == []


def test_a_receipt_holds_no_control_characters_and_no_endless_line() -> None:
    receipt = msgspec.structs.replace(BARE, tags={"a": "\x1b[31mred\nand a line", "b": "x" * 300})
    line = receipt.text().splitlines()[-1]
    assert line == golden("model.ledger.tags-31mred-line") + "x" * 168 + "…"
    assert len(line) == 200


def test_a_receipt_round_trips_through_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(FULL), type=Receipt) == FULL


@given(st.lists(st.text(), max_size=4), st.dictionaries(st.text(), st.text(), max_size=4), st.text())
def test_a_receipt_is_at_most_eight_lines_whatever_is_in_it(notes: list[str], tags: dict[str, str], gate: str) -> None:
    known = msgspec.structs.replace(FULL, uses=(use(50.0, peak_memory_bytes=1),), tracked=gate)
    lines = msgspec.structs.replace(known, notes=tuple(notes), tags=tags, gate=gate).text().split("\n")
    assert len(lines) <= 8
    assert all(line and line.isprintable() and len(line) <= 200 for line in lines)
