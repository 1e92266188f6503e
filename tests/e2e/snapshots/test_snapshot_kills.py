"""`env="snapshot"` while processes are killed or interrupted, in one home that each test leaves as it was.

Stages are held by stopping (SIGSTOP) the process whose turn it is, so that what is killed is killed there and then. A
test that has something restored writes a text of its own: what was restored before would not be restored again.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.testing import stop_agent
from tests.e2e.conftest import FAKES
from tests.support.homes import use_home
from tests.support.local.observe import Process, agent, cancel_all, nothing_of_a_run, supervisor, wait_for
from tests.support.local.small_environment import (
    WORK,
    Dialogue,
    SmallEnvironment,
    directories,
    named,
    restorer,
    restoring,
    zygote_pids,
)


class Standing(NamedTuple):
    """What all tests of this module share."""

    home: Path
    small: SmallEnvironment
    caller: Dialogue


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Yield a home, an environment and a caller."""
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        use_home(patch, home, FAKES)
        small = SmallEnvironment(tmp_path_factory.mktemp("standing") / "here")
        small.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
        small.write("work.py", WORK)
        caller = Dialogue(small, "work")
        try:
            yield Standing(home, small, caller)
        finally:
            caller.close()
            cancel_all(home)
            stop_agent(home)
            shutil.rmtree(home)


