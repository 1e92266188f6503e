"""`sgpu top`: a frame of the monitor as a table, and the table as lines that fit any terminal."""

from __future__ import annotations

import json

import msgspec
import pytest

from serverless_gpu.cli.top_table import Around, DeviceOwner, Style, TopTable, draw, table_json, tabulate
from serverless_gpu.model.telemetry import RankSample
from serverless_gpu.node.monitor.messages import NodeFrame
from tests.support.cli.framed import FIRST, NOW_NS, SECOND, S, around, frame, slots
from tests.support.golden import golden
from tests.support.tiny_terminal import screen

PLAIN = Style(colour=False, unicode=True)


def made(shown: NodeFrame | None = None) -> TopTable:
    return tabulate(shown or frame(), frame(at_ns=NOW_NS - S), around())


def test_each_device_knows_who_has_it() -> None:
    owners = [row.owner for row in made().devices]
    assert [owner and (owner.run_id, owner.rank, owner.user) for owner in owners] == [
        *((FIRST, rank, "ada") for rank in range(4)),
        None,
        ("01zz", None, "bob"),
        (SECOND, 0, "ada"),
        None,
    ]
    assert made().devices[7].quarantined == golden("cli.top.memory-process-gb")


def test_each_run_has_the_samples_of_its_own_ranks() -> None:
    first, second = made().runs
    assert [rank.rank for rank in first.ranks] == [0, 1, 2, 3]
    assert [rank.memory_bytes for rank in second.ranks] == [10**9]


def test_a_rank_that_is_gone_shifts_nothing() -> None:
    whole = frame()
    left = tuple(rank for place, rank in enumerate(whole.sample.ranks) if place != 2)
    first, second = made(msgspec.structs.replace(whole, sample=msgspec.structs.replace(whole.sample, ranks=left))).runs
    assert [rank.rank for rank in first.ranks] == [0, 1, 3]
    assert len(second.ranks) == 1


def test_one_program_per_node_has_all_its_devices() -> None:
    whole = frame()
    alone = msgspec.structs.replace(whole.attempts[0], pids={2: 100})
    ranks = (RankSample(2, 300), RankSample(0, 50))
    shown = msgspec.structs.replace(
        whole, attempts=(alone, whole.attempts[1]), sample=msgspec.structs.replace(whole.sample, ranks=ranks)
    )
    owners = [row.owner for row in made(shown).devices[:4]]
    assert [owner and owner.rank for owner in owners] == [2] * 4
    assert made(shown).runs[0].ranks == (RankSample(2, 300),)


def test_rates_are_differences_and_need_two_frames() -> None:
    assert made().rates.receive == 12_000_000
    assert tabulate(frame(), None, around()).rates.receive is None
    assert tabulate(frame(), frame(at_ns=NOW_NS + S), around()).rates.receive is None, "a clock that was set back"


WIDE = f"""\
node-7 · cpu 37 % · memory 61.0/251.0 GB · disk 412.0 GB free · network ↓ 12.0 MB/s ↑ 3.0 MB/s
8 H100: 6 lent, 1 free, 1 in quarantine · 2.2 kW

#  BUSY        MEMORY              POWER      TEMP   CLOCK                  WHO
0  ███░  87 %  ███░ 61.0/80.0 GiB  572/700 W  64 °C  1980 MHz               train rank 0 …6o8p0a1s
1  ████  99 %  ███░ 61.0/80.0 GiB  644/700 W  64 °C  1980 MHz power cap     train rank 1 …6o8p0a1s
2  ████ 100 %  ████ 79.0/80.0 GiB  650/700 W  88 °C  1980 MHz heat          train rank 2 …6o8p0a1s
3  █░░░   3 %  ███░ 61.0/80.0 GiB  68/700 W   64 °C  1980 MHz               train rank 3 …6o8p0a1s
4  ░░░░   0 %  ░░░░  0.0/80.0 GiB  50/700 W   64 °C  1980 MHz               free
5  ░░░░   0 %  ░░░░  0.0/80.0 GiB  50/700 W   64 °C  1980 MHz               …01zz bob
6  █░░░  12 %  ██░░ 40.0/80.0 GiB  122/700 W  64 °C  1980 MHz 2 ECC errors  evil?[31m\\x0aname?[0m ra
7  -                                                                        quarantined: memory of n

run {FIRST} · train · RUNNING · 12 min 03 s · attempt 2
  MLflow: http://127.0.0.1:5000/#/experiments/1/runs/abcdef
  rank 0: cpu 101 %, 3.1 GB, GPU 61.0 GiB   rank 1: cpu 102 %, 3.1 GB, GPU 61.0 GiB
  rank 2: cpu 103 %, 3.1 GB, GPU 61.0 GiB   rank 3: cpu 104 %, 3.1 GB, GPU 61.0 GiB
run {SECOND} · evil?[31m\\x0aname?[0m · STARTING
  rank 0: cpu 50 %, 1.0 GB"""


