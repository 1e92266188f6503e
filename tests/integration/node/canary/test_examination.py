"""The canary of a node that cannot start runs, and the search for remains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.model.canary import UID, Trial, rows
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.canary import runs
from serverless_gpu.node.canary.examination import Examination, examine, new_key, trials, with_reason, with_remains
from serverless_gpu.node.canary.runs import json_lines
from serverless_gpu.node.canary.targets import new_mark, server_address
from tests.support.local.observe import wait_for

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"


def test_a_node_without_an_agent_gives_a_report_with_the_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Home) -> None:
        raise AgentUnavailable("the agent of this node did not come up")

    monkeypatch.setattr(runs, "connect", refuse)
    (tmp_path / "runs").mkdir()
    report = examine(Home(tmp_path), SystemClock(), Examination("n1", "sandbox"), os.environ)
    assert report.problem.startswith("the agent of this node did not come up")
    assert report.failed
    assert {row.verdict for row in report.rows} == {"unknown"}
    assert list(tmp_path.rglob("sgpu-canary-*")) == []


def test_what_a_run_left_is_found_removed_and_counts_as_possible() -> None:
    mark = new_mark()
    place = Path("/tmp", mark)
    place.touch()
    with subprocess.Popen([sys.executable, "-c", SLEEP, mark], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        done = Trial("possible")
        names = ("leave-process", "leave-file", "leave-segment")
        found = with_remains({**dict.fromkeys(names, done), "server-key": done}, mark, new_key())
        wait_for(lambda: process.poll() is not None, "the process that was left has ended")
    assert {name: trial.outcome for name, trial in found.items()} == {
        "leave-process": "possible",
        "leave-file": "possible",
        "leave-segment": "refused",
        "server-key": "possible",
    }
    assert not place.exists()


def test_an_attempt_that_was_refused_leaves_nothing_to_search_for() -> None:
    refused = Trial("refused", "EACCES")
    assert with_remains({"leave-file": refused}, new_mark(), new_key()) == {"leave-file": refused}


def test_27_an_attempt_on_the_network_of_a_node_without_rules_names_the_reason() -> None:
    done = Trial("possible")
    found = rows("sandbox", {"server-port": done, "node-home": done}, {})
    remedies = {row.attempt: row.remedy for row in with_reason(found, "no rights") if row.verdict == "possible"}
    assert remedies == {"server-port": "no rights", "node-home": UID.remedy}
    assert with_reason(found, "") == found


def test_only_lines_with_an_outcome_count() -> None:
    text = 'a warning\n{"port": 1}\n[2]\n{"attempt": "swap", "outcome": "refused", "detail": "EPERM"}\n{"attempt"'
    assert trials(json_lines(text)) == {"swap": Trial("refused", "EPERM")}


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://127.0.0.1:7878", "127.0.0.1:7878"),
        ("https://gpu.example.org", "gpu.example.org:443"),
        ("http://[::1]:80", "::1:80"),
    ],
)
def test_the_address_of_a_server_is_a_target(url: str, port: str) -> None:
    assert server_address(url) == {"server_url": url, "server_port": port}


def test_a_url_without_a_host_is_no_target() -> None:
    assert server_address("") == {}
