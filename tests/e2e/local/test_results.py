"""What a call gives back: results by rank, in every way a function can be written and a run can be followed."""

from __future__ import annotations

import functools
import importlib
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy
import pytest
import torch

from serverless_gpu import Run, as_completed, attach, distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import InvalidOption, InvalidValue
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.local.ranks import stay

pytestmark = pytest.mark.usefixtures("warm")


@distributed(gpus=2, quiet=True)
def module_level(base: int, rank: int = -1) -> int:
    """Add."""
    return base + rank


# --- the list ---------------------------------------------------------------------------------------------------------


def test_results_are_ordered_by_rank_whoever_is_first() -> None:
    @distributed(gpus=4, quiet=True)
    def slow_first(rank: int = -1) -> int:
        threading.Event().wait(0.05 * (4 - rank))
        return rank

    assert slow_first.distributed() == [0, 1, 2, 3]


def test_a_function_that_returns_nothing_gives_none_for_every_rank() -> None:
    @distributed(gpus=2, quiet=True)
    def nothing() -> None:
        pass

    assert nothing.distributed() == [None, None]


def test_one_gpu_gives_a_list_too() -> None:
    @distributed(gpus=1, quiet=True)
    def one() -> str:
        return "only"

    assert one.distributed() == ["only"]


def test_without_gpus_every_gpu_of_the_node_is_used() -> None:
    @distributed(quiet=True)
    def size() -> int:
        return rt.get_world_size()

    assert size.distributed() == [8] * 8


def test_num_gpus_means_gpus() -> None:
    assert distributed(num_gpus=2, quiet=True)(rt.get_global_rank).distributed() == [0, 1]


# --- ways to write the function ---------------------------------------------------------------------------------------


def test_a_function_of_a_module() -> None:
    assert module_level.distributed(10) == [10, 11]
    assert module_level.__doc__ == "Add." and module_level.__name__ == "module_level"


def test_a_nested_function_keeps_its_closure() -> None:
    factor = 3

    def make() -> Callable[[int], int]:
        def times(value: int) -> int:
            return value * factor

        return times

    assert distributed(gpus=2, quiet=True)(make()).distributed(5) == [15, 15]


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_decorated_inside_an_if(size: int) -> None:
    if size > 1:

        @distributed(gpus=size, quiet=True)
        def train() -> int:
            return rt.get_local_rank()
    else:

        @distributed(gpus=1, quiet=True)
        def train() -> int:
            return -1

    assert train.distributed() == ([-1] if size == 1 else [0, 1, 2])


def test_as_a_plain_higher_order_function_over_what_is_callable() -> None:
    run = distributed(gpus=2, quiet=True)
    assert run(lambda text: text.upper()).distributed("a") == ["A", "A"]
    assert run(functools.partial(pow, 2)).distributed(5) == [32, 32]
    assert run(len).distributed([1, 2, 3]) == [3, 3]


def test_methods_can_be_decorated() -> None:
    class Trainer:
        def __init__(self, base: int) -> None:
            self.base = base

        @distributed(gpus=2, quiet=True)
        def train(self, more: int) -> int:
            return self.base + more

    assert Trainer(4).train.distributed(1) == [5, 5]
    assert Trainer(4).train(1) == 5


def test_arguments_defaults_and_keywords_reach_every_rank() -> None:
    @distributed(gpus=2, quiet=True)
    def show(first: int, *rest: int, scale: float = 0.5, **options: object) -> list[object]:
        return [first, rest, scale, options]

    assert show.distributed(1, 2, 3, name="x", depth=[4]) == [[1, (2, 3), 0.5, {"name": "x", "depth": [4]}]] * 2
    assert show.distributed(1) == [[1, (), 0.5, {}]] * 2


def test_rank_and_world_size_are_filled_in_unless_they_are_given() -> None:
    @distributed(gpus=2, quiet=True)
    def place(name: str, rank: int | None = None, *, world_size: int | None = None) -> list[object]:
        return [name, rank, world_size]

    assert place.distributed("a") == [["a", 0, 2], ["a", 1, 2]]
    assert place.distributed("a", 7, world_size=9) == [["a", 7, 9]] * 2


