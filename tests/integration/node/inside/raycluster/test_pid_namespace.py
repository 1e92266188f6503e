"""A family of processes ends at once, in a pid namespace of its own and where the kernel gives none."""

from __future__ import annotations

import os

import pytest

from tests.support.node.rank_process import run_rank

PREAMBLE = """
import json, os, select, signal, time
from _sgpu_inside import linux, namespaces
from _sgpu_inside.raycluster import pid_namespace
if sys.argv[2] == "refused":
    pid_namespace._probe = lambda: "the kernel says no"
family = pid_namespace.Family()
def start(run):
    reading, writing = os.pipe()
    pid = family.fork(lambda: run(writing))
    os.close(writing)
    return pid, reading
"""
IS_ROOT = os.geteuid() == 0


@pytest.mark.parametrize("how", ["namespace", "refused"])
def test_a_family_ends_with_grandchildren_that_got_away(how: str) -> None:
    said = run_rank(
        PREAMBLE
        + """
def leave_behind(writing):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(writing, b"x")
        time.sleep(600)
    os._exit(0)
pid, reading = start(leave_behind)
print(os.read(reading, 1) == b"x")
print(os.waitpid(pid, 0)[1])
family.end()
print(os.read(reading, 1) == b"", linux.descendants(os.getpid()))  # end of file: nobody has the pipe any more
""",
        how,
    )
    assert said == "True\n0\nTrue []\n"


@pytest.mark.skipif(not IS_ROOT, reason="a namespace may be refused to users")
def test_members_see_nobody_but_the_family() -> None:
    said = run_rank(
        PREAMBLE
        + """
def look(writing):
    seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    os.write(writing, json.dumps([os.getpid(), seen]).encode())
    return 7
pid, reading = start(look)
print(os.read(reading, 999).decode())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(os.path.exists(f"/proc/{os.getpid()}"))
family.end()
""",
        "namespace",
    )
    assert said == "[2, [1, 2]]\n7\nTrue\n"


def test_orphans_are_reaped_and_who_was_forked_here_is_left_to_whoever_forked_it() -> None:
    said = run_rank(
        PREAMBLE
        + """
def leave_behind(writing):
    if os.fork() == 0:
        os.write(writing, b"x")
        os._exit(0)
    return 7
pid, reading = start(leave_behind)
os.read(reading, 2)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(family.reap() is not None, end=" ")
while len(linux.children(os.getpid())) > 1:  # the orphan may still be ending
    family.reap()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        "refused",
    )
    assert said == "True 7\n"


@pytest.mark.parametrize("how", ["namespace", "refused"])
def test_a_family_dies_with_the_process_that_made_it(how: str) -> None:
    said = run_rank(
        """
import os, sys, time
reading, writing = os.pipe()
if os.fork() == 0:
    try:
"""
        + "".join(f"        {line}\n" for line in PREAMBLE.splitlines())
        + """
        def stay(writing):
            os.write(writing, b"x")
            time.sleep(600)
        pid, ready = start(stay)
        os.read(ready, 1)
    finally:
        os._exit(0)
os.close(writing)
print(os.read(reading, 1) == b"")  # all of them had its other end
""",
        how,
    )
    assert said == "True\n"


@pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")
def test_a_user_has_a_namespace_too_or_is_told_why_not() -> None:
    said = run_rank(
        PREAMBLE.replace(
            "if sys", "import codecs\ncodecs.lookup('ascii')\nos.setgid(65534)\nos.setuid(65534)\nif sys", 1
        )
        + """
pid, reading = start(lambda writing: os.write(writing, f"{os.getpid()} {os.getuid()} {os.getgid()}".encode()) * 0)
seen = os.read(reading, 99).decode()
print(seen if not family.refused else family.refused)
family.end()
""",
        "namespace",
    )
    assert said == "2 65534 65534\n"
