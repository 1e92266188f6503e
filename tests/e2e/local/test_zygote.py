"""Warm interpreters: what is safe to copy, what must differ in every rank, and when a copy is too old."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import random
import re
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import TypeVar

import numpy
import pytest
import torch
import typing_extensions

from serverless_gpu import Run, distributed, session
from serverless_gpu.errors import RunError
from serverless_gpu.node.inside.zygote import collapse_huge_page
from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.observe import Process, ended, start_script, wait_for

T = TypeVar("T")


def test_our_ranks_run_parallel_regions_again_and_again(warm: Path) -> None:
    @distributed(gpus=2, quiet=True, timeout=60)
    def compute() -> float:
        torch.set_num_threads(2)
        matrix = torch.ones(600, 600)
        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        return float((matrix @ matrix).exp().clamp(max=1).sum()) + float(torch.ones(2_000_000).exp().sum() > 0)

    for _ in range(3):
        assert compute.distributed() == [360_001.0] * 2


def test_every_rank_has_its_own_random_numbers(warm: Path) -> None:
    @distributed(gpus=4, quiet=True)
    def draw() -> list[object]:
        return [
            float(numpy.random.random()),
            random.random(),
            os.urandom(8),
            int(numpy.random.default_rng().integers(2**62)),
            float(torch.rand((), dtype=torch.float64)),
        ]

    drawn = draw.distributed() + draw.distributed()
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 8, "all ranks of both runs differ"


def test_cores_are_shared_among_the_ranks(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> list[object]:
        return [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for size in (1, 2, 8):  # of eight
        share = max(1, max(1, cores * size // 8) // size)
        assert distributed(gpus=size, quiet=True)(threads).distributed() == [[share, str(share), str(share)]] * size


def test_22C7_openblas_has_its_share_and_no_thread_before_it_is_used(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> tuple[list[int], int]:
        threads = len(os.listdir("/proc/self/task"))
        return [library.read() for library in sys.modules["_sgpu_inside.blas"].libraries], threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for size in (1, 2):  # of eight
        share = max(1, max(1, cores * size // 8) // size)
        for counts, threads in distributed(gpus=size, quiet=True)(count).distributed():
            assert counts and set(counts) == {share}
            assert threads == 1, "threads that spin would take the cores from the other ranks"


def test_22C7_a_warm_interpreter_lies_in_huge_pages_once_its_first_run_has_ended(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_collapse():
        pytest.skip("this kernel gives no huge pages on request")
    monkeypatch.delenv("SERVERLESS_GPU_PRELOAD")  # without torch there is too little for one
    assert distributed(gpus=1, quiet=True)(os.getppid).distributed()
    assert distributed(gpus=1, quiet=True)(os.getppid).distributed()
    zygotes = [int(process.name) for process in Path("/proc").glob("[0-9]*") if is_zygote_of(process, own)]
    assert zygotes
    wait_for(lambda: all(huge_kilobytes(pid) > 0 for pid in zygotes), "what it loaded lies in huge pages")
    assert distributed(gpus=2, quiet=True)(abs).distributed(-3) == [3, 3]


def can_collapse() -> bool:
    with mmap.mmap(-1, 6 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return collapse_huge_page(-(-start // (2 << 20)) * (2 << 20))


def is_zygote_of(process: Path, home: Path) -> bool:
    status = agent_status(home)
    try:
        name = (process / "comm").read_text().strip()
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return status is not None and name == "sgpu-zygote" and parent == status.pid


def huge_kilobytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("AnonHugePages:")[2].split()[0])


@pytest.mark.long
def test_a_users_own_number_of_threads_is_kept(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert distributed(gpus=1, quiet=True)(torch.get_num_threads).distributed() == [1]


def test_ranks_touch_cuda_only_themselves(warm: Path) -> None:
    @distributed(gpus=2, quiet=True)
    def state() -> list[object]:
        return [torch.cuda.is_initialized(), threading.active_count()]  # type: ignore[no-untyped-call]  # torch has no type for it

    assert state.distributed() == [[False, 1]] * 2


# --- warm and cold ----------------------------------------------------------------------------------------------------


def receipt_of(run: Run[T]) -> tuple[bool, str]:
    """Return whether a run was warm, and why not, once it has ended well."""
    run.results(timeout=60)
    receipt = run.receipt(timeout=50)
    return receipt.warm, receipt.warm_reason


def is_ready(home: Path) -> bool:
    """Return whether every zygote of a home is ready."""
    status = agent_status(home)
    return status is not None and all(zygote.state == "ready" for zygote in status.zygotes)


def test_the_first_run_is_cold_and_the_next_one_warm(own: Path) -> None:
    say = distributed(gpus=1, quiet=True)(len)
    warm, reason = receipt_of(say.submit("a"))
    assert not warm and reason
    assert receipt_of(say.submit("a")) == (True, "")


def test_a_changed_file_that_the_zygote_loaded_makes_the_next_run_cold(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sitecustomize.py"  # loaded by every interpreter that has it on its path
    path.write_text("VALUE = 1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))

    def value() -> object:
        return sys.modules["sitecustomize"].VALUE

    run = distributed(gpus=1, quiet=True)(value)
    assert run.distributed() == [1]
    assert receipt_of(run.submit()) == (True, "")
    path.write_text("VALUE = 'changed'\n")
    again = run.submit()
    warm, reason = receipt_of(again)
    assert not warm and reason == f"{path} has changed"
    assert again.results() == ["changed"]
    assert receipt_of(run.submit()) == (True, "")
    path.unlink()
    assert receipt_of(distributed(gpus=1, quiet=True)(len).submit("a")) == (False, f"{path} has changed")


def test_a_package_that_is_installed_meanwhile_is_seen_by_a_warm_run(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def look() -> str:
        return str(importlib.import_module("installed_later").VERSION)

    run = distributed(gpus=2, quiet=True)(look)
    with pytest.raises(ModuleNotFoundError, match="installed_later"):
        run.distributed()
    (site / "installed_later").mkdir()
    for version in ("1.0", "2.0.0"):
        (site / "installed_later" / "__init__.py").write_text(f"VERSION = {version!r}\n")
        again = run.submit()
        assert again.results(timeout=50) == [version] * 2
        assert again.receipt(timeout=50).warm


def test_start_up_variables_make_another_zygote_and_others_do_not(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = distributed(gpus=1, quiet=True)(os.environ.get)
    assert run.distributed("MALLOC_ARENA_MAX") == [None]
    monkeypatch.setenv("MY_SETTING", "1")
    assert receipt_of(run.submit("MY_SETTING")) == (True, "")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    warm, reason = receipt_of(run.submit("MALLOC_ARENA_MAX"))
    assert not warm and reason == golden("local.zygote.first-run-value")
    status = agent_status(own)
    assert status is not None and len(status.zygotes) == 2
    assert receipt_of(run.submit("MALLOC_ARENA_MAX")) == (True, "")
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    assert receipt_of(run.submit("MALLOC_ARENA_MAX")) == (True, ""), "the first one is still there"


@pytest.mark.long
def test_23B10_what_libraries_set_themselves_leaves_the_next_run_warm(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the demo, whose scikit-learn sets variables of OpenMP when it is imported."""
    monkeypatch.delenv("KMP_INIT_AT_FORK", raising=False)
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK", raising=False)
    run = distributed(gpus=1, quiet=True)(os.environ.get)
    assert run.distributed("KMP_INIT_AT_FORK") == [None]
    program = "import os, sklearn; print(os.environ['KMP_INIT_AT_FORK'], os.environ['KMP_DUPLICATE_LIB_OK'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    forks, duplicates = done.stdout.split()
    monkeypatch.setenv("KMP_INIT_AT_FORK", forks)
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", duplicates)
    wait_for(lambda: is_ready(own), "the warm interpreter is ready")
    again = run.submit("KMP_INIT_AT_FORK")
    assert receipt_of(again) == (True, "")
    assert again.results() == [forks], "ranks have the variable all the same"
    status = agent_status(own)
    assert status is not None and len(status.zygotes) == 1
    monkeypatch.setenv("KMP_INIT_AT_FORK", "TRUE")
    assert receipt_of(run.submit("KMP_INIT_AT_FORK"))[0] is False, "no library sets this value"