def test_a_direct_call_is_the_plain_function_in_this_process() -> None:
    @distributed(gpus=2, quiet=True)
    def where_am_i() -> int:
        return os.getpid()

    assert where_am_i() == os.getpid()
    assert hasattr(where_am_i, "distributed")
    pids = where_am_i.distributed()
    assert len({*pids, os.getpid()}) == 3, "every rank is a process of its own"


# --- handles ----------------------------------------------------------------------------------------------------------


def test_submit_returns_at_once_and_the_handle_tells_everything(where: str) -> None:
    run = distributed(gpus=2, quiet=True, tags={"team": "search"})(stay).submit(where)
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    with pytest.raises(TimeoutError, match=run.id):
        run.results(timeout=0.01)
    Path(where, "go").touch()
    assert run.results(timeout=50) == [0, 1]
    assert run.result(1) == 1 and run.result() == 0
    with pytest.raises(InvalidValue, match="ranks 0 to 1"):
        run.result(2)
    receipt = run.receipt(timeout=50)
    assert receipt.state == run.status() == "SUCCEEDED"
    assert (receipt.world_size, receipt.gpu_type, receipt.tags) == (2, "H100", {"team": "search"})
    assert receipt.gpu_ms >= 0 and receipt.micros is None and "unpriced" in receipt.text()


def test_arguments_of_a_handle_that_cannot_be() -> None:
    run = distributed(gpus=1, quiet=True)(len).submit("ab")
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: run.wait(cast("float", "x")), InvalidOption, "timeout must be a number of seconds or None, not 'x'"),
        (
            lambda: run.results(cast("float", [1])),
            InvalidOption,
            "timeout must be a number of seconds or None, not [1]",
        ),
        (lambda: run.receipt(float("nan")), InvalidValue, "timeout must be a number of seconds or None, not nan"),
        (lambda: run.result(cast("int", "0")), InvalidOption, "rank must be a number, not '0'"),
        (lambda: run.result(1), InvalidValue, f"run {run.id} has only rank 0, not 1"),
        (lambda: run.logs(-1), InvalidValue, f"run {run.id} has only rank 0, not -1"),
        (
            lambda: run.logs(0, "stdin"),
            InvalidValue,
            f'run {run.id} has no stream \'stdin\'\nhint: the streams are "stdout" and "stderr"',
        ),
        (lambda: attach(cast("str", None)), InvalidOption, "attach takes the identifier of a run, a string, not None"),
        (lambda: as_completed(cast("list[Run[int]]", 5)), InvalidOption, "as_completed takes a list of runs, not 5"),
        (
            lambda: as_completed(cast("list[Run[int]]", [run, 1])),
            InvalidOption,
            "as_completed takes a list of runs; 1 is not a run",
        ),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == message
    for run_id in ("", ".", "..", f"../runs/{run.id}", "a\0b", "x" * 300, run.id[:-1]):
        with pytest.raises(InvalidValue, match=re.escape(golden("local.results.run"))):
            attach(run_id)
    assert run.wait(float("inf")) and run.results(-1) == [2], "no limit, and no wait"


def test_what_ranks_write_is_in_the_logs_and_rank_0s_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    @distributed(gpus=2)
    def chat(rank: int = -1) -> None:
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)

    chat.distributed()
    shown = capsys.readouterr()
    assert "[rank 0] out 0\n" in shown.out and "[rank 0] err 0\n" in shown.err
    assert "out 1" not in shown.out + shown.err
    run = chat.submit()
    run.wait(50)
    assert run.logs(1) == "out 1\n" and run.logs(1, "stderr") == "err 1\n"


def test_map_starts_one_run_per_item() -> None:
    @distributed(gpus=2, quiet=True)
    def scaled(lr: float, rank: int = -1, *, by: int = 1) -> float:
        return lr * by + rank

    runs = scaled.map([1.0, 2.0, 3.0, 4.0, 5.0], by=10)
    assert len({run.id for run in runs}) == 5
    assert [run.results(timeout=60) for run in runs] == [[10 * n, 10 * n + 1] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]


