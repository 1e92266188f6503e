"""What bad input gets: a clear error before anything is launched, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.errors import (
    ArgumentMismatch,
    GpuTypeMismatch,
    InvalidOption,
    InvalidValue,
    NotDistributable,
    NotEnoughGpus,
    NotPicklable,
    RunError,
    ServerlessGpuError,
    ServerNotConfigured,
    StorageError,
    UsageError,
)
from serverless_gpu.node.base.home import Home
from serverless_gpu.testing import agent_status, stop_agent
from tests.support.golden import golden
from tests.support.local.observe import (
    held_locks,
    nothing_of_a_run,
    processes_of,
    run_directories,
    run_script,
    run_sockets,
    wait_for,
)
from tests.support.small_disks import fill, small_disk

MIB = 1 << 20


@pytest.fixture
def untouched(own: Path) -> Iterator[Path]:
    """Yield a home; afterwards not even an agent may have been started."""
    yield own
    assert run_directories(own) == [] and processes_of(own) == []
    assert not (own / "agent.log").exists()


@pytest.fixture
def clean(warm: Path) -> Iterator[Path]:
    """Yield a home with an agent; afterwards everything is as it was."""
    distributed(gpus=1, quiet=True)(len).distributed("a")
    wait_for(lambda: nothing_of_a_run(warm), "that run is gone")
    before = run_directories(warm)
    yield warm
    assert run_directories(warm) == before, "no run directory is left"
    assert held_locks(warm) == [] and run_sockets(warm) == []
    status = agent_status(warm)
    assert status is not None and status.attempts == () and status.queued == ()


def train(lr: float, *, epochs: int = 1) -> float:
    """Be a function with a signature."""
    return lr * epochs


async def coroutine() -> None:
    """Be awaited by nobody."""


def generator() -> Iterator[int]:
    """Yield."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Yield to nobody."""
    yield 1


# --- at decoration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [None, 3, "train", [train]])
def test_what_is_not_callable(untouched: Path, function: Callable[[], None]) -> None:
    with pytest.raises(NotDistributable, match="not callable") as caught:
        distributed(gpus=2)(function)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("function", "words"),
    [(coroutine, "async function"), (generator, "generator function"), (async_generator, "(async|generator) function")],
)
def test_async_and_generator_functions(untouched: Path, function: Callable[[], object], words: str) -> None:
    with pytest.raises(NotDistributable, match=words) as caught:
        distributed(gpus=2)(function)
    assert caught.value.hint, "says what to do instead"


def test_the_decorator_without_parentheses(untouched: Path) -> None:
    with pytest.raises(InvalidOption, match="parentheses"):
        distributed(train)  # type: ignore[arg-type]  # the mistake under test


def test_an_unknown_option_lists_the_valid_ones(untouched: Path) -> None:
    with pytest.raises(InvalidOption, match=golden("local.bad_input.gpu-did-you")) as caught:
        distributed(gpu=8)  # type: ignore[call-arg]  # the mistake under test
    assert isinstance(caught.value, TypeError)
    for name in ("gpus", "gpu_type", "timeout", "tags", "grace", "on_interrupt", "memory", "ranks_log"):
        assert name in caught.value.hint