@pytest.mark.long
def test_names_of_one_interpreter_share_a_zygote_and_another_environment_has_its_own(own: Path, tmp_path: Path) -> None:
    """As `pip` writes `python3` into console scripts, and people type `python`."""
    places = "\n".join(place for place in sys.path if place)
    for name in ("one", "other"):
        venv.create(tmp_path / name, symlinks=True)
        (packages,) = (tmp_path / name / "lib").glob("python*/site-packages")
        (packages / "of_the_tests.pth").write_text(places)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom serverless_gpu import distributed\n"
        "def where():\n    return sys.executable, sys.prefix\n"
        "run = distributed(gpus=1, quiet=True)(where).submit()\n"
        "print(run.results()[0][1] == sys.prefix, run.receipt().warm)\n"
    )

    def run(python: str, *arguments: str) -> str:
        command = [str(tmp_path / python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout

    assert run("one/bin/python", str(script)) == "True False\n"
    assert run("one/bin/python3", str(script)) == "True True\n"
    assert run("other/bin/python", str(script)) == "True False\n"
    assert zygotes(own) == 2
    checks = json.loads(run("one/bin/python3", "-m", "serverless_gpu.cli", "doctor", "--json"))["checks"]
    (found,) = [finding for check in checks if check["code"] == "zygote" for finding in check["findings"]]
    assert re.fullmatch(r"pid \d+ is ready", found["sentence"])


def test_the_number_of_zygotes_is_bounded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = distributed(gpus=1, quiet=True)(len)
    for number in range(6):
        monkeypatch.setenv("PYTHONHASHSEED", str(number))
        assert run.distributed("ab") == [2]
    assert zygotes(own) <= 4


def test_other_interpreters_do_not_cost_a_session_its_warm_start(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = distributed(gpus=1, quiet=True)(len)
    with session(gpus=1, quiet=True) as held:
        held.distributed(len, "ab")
        for number in range(4):
            monkeypatch.setenv("PYTHONHASHSEED", str(number))
            assert run.distributed("ab") == [2]
        assert zygotes(own) == 5
        monkeypatch.delenv("PYTHONHASHSEED")
        assert receipt_of(held.submit(len, "ab")) == (True, "")


def test_a_package_that_cannot_be_preloaded_costs_the_warm_start_only(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('a broken numpy')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    warm, reason = receipt_of(distributed(gpus=1, quiet=True)(len).submit("ab"))
    assert not warm and "numpy" in reason and "a broken numpy" in reason


@pytest.mark.long
@pytest.mark.slow
def test_a_package_that_was_mended_makes_runs_warm_again(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "numpy.py"
    broken.write_text("raise RuntimeError('a broken numpy')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    run = distributed(gpus=1, quiet=True)(len)
    assert run.distributed("ab") == [2]
    broken.unlink()

    def warm_again() -> bool:
        time.sleep(1)  # each try is a cold start
        warm, reason = receipt_of(run.submit("ab"))
        return warm or "a broken numpy" not in reason

    wait_for(warm_again, "it was tried again")


def test_an_interpreter_that_ends_at_its_start_says_why(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('closed today')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    with pytest.raises(RunError, match="closed today") as caught:
        distributed(gpus=1, quiet=True)(len).distributed("ab")
    assert caught.value.reason == "start_failed"


def test_threads_of_preloaded_packages_lead_to_a_cold_start(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='busy').start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    run = distributed(gpus=2, quiet=True)(len)
    assert run.distributed("ab") == [2, 2]
    warm, reason = receipt_of(run.submit("ab"))
    assert not warm and "thread" in reason


OWN_MODULE = """
import sys
from serverless_gpu import distributed

def who():
    import {name}
    return [{name}.__file__, getattr({name}, "MINE", None)]

@distributed(gpus=2, quiet=True)
def train():
    return who()

run = train.submit()
assert run.results() == [who()] * 2, (run.results(), who())
print(run.receipt().warm, run.receipt().warm_reason, sep="\\n")
"""


def run_beside(directory: Path, name: str, **environ: str) -> tuple[str, str]:
    """Run a script that compares the module a rank imports with its own; return warm or not, and the reason."""
    path = directory / "script.py"
    path.write_text(OWN_MODULE.format(name=name))
    code, stdout, stderr = ended(start_script(path, environ=environ))
    assert code == 0, stderr
    warm, reason = stdout.splitlines()
    return warm, reason


@pytest.mark.parametrize("name", ["queue", "random", "numpy.version"])
def test_a_module_beside_the_script_is_the_one_that_ranks_import(warm: Path, tmp_path: Path, name: str) -> None:
    top = name.partition(".")[0]
    if top == name:
        file = tmp_path / f"{name}.py"
    else:
        file = tmp_path / top / "__init__.py"
        file.parent.mkdir()
        (file.parent / "version.py").write_text("MINE = 2\n")
    file.write_text("MINE = 1\n")
    before = distributed(gpus=2, quiet=True)(len)
    before.distributed("ab")
    found = run_beside(tmp_path, name)
    has = "Python's own" if top in sys.stdlib_module_names else numpy.__file__
    assert found == ("False", golden("local.zygote.caller-warm-interpreter", top=top, file=file, has=has))
    assert receipt_of(before.submit("ab")) == (True, ""), "others are not concerned"


def test_a_dependency_of_what_is_preloaded_may_lie_beside_the_script(warm: Path, tmp_path: Path) -> None:
    file = tmp_path / "typing_extensions.py"  # imported by torch
    file.write_text(Path(typing_extensions.__file__).read_text() + "\nMINE = 1\n")
    warmth, reason = run_beside(tmp_path, "typing_extensions")
    assert warmth == "False" and reason.startswith(
        f"typing_extensions is {file} for the caller, but the warm interpreter has"
    )


def test_a_directory_that_is_no_package_does_not_cost_the_warm_start(warm: Path, tmp_path: Path) -> None:
    (tmp_path / "calendar").mkdir()  # of data: Python prefers its own module
    (tmp_path / "pathlib.txt").touch()
    distributed(gpus=2, quiet=True)(len).distributed("ab")
    assert run_beside(tmp_path, "calendar") == ("True", "")


def test_a_module_that_the_caller_took_from_python_before_stays_that(warm: Path, tmp_path: Path) -> None:
    """What is loaded stays, in the caller; so ranks have it from Python, too, whatever the path says by now."""
    (tmp_path / "calendar.py").write_text("MINE = 1\n")
    distributed(gpus=1, quiet=True)(len).distributed("ab")
    path = tmp_path / "elsewhere" / "script.py"
    path.parent.mkdir()
    path.write_text(
        f"import calendar, sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + OWN_MODULE.format(name="calendar")
    )
    code, stdout, stderr = ended(start_script(path))
    assert (code, stdout) == (0, "True\n\n"), stderr


def test_a_module_in_the_python_path_is_the_zygotes_own(own: Path, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "calendar.py").write_text("MINE = 1\n")
    places = os.pathsep.join(filter(None, [str(tmp_path / "path"), os.environ.get("PYTHONPATH")]))
    run_beside(tmp_path, "calendar", PYTHONPATH=places)
    assert run_beside(tmp_path, "calendar", PYTHONPATH=places) == ("True", "")


def test_prewarming_makes_the_first_run_warm(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVERLESS_GPU_PREWARM")
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nfrom serverless_gpu import distributed\n"
        "@distributed(gpus=1, quiet=True)\ndef train():\n    return 1\n"
        "if sys.argv[1] == 'call':\n"
        "    run = train.submit()\n    run.results()\n    print(run.receipt().warm)\n"
        "else:\n    sys.stdin.read()\n"
    )
    decorating = subprocess.Popen([sys.executable, str(path), "decorate"], stdin=subprocess.PIPE)
    wait_for(lambda: agent_status(own) is not None and is_ready(own) and zygotes(own) == 1, "it is prewarmed")
    decorating.communicate(b"", timeout=60)
    done = subprocess.run([sys.executable, str(path), "call"], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "True\n", done.stderr


def zygotes(home: Path) -> int:
    """Return how many zygotes there are."""
    status = agent_status(home)
    return 0 if status is None else len(status.zygotes)


DAEMON = """
import os, pathlib
if os.getppid() != 1 and not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    pathlib.Path({marker!r}).write_text(str(os.getpid()))
    os.closerange(0, 64)
    import time
    time.sleep(600)
"""


def test_22A11_what_start_up_code_leaves_ends_with_the_run_that_it_was_started_for(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = distributed(gpus=1, quiet=True)(len)
    marker = tmp_path / "daemon"
    (tmp_path / "sitecustomize.py").write_text(DAEMON.format(marker=str(marker)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    daemons = []
    for _ in range(2):
        run = call.submit("a")
        warm, reason = receipt_of(run)
        assert not warm and reason
        daemons.append(Process(int(marker.read_text())))
    assert golden("local.zygote.start-up-code") in reason
    for daemon in daemons:
        daemon.wait_gone()
