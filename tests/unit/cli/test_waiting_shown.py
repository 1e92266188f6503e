"""A run that waits, in the commands: its place, its sentence with the times of this place, and all parts in JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from serverless_gpu.ambient import format_soon
from serverless_gpu.cli.runs.run_rows import as_json, moment_of, row, sentence_of
from serverless_gpu.wire.queue import WaitView
from tests.support.cli.waiting_shown import AT_NS, VIEW, WAITING
from tests.support.golden import golden


@pytest.fixture(autouse=True)
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process be nine hours ahead of Greenwich."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_the_sentence_has_the_times_of_this_place() -> None:
    assert sentence_of(VIEW).endswith(" it starts at 18 Mar 2030 02:47 at the latest; you are 2nd")


def test_a_sentence_without_parts_is_the_server_s() -> None:
    assert sentence_of(msgspec.structs.replace(VIEW, waiting=None)) == golden("cli.waiting_shown.server")
    moon = msgspec.structs.replace(WAITING, reason="moonlight")
    assert sentence_of(msgspec.structs.replace(VIEW, waiting=moon)) == golden("cli.waiting_shown.server")


def test_the_list_has_its_place() -> None:
    assert row(VIEW)[-1] == "waits 2nd, bob"
    assert row(msgspec.structs.replace(VIEW, waiting=None))[-1] == "waits, bob"


def test_programs_get_all_parts() -> None:
    told = as_json(VIEW)["waiting"]
    assert isinstance(told, dict)
    assert (told["reason"], told["place"], told["start"], told["is_bound"]) == (
        "capacity",
        2,
        "2030-03-17T17:46:40Z",
        True,
    )
    assert told["holders"] == [
        {
            "title": "alice/bert-ft",
            "count": 3,
            "until": "2030-03-17T17:46:40Z",
            "is_bound": True,
            "is_leaving": False,
        }
    ]
    moments = {"at_ns": "start", "turns_ns": "turns", "kept_ns": "kept", "likely_ns": "likely"}
    assert set(told) == set(WaitView.__struct_fields__) - set(moments) | set(moments.values())
    assert as_json(msgspec.structs.replace(VIEW, waiting=None))["waiting"] is None


def test_when_it_starts_is_said_as_it_is_known() -> None:
    assert moment_of(WAITING) == "2030-03-18 02:46:40 at the latest"
    assert moment_of(msgspec.structs.replace(WAITING, is_bound=False)) == "about 2030-03-18 02:46:40"


def test_a_moment_to_come_is_told_with_its_date_only_where_it_needs_one() -> None:
    day = 86_400_000_000_000
    assert format_soon(AT_NS, now_ns=AT_NS - 60_000_000_000) == "02:46"
    assert format_soon(AT_NS, now_ns=AT_NS - day) == "18 Mar 02:46"
    assert format_soon(AT_NS + 365 * day, now_ns=AT_NS) == "18 Mar 2031 02:46"
