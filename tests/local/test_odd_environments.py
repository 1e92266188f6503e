"""Calls in environments like those that people have: containers, file systems and kernels that refuse something.

The caller, and with it agent, supervisor and ranks, runs behind what `tests.odd_environments` puts before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.small_environment import Dialogue, SmallEnvironment
from tests.odd_environments import refusing, without

WORK = """
def value():
    import toy
    return toy.VALUE

def capabilities():
    import os
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return [os.getuid(), bool(int(status["CapBnd"], 16) >> 21 & 1)]
"""


@pytest.fixture
def small(own: Path, tmp_path: Path) -> SmallEnvironment:
    """Return an environment and a project of the test's own; the home is in SERVERLESS_GPU_HOME."""
    environment = SmallEnvironment(tmp_path / "here")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    environment.write("work.py", WORK)
    return environment


RECEIPT = "[run := snapshot(work.value), run.results(60), run.receipt(60).environment, run.receipt(60).warm][1:]"


def test_23C1_root_of_a_container_has_its_environment_mounted(small: SmallEnvironment) -> None:
    small.before = without("sys_admin")
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert (values, "links" in environment) == (["one"], False), environment
        small.install("toy", "2.0", {"toy/__init__.py": "VALUE = 'two'\n"})
        values, environment, warm = eval(caller.ask(RECEIPT))  # in the same zygote, whose stem mounts over it
        assert (values, "links" in environment, warm) == (["two"], False, True), environment
    finally:
        caller.close()


def test_23C1_where_every_way_is_refused_links_are_used_and_the_receipt_says_why(small: SmallEnvironment) -> None:
    small.before = (*without("all"), *refusing("no-namespaces"))
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert values == ["one"]
        assert (
            "links (no mounts: a mount namespace cannot be made: Operation not permitted; with a user " in environment
        )
    finally:
        caller.close()