@pytest.mark.parametrize(("gpus", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("8", TypeError)])
def test_impossible_numbers_of_gpus(untouched: Path, gpus: int, error: type[Exception]) -> None:
    with pytest.raises(UsageError, match="gpus must be") as caught:
        distributed(gpus=gpus)
    assert isinstance(caught.value, error) and repr(gpus) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": True}, "gpus"),
        ({"gpus": 2, "num_gpus": 3}, "disagree"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "3 hours"}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"grace": -1}, "grace"),
        ({"memory": "lots"}, "memory"),
        ({"memory": 0}, "memory"),
        ({"tags": {"team": 3}}, "tags"),
        ({"tags": "team"}, "tags"),
        ({"priority": "urgent"}, "priority"),
        ({"on_interrupt": "ignore"}, "on_interrupt"),
        ({"ranks_log": "some"}, "ranks_log"),
        ({"remote": 1}, "remote"),
        ({"gpu_type": 100}, "gpu_type"),
        ({"gpu_type": "X9000"}, "X9000"),
    ],
)
def test_impossible_options(untouched: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        distributed(**options)  # type: ignore[arg-type]  # the mistake under test


# --- at the call ------------------------------------------------------------------------------------------------------


def test_missing_and_extra_arguments(untouched: Path) -> None:
    decorated = distributed(gpus=2)(train)
    with pytest.raises(ArgumentMismatch, match="missing lr"):
        decorated.distributed()  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(ArgumentMismatch, match="unexpected epoch") as caught:
        decorated.distributed(0.1, epoch=2)  # type: ignore[call-arg]  # the mistake under test
    assert golden("local.bad_input.did-you-mean") in caught.value.hint
    with pytest.raises(ArgumentMismatch, match="1 positional argument"):
        decorated.submit(0.1, 2)  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(ArgumentMismatch, match="lr given twice"):
        decorated.distributed(0.1, lr=0.2)  # type: ignore[misc]  # the mistake under test


def test_remote_without_a_server(untouched: Path) -> None:
    with pytest.raises(ServerNotConfigured, match="sgpu up"):
        distributed(gpus=8, gpu_type="H100", remote=True)(train).distributed(0.1)


def test_a_working_directory_that_is_gone(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StorageError, match="working directory"):
        distributed(gpus=1)(train).distributed(0.1)
    assert run_directories(own) == []


def test_more_gpus_than_there_are_and_the_wrong_type(clean: Path) -> None:
    with pytest.raises(NotEnoughGpus, match="9"):
        distributed(gpus=9)(train).distributed(0.1)
    with pytest.raises(GpuTypeMismatch, match="H100"):
        distributed(gpus=1, gpu_type="B200")(train).distributed(0.1)


def test_an_unpicklable_closure(clean: Path) -> None:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    with pytest.raises(NotPicklable, match=golden("local.bad_input.closure-variable-lock")):
        distributed(gpus=2)(guarded).distributed()
    with pytest.raises(NotPicklable):
        distributed(gpus=2)(guarded).submit()


def test_one_bad_item_of_a_map_cancels_those_before_it(clean: Path) -> None:
    def wait(_: object) -> None:
        threading.Event().wait(60)

    before = run_directories(clean)
    with pytest.raises(NotPicklable):
        distributed(gpus=1, quiet=True)(wait).map([1, threading.Lock()])
    for name in set(run_directories(clean)) - set(before):
        receipt = clean / "runs" / name / "1" / "receipt.json"
        wait_for(receipt.exists, "the run before the bad item has ended")
        assert b'"CANCELLED"' in receipt.read_bytes()
        wait_for(lambda: nothing_of_a_run(clean), "it is gone")
        shutil.rmtree(clean / "runs" / name)


def test_a_configuration_that_cannot_be_read(own: Path) -> None:
    (own / "config.toml").write_text("[prices\n")
    with pytest.raises(InvalidValue, match=r"config\.toml"):
        distributed(gpus=1)(train).distributed(0.1)
    assert run_directories(own) == []


def test_an_interpreter_that_cannot_be_started_says_so(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ServerlessGpuError, match="/nowhere/python"):
        distributed(gpus=1)(train).distributed(0.1)
    assert held_locks(own) == []


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(own: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home on a disk of 4 MB with a running agent."""
    with small_disk("4m", at=own / "d") as disk:
        monkeypatch.setenv("SERVERLESS_GPU_HOME", str(disk))
        try:
            assert distributed(gpus=1, quiet=True)(len).distributed("a") == [1]
            wait_for(lambda: nothing_of_a_run(disk), "the first run has let go of everything")
            yield disk
        finally:
            stop_agent(disk)


def test_a_full_disk_is_said_and_nothing_half_written_is_left(small: Path) -> None:
    before = run_directories(small)
    filler = fill(small)
    with pytest.raises(StorageError, match="space") as caught:
        distributed(gpus=1)(train).distributed(0.1)
    assert "SERVERLESS_GPU_HOME" in caught.value.hint
    assert run_directories(small) == before and held_locks(small) == [] and run_sockets(small) == []
    filler.unlink()
    assert distributed(gpus=1, quiet=True)(train).distributed(0.1) == [0.1], "with space again, it works again"


def test_arguments_that_do_not_fit_on_the_disk(small: Path) -> None:
    before = run_directories(small)
    with pytest.raises(StorageError, match=r"(?i)space"):
        distributed(gpus=1, quiet=True)(len).distributed(os.urandom(6 * MIB))
    assert run_directories(small) == before and held_locks(small) == [] and run_sockets(small) == []


def test_a_result_that_does_not_fit_on_the_disk(small: Path) -> None:
    run = distributed(gpus=1, quiet=True)(os.urandom).submit(6 * MIB)
    with pytest.raises(RunError, match="rank 0") as caught:
        run.results(timeout=50)
    assert caught.value.reason == "result_storage"
    wait_for(lambda: nothing_of_a_run(small), "its receipt is written")
    assert all(path.stat().st_size < MIB for path in run.directory.rglob("*") if path.is_file())
    assert distributed(gpus=1, quiet=True)(train).distributed(0.1) == [0.1]


def test_an_exception_on_a_full_disk_still_arrives(small: Path) -> None:
    def fail(path: str) -> None:
        fill(Path(path))
        raise ValueError("what the user must see")

    with pytest.raises((ValueError, RunError), match=re.escape(golden("local.bad_input.user-must-see"))):
        distributed(gpus=1, quiet=True)(fail).distributed(str(small))
    wait_for(lambda: held_locks(small) == [], "its device is given back")


def test_logs_that_do_not_fit_on_the_disk_do_not_end_the_run(small: Path) -> None:
    def chat() -> str:
        for _ in range(6):
            print("x" * MIB)
        return "done"

    run = distributed(gpus=1, quiet=True)(chat).submit()
    try:
        assert run.results(timeout=50) == ["done"]
    except RunError as error:
        assert error.reason == "result_storage", "the result itself found no room"
    assert any(golden("local.output.rank-output-kept") in note for note in run.receipt(timeout=50).notes)


def test_a_home_that_cannot_be_written_is_replaced_and_that_is_said(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = own / "t"
    spare.mkdir()
    fallback = spare / f"serverless_gpu-home-{os.getuid()}"
    with small_disk("1m", at=own / "d", options="ro") as disk:
        monkeypatch.setenv("SERVERLESS_GPU_HOME", str(disk / "home"))
        monkeypatch.setenv("TMPDIR", str(spare))
        try:
            with pytest.warns(UserWarning, match=rf"{disk}.*cannot be written.*{fallback}"):
                run = distributed(gpus=1, quiet=True)(train).submit(0.1)
            assert run.results(timeout=50) == [0.1] and run.directory.is_relative_to(fallback)
            run.receipt(timeout=50)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert distributed(gpus=1, quiet=True)(train).distributed(0.1) == [0.1], "said once per process"
        finally:
            stop_agent(fallback)


def test_no_writable_home_at_all(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk("1m", at=own / "d", options="ro") as disk:
        monkeypatch.setenv("SERVERLESS_GPU_HOME", str(disk / "home"))
        monkeypatch.setenv("TMPDIR", str(disk))
        with pytest.raises(StorageError, match=r"neither.*nor"):
            distributed(gpus=1)(train).distributed(0.1)


def test_an_error_in_a_script_is_one_message_without_a_run(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from serverless_gpu import distributed\n"
        "def train(lr):\n    print('never')\n"
        "distributed(gpus=2)(train).distributed()\n"
    )
    done = run_script(path)
    assert done.returncode == 1 and done.stdout == ""
    assert golden("local.bad_input.argumentmismatch-arguments-do") in done.stderr
    assert processes_of(own) == []


def test_ctrl_c_as_soon_as_the_directory_of_a_run_exists_leaves_nothing(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_attempt = Home.make_attempt

    def interrupted(home: Home, run_id: str, fence: int) -> Path:
        make_attempt(home, run_id, fence)
        raise KeyboardInterrupt

    monkeypatch.setattr(Home, "make_attempt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distributed(gpus=1, quiet=True)(train).distributed(0.1)
