"""Many runs at once: maps and their values, runs as futures, and what a script leaves behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import pytest

from serverless_gpu import RunList, as_completed, attach, distributed
from serverless_gpu.client.runs.started_runs import unfinished_text
from serverless_gpu.errors import ArgumentMismatch, InvalidOption, RunCancelled
from tests.support.local.observe import run_script
from tests.support.local.ranks import stay


@distributed(gpus=1, quiet=True)
def late() -> None:
    """Raise the exception that a wait raises, too."""
    raise TimeoutError("of the user")


@distributed(gpus=1, quiet=True)
def combine(x: int, y: int = 0, *, base: int = 0) -> int:
    """Return a sum; refuse 13."""
    if x == 13:
        raise ValueError("13")
    return base + 10 * x + y


# --- maps -------------------------------------------------------------------------------------------------------------


def test_23A5_map_takes_several_iterables_and_starmap_takes_tuples(warm: Path) -> None:
    runs = combine.map([1, 2, 3], (y for y in (4, 5)), base=100)
    assert type(runs) is RunList
    assert runs.results(60) == [114, 125], "the shortest decides"
    assert combine.starmap([(1, 2), (3,)]).results(60) == [12, 30]
    assert [run.result(timeout=60) for run in combine.map([])] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: combine.map(),
        lambda: combine.map(3),  # type: ignore[arg-type]  # the mistake
        lambda: combine.starmap(3),  # type: ignore[arg-type]  # the mistake
        lambda: combine.starmap([1, 2]),  # type: ignore[list-item]  # the mistake
    ],
)
def test_23A5_what_cannot_be_mapped_over_is_refused(warm: Path, call: object) -> None:
    assert callable(call)
    with pytest.raises(InvalidOption):
        call()


def test_23A5_return_exceptions_of_a_map_names_the_place_where_it_goes(warm: Path) -> None:
    with pytest.raises(ArgumentMismatch) as caught:
        combine.map([1], return_exceptions=True)
    assert ".results(return_exceptions=True)" in str(caught.value.hint)


def test_23B11_results_of_a_map_are_values_in_order_or_what_ended_a_run(warm: Path) -> None:
    runs = combine.map([2, 13, 1])
    values = runs.results(60, return_exceptions=True)
    assert values[0] == 20 and isinstance(values[1], ValueError) and values[2] == 10
    with pytest.raises(ValueError):
        runs.results(60)
    assert sorted(run.id for run in runs.as_completed(60)) == sorted(run.id for run in runs)


def test_23B11_results_of_a_map_have_one_limit_for_all(warm: Path, where: str) -> None:
    runs = distributed(gpus=1, quiet=True)(stay).map([where, where])
    with pytest.raises(TimeoutError):
        runs.results(0.05)
    runs.cancel()
    assert all(isinstance(error, RunCancelled) for error in runs.results(60, return_exceptions=True))


# --- one run ----------------------------------------------------------------------------------------------------------


def test_23A5_done_and_exception_of_a_run(warm: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    assert not run.done()
    with pytest.raises(TimeoutError):
        run.exception(0.05)
    Path(where, "go").touch()
    assert run.exception(60) is None and run.done()
    assert isinstance(combine.submit(13).exception(60), ValueError)
    assert isinstance(late.submit().exception(60), TimeoutError), "the user's own is returned"


def test_23A5_runs_are_awaited_beside_other_tasks(warm: Path, where: str) -> None:
    async def main() -> tuple[list[int], BaseException | None, list[int]]:
        run = distributed(gpus=1, quiet=True)(stay).submit(where)
        waiting = asyncio.ensure_future(_awaited(run))
        failed = await asyncio.gather(_awaited(combine.submit(13)), return_exceptions=True)
        Path(where, "go").touch()  # the loop is free while the run goes on
        return await waiting, failed[0] if isinstance(failed[0], BaseException) else None, await combine.submit(4)

    waited, failed, last = asyncio.run(main())
    assert waited == [0] and isinstance(failed, ValueError) and last == [40]


async def _awaited(run: object) -> list[int]:
    return await run  # type: ignore[misc,no-any-return]  # a run of any result


def test_23A5_a_cancelled_task_leaves_its_run(warm: Path, where: str) -> None:
    async def main() -> str:
        run = distributed(gpus=1, quiet=True)(stay).submit(where)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(run), 0.05)
        assert not run.done()
        return run.id

    run = attach(asyncio.run(main()))
    Path(where, "go").touch()
    assert run.results(60) == [0]


def test_23A5_futures_of_runs_work_with_concurrent_futures(warm: Path) -> None:
    runs = combine.map([1, 13])
    futures = [run.future() for run in runs]
    assert futures[0] is runs[0].future()
    done, pending = concurrent.futures.wait(futures, timeout=60)
    assert (len(done), len(pending)) == (2, 0)
    assert futures[0].result() == [10] and isinstance(futures[1].exception(), ValueError)
    assert {run.id for run in as_completed(runs, 60)} == {run.id for run in runs}
    assert combine.submit(7).future().result(60) == [70], "another one, after the thread has ended"


# --- the end of a script ----------------------------------------------------------------------------------------------

LEAVING = """
import sys, time
from pathlib import Path
from serverless_gpu import distributed

def wait(where):
    Path(where, "begun").touch()
    while not Path(where, "go").exists():
        time.sleep(0.01)

if __name__ == "__main__":
    where, quiet = sys.argv[1], sys.argv[2] == "quiet"
    distributed(gpus=1, quiet=quiet)(abs).submit(-1).results()
    print(*(run.id for run in distributed(gpus=1, quiet=quiet)(wait).map([where] * 2)))
    while not Path(where, "begun").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("quiet", ["told", "quiet"])
def test_23B11_a_script_names_the_runs_that_go_on_when_it_ends(
    own: Path, where: str, tmp_path: Path, quiet: str
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    done = run_script(script, where, quiet)
    ids = done.stdout.split()
    assert len(ids) == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "sgpu cancel" in line]
    if quiet == "quiet":
        assert lines == []
    else:
        assert len(lines) == 1 and all(run_id in lines[0] for run_id in ids), done.stderr
    Path(where, "go").touch()
    for run_id in ids:
        attach(run_id).results(60)


def test_23B11_the_line_names_a_few_of_many() -> None:
    text = unfinished_text([f"r{number}" for number in range(8)], [])
    assert "8 runs" in text and "r4 and 3 more" in text and "r5" not in text
    assert unfinished_text([], []) == ""
    assert "may continue" in unfinished_text([], ["r1"])