def test_a_frame_is_drawn() -> None:
    lines = draw(made(), columns=100, style=PLAIN, user="ada")
    assert "\n".join(line.rstrip() for line in lines) == WIDE


@pytest.mark.parametrize("columns", [1, 2, 7, 20, 33, 40, 60, 79, 80, 97, 120, 200, 400])
@pytest.mark.parametrize("style", [PLAIN, Style(colour=True, unicode=True), Style(colour=False, unicode=False)])
def test_every_width_is_kept(columns: int, style: Style) -> None:
    for shown in (frame(), slots(4, 2), slots(2, 0), msgspec.structs.replace(frame(), devices=())):
        lines = draw(made(shown), columns=columns, style=style)
        assert all(len(screen(line)[0]) <= columns for line in lines)
        assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (90, "#  BUSY  MEMORY        POWER      TEMP   WHO"),
        (60, "#  BUSY  MEMORY  WHO"),
        (40, "#  BUSY  WHO"),
        (28, "#  BUSY"),
    ],
)
def test_what_matters_least_goes_first(columns: int, head: str) -> None:
    heads = next(line for line in draw(made(), columns=columns, style=PLAIN) if line.startswith("#"))
    assert heads.split() == head.split()


def test_slots_of_a_cpu_are_listed_where_they_are_lent() -> None:
    text = "\n".join(draw(made(slots(64, 2)), columns=100, style=PLAIN, user="ada"))
    assert golden("cli.top.64-cpu-slots") in text
    assert text.count(" 99 %") == 4, "two devices and their two ranks"
    assert "MEMORY" not in text and "POWER" not in text
    idle = draw(made(slots(64, 0)), columns=100, style=PLAIN)
    assert idle == ["node-7", golden("cli.top.64-cpu-slots-lent"), "", "no runs"]


def test_colours_say_nothing_that_words_do_not() -> None:
    coloured = draw(made(), columns=100, style=Style(colour=True, unicode=True), user="ada")
    assert any("\x1b[31m" in line for line in coloured)
    assert [screen(line)[0] for line in coloured] == [
        line.rstrip() for line in draw(made(), columns=100, style=PLAIN, user="ada")
    ]


def test_a_terminal_without_unicode_gets_none_of_ours() -> None:
    shown = made(msgspec.structs.replace(frame(), attempts=()))
    own = tabulate(
        frame(),
        frame(at_ns=NOW_NS - S),
        Around(node="n", user="ada", holders={"GPU-1": DeviceOwner(run_id="", name="", rank=None, user="bob")}),
    )
    for table in (shown, own):
        lines = draw(table, columns=100, style=Style(colour=False, unicode=False), user="ada")
        assert "".join(lines).replace("…", "").replace("·", "").isascii()


def test_json_has_every_value() -> None:
    value = json.loads(msgspec.json.encode(table_json(made())))
    assert value["node"] == "node-7" and value["host"]["cpu_percent"] == 37
    assert value["devices"][1]["throttle"] == 4 and value["devices"][1]["owner"]["rank"] == 1
    assert value["devices"][7]["busy_percent"] is None and value["devices"][7]["owner"] is None
    assert value["runs"][0]["ranks"][3]["gpu_memory_bytes"] == 61 * 2**30
    assert value["runs"][0]["tracked"].startswith("http://")