def test_cancel_from_another_thread_while_one_waits(where: str) -> None:
    run = distributed(gpus=2, quiet=True)(stay).submit(where)
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    ended: list[str] = []

    def follow() -> None:
        try:
            run.results()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test compares its name
            ended.append(type(error).__name__)

    waiter = threading.Thread(target=follow)
    waiter.start()
    canceller = threading.Thread(target=run.cancel)
    wait_for(lambda: waiter.is_alive(), "somebody waits")
    canceller.start()
    canceller.join(10)
    stuck = canceller.is_alive()
    Path(where, "go").touch()
    waiter.join(30)
    assert not stuck, "cancel() waited for results()"
    assert ended == ["RunCancelled"]


def test_attach_at_once_while_it_runs_and_after_its_end(where: str) -> None:
    run = distributed(gpus=2, quiet=True)(stay).submit(where)
    early = attach(run.id)
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    late = attach(run.id)
    assert late.status() == "RUNNING"
    Path(where, "go").touch()
    assert late.results(timeout=50) == run.results(timeout=50) == early.results(timeout=50) == [0, 1]
    assert late.receipt(timeout=50) == run.receipt(timeout=50)
    after = attach(run.id)
    assert after.results() == [0, 1] and after.receipt() == run.receipt() and after.status() == "SUCCEEDED"
    with pytest.raises(InvalidValue, match="run 'nonsense' does not exist"):
        attach("nonsense")


def test_several_runs_at_once_from_threads() -> None:
    @distributed(gpus=2, quiet=True)
    def square(value: int, rank: int = -1) -> int:
        return value * value + rank

    found: dict[int, list[int]] = {}

    def call(value: int) -> None:
        found[value] = square.distributed(value)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: [n * n, n * n + 1] for n in range(6)}


def test_results_of_several_handles_in_any_order() -> None:
    @distributed(gpus=1, quiet=True)
    def echo(value: int) -> int:
        return value

    runs: list[Run[int]] = [echo.submit(n) for n in range(4)]
    assert [run.result(timeout=50) for run in reversed(runs)] == [3, 2, 1, 0]


# --- values -----------------------------------------------------------------------------------------------------------


def test_large_tensors_and_arrays_come_back_equal_and_writable() -> None:
    @distributed(gpus=2, quiet=True)
    def make(rank: int = -1) -> dict[str, object]:
        ones = torch.full((8_000_000,), float(rank))
        return {"tensor": ones, "view": ones[::2], "array": numpy.arange(1_000_000) + rank}

    for rank, value in enumerate(make.distributed()):
        tensor, view, array = value["tensor"], value["view"], value["array"]
        assert isinstance(tensor, torch.Tensor) and isinstance(view, torch.Tensor) and isinstance(array, numpy.ndarray)
        assert tensor.shape == (8_000_000,) and bool((tensor == rank).all())
        assert int(array[-1]) == 999_999 + rank
        tensor[0] = 42.0
        array[0] = 42
        assert float(view[0]) == 42.0, "a view still shares its tensor's memory"


def test_large_arguments_reach_every_rank() -> None:
    @distributed(gpus=2, quiet=True)
    def total(tensor: torch.Tensor, array: numpy.ndarray) -> list[float]:
        tensor += 1  # its own copy
        return [float(tensor.sum()), float(array.sum())]

    tensor = torch.zeros(2_000_000)
    assert total.distributed(tensor, numpy.ones(500_000)) == [[2_000_000.0, 500_000.0]] * 2
    assert float(tensor.sum()) == 0.0


# --- the caller's context ---------------------------------------------------------------------------------------------


