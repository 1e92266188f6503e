"""Usages 9 to 12 of the public `ray_launch` surface run unchanged, on eight declared A10s.

Each follows one published way of use; the code is our own. They say `remote=True`, as published, and go through a
server of this machine; usage 12 takes it from its environment, and runs without one as well, as the examples do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray.user_scripts import LIMIT_S, run_cells, run_code
from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import cancel_all, nothing_of_a_run, wait_for
from tests.support.remote.server_process import ServerProcess
from tests.support.tracking.mlflow_server import PYTHON as MLFLOW_PYTHON
from tests.support.tracking.mlflow_server import MlflowServer

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def served_a10s() -> Iterator[dict[str, str]]:
    """Yield the variables of a home with a server and eight declared A10s."""
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_home(monkeypatch, home, "A10:8")
        server = ServerProcess(home)
        server.start()
    yield {"SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_PREWARM": "0"}
    server.kill(signal.SIGTERM)
    end_node(home)
    shutil.rmtree(home)


@pytest.fixture
def served(served_a10s: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield them, and require that no run outlives the test."""
    home = Path(served_a10s["SERVERLESS_GPU_HOME"])
    yield served_a10s
    try:
        wait_for(lambda: nothing_of_a_run(home), "every run of the test has ended")
    finally:
        cancel_all(home)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[MlflowServer]:
    """Yield an MLflow server that answers."""
    server = MlflowServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_usage_9_ray_data_with_a_class_on_every_gpu(served: dict[str, str], tmp_path: Path) -> None:
    """A class that is defined inside, one GPU each, Parquet to Parquet; the call blocks until it is done."""
    code = """
        from serverless_gpu.ray import ray_launch

        SOURCE, TARGET, MODELS = "source", "target", 2

        @ray_launch(gpus=8, gpu_type="a10", remote=True)
        def embed():
            import os
            import ray

            print("resources", ray.cluster_resources())

            class Embedder:
                def __init__(self):
                    self.gpu = os.environ["CUDA_VISIBLE_DEVICES"]

                def __call__(self, batch):
                    batch["vector"] = batch["number"] * 2
                    batch["gpu"] = [self.gpu] * len(batch["number"])
                    return batch

            numbers = ray.data.read_parquet(SOURCE)
            vectors = numbers.map_batches(
                Embedder, num_gpus=1, concurrency=MODELS, batch_format="numpy", batch_size=25
            )
            vectors.write_parquet(TARGET)

        if __name__ == "__main__":
            import os
            import pyarrow
            import pyarrow.parquet

            os.mkdir(SOURCE)
            for part in range(4):
                table = pyarrow.table({"number": range(100 * part, 100 * part + 100)})
                pyarrow.parquet.write_table(table, f"{SOURCE}/{part}.parquet")
            embed.distributed()
            done = pyarrow.parquet.read_table(TARGET).to_pydict()
            print("doubled", sorted(done["vector"]) == [2 * number for number in range(400)])
            print("on", all(gpu in list("01234567") for gpu in done["gpu"]))
    """
    out, _ = run_code(tmp_path, code, served)
    assert "'GPU': 8.0" in out and "'accelerator_type:A10': 1.0" in out
    assert golden("ray.usages.doubled-true-true") in out


