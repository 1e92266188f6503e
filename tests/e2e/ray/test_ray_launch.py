"""What a driver meets in its cluster, how a task's exception arrives, and what is said of the run: one run for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serverless_gpu import attach
from serverless_gpu.node.attempt.history import run_ids
from tests.e2e.ray.user_scripts import LIMIT_S, run_code
from tests.support.cli.cli import sgpu
from tests.support.golden import golden

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

CODE = """
    import json
    import ray
    from serverless_gpu import runtime
    from serverless_gpu.ray import ray_init, ray_launch

    class NoRow(ValueError):
        pass

    @ray.remote(num_cpus=0)
    def look_up():
        raise NoRow("no such row")

    def refused(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    @ray_launch(gpus=1, gpu_type="H100", object_store_memory="90MB")
    def drive(what):
        seen = {
            "size": refused(ray_init, num_cpus=4),
            "version": ray_init(namespace="mine").address_info["gcs_address"] != "",
            "again": ray_init() is not None,
            "namespace": ray.get_runtime_context().namespace,
            "store": ray.cluster_resources()["object_store_memory"],
            "place": [runtime.get_global_rank(), runtime.get_world_size()],
        }
        print("seen " + json.dumps(seen), flush=True)
        ray.get(look_up.remote())

    if __name__ == "__main__":
        print("foreign " + json.dumps(refused(drive.distributed, ray.ObjectRef(bytes(28)))))
        run = drive.submit("anything")
        try:
            run.results()
        except ValueError as error:
            print("raised " + json.dumps([isinstance(error, NoRow), isinstance(error, ray.exceptions.RayTaskError)]))
"""


def test_a_driver_and_its_caller(home: Path, tmp_path: Path) -> None:
    out, _ = run_code(tmp_path, CODE, {"SERVERLESS_GPU_FAKE": "H100:1"})
    told = dict(line.split(" ", 1) for line in out.splitlines())
    assert "argument `what` -> ray.ObjectRef" in json.loads(told["foreign"])
    assert json.loads(told["raised"]) == [True, True]

    [run_id] = run_ids(home / "runs")
    run = attach(run_id)
    seen = json.loads(run.logs(0).partition("seen ")[2].splitlines()[0])
    assert seen.pop("size").startswith("InvalidOption: the cluster of this run already exists, so ray_init cannot set")
    assert seen == {"version": True, "again": True, "namespace": "mine", "store": 90_000_000, "place": [0, 1]}
    assert "Ray 2." in "; ".join(run.receipt().notes)
    lines = sgpu("show", run_id).output.splitlines()
    assert lines[1] == golden("ray.ray_launch.asked-ray-cluster")
    assert any(" ray/0/" in line for line in lines), "Ray's own logs are among the files"