def test_ranks_take_on_what_the_caller_is_at_the_moment_of_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @distributed(gpus=2, quiet=True)
    def context() -> dict[str, object]:
        mask = os.umask(0)
        return {
            "cwd": os.getcwd(),
            "umask": mask,
            "argv": list(sys.argv),
            "path": list(sys.path),
            "set": os.environ.get("MY_SETTING"),
            "unset": "GONE" in os.environ,
        }

    monkeypatch.setenv("GONE", "1")
    context.distributed()
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MY_SETTING", "käse\n\udcff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3"])
    monkeypatch.syspath_prepend(str(tmp_path / "libs"))
    mask = os.umask(0o027)
    try:
        found = context.distributed()
    finally:
        os.umask(mask)
    assert (
        found
        == [
            {
                "cwd": str(tmp_path),
                "umask": 0o027,
                "argv": ["train.py", "--lr", "1e-3"],
                "path": sys.path,
                "set": "käse\n\udcff",
                "unset": False,
            }
        ]
        * 2
    )


def test_the_variables_every_rank_has() -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NUM_NODES"]
    names += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SGPU_RUN_ID", "SGPU_FENCE", "SGPU_GPU_UUIDS"]
    names += ["PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"]

    @distributed(gpus=2, quiet=True)
    def variables() -> dict[str, str]:
        assert (rt.get_global_rank(), rt.get_world_size()) == (int(os.environ["RANK"]), 2)
        assert (rt.get_local_rank(), rt.get_local_world_size(), rt.get_node_rank()) == (rt.get_global_rank(), 2, 0)
        return {name: os.environ[name] for name in names}

    run = variables.submit()
    first, second = run.results(timeout=50)
    assert (first["RANK"], second["RANK"]) == (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["SGPU_RUN_ID"] == first["TORCHELASTIC_RUN_ID"] == run.id
    assert first["NUM_NODES"] == first["SGPU_FENCE"] == first["PYTHONUNBUFFERED"] == "1"
    same = set(names) - {"RANK", "LOCAL_RANK"}
    assert {name: first[name] for name in same} == {name: second[name] for name in same}


def test_files_that_ranks_make_have_the_callers_permissions(tmp_path: Path) -> None:
    @distributed(gpus=1, quiet=True)
    def write(path: str) -> None:
        Path(path).write_text("x")

    mask = os.umask(0o077)
    try:
        write.distributed(str(tmp_path / "private"))
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_a_module_that_is_edited_between_two_calls_is_run_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = tmp_path / "edited_module.py"
    source.write_text("def answer():\n    return 1\n")
    importlib.invalidate_caches()
    module = importlib.import_module("edited_module")
    assert distributed(gpus=1, quiet=True)(module.answer).distributed() == [1]
    source.write_text("def answer():\n    return 'edited'\n")
    assert distributed(gpus=1, quiet=True)(module.answer).distributed() == ["edited"]
    del sys.modules["edited_module"]


@distributed(gpus=1, quiet=True)
def stay_alone(where: str) -> int:
    return stay(where)


def test_runs_are_given_in_the_order_in_which_they_end(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    runs = dict(zip(places, stay_alone.map([str(place) for place in places]), strict=True))
    completed = as_completed(runs.values(), timeout=60)
    for place in reversed(places):
        (place / "go").touch()
        assert next(completed) is runs[place]
    assert list(completed) == []
    assert [run.id for run in as_completed([runs[places[0]]] * 2)] == [runs[places[0]].id]


def test_who_waits_for_runs_can_give_up(tmp_path: Path) -> None:
    run = stay_alone.submit(str(tmp_path))
    with pytest.raises(TimeoutError, match=re.escape(golden("local.results.runs-ended"))):
        list(as_completed([run], timeout=0.1))
    (tmp_path / "go").touch()
    assert run.result() == 0


@distributed(gpus=2, quiet=True)
def environment(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_get_the_share_of_the_cores_that_goes_with_their_devices() -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment.distributed("OMP_NUM_THREADS") == [str(max(1, cores * 2 // 8 // 2))] * 2


def test_accelerate_is_told_that_there_is_no_gpu_unless_the_caller_knows_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert environment.distributed("ACCELERATE_USE_CPU") == ["true"] * 2
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert environment.distributed("ACCELERATE_USE_CPU") == ["false"] * 2


def test_asking_without_waiting_hears_that_a_run_has_ended() -> None:
    run = module_level.submit(1)
    while not run.wait(timeout=0):
        threading.Event().wait(0.01)
    assert run.results(timeout=0) == [1, 2]
