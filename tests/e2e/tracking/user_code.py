"""What users write: functions for ranks that log to MLflow. Imported where MLflow is, and nowhere else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow


def rank() -> int:
    """Return this rank's number."""
    return int(os.environ["RANK"])


def log_without_start() -> dict[str, Any]:
    """Log from every rank, same keys, same steps, no start_run."""
    for step in range(20):
        mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
        mlflow.log_metric(f"loss_{rank()}", float(step), step=step)
    run = mlflow.active_run()
    assert run is not None
    return {"active": run.info.run_id, "last": _last()}


def start_with_name() -> dict[str, Any]:
    """As the FSDP tutorial: a named run on all ranks, artifacts, then again."""
    with mlflow.start_run(run_name="fsdp", log_system_metrics=True) as run:
        mlflow.log_param("workers", 2)
        mlflow.log_metric("first", 1.0, step=rank())
        mlflow.log_text("text", f"notes/{rank()}.txt")
    with mlflow.start_run() as again:
        mlflow.log_metric("second", 2.0, step=rank())
    return {"first": run.info.run_id, "second": again.info.run_id, "last": _last()}


def _last() -> str:
    run = mlflow.last_active_run()
    return "" if run is None else str(run.info.run_id)


def last_before_anything() -> str:
    """Ask for the last run where this rank has not started any."""
    return _last()


def another_experiment() -> dict[str, Any]:
    """Log into an experiment of the user's own, then into the job's again."""
    mlflow.set_experiment("/tests/of the user's own")
    with mlflow.start_run(run_name=f"own-{rank()}") as own:
        mlflow.log_metric("own", 1.0)
    mlflow.set_experiment(experiment_id=os.environ["TEST_EXPERIMENT"])
    with mlflow.start_run() as job:
        mlflow.log_metric("job", 1.0)
    return {"own": own.info.run_id, "job": job.info.run_id}


def another_store() -> str:
    """Log into a store of the user's own."""
    mlflow.set_tracking_uri("sqlite:///own.db")
    with mlflow.start_run() as run:
        mlflow.log_metric("own", 1.0)
    return str(run.info.run_id)


def nested_and_named() -> dict[str, Any]:
    """Start runs below the job's, in each of the ways there are, and continue one by its identifier."""
    with mlflow.start_run(nested=True, run_name="outside") as outside:
        pass
    with mlflow.start_run() as job, mlflow.start_run(nested=True, run_name="inside") as inside:
        mlflow.log_param("lr", 0.1)
    with mlflow.start_run(parent_run_id=job.info.run_id, run_name="below") as below:
        pass
    client = mlflow.MlflowClient()
    trial = client.create_run(job.info.experiment_id, tags={"mlflow.parentRunId": job.info.run_id})
    client.log_metric(trial.info.run_id, "score", 1.0)
    client.set_terminated(trial.info.run_id)
    with mlflow.start_run(run_id=inside.info.run_id):
        mlflow.log_metric("later", 1.0)
    runs = {"job": job, "outside": outside, "inside": inside, "below": below, "trial": trial}
    return {name: run.info.run_id for name, run in runs.items()}


def unequal_params() -> str:
    """Log parameters of which one differs between ranks; with points beside them in the same batches."""
    mlflow.log_params({"lr": 0.1, "seed": rank(), "layers": 12})
    mlflow.log_metric("after", 1.0, step=rank())
    mlflow.flush_async_logging()
    mlflow.log_param("shard", f"part-{rank()}", synchronous=True)
    return "ok"


def contradict() -> list[str]:
    """Log another value of a parameter: in the same run, and after a new start."""
    said = []
    with mlflow.start_run():
        mlflow.log_param("lr", 1, synchronous=True)
        try:
            mlflow.log_param("lr", 2, synchronous=True)
        except mlflow.MlflowException as error:
            said.append(error.error_code)
    with mlflow.start_run():
        mlflow.log_param("lr", 2, synchronous=True)
    with mlflow.start_run():
        mlflow.log_param("lr", 3, synchronous=True)
    return said


def fail_inside() -> None:
    """Raise in a run, right after a point."""
    with mlflow.start_run():
        mlflow.log_metric("loss", float("nan"))
        raise ValueError("diverged")