@pytest.fixture
def own(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the home, and require that no run outlives the test."""
    use_home(monkeypatch, standing.home, FAKES)
    yield standing.home
    wait_for(lambda: nothing_of_a_run(standing.home), "every run of the test has ended")


@pytest.fixture
def small(own: Path, standing: Standing) -> SmallEnvironment:
    """Return the environment, its project as it was."""
    standing.small.write("work.py", WORK)
    return standing.small


@pytest.fixture
def dialogue(small: SmallEnvironment, standing: Standing) -> Dialogue:
    """Return the caller."""
    return standing.caller


@pytest.fixture
def warmed(own: Path, dialogue: Dialogue) -> Dialogue:
    """Return the caller, which has run something."""
    assert dialogue.ask("call(work.code)") == "'first'"
    return dialogue


def test_a_killed_service_is_started_again(own: Path, warmed: Dialogue) -> None:
    (service,) = named("sgpu-snapshots", own)
    service.kill()
    assert warmed.ask("call(work.code)") == "'first'"
    (another,) = named("sgpu-snapshots", own)
    assert another.pid != service.pid


def test_a_service_killed_while_it_is_asked_is_asked_again(own: Path, warmed: Dialogue) -> None:
    (service,) = named("sgpu-snapshots", own)
    service.send(signal.SIGSTOP)
    warmed.say("call(work.code)")
    wait_for(lambda: len(directories(own)) > 1, "the question is put before the run directory is made")
    service.kill()
    assert warmed.hear() == "'first'"


def test_a_killed_restoring_process_is_replaced_and_the_run_goes_on(
    own: Path, small: SmallEnvironment, warmed: Dialogue
) -> None:
    first = restorer(own)
    first.send(signal.SIGSTOP)
    small.write("work.py", WORK.replace("first", "second"))
    warmed.say("call(work.code)")
    wait_for(lambda: restoring(own), "it was asked")
    first.kill()
    assert warmed.hear() == "'second'"
    assert restorer(own).pid != first.pid


def test_a_restoring_process_that_dies_again_and_again_fails_the_run(
    own: Path, small: SmallEnvironment, warmed: Dialogue
) -> None:
    first = restorer(own)
    first.send(signal.SIGSTOP)
    small.write("work.py", WORK.replace("first", "third"))
    # What every next one would import: it ends at once.
    (own / "environments" / "locks").rename(own / "environments" / "locks.away")
    (own / "environments" / "locks").write_text("no directory")
    try:
        warmed.say("call(work.code)")
        wait_for(lambda: restoring(own), "it was asked")
        first.kill()
        answer = warmed.hear()
    finally:
        (own / "environments" / "locks").unlink()
        (own / "environments" / "locks.away").rename(own / "environments" / "locks")
    assert answer.startswith(("RunError: the environment could not be restored", "RunError: the node's disk")), answer
    assert warmed.ask("call(work.code)") == "'third'", "the next run tries again"


def test_a_killed_agent_loses_nothing_while_it_restores(own: Path, small: SmallEnvironment, warmed: Dialogue) -> None:
    restorer(own).send(signal.SIGSTOP)
    small.write("work.py", WORK.replace("first", "fourth"))
    warmed.say("call(work.code)")
    wait_for(lambda: restoring(own), "it was asked")
    old, process = restorer(own), agent(own)
    process.kill()
    old.send(signal.SIGCONT)
    assert warmed.hear() == "'fourth'"
    assert agent(own).pid != process.pid


def test_a_killed_supervisor_is_replaced_as_long_as_nothing_has_run(
    own: Path, small: SmallEnvironment, warmed: Dialogue, tmp_path: Path
) -> None:
    stopped = restorer(own)
    stopped.send(signal.SIGSTOP)
    small.write("work.py", WORK + "\n# another\n")
    warmed.say(f"call(work.touch, {str(tmp_path / 'ran')!r})")
    wait_for(lambda: restoring(own), "it was asked")
    supervisor(own, directories(own)[-1].parent.name).kill()
    stopped.send(signal.SIGCONT)
    assert warmed.hear() == "None", "nothing had run, so it was launched again"
    assert (tmp_path / "ran").exists()
    wait_for(lambda: nothing_of_a_run(own), "nothing is left")


def test_a_killed_zygote_is_replaced_in_the_same_environment(own: Path, warmed: Dialogue) -> None:
    (pid,) = zygote_pids(own)
    Process(pid).kill()
    assert warmed.ask("call(work.code)") == "'first'"
    assert zygote_pids(own) != [pid]


@pytest.mark.parametrize("what", [".", "view", "units", "units/??/*", "trees"])
def test_what_is_deleted_under_a_warm_agent_is_restored_again(own: Path, dialogue: Dialogue, what: str) -> None:
    assert dialogue.ask("call(work.value)") == "'one'"
    before = zygote_pids(own)
    wait_for(lambda: nothing_of_a_run(own), "nothing writes there any more")
    found = list(own.glob(f"environments/{what}")) if "*" in what else [own / "environments" / what]
    for path in [path for path in found if (path / "site" / "toy").is_dir()] or found:
        shutil.rmtree(path)
    assert [dialogue.ask("call(work.value)") for _ in range(2)] == ["'one'"] * 2
    assert zygote_pids(own) != before
    assert dialogue.ask("snapshot(work.value).receipt(60).warm") == "True"


def test_ctrl_c_while_the_environment_is_looked_at(own: Path, small: SmallEnvironment, warmed: Dialogue) -> None:
    (service,) = named("sgpu-snapshots", own)
    service.send(signal.SIGSTOP)
    runs = len(directories(own))
    warmed.say("call(work.code)")
    wait_for(lambda: len(directories(own)) > runs, "the call has begun")
    warmed.process.send_signal(signal.SIGINT)
    assert warmed.hear() == "KeyboardInterrupt"
    assert len(directories(own)) == runs, "nothing of it is left"
    service.send(signal.SIGCONT)
    assert warmed.ask("call(work.code)") == "'first'"
    assert [process.pid for process in named("sgpu-snapshots", own)] == [service.pid], "Ctrl-C did not reach it"


def test_ctrl_c_while_the_environment_is_restored(own: Path, small: SmallEnvironment, warmed: Dialogue) -> None:
    stopped = restorer(own)
    stopped.send(signal.SIGSTOP)
    small.write("work.py", WORK.replace("first", "fifth"))
    warmed.say("distributed(gpus=1, gpu_type='CPU', env='snapshot')(work.code).distributed()")
    wait_for(lambda: restoring(own), "it was asked")
    warmed.process.send_signal(signal.SIGINT)
    assert warmed.hear() == "KeyboardInterrupt"
    wait_for(lambda: nothing_of_a_run(own), "nothing is left")
    stopped.send(signal.SIGCONT)
    assert warmed.ask("call(work.code)") == "'fifth'"
