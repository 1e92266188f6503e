"""Every example, run as a user runs it: a script of its own, on real input, until it prints its outcome.

On two CPU slots; with `-m gpu` the same files, unchanged, on the GPUs of the machine. What takes long, or needs more
than torch and scikit-learn, is marked `heavy` and part of `make test-all`.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, run_directories, run_script
from tests.support.paths import REPOSITORY
from tests.support.remote.server_process import ServerProcess

LIMIT_S = 240  # each takes a tenth of that on two idle cores

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(LIMIT_S + 30)]

EXAMPLES = REPOSITORY / "examples"
# In environments with MLflow, and with Ray: tests/e2e/tracking/test_runs.py, tests/e2e/ray/test_examples.py.
ELSEWHERE = ("mlflow_digits.py", "ray_data_inference.py", "ray_train_digits.py", "ray_tune_digits.py")
RECEIPT = "serverless-gpu: "
# What transformers says to itself.
FOREIGN = ("is_gradient_checkpointing", "warnings.warn(")

RunExample = Callable[..., tuple[str, str]]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def run_example(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunExample]:
    """Yield a function that runs one example in a home of its own; it returns stdout and stderr without receipts."""
    monkeypatch.delenv("SERVERLESS_GPU_PREWARM")
    monkeypatch.delenv("SERVERLESS_GPU_PRELOAD")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if request.param == "cpu":
        monkeypatch.setenv("SERVERLESS_GPU_FAKE", "CPU:2")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(name: str, *arguments: str) -> tuple[str, str]:
        done = run_script(EXAMPLES / name, *arguments, limit_s=LIMIT_S)
        said = [line for line in done.stderr.splitlines() if not line.startswith(RECEIPT)]
        rest = "\n".join(line for line in said if not any(known in line for known in FOREIGN))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, rest

    yield run
    cancel_all(home)


def number(pattern: str, text: str) -> float:
    """Return the number that follows in a text, as the pattern's group."""
    match = re.search(pattern, text)
    assert match, text
    return float(match[1])


def test_the_index_names_every_example() -> None:
    """Each file has its line in the index, and its test here."""
    files = sorted(file.name for file in EXAMPLES.glob("*.py"))
    index = re.findall(r"^- \[(\w+\.py)\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in index) == sorted(target for _, target in index) == files
    run_here = re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text("utf-8"))
    assert sorted({*run_here, *ELSEWHERE}) == files


def test_digits_ddp(run_example: RunExample) -> None:
    out, err = run_example("digits_ddp.py")
    assert "[rank 0] epoch 30: loss" in out
    assert number(r"test accuracy: ([\d.]+)%", out) > 94
    assert err == ""


@pytest.mark.long  # it trains for half a minute
def test_preempted_run_is_bit_for_bit_as_if_nothing_had_happened(run_example: RunExample, home: Path) -> None:
    server = ServerProcess(home)
    server.start()
    try:
        out, err = run_example("preempted_run.py")
    finally:
        server.kill(signal.SIGTERM)
        end_node(home)
    assert number(r"the second attempt goes on after step (\d+)", out) >= 20
    assert golden("examples.examples.120-steps-each") in out
    assert err == ""


@pytest.mark.heavy
def test_char_gpt_learns_python(run_example: RunExample) -> None:
    out, err = run_example("char_gpt.py")
    assert number(r"loss on held-out modules: ([\d.]+) nats per character", out) < 2.0
    sample = out.partition("\ndef ")[2].partition("\nloss on")[0]
    assert len(sample) >= 300 and "    " in sample, "it has written something with indentation"
    assert err == ""


@pytest.mark.heavy
def test_fsdp_resume_ends_where_an_unbroken_run_ends(run_example: RunExample, home: Path) -> None:
    out, err = run_example("fsdp_resume.py")
    stopped = re.search(r"^CANCELLED, newest checkpoint: step-(\d+)$", out, re.MULTILINE)
    assert stopped
    goes_on = f"[rank 0] resumed from step-{stopped[1]}\n[rank 0] step {int(stopped[1]) + 50}: checkpoint\n"
    assert goes_on in out, "it does not start from the beginning"
    resumed, unbroken = (
        ast.literal_eval(text) for text in re.findall(r"^(?:resumed|unbroken): +(.*)$", out, re.MULTILINE)
    )
    assert resumed["step"] == unbroken["step"] == 200
    assert resumed["loss"] == pytest.approx(unbroken["loss"], rel=1e-3) and resumed["accuracy"] > 0.85
    assert len(run_directories(home)) == 3
    assert err == ""


@pytest.mark.heavy
def test_learning_rate_sweep(run_example: RunExample, home: Path) -> None:
    out, err = run_example("learning_rate_sweep.py")
    rows = re.findall(r"^ *([\d.]+) +([\d.]+|nan) +([\d.]+)%(  best)?$", out, re.MULTILINE)
    assert len(rows) == len(run_directories(home)) == 10
    best = [float(accuracy) for _, _, accuracy, mark in rows if mark]
    assert len(best) == 1 and best[0] == max(float(row[2]) for row in rows) > 90
    assert float(rows[0][2]) < 80, "the smallest learning rate is too small"
    assert err.splitlines()[-1].startswith("[##########] 10 of 10 done")
    assert "Traceback" not in err and "Warning" not in err


@pytest.mark.long  # three runs of torch
def test_batch_inference_answers_in_the_order_of_the_texts(run_example: RunExample, home: Path) -> None:
    out, err = run_example("batch_inference.py")
    texts, runs = number(r"(\d+) texts in \d+ runs", out), number(r"texts in (\d+) runs", out)
    assert texts > 2000 and runs == -(-texts // 500)
    assert len(run_directories(home)) == runs + 1, "the training had a run, too"
    compress, wait, pick = out.split("?\n")[1:]
    assert ".compress: " in compress and "subprocess.wait: " in wait and "random.choice: " in pick
    assert err == ""


@pytest.mark.long  # the example of the test above, with other input
def test_batch_inference_of_a_file_of_ones_own(run_example: RunExample, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(
        "".join(f"{animal} number {index} lives here\n" for animal in ("cat", "owl") for index in range(300))
    )
    out, err = run_example("batch_inference.py", str(file))
    assert "600 texts in 2 runs" in out
    assert err == ""


@pytest.mark.heavy
def test_accelerate_loop_runs_unchanged(run_example: RunExample) -> None:
    out, err = run_example("accelerate_loop.py")
    assert number(r"test accuracy: ([\d.]+)%", out) > 94
    assert "trained by 2 processes" in out
    assert err == ""


@pytest.mark.heavy
def test_trainer_lora_teaches_another_language(run_example: RunExample) -> None:
    out, err = run_example("trainer_lora.py")
    untrained, pretrained, adapted = (
        number(rf"{name} +([\d.]+)", out) for name in ("untrained", "pretrained", "adapted")
    )
    assert untrained > 5.3 and pretrained < 3.2 and adapted < pretrained - 0.2
    assert number(r"trainable%: ([\d.]+)", out) < 10
    assert err == ""
