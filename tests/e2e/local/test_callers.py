"""Where a call comes from: scripts, their modules, notebook cells, other processes, type checkers."""

from __future__ import annotations

import contextlib
import linecache
import locale
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mypy.api
import pytest

from serverless_gpu import Run, attach, distributed, session
from serverless_gpu.errors import AgentUnavailable, ServerlessGpuError
from tests.support.golden import golden
from tests.support.local.observe import run_script, wait_for
from tests.support.local.ranks import rank_number, stay

pytestmark = pytest.mark.usefixtures("warm")


def script(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def test_what_main_defines_travels_by_value(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import dataclasses, enum, os, pickle, sys
        from serverless_gpu import distributed

        SCALE = 3

        class Kind(enum.Enum):
            SMALL = 1

        @dataclasses.dataclass
        class Point:
            x: int
            kind: Kind

        def helper(value):
            return value * SCALE

        @distributed(gpus=2, quiet=True)
        def train(point, rank=-1):
            assert isinstance(point, Point) and point.kind is Kind.SMALL
            pickle.loads(pickle.dumps(point))      # as DataLoader workers do: __main__ is found by name
            return Point(helper(point.x) + rank, Kind.SMALL)

        if __name__ == "__main__":
            results = train.distributed(Point(5, Kind.SMALL))
            assert all(type(point) is Point for point in results), "the caller's own class comes back"
            assert all(point.kind is Kind.SMALL for point in results), "the caller's own enum comes back"
            print([point.x for point in results], sys.argv[1:], helper(2))
        """,
    )
    done = run_script(path, "--lr", "3e-4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[15, 16] ['--lr', '3e-4'] 6\n"


def test_no_main_guard_is_needed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from serverless_gpu import distributed
        import functools
        print("once")
        print(distributed(gpus=2, quiet=True)(functools.partial(max, 4)).distributed(3))
        """,
    )
    assert run_script(path).stdout == "once\n[4, 4]\n"


def test_modules_beside_a_script_travel_by_reference(tmp_path: Path) -> None:
    package = tmp_path / "project" / "models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(
        "import threading\nLOCK = threading.Lock()  # could not travel by value\n"
        "class Net:\n    def __init__(self, depth):\n        self.depth = depth\n"
        "def build(depth):\n    with LOCK:\n        return Net(depth)\n"
    )
    path = script(
        tmp_path / "project",
        """
        from serverless_gpu import distributed
        from models.net import Net, build

        @distributed(gpus=2, quiet=True)
        def train(depth):
            net = build(depth)
            assert isinstance(net, Net)
            return net

        print([type(net) is Net and net.depth for net in train.distributed(depth=7)])
        print([net.depth for net in distributed(gpus=2, quiet=True)(build).distributed(8)])
        """,
    )
    done = run_script(path)  # from another directory: the script's own is on sys.path
    assert (done.stdout, done.stderr) == ("[7, 7]\n[8, 8]\n", "")


def test_a_script_by_its_relative_path(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def name():\n    return __name__\n")
    script(
        tmp_path,
        """
        import os
        import beside
        from serverless_gpu import distributed

        @distributed(gpus=2, quiet=True)
        def train():
            return beside.name(), os.path.basename(os.getcwd())

        print(train.distributed())
        """,
    )
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90)
    assert done.stdout == f"{[('beside', tmp_path.name)] * 2}\n", done.stderr


def test_python_minus_c_and_minus_m(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from serverless_gpu import distributed\n"
        "@distributed(gpus=2, quiet=True)\ndef f(rank=-1):\n    return rank\n"
        "if __name__ == '__main__':\n    print(f.distributed())\n"
    )
    for arguments in (["-m", "job"], ["-c", "import job; print(job.f.distributed())"]):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90)
        assert done.stdout == "[0, 1]\n", done.stderr


def test_a_notebook_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        "import os\nSCALE = 4\ndef helper(x):\n    return x * SCALE\n",
        "def train(x, rank=-1):\n    return helper(x) + rank\n",
        "def broken():\n    raise ValueError('in a cell')\n",
    ]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        name = f"/tmp/ipykernel_1/cell{number}.py"
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), namespace)
    run = distributed(gpus=2, quiet=True)
    assert run(cast("Callable[[int], int]", namespace["train"])).distributed(2) == [8, 9]
    with pytest.raises(ValueError, match="in a cell") as caught:
        run(cast("Callable[[], None]", namespace["broken"])).distributed()
    assert golden("local.callers.raise-valueerror-cell") in str(caught.value.__cause__), (
        "the cell's own lines are shown"
    )


