"""The example of docs/how-to/reserved-or-on-demand.md is computed again, and its rows are compared."""

from __future__ import annotations

import re

from serverless_gpu.model.billing.advice import GpuRates, GpuUse, advise, curve_of, mix
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.units import MICROS_PER_UNIT
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "how-to" / "reserved-or-on-demand.md").read_text(encoding="utf-8")


def use(start: int, end: int, gpus: int) -> GpuUse:
    return GpuUse(start_ns=start * HOUR_NS, end_ns=end * HOUR_NS, gpus=gpus)


CURVE = curve_of([use(0, 10, 2), use(1, 7, 4), use(3, 4, 2)], 0, 10 * HOUR_NS)
RATES = GpuRates(reserved=MICROS_PER_UNIT, on_demand=2 * MICROS_PER_UNIT)


def table(head: str) -> list[list[str]]:
    """Return the rows of the table that begins so, without emphasis."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_slots_of_the_page() -> None:
    found = []
    for slot in advise(CURVE, RATES).slots:
        joined = " and " if slot.last == slot.first + 1 else " to "
        found.append([f"{slot.first}{joined}{slot.last}", f"{slot.share_percent:.0f} %", "yes" if slot.pays else "no"])
    told = table("| slot | wanted |")
    assert [[slots, wanted.removesuffix(" of the time"), pays] for slots, wanted, pays in told] == found


def test_the_costs_of_the_page() -> None:
    rows = table("| GPUs reserved |")
    assert [int(row[0]) for row in rows] == [0, advise(CURVE, RATES).best.slots, CURVE.peak]
    for slots, *cells in rows:
        found = mix(CURVE, RATES, int(slots))
        told = [float(re.findall(r"[\d.]+", cell)[-1]) for cell in cells]
        assert told == [
            micros / MICROS_PER_UNIT
            for micros in (found.reserved_micros, found.idle_micros, found.on_demand_micros, found.micros)
        ]


def test_the_break_even_duty_of_the_page() -> None:
    told = re.search(
        r"prices of ([\d.]+) and ([\d.]+), a reserved GPU pays off from a duty of ([\d.]+) %", " ".join(PAGE.split())
    )
    assert told is not None
    reserved, on_demand, percent = told.groups()
    assert f"{100 * float(reserved) / float(on_demand):.1f}" == percent
