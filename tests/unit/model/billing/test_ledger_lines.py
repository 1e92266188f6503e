"""Lines, entries: what an attempt used on each day, and how a ledger comes to say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing.ledger import (
    EntryKind,
    LedgerEntry,
    LedgerLine,
    charge,
    lines,
    post,
    priced,
    reversed_line,
)
from serverless_gpu.model.billing.metering import Meter, lendings
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff, cost
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.server.invariants.run_invariants import LentDevice, double_lendings, lent_devices

DAY = 20_000
MIDNIGHT_NS = DAY * DAY_NS
GPUS = ("GPU-a", "GPU-b")
TARIFF = Tariff(
    gpu_micros_per_hour=3_000_000,
    core_micros_per_hour=40_000,
    memory_micros_per_hour=5_000,
    dbu_micros_per_hour=8_884_000,
)
AMOUNTS = ("environment_ms", "start_ms", "run_ms", "stop_ms", "gate_ms", "idle_ms", "gpu_ms", "billed_ms", "core_ms")


def fact(seq: int, kind: str, at_s: float, *, grace_ms: int | None = None) -> Fact:
    """Return a fact that happened so long after midnight of day 20,000; the boot was 1,000 s before."""
    return Fact(
        attempt="run1:1",
        seq=seq,
        kind=FactKind(kind),
        boot_id="boot-1",
        boottime_ns=round((1_000 + at_s) * 1e9),
        wall_ns=MIDNIGHT_NS + round(at_s * 1e9),
        gpus=GPUS,
        cpus=0,
        memory_bytes=0,
        grace_ms=grace_ms,
    )


WHOLE = (
    fact(0, "reserved", 10),
    fact(1, "hydrating", 10),
    fact(2, "starting", 13),
    fact(3, "exec", 14.5),
    fact(4, "alive", 75),
    fact(5, "stopping", 100, grace_ms=30_000),
    fact(6, "exited", 102),
    fact(7, "freed", 102.25),
)


def test_every_segment_is_apart_from_facts_alone() -> None:
    (line,) = lines(WHOLE, UNPRICED)
    assert line == LedgerLine(
        day=DAY,
        start_ns=MIDNIGHT_NS + 10_000_000_000,
        end_ns=MIDNIGHT_NS + 102_250_000_000,
        gpus=2,
        environment_ms=6_000,
        start_ms=3_000,
        run_ms=171_000,
        stop_ms=4_000,
        gate_ms=500,
        gpu_ms=175_500,
        billed_ms=175_500,
    )


def test_facts_of_an_older_node_still_charge() -> None:
    older = [each for each in WHOLE if each.kind not in (FactKind.STARTING, FactKind.STOPPING)]
    (line,) = lines(older, UNPRICED)
    assert (line.environment_ms, line.start_ms, line.run_ms, line.stop_ms) == (9_000, 0, 175_000, 0)
    assert line.gpu_ms == line.billed_ms == 175_500


def test_after_the_grace_of_a_stop_nothing_is_billed() -> None:
    facts = (*WHOLE[:5], fact(5, "stopping", 100, grace_ms=1_500), *WHOLE[6:])
    (line,) = lines(facts, TARIFF)
    assert (line.gpu_ms, line.billed_ms) == (175_500, 2 * 87_000)
    assert line.micros == cost(TARIFF, 174_000)
    # The ranks were not asked: they ended by themselves, or failed.
    facts = (*WHOLE[:5], fact(5, "stopping", 100), *WHOLE[6:])
    assert lines(facts, TARIFF)[0].billed_ms == 175_500


def test_what_the_platform_failed_in_is_metered_and_costs_nothing() -> None:
    (line,) = lines(WHOLE, TARIFF, is_billed=False)
    assert (line.gpu_ms, line.billed_ms, line.micros, line.dbu_micros, line.core_ms) == (175_500, 0, 0, 0, 0)
    assert lines(WHOLE, UNPRICED, is_billed=False)[0].micros is None


def test_cores_and_memory_are_charged_where_they_were_limited() -> None:
    facts = [msgspec.structs.replace(each, cpus=8, memory_bytes=3 << 29) for each in WHOLE]
    (line,) = lines(facts, TARIFF)
    assert (line.core_ms, line.memory_mib_ms) == (8 * 87_750, 1_536 * 87_750)
    assert line.micros == -(-(175_500 * 3_000_000 + 8 * 87_750 * 40_000 + 87_750 * 5_000 * 3 // 2) // 3_600_000)
    assert line.dbu_micros == -(-175_500 * 8_884_000 // 3_600_000)


def test_the_core_of_a_cpu_slot_is_not_charged_again() -> None:
    slots = [msgspec.structs.replace(each, gpus=("CPU-0", "CPU-1"), cpus=2) for each in WHOLE]
    assert lines(slots, TARIFF)[0].core_ms == 0
    more = [msgspec.structs.replace(each, cpus=6) for each in slots]
    assert lines(more, TARIFF)[0].core_ms == 4 * 87_750


def test_a_day_ends_at_midnight_utc_and_costs_add_up() -> None:
    late = [msgspec.structs.replace(each, wall_ns=each.wall_ns - 60_000_000_001) for each in WHOLE]
    first, second = lines(late, TARIFF)
    assert (first.day, second.day) == (DAY - 1, DAY)
    assert first.end_ns == second.start_ns == MIDNIGHT_NS
    assert (first.run_ms, second.run_ms) == (2 * 45_500, 2 * 40_000)
    assert (first.micros or 0) + (second.micros or 0) == cost(TARIFF, 175_500)
    # The clock of the first fact places it; a clock that is set later changes nothing.
    moved = [late[0], *(msgspec.structs.replace(each, wall_ns=0) for each in late[1:])]
    assert lines(moved, TARIFF) == (first, second)


def test_a_lost_hand_back_never_has_a_session_pay_for_what_a_run_had() -> None:
    facts = (
        fact(0, "reserved", 0),
        fact(1, "held", 0),
        fact(2, "alive", 5),
        # freed at 7 is missing, and came back at 50
        fact(4, "held", 50),
        fact(5, "freed", 60),
    )
    assert [line.idle_ms for line in lines(facts, UNPRICED)] == [2 * (5_000 + 10_000)]
    (line,) = lines((*facts, fact(3, "freed", 7)), UNPRICED)
    assert line.idle_ms == line.gpu_ms == 2 * (7_000 + 10_000)


# --- entries ----------------------------------------------------------------------------------------------------------


def net(entries: Iterable[LedgerEntry], *, provisional: bool | None = None) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for entry in entries:
        if provisional is None or entry.provisional is provisional:
            amounts = (*(getattr(entry.line, name) for name in AMOUNTS), entry.line.micros or 0, entry.line.dbu_micros)
            known = found.get(entry.line.day, (0,) * len(amounts))
            found[entry.line.day] = tuple(map(sum, zip(known, amounts, strict=True)))
    return {day: amounts for day, amounts in found.items() if any(amounts)}


def as_posted(target: Sequence[LedgerLine]) -> list[LedgerEntry]:
    return [
        LedgerEntry(number=number, kind=EntryKind.ORIGINAL, provisional=False, line=line)
        for number, line in enumerate(target, 1)
    ]


def test_what_is_there_and_right_is_not_written_again() -> None:
    target = lines(WHOLE, TARIFF)
    entries = post((), target, final=True)
    assert entries == tuple(as_posted(target))
    assert post(entries, target, final=True) == ()


def test_a_provisional_day_is_taken_back_and_said_anew() -> None:
    early = post((), lines(WHOLE[:5], TARIFF), final=False)
    assert [(entry.kind, entry.provisional) for entry in early] == [(EntryKind.ORIGINAL, True)]
    assert post(early, lines(WHOLE[:5], TARIFF), final=False) == ()
    late = post(early, lines(WHOLE, TARIFF), final=True)
    assert [(entry.number, entry.kind, entry.provisional) for entry in late] == [
        (2, EntryKind.REVERSAL, True),
        (3, EntryKind.RESTATED, False),
    ]
    assert late[0].line == reversed_line(early[0].line) and late[0].line.gpus == 2
    assert net((*early, *late), provisional=True) == {}
    assert net((*early, *late)) == net(as_posted(lines(WHOLE, TARIFF)))


def test_F17_what_turns_out_to_be_final_is_said_as_final_even_unchanged() -> None:
    target = lines(WHOLE[:5], TARIFF)
    early = post((), target, final=False)
    late = post(early, target, final=True)
    assert [(entry.kind, entry.provisional) for entry in late] == [
        (EntryKind.REVERSAL, True),
        (EntryKind.RESTATED, False),
    ]


def test_what_was_begun_and_not_ended_is_completed() -> None:
    target = lines(WHOLE, TARIFF)
    posted = as_posted(lines(WHOLE[:5], TARIFF))
    whole = post(posted, target, final=True)
    torn = [*posted, whole[0]]  # the reversal, and not what holds in its place
    assert post(torn, target, final=True) == whole[1:]


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Return facts as a node writes them, of a run or a session, over several days, with a reboot perhaps."""
    at_ns = draw(st.integers(0, 10**15))
    wall_ns = MIDNIGHT_NS + draw(st.integers(0, DAY_NS))
    reboot_at = draw(st.one_of(st.none(), st.integers(0, 12)))
    if draw(st.booleans()):
        kinds = ["reserved", "starting", "exec", *(["alive"] * draw(st.integers(0, 5))), "stopping", "exited", "freed"]
    else:
        kinds = ["reserved", *(["held", "alive", "freed"] * draw(st.integers(1, 4)))]
    kinds = kinds[: draw(st.integers(1, len(kinds)))]
    cpus, memory, devices = draw(st.integers(0, 64)), draw(st.integers(0, 2**40)), draw(st.integers(1, 8))
    grace_ms = draw(st.one_of(st.none(), st.integers(0, 10**6)))
    found = []
    for seq, kind in enumerate(kinds):
        step_ns = draw(st.integers(0, 10**14))
        at_ns, wall_ns = at_ns + step_ns, wall_ns + step_ns
        if seq == reboot_at:
            at_ns = 0
        found.append(
            Fact(
                attempt="run1:1",
                seq=seq,
                kind=FactKind(kind),
                boot_id="boot-1" if reboot_at is None or seq < reboot_at else "boot-2",
                boottime_ns=at_ns,
                wall_ns=wall_ns,
                gpus=tuple(f"GPU-{number}" for number in range(devices)),
                cpus=cpus,
                memory_bytes=memory,
                grace_ms=grace_ms if kind == "stopping" else None,
            )
        )
    return found