def test_attach_from_another_process(tmp_path: Path) -> None:
    run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    path = script(
        tmp_path,
        """
        import pathlib, sys
        from serverless_gpu import attach
        run = attach(sys.argv[1])
        pathlib.Path(sys.argv[2], "go").touch()
        print(run.results(timeout=60), run.status(), run.receipt(timeout=60).state)
        print(attach(sys.argv[1]).results())
        """,
    )
    done = run_script(path, run.id, str(tmp_path))
    assert done.stdout == "[0, 1] SUCCEEDED SUCCEEDED\n[0, 1]\n", done.stderr
    assert run.results(timeout=50) == attach(run.id).results() == [0, 1]


def test_a_session_with_too_many_listeners_says_so_and_not_that_it_has_ended() -> None:
    with session(gpus=2, gpu_type="H100", quiet=True) as held:
        listeners = [attach(held.id) for _ in range(63)]
        with pytest.raises(AgentUnavailable, match=golden("local.callers.run-goes-64", id=held.id)):
            attach(held.id)
        with pytest.raises(ServerlessGpuError, match=re.escape(golden("local.callers.64-others-connected"))) as refused:
            held.distributed(rank_number)
        assert "has ended" not in str(refused.value)
        assert listeners.pop().status() == "RUNNING"  # and this one goes

        def served() -> bool:
            with contextlib.suppress(ServerlessGpuError):
                return held.distributed(rank_number) == [0, 1]
            return False

        wait_for(served, "there is a place again")


def test_ranks_can_start_processes_and_threads_of_their_own() -> None:
    @distributed(gpus=2, quiet=True)
    def workers(rank: int = -1) -> list[object]:
        import concurrent.futures  # noqa: PLC0415 - in the rank
        import multiprocessing  # noqa: PLC0415 - in the rank

        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(abs, [-1, -2])
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            names = list(threads.map(str, [rank]))
        return [squares, names]

    assert workers.distributed() == [[[1, 2], ["0"]], [[1, 2], ["1"]]]


def test_type_checkers_see_the_users_signature(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from serverless_gpu import distributed
        from serverless_gpu.compute import GPUType

        @distributed(gpus=8, gpu_type=GPUType.H100, tags={"team": "search"}, grace=5.0)
        def train(lr: float, *, epochs: int = 1) -> dict[str, float]:
            return {"loss": lr * epochs}

        reveal_type(train(0.1))
        reveal_type(train.distributed(0.1, epochs=2))
        reveal_type(train.submit(0.1))
        reveal_type(train.submit(lr=0.1).result())
        reveal_type(train.map([0.1]))
        train.distributed("0.1")
        train.distributed(0.1, epoch=2)
        distributed(gpus=8, num_gpu=8)
        """,
        "typed.py",
    )
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\n")
    out, err, code = mypy.api.run([str(path), "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")])
    lines: Sequence[str] = [line.partition(": ")[2] for line in out.splitlines()]
    assert code == 1 and not err, err
    revealed = [line for line in lines if "Revealed type" in line]
    for line, words in zip(
        revealed,
        [
            ["dict[", "float]"],
            ["list[", "dict[", "float]]"],
            ["serverless_gpu.client.runs.run.Run[", "dict["],
            ["dict[", "float]"],
            ["serverless_gpu.client.runs.run_list.RunList[", "dict["],
        ],
        strict=True,
    ):
        assert all(word in line for word in words) and "Any" not in line, line
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 3, out
    assert "incompatible type" in errors[0] and "epoch" in errors[1] and "num_gpu" in errors[2]


def test_23A6_ranks_have_the_callers_time_zone_and_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    @distributed(gpus=1, quiet=True)
    def look() -> tuple[int, str]:
        return time.localtime().tm_gmtoff, locale.setlocale(locale.LC_CTYPE)

    monkeypatch.delenv("LC_ALL", raising=False)
    for zone, offset_s, name in (("XYZ-5", 18_000, "C.UTF-8"), ("XYZ+3", -10_800, "C.utf8")):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setenv("LC_CTYPE", name)
        assert look.distributed() == [(offset_s, name)]
    assert look.submit().receipt(50).warm
