"""Programs in the shapes in which people write them, run as they run them: own home, fresh process, nothing changed.

`user_code` holds the programs, which check their outcome themselves; README.md says which test covers which shape.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.testing import stop_agent
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import cancel_all, nothing_of_a_run, wait_for
from tests.support.notebook.kernel import started
from tests.support.paths import REPOSITORY

LIMIT_S = 240.0  # each takes a tenth of that on two idle cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]

USER_CODE = Path(__file__).parent / "user_code"
PYTHON = Path(sys.prefix) / "programs" / "bin" / "python"
"""The interpreter of a user who has installed all libraries of the heavy programs."""


class Outcome(NamedTuple):
    """What a program has printed."""

    out: str
    err: str
    code: int


@pytest.fixture(scope="module")
def users_home() -> Iterator[Path]:
    """Yield the home of the user whose programs these are."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    yield directory
    stop_agent(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def work(users_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory with the programs, and require that no run outlives the test."""
    use_home(monkeypatch, users_home, "CPU:2", preload="")
    monkeypatch.delenv("SERVERLESS_GPU_PREWARM")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MPLBACKEND", "agg")
    directory = tmp_path / "project"
    shutil.copytree(USER_CODE, directory, ignore=shutil.ignore_patterns("__pycache__"))
    yield directory
    try:
        wait_for(lambda: nothing_of_a_run(users_home), "every run of the test has ended")
    finally:
        cancel_all(users_home)


def run(
    directory: Path,
    *command: str,
    python: Path | str = sys.executable,
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a program in a directory with an interpreter, and return what it printed."""
    done = subprocess.run(
        [str(python), *command],
        cwd=directory,
        env={**os.environ, **(environ or {})},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return Outcome(done.stdout, done.stderr, done.returncode)


def sgpu(directory: Path, *arguments: str, python: Path | str = sys.executable) -> Outcome:
    """Run a command of `sgpu` in a directory."""
    return run(directory, "-m", "serverless_gpu.cli", *arguments, python=python)


class Program(NamedTuple):
    """A program, and what it prints where all is well.

    Attributes:
        name: its file, without the suffix.
        out: a pattern for all of stdout.
        err: a pattern for all of stderr.
    """

    name: str
    out: str = r"done\n"
    err: str = ""


# Each takes less than five seconds.
PLAIN = (
    Program(
        "tqdm_bar", r"\[rank 0\] step 0\n.*step 2\ndone\n", r"\[rank 0\] training: 100%\|█+\| 3/3 .*loss=0\.333\] *\n"
    ),
    Program("logging_config", r"INFO trainer: before\n(\[rank 0\] .*\n){2}INFO trainer: after\ndone\n"),
    Program("captured_config"),
    Program("cached_functions", r"\[rank 0\] loading abc\ndone\n"),
    Program(
        "iterators",
        r"the call to total .*argument `numbers` -> generator\n.*hint: create the object inside .*\ndone\n",
    ),
    Program("numpy_closure"),
    Program("subprocesses", r"\[rank 0\] a line of a program\ndone\n"),
    Program("asyncio_rank"),
    Program("signal_handlers"),
    # Rank 0 may have printed none, one or both of its lines when rank 1 ends. SIGTERM may cut off rank 1.
    Program(
        "os_exit",
        r"(\[rank 0\] .*\n)*"
        r"exit_3 RankCrashed 1 rank 1 exited with code 3 before it returned a result\n"
        r"(\[rank 0\] .*\n)*"
        r"exit_0 RankCrashed 1 rank 1 exited with code 0 before it returned a result\n"
        r"(\[rank 0\] .*\n)*"
        r"sys_exit RunError 1 rank 1 called sys.exit before it returned a result: exit code 4\ndone\n",
        r"(\[rank 1\] last words\n)+(\[rank 1\] rank 1 has left\n)?",
    ),
    Program("stdin_reader", r"\[rank 0\] continue\? \ndone\n"),
    Program("methods"),
    Program("threads_of_callers", r"(\[rank 0\] lr \d\n){6}done\n"),
)

# Others take longer, or need packages of the `programs` extra. Libraries say much on stderr.
HEAVY = (
    Program("process_pools"),
    Program("figure"),
    Program("dataloader_workers"),
    Program("mp_spawn"),
    Program("sklearn_search"),
    Program("hf_trainer", r".*'eval_accuracy': '1'.*done\n", r".*"),
    Program("lightning_fit", err=r".*MEMBER: 1/2.*"),
    Program("hydra_app", r"\('sgd-2', 0\.2\)\ndone\n"),
    Program("webdataset_shards"),
    Program("stateful_loader", err=r".*"),
    Program("streaming_datasets", err=r".*"),
    Program("optuna_study"),
    Program("xgboost_ranks", r".*done\n"),
    Program("lightgbm_ranks"),
)


def test_the_table_of_shapes_names_every_program_and_tests_that_exist() -> None:
    table = (USER_CODE.parent / "README.md").read_text("utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`test_" in line]
    assert len(rows) >= 35
    programs = {path.relative_to(USER_CODE.parent).as_posix() for path in USER_CODE.glob("*.py")}
    linked = set(re.findall(r"\((user_code/\w+\.py)\)", table))
    assert linked == programs
    sources = "".join(path.read_text("utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    assert not [name for name in named if f"def {name}(" not in sources]
    run_by_table = {
        row.split("user_code/")[1].split(".py")[0] for row in rows if re.search(r"`test_(heavy_)?program`", row)
    }
    assert run_by_table == {program.name for program in (*PLAIN, *HEAVY)}


def require_outcome(program: Program, outcome: Outcome) -> None:
    """Require that a program ended well, and printed what it prints and nothing else."""
    assert outcome.code == 0, outcome.out + outcome.err
    assert re.fullmatch(program.out, outcome.out, re.DOTALL), outcome.out
    assert re.fullmatch(program.err, outcome.err, re.DOTALL), outcome.err


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.name)
def test_program(work: Path, program: Program) -> None:
    require_outcome(program, run(work, f"{program.name}.py", stdin="for the caller\nand more\n"))


@pytest.mark.heavy
@pytest.mark.parametrize("program", HEAVY, ids=lambda program: program.name)
def test_heavy_program(work: Path, program: Program) -> None:
    require_outcome(program, run(work, f"{program.name}.py", python=PYTHON))


@pytest.mark.heavy
def test_trl_sft_with_captured_arguments(work: Path) -> None:
    """Every object was made in the caller, where it belonged to a single process."""
    require_outcome(Program("trl_sft", r"(\[rank 0\] .*\n)+done\n", r".*"), run(work, "trl_sft.py", python=PYTHON))


def test_click_app(work: Path) -> None:
    outcome = run(work, "click_app.py", "train", "--lr", "0.5", "--layer", "2", "--layer", "4", "small")
    assert outcome == ("[(0, 'small', 3.0), (1, 'small', 3.0)]\n", "", 0)
    outcome = run(work, "click_app.py", "train", "--lr", "much", "small")
    assert outcome.code == 2 and outcome.err.endswith("Invalid value for '--lr': 'much' is not a valid float.\n")


@pytest.mark.heavy
def test_fire_app(work: Path) -> None:
    outcome = run(work, "fire_app.py", "--lr", "0.5", "fit", "--steps", "3", python=PYTHON)
    assert outcome == ("3.0\n3.0\n", "", 0)


@pytest.mark.heavy
def test_hydra_app_with_overrides(work: Path) -> None:
    outcome = run(work, "hydra_app.py", "optimizer=adam", "steps=5", "hydra.run.dir=elsewhere", python=PYTHON)
    assert outcome == ("('adam-5', 0.005)\ndone\n", "", 0)
    assert (work / "elsewhere" / "rank-1").read_text() == golden("programs.programs.optimizer-kind-adam")


def test_a_package_is_run_as_a_module(work: Path) -> None:
    assert run(work, "-m", "trainer_package", "4") == ("[12, 15]\n", "", 0)
    submitted = sgpu(work, *SUBMIT, "--ranks-log", "all", "-m", "trainer_package.train", "4")
    assert submitted.code == 0, submitted.err
    assert sorted(submitted.out.splitlines()) == ["[rank 0] value 12 of 2", "[rank 1] value 12 of 2"]


SUBMIT = ("submit", "--local", "--gpus", "2", "--gpu-type", "CPU")
SCRIPT_RANKS = ["[rank 0] rank 0 local 0 of 2: equal True", "[rank 1] rank 1 local 1 of 2: equal True"]


@pytest.mark.heavy
def test_a_script_for_torchrun_is_submitted(work: Path) -> None:
    """Each rank runs it, or torchrun runs it once per node; its own usage errors are its own."""
    command = ("torchrun_script.py", "--epochs", "2", "--out")
    submitted = sgpu(work, *SUBMIT, "--ranks-log", "all", *command, "model.pt")
    assert submitted.code == 0, submitted.err
    assert sorted(submitted.out.splitlines()) == SCRIPT_RANKS and (work / "model.pt").exists()
    launched = sgpu(work, *SUBMIT, "--per-node", "torchrun", "--nproc-per-node", "2", *command, "other.pt")
    assert launched.code == 0, launched.err
    assert sorted(line.removeprefix("[rank 0] ") for line in launched.out.splitlines()) == [
        line.partition("] ")[2] for line in SCRIPT_RANKS
    ]
    assert (work / "other.pt").exists()
    wrong = sgpu(work, *SUBMIT, "torchrun_script.py", "--epochs")
    assert wrong.code == 2
    assert golden("programs.programs.rank-torchrun-script") in wrong.err


@pytest.mark.heavy
@pytest.mark.parametrize(
    "launcher", [(), ("--per-node", "torchrun", "--nproc-per-node", "2")], ids=["ranks", "torchrun"]
)
def test_a_script_for_accelerate_launch_is_submitted(work: Path, launcher: tuple[str, ...]) -> None:
    """Without `accelerate launch` itself, which starts one process where it finds no GPUs and no MPI."""
    submitted = sgpu(work, *SUBMIT, *launcher, "accelerate_script.py", "--output_dir", "out")
    assert submitted.code == 0, submitted.err
    assert golden("programs.programs.rank-processes-equal") in submitted.out
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {path.name for path in (work / "out/checkpoint").iterdir()}


def test_a_notebook_whose_cells_and_modules_are_edited(users_home: Path, work: Path) -> None:
    """Every call uses what the cells say now: classes, functions, settings, a helper module that was reloaded."""
    helper = work / "edited_helper.py"
    helper.write_text("def scale(x):\n    return x\n")
    with started(work, SERVERLESS_GPU_HOME=str(users_home), SERVERLESS_GPU_FAKE="CPU:2") as kernel:
        for cell in (CELL_SETUP, CELL_CLASS, CELL_TRAIN):
            assert kernel.run(cell).error == ("", "")
        assert kernel.run(CELL_CALL).result == "[(1, 2), (2, 2)]"
        kernel.run(CELL_CLASS.replace("self.width", "10 * self.width"))
        assert kernel.run(CELL_CALL).result == "[(1, 20), (2, 20)]", "the class is the new one"
        helper.write_text("def scale(x):\n    return 100 * x\n")
        kernel.run("import importlib; importlib.reload(edited_helper)")
        assert kernel.run(CELL_CALL).result == "[(100, 20), (200, 20)]", "the module is the new one"
        kernel.run(CELL_TRAIN.replace("edited_helper", "edited"))
        assert kernel.run(CELL_CALL).error == ("NameError", golden("programs.programs.name-edited-defined"))
        kernel.run("edited, config, offset = edited_helper, Config(3), 5")
        assert kernel.run(CELL_CALL).result == "[(500, 30), (600, 30)]", "names and settings are the new ones"


CELL_SETUP = """
import edited_helper
from dataclasses import dataclass
from serverless_gpu import distributed
offset = 1
"""
CELL_CLASS = """
@dataclass(slots=True)
class Config:
    width: int
    def size(self):
        return self.width
config = Config(2)
"""
CELL_TRAIN = """
@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(config, rank=0):
    assert type(config) is Config
    return edited_helper.scale(rank + offset), config.size()
"""
CELL_CALL = "results = train.distributed(config); results"