def many_points() -> str:
    """Log some thousands of points, by the fastest way."""
    for start in range(0, 3000, 500):
        mlflow.log_metrics({f"m{number}": 1.0 for number in range(500)}, step=start, synchronous=True)
    return "ok"


def log_for_a_while() -> dict[str, float]:
    """Log a thousand points asynchronously, one after the other, and say how long the calls took."""
    mlflow.start_run()
    Path("started").touch()
    limit = time.monotonic() + 60
    while not Path("go").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    slowest, began = 0.0, time.monotonic()
    for step in range(1000):
        before = time.monotonic()
        mlflow.log_metric("loss", 1.0, step=step)
        slowest = max(slowest, time.monotonic() - before)
    return {"slowest": slowest, "all": time.monotonic() - began}


def sklearn_autolog() -> str:
    """Fit twice under autolog."""
    linear_model = importlib.import_module("sklearn.linear_model")
    datasets = importlib.import_module("sklearn.datasets")
    mlflow.sklearn.autolog(log_models=False, log_input_examples=False)
    x, y = datasets.load_iris(return_X_y=True)
    linear_model.LogisticRegression(max_iter=200).fit(x, y)
    linear_model.LogisticRegression(max_iter=200).fit(x, y)
    return _last()


def trainer() -> str:
    """Train with Hugging Face's Trainer, which starts, names and ends a run by itself."""
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is loaded late
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    options = transformers.TrainingArguments(
        output_dir="out",
        max_steps=4,
        logging_steps=1,
        report_to="mlflow",
        run_name="my trainer",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 16
    transformers.Trainer(model=Model(), args=options, train_dataset=data).train()
    return _last()


def _fit(**options: Any) -> None:
    lightning = importlib.import_module("lightning.pytorch")
    boring = importlib.import_module("lightning.pytorch.demos.boring_classes")

    class Model(boring.BoringModel):  # type: ignore[misc,name-defined]  # Lightning is loaded late
        def training_step(self, batch: Any, index: int) -> Any:
            out = super().training_step(batch, index)
            self.log("train_loss", out["loss"])
            return out

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(
        max_steps=4, accelerator="cpu", devices=1, log_every_n_steps=1, limit_val_batches=0, **quiet, **options
    ).fit(Model())


def lightning_logger() -> dict[str, str]:
    """Train with Lightning's logger: one that is not told where, and one for an experiment of the user's own."""
    loggers = importlib.import_module("lightning.pytorch.loggers")
    logger = loggers.MLFlowLogger(run_name="my lightning", tags={"team": "vision"})
    _fit(logger=logger)
    own = loggers.MLFlowLogger(experiment_name="/tests/of lightning's user")
    _fit(logger=own)
    return {"job": str(logger.run_id), "own": str(own.run_id)}


def lightning_autolog() -> str:
    """Train with Lightning under autolog."""
    mlflow.pytorch.autolog(log_models=False)
    _fit(logger=False)
    return _last()


def register() -> float:
    """Log a model, register it, and load it back from the registry."""
    torch = importlib.import_module("torch")
    name = os.environ["TEST_MODEL"]
    model = torch.nn.Linear(2, 1)
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            model, name="model", registered_model_name=name, pip_requirements=["torch"], serialization_format="pickle"
        )
    loaded = mlflow.pytorch.load_model(f"models:/{name}/1")
    return float((loaded.weight - model.weight).abs().max())


def log_in_children() -> None:
    """Log one point in a process that is forked, and one in a program that is started: neither waits for anything."""
    mlflow.log_metric("parent", 1.0)
    pid = os.fork()
    if pid == 0:
        mlflow.log_metric("forked", 1.0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    active = mlflow.active_run()
    assert active is not None
    program = (
        f"import mlflow, os\nmlflow.start_run({active.info.run_id!r})\nmlflow.log_metric('started', 1.0)\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def is_asynchronous() -> bool:
    """Return whether MLflow logs in the background."""
    return bool(mlflow.environment_variables.MLFLOW_ENABLE_ASYNC_LOGGING.get())
