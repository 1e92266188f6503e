"""Each point that was to be mended has a test whose name carries it, and no test carries a point that is not listed.

test_22B7_…     issue 22, group B, point 7
test_22C_…      what issue 22 asks of group C beside its numbered points
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

TESTS = REPOSITORY / "tests"
POINTS = {
    "22A1": "a second principal waits until an administrator accepts a shared uid",
    "22A2": "zygotes of one owner",
    "22A3": "a node's token is one node's",
    "22A4": "no list of condemned objects",
    "22A5": "units are verified before they are stored",
    "22A6": "a snapshot's address covers what a restore acts on",
    "22A7": "writes to a node's cache of units are noticed",
    "22A8": "a killed supervisor is paid for",
    "22A9": "a run without a team counts for its owner's teams",
    "22A10": "only the kernel reports an Xid",
    "22A11": "start-up code ends with its zygote; interpreters and options are checked",
    "22A12": "every token ends",
    "22B1": "commands say that a server is away",
    "22B2": "a home that cannot be written to is refused",
    "22B3": "a rollback of the database is noticed",
    "22B4": "a disk that turns read-only is named and settled",
    "22B5": "a server that has another port and token is found",
    "22B6": "the CPU time of commands",
    "22B7": "a server that lost its database ends",
    "22B8": "two servers of one database share a directory",
    "22B9": "a database that starts is waited for",
    "22B10": "output of runs that the database does not know is named",
    "22C": "equals keep their order in replays",
    "22C1": "the speed of a capture",
    "22C2": "the speed of a tree of links",
    "22C3": "warm calls in a snapshot",
    "22C4": "answers under load",
    "22C5": "reports by tag",
    "22C6": "decisions where many runs may be preempted",
    "22C7": "calls without a pause",
    "22C8": "calls over two nodes, and devices of a gang that is half silent",
    "22C9": "remote calls beside local ones",
    "22D1": "fair share by use",
    "22D2": "resume needs progress",
    "22D3": "mandatory policies add up",
    "22D4": "CRITICAL is granted",
    "22D5": "latest times are rounded up, likely ones stand beside them",
    "22D6": "what a budget holds, when it closes, and its periods",
    "22D7": "logs of an attempt, idle time-outs, default limits and teams",
    "22D8": "pages agree about lending and preemption",
}
_NAMED = re.compile(r"^ *(?:async )?def test_(22[A-Z]\d*)_", re.MULTILINE)


def named(root: Path) -> dict[str, set[str]]:
    """Return the files that have tests of a point, by point."""
    found: dict[str, set[str]] = {}
    for path in root.rglob("test_*.py"):
        for point in _NAMED.findall(path.read_text(encoding="utf-8")):
            found.setdefault(point, set()).add(str(path.relative_to(root)))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """Return the points that tests of this repository carry."""
    return named(TESTS)


@pytest.mark.parametrize("point", POINTS)
def test_each_point_has_a_test_of_its_name(point: str, found: dict[str, set[str]]) -> None:
    assert found.get(point), f"no test is called test_{point}_…: {POINTS[point]}"


def test_no_test_carries_a_point_that_is_not_listed(found: dict[str, set[str]]) -> None:
    assert {point: files for point, files in found.items() if point not in POINTS} == {}


def test_only_functions_of_test_files_count(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_22A1_works():\n    pass\n\n\n# def test_22A2_was()\n")
    (tmp_path / "helping.py").write_text("def test_22A3_is_not_collected():\n    pass\n")
    assert named(tmp_path) == {"22A1": {"test_some.py"}}
