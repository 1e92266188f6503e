"""C3: calls in a watched environment run what is there now, whatever name it was written by and whoever was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local.observe import Process, wait_for
from tests.support.local.small_environment import Dialogue, SmallEnvironment, named

WORK = """
import os

def value():
    import toy
    return toy.VALUE

def call_in_a_fork(call, write):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write()
        os.write(writing, call(value).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said

def write(path, text):
    with open(path, "r+") as file:
        file.write(text)
"""


@pytest.fixture
def small(own: Path, tmp_path: Path) -> SmallEnvironment:
    """Return an environment with a module of which there is another hard link, as of files that uv installs."""
    environment = SmallEnvironment(tmp_path / "here")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    environment.write("work.py", WORK)
    os.link(environment.site / "toy" / "__init__.py", tmp_path / "cached.py")
    return environment


@pytest.fixture
def watched(own: Path, small: SmallEnvironment) -> Iterator[Dialogue]:
    """Yield a caller whose environment is watched."""
    started = Dialogue(small, "work")
    assert started.ask("call(work.value)") == "'one'"
    wait_for(lambda: placed(own), "the environment is watched")
    yield started
    started.close()


def placed(home: Path) -> list[Process]:
    """Return the watching processes of a home that wait for events."""
    return [process for process in named("sgpu-watch", home) if waits(process)]


def waits(process: Process) -> bool:
    try:
        queues = [path.read_text() for path in Path(f"/proc/{process.pid}/fdinfo").iterdir()]
        asleep = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:  # it has ended, or a descriptor was closed
        return False
    return asleep and any("inotify wd:" in queue for queue in queues)


def write_in_place(path: Path) -> None:
    with path.open("r+") as file:
        file.write("VALUE = 'two'\n")


def rename_over(path: Path) -> None:
    path.with_name("new").write_text("VALUE = 'two'\n")
    path.with_name("new").replace(path)


def replace_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("_away"))
    path.parent.mkdir()
    path.write_text("VALUE = 'two'\n")


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "written": lambda file, other: write_in_place(file),
    "written by another hard link": lambda file, other: write_in_place(other),
    "renamed over": lambda file, other: rename_over(file),
    "directory replaced": lambda file, other: replace_directory(file),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.long if way in ("written", "directory replaced") else ()) for way in WAYS],
)
def test_22C3_a_call_runs_what_was_written_before_it(
    own: Path, small: SmallEnvironment, watched: Dialogue, tmp_path: Path, way: str
) -> None:
    assert watched.ask("call(work.value)") == "'one'"
    WAYS[way](small.site / "toy" / "__init__.py", tmp_path / "cached.py")
    assert watched.ask("call(work.value)") == "'two'"


@pytest.mark.parametrize("victim", ["sgpu-watch", pytest.param("sgpu-snapshots", marks=pytest.mark.long)])
def test_22C3_a_killed_process_loses_no_change(
    own: Path, small: SmallEnvironment, watched: Dialogue, victim: str
) -> None:
    (watching,) = placed(own)
    (process,) = named(victim, own)
    process.kill()
    watching.wait_gone()
    write_in_place(small.site / "toy" / "__init__.py")
    assert watched.ask("call(work.value)") == "'two'"


@pytest.mark.long
def test_22C3_a_forked_child_of_a_watched_caller_runs_what_it_wrote(
    own: Path, small: SmallEnvironment, watched: Dialogue
) -> None:
    path = small.site / "toy" / "__init__.py"
    write = f"lambda: work.write({str(path)!r}, \"VALUE = 'two'\\n\")"
    assert watched.ask(f"work.call_in_a_fork(call, {write})") == "'two'"
    assert watched.ask("call(work.value)") == "'two'", "the parent's watches saw it as well"


def test_22C3_watches_end_with_their_caller(own: Path, watched: Dialogue) -> None:
    (watching,) = placed(own)
    watched.process.kill()
    watching.wait_gone()