TARIFFS = st.builds(
    Tariff,
    gpu_micros_per_hour=st.one_of(st.none(), st.integers(0, 10**12)),
    core_micros_per_hour=st.one_of(st.none(), st.integers(0, 10**9)),
    memory_micros_per_hour=st.one_of(st.none(), st.integers(0, 10**9)),
    dbu_micros_per_hour=st.integers(0, 10**9),
)


@given(histories(), TARIFFS, st.booleans(), st.data())
def test_F34_any_order_and_any_repetition_give_the_same_lines(
    facts: list[Fact], tariff: Tariff, is_billed: bool, data: st.DataObject
) -> None:
    repeated = data.draw(st.lists(st.sampled_from(facts), max_size=10))
    shuffled = data.draw(st.permutations([*facts, *repeated]))
    assert lines(shuffled, tariff, is_billed=is_billed) == lines(facts, tariff, is_billed=is_billed)


@given(histories(), TARIFFS)
def test_lines_add_up_to_one_charge_that_is_rounded_once_and_never_more_than_was_held(
    facts: list[Fact], tariff: Tariff
) -> None:
    found = lines(facts, tariff)
    whole = charge(facts, gpu_type="H100", tariff=tariff)
    assert whole.gpu_ms == sum(line.gpu_ms for line in found)
    assert whole.micros == cost(
        tariff,
        sum(line.billed_ms for line in found),
        sum(line.core_ms for line in found),
        sum(line.memory_mib_ms for line in found),
    )
    for line in found:
        held_ms = sum(getattr(line, name) for name in AMOUNTS[:6])
        assert 0 <= line.billed_ms <= line.gpu_ms <= held_ms
        # Positions are cut to whole milliseconds, each of them: a day may have one more than its share.
        assert held_ms <= line.gpus * (-(-(line.end_ns - line.start_ns) // 1_000_000) + 1)
        assert line.day == line.start_ns // DAY_NS and line.end_ns <= (line.day + 1) * DAY_NS
        assert line.micros is None or line.micros >= 0
    boots = {each.boot_id: [own.boottime_ns for own in facts if own.boot_id == each.boot_id] for each in facts}
    held_ns = len(facts[0].gpus) * sum(max(times) - min(times) for times in boots.values())
    assert sum(line.gpu_ms + line.environment_ms + line.start_ms for line in found) * 1_000_000 <= held_ns


@given(histories(), TARIFFS, st.data())
def test_any_sequence_of_posts_ends_in_the_same_sums(facts: list[Fact], tariff: Tariff, data: st.DataObject) -> None:
    posted: list[LedgerEntry] = []
    for _ in range(data.draw(st.integers(0, 5))):
        some = data.draw(st.lists(st.sampled_from(facts), unique_by=lambda each: each.seq))
        billed = data.draw(st.booleans())
        new = post(posted, lines(some, tariff, is_billed=billed), final=data.draw(st.booleans()))
        posted += new[: data.draw(st.integers(0, len(new)))]  # a crash in between: only some of it was written
    target = lines(facts, tariff)
    posted += post(posted, target, final=True)
    assert post(posted, target, final=True) == ()
    assert net(posted) == net(as_posted(target))
    assert net(posted, provisional=True) == {}
    assert [entry.number for entry in posted] == list(range(1, len(posted) + 1))


# --- sums, and who had what -------------------------------------------------------------------------------------------

WHO = {
    "tag": ("team=search", "team=vision", ""),
    "user": ("alice", "bob"),
    "team": ("search", "vision", "speech"),
    "pool": ("batch", ""),
}


@given(st.lists(st.tuples(histories(), TARIFFS, st.tuples(*(st.sampled_from(names) for names in WHO.values())))))
def test_sums_by_tag_user_team_pool_and_run_agree_to_the_millionth(
    attempts: list[tuple[list[Fact], Tariff, tuple[str, ...]]],
) -> None:
    by: dict[tuple[str, str], int] = {}
    total = 0
    for number, (facts, tariff, names) in enumerate(attempts):
        for line in lines(facts, tariff):
            total += line.micros or 0
            for key in (*zip(WHO, names, strict=True), ("run", str(number)), ("day", str(line.day))):
                by[key] = by.get(key, 0) + (line.micros or 0)
        whole = charge(facts, gpu_type="H100", tariff=tariff)
        assert by.get(("run", str(number)), 0) == (whole.micros or 0)
    for kind in (*WHO, "run", "day"):
        assert sum(micros for (dimension, _), micros in by.items() if dimension == kind) == total


def doubles(*attempts: Iterable[Fact]) -> list[str]:
    """Return what I4 says of attempts of one node, which are numbered."""
    lent: dict[tuple[str, ...], list[LentDevice]] = {}
    for number, facts in enumerate(attempts):
        for place, one in lent_devices(f"r:{number}", "n", tuple(facts)):
            lent.setdefault(place, []).append(one)
    return sorted(violation.subject for place, ones in lent.items() for violation in double_lendings(place[-1], ones))


def later(facts: Iterable[Fact], seconds: int) -> list[Fact]:
    return [msgspec.structs.replace(each, boottime_ns=each.boottime_ns + seconds * 10**9) for each in facts]


def test_a_device_that_two_attempts_had_at_once_is_found() -> None:
    assert [(one.start_ns, one.end_ns) for one in lendings(WHOLE)] == [(1_010 * 10**9, 1_102_250_000_000)]
    assert doubles(WHOLE, later(WHOLE, 93)) == []
    sooner = later(WHOLE, 92)
    assert doubles(WHOLE, sooner) == ["device GPU-a", "device GPU-b"]
    assert doubles(WHOLE, [msgspec.structs.replace(each, boot_id="boot-2") for each in sooner]) == []


def test_a_long_one_is_compared_with_all_that_follow() -> None:
    found = [
        LentDevice(0, 100, "long"),
        LentDevice(10, 20, "within"),
        LentDevice(30, 40, "too"),
        LentDevice(100, 110, "after"),
    ]
    assert [one.sentence.split()[3] for one in double_lendings("GPU-a", found)] == ["within", "too"]


def test_a_session_and_its_runs_never_have_a_device_at_once() -> None:
    session = [
        fact(0, "reserved", 0),
        fact(1, "held", 0),
        fact(2, "freed", 10),
        fact(3, "held", 30),
        fact(4, "freed", 40),
    ]
    run = [fact(0, "reserved", 10), fact(1, "exec", 11), fact(2, "exited", 29), fact(3, "freed", 30)]
    assert doubles(session, run) == []
    # The run's last word is missing: its account ends before, not after.
    assert doubles(session, run[:3]) == []


def test_a_clock_that_is_wrong_by_centuries_makes_no_lines_without_end() -> None:
    facts = (WHOLE[3], msgspec.structs.replace(WHOLE[7], boottime_ns=2**62))
    found = lines(facts, TARIFF)
    assert len(found) == 401 and found[-1].end_ns - found[0].start_ns == 400 * DAY_NS


def test_facts_that_come_one_by_one_and_late_make_few_rows() -> None:
    """Each day is restated when its own facts come, and a later one only when the costs before it change."""
    days = [
        msgspec.structs.replace(
            each, boottime_ns=each.boottime_ns + number * DAY_NS, wall_ns=each.wall_ns + number * DAY_NS, seq=seq
        )
        for seq, (number, each) in enumerate(
            (number, each) for number in range(30) for each in (fact(0, "held", 1), fact(1, "freed", 2.0001))
        )
    ]
    posted: list[LedgerEntry] = []
    known: list[Fact] = []
    for each in days:
        known.append(each)
        posted += post(posted, lines(known, TARIFF), final=False)
    posted += post(posted, lines(known, TARIFF), final=True)
    assert len(posted) <= 5 * 30
    assert net(posted) == net(as_posted(lines(days, TARIFF)))


@given(histories(), TARIFFS)
def test_what_is_taken_one_by_one_is_at_any_cut_what_all_at_once_are(facts: list[Fact], tariff: Tariff) -> None:
    """A receipt is made by who took each fact as it happened, the ledger's entries by who has them all."""
    meter = Meter()
    for number, each in enumerate(facts, 1):
        meter.add(each)
        assert priced(meter.used(), tariff) == lines(facts[:number], tariff)


@given(histories(), TARIFFS, st.integers(0, 20))
def test_a_crash_at_any_fact_leaves_at_most_what_the_whole_would_have_been(
    facts: list[Fact], tariff: Tariff, cut: int
) -> None:
    whole, early = (charge(some, gpu_type="H100", tariff=tariff) for some in (facts, facts[:cut]))
    assert early.gpu_ms <= whole.gpu_ms and early.billed_ms <= whole.billed_ms
    assert (early.micros or 0) <= (whole.micros or 0)
    assert lines(facts[:cut], tariff)[:-1] == lines(facts, tariff)[: max(0, len(lines(facts[:cut], tariff)) - 1)]
