"""Crews meet by sockets: each reaches all others, strangers reach nobody, and what fails says why.

Scenes run in a process of their own (`meeting_crews.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from serverless_gpu.model.lifecycle.rendezvous import PROBE_S
from serverless_gpu.node.supervisor.rendezvous import GUESTS_MAX, SETTLE_S
from tests.support.golden import golden
from tests.support.paths import REPOSITORY


def scene(name: str) -> Any:
    """Return what came of a scene."""
    command = [sys.executable, "-m", "tests.support.node.meeting_crews", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sixteen_crews_meet_in_less_than_200_ms() -> None:
    came = scene("all_meet")
    assert came["met"] and came["answered"] == 16 * 15
    assert came["took_s"] < 0.2, "an attempt waits for that before user code"


def test_a_crew_of_another_gang_is_not_taken_for_one_of_ours() -> None:
    assert scene("another_gang") == [["the peer closed the connection"], ["the peer closed the connection"]]


def test_who_does_not_answer_is_waited_for_once_and_names_are_not_looked_up() -> None:
    came = scene("nobody")
    assert came["problems"][:2] == [golden("node.node_meeting.answer"), "Connection refused"]
    assert len(came["problems"]) == 3 and came["problems"][2]
    assert PROBE_S <= came["took_s"] < PROBE_S + 2


def test_a_dead_address_is_not_waited_for_where_another_one_lives() -> None:
    came = scene("settles")
    for problems in came["problems"]:
        assert problems[0] == "" and problems[1], problems
    assert came["took_s"] < SETTLE_S + 1


def test_a_network_that_loses_large_packets_is_found_before_user_code_hangs_on_it() -> None:
    came = scene("large_is_lost")
    assert came["said"]
    assert came["problems"] == [golden("node.node_meeting.answers-but-large")]


def test_strangers_garbage_and_floods_are_told_nothing_and_stop_nobody() -> None:
    came = scene("strangers")
    assert came["told"] == 0 and came["left"] == 0
    assert came["guests"] <= GUESTS_MAX and came["took_s"] < PROBE_S


def test_what_is_no_list_of_all_crews_is_left_alone() -> None:
    assert scene("nonsense") == {"untouched": True, "same": True}


def test_a_port_of_the_rendezvous_that_is_closed_is_found_and_an_open_one_is_rank_0s() -> None:
    assert scene("rendezvous_is_closed") == {"problems": ["Connection refused"], "listens": True}


def test_a_crew_without_an_address_is_waited_for_by_nobody() -> None:
    assert scene("alone") == [0, 1]
