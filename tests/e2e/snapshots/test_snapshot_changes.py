"""F29: ranks that change files of an environment made of links: the next run is told, and does not see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.base.home import Home
from tests.support.golden import golden
from tests.support.local.small_environment import Dialogue, SmallEnvironment

WORK = """
import os, sys

def value():
    import toy
    return toy.VALUE

def write():
    import toy
    os.chmod(toy.__file__, 0o644)
    with open(toy.__file__, "a") as file:
        file.write("VALUE = 'changed'\\n")

def add():
    import toy
    folder = os.path.dirname(toy.__file__)
    os.chmod(folder, 0o755)
    with open(folder + "/more.py", "w") as file:
        file.write("MORE = 1\\n")

def remove():
    import toy
    folder = os.path.dirname(toy.__file__)
    os.chmod(folder, 0o755)
    os.unlink(toy.__file__)

def more():
    import importlib.util
    return importlib.util.find_spec("toy.more") is not None
"""


@pytest.fixture
def linked(own: Path, tmp_path: Path) -> Iterator[Dialogue]:
    """Yield a caller whose environment is restored by links, and has been used once."""
    environment = SmallEnvironment(tmp_path / "here")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    environment.write("work.py", WORK)
    started = Dialogue(environment, "work", SERVERLESS_GPU_RESTORE="links")
    assert started.ask("call(work.value)") == "'one'"
    yield started
    started.close()


@pytest.mark.parametrize(
    ("change", "which"),
    [
        ("write", r"toy/__init__\.py has \d+ bytes instead of 14"),
        pytest.param("add", r"lib/python[^/]+/site-packages/toy/more\.py was added", marks=pytest.mark.long),
        pytest.param("remove", r"lib/python[^/]+/site-packages/toy/__init__\.py is missing", marks=pytest.mark.long),
    ],
)
def test_F29_what_a_rank_changed_is_said_and_restored_before_the_next_run(
    own: Path, linked: Dialogue, change: str, which: str
) -> None:
    assert linked.ask(f"call(work.{change})") == "None"
    receipt = linked.ask("snapshot(work.value).receipt(60).environment")
    said = "files of the restored environment were changed by a run: "
    assert re.search(f"links.*{said}{which}; restored again", receipt), receipt
    assert said in Home(own).agent_log.read_text()
    assert linked.ask("[call(work.value), call(work.more)]") == "['one', False]"
    assert said not in linked.ask("snapshot(work.value).receipt(60).environment")


def test_F29_a_file_changed_through_a_link_is_not_seen_by_a_run_with_mounts(own: Path, linked: Dialogue) -> None:
    assert linked.ask("call(work.write)") == "None"
    assert linked.ask("os.environ.pop('SERVERLESS_GPU_RESTORE')") == "'links'"
    receipt = linked.ask("snapshot(work.value).receipt(60).environment")
    assert "toy/__init__.py has" in receipt and "overlay" in receipt
    assert linked.ask("call(work.value)") == "'one'"


def test_F29_runs_that_change_nothing_are_not_said_to(own: Path, linked: Dialogue) -> None:
    for _ in range(3):
        assert golden("snapshots.snapshot_changes.changed-run") not in linked.ask(
            "snapshot(work.value).receipt(60).environment"
        )