def test_usage_10_tune_in_a_task_runner_of_a_notebook(
    served: dict[str, str], mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    """An actor that the notebook defines runs Tune and logs to MLflow; the caller takes the ResultGrid and the run."""
    setup = """
        import getpass
        import mlflow
        import ray
        from ray import tune
        from serverless_gpu.ray import ray_launch

        NOTEBOOK = "/Users/" + getpass.getuser() + "/interactive"  # this one has no file
    """
    define = """
        def objective(config):
            tune.report({"loss": (config["depth"] - 3) ** 2})

        @ray.remote(num_cpus=1)
        class TaskRunner:
            def run(self, storage):
                space = {"depth": tune.grid_search([1, 3])}
                tuner = tune.Tuner(
                    objective,
                    param_space=space,
                    tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
                    run_config=tune.RunConfig(storage_path=storage, verbose=0),
                )
                grid = tuner.fit()
                mlflow.log_metric("best_loss", grid.get_best_result().metrics["loss"])
                mlflow.flush_async_logging()
                return grid

        @ray_launch(gpus=8, gpu_type='A10', remote=True)
        def train(storage):
            runner = TaskRunner.remote()
            return ray.get(runner.run.remote(storage))
    """
    use = """
        import os
        results = train.distributed(os.path.abspath("storage"))
        grid = results[0] if isinstance(results, list) else results
        print("best", len(grid), grid.get_best_result().config)
        experiment = mlflow.get_experiment_by_name(NOTEBOOK)
        named = "attributes.run_name LIKE 'jobTaskRun%'"
        runs = mlflow.search_runs([experiment.experiment_id], named, output_format="list")
        print("logged", [run.data.metrics["best_loss"] for run in runs])
    """
    # A user has both in one environment.
    both = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(mlflow_packages())]).strip(os.pathsep)}
    variables = {**served, **both, "MLFLOW_TRACKING_URI": mlflow_server.uri}
    out, _ = run_cells(tmp_path, [setup, define, use], variables)
    assert "\nbest 2 {'depth': 3}\n" in out
    assert "\nlogged [0.0]\n" in out, "what an actor logs is in the run of the call"


def test_usage_11_one_gpu_and_none_returned_under_the_main_guard(served: dict[str, str], tmp_path: Path) -> None:
    """RAY_TEMP_DIR is set before, a plain class does the work; nothing is written where that variable says."""
    theirs = tmp_path / "their-ray"
    code = """
        import os
        from serverless_gpu.ray import ray_launch

        class Pipeline:
            def __init__(self, name):
                self.name = name

            def run(self):
                import ray

                squares = ray.get([ray.remote(lambda x: x * x).remote(x) for x in range(4)])
                print(self.name, squares, "GPUs", ray.cluster_resources()["GPU"])

        if __name__ == "__main__":
            os.environ["RAY_TEMP_DIR"] = os.path.abspath("their-ray")

            @ray_launch(gpus=1, gpu_type='a10', remote=True)
            def main() -> None:
                Pipeline("squares").run()

            try:
                print("returned", main.distributed())
            except KeyError as error:
                print("known", error)
    """
    out, _ = run_code(tmp_path, code, served)
    assert "squares [0, 1, 4, 9] GPUs 1.0\n" in out
    assert "\nreturned [None]\n" in out
    assert not theirs.exists()


def test_usage_12_a_smoke_script_that_takes_everything_from_its_environment(
    served: dict[str, str], tmp_path: Path
) -> None:
    """No notebook anywhere; it counts nodes and asks an actor for its GPU."""
    code = """
        import os
        import sys
        from serverless_gpu.ray import ray_launch

        COUNT, KIND = int(os.environ["SMOKE_GPUS"]), os.environ["SMOKE_GPU_TYPE"]

        @ray_launch(gpus=COUNT, gpu_type=KIND, remote=bool(os.environ.get("SMOKE_REMOTE")))
        def smoke():
            import ray

            ray.init()

            @ray.remote(num_gpus=1, accelerator_type=KIND)
            class Probe:
                def look(self):
                    kinds = [name for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
                    return kinds, ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

            kinds, ids, visible = ray.get(Probe.remote().look.remote())
            return {"nodes": len([node for node in ray.nodes() if node["Alive"]]), "kinds": kinds,
                    "gpus": ray.available_resources().get("GPU", 0) + len(ids), "same": visible == str(ids[0])}

        print(smoke.distributed())
    """
    environ = {**served, "SMOKE_GPUS": "8", "SMOKE_GPU_TYPE": "A10", "SMOKE_REMOTE": "1"}
    out, _ = run_code(tmp_path, code, environ)
    assert out.endswith("[{'nodes': 1, 'kinds': ['accelerator_type:A10'], 'gpus': 8.0, 'same': True}]\n")


def mlflow_packages() -> Path:
    """Return where MLflow is installed, in an environment of its own."""
    ask = "import importlib.util; print(importlib.util.find_spec('mlflow').origin)"
    said = subprocess.run([str(MLFLOW_PYTHON), "-c", ask], capture_output=True, text=True, check=True).stdout
    return Path(said.strip()).parents[1]
