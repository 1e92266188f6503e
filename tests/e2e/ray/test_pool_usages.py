"""Usages 7 to 9 of the public surface, as they are written, on machines of a pool that Ray keeps together.

Each follows one published way of use; the code is our own. The shapes are declared, and none fits on one machine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray.pools import Pool
from tests.e2e.ray.user_environment import UserEnvironment

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(420)]

RUN_S = 300.0


@pytest.fixture(scope="module")
def user() -> Iterator[UserEnvironment]:
    """Yield somebody at the first of three machines."""
    with Pool("A10:2") as pool:
        pool.join("two", "H100:8,A10:3")
        pool.join("three", "H100:8,A10:3")
        names = ("ray", "pyarrow", "pandas", "numpy", "fsspec")
        yield UserEnvironment(pool.first.home / "user", pool.first.environ, *names)


def run_code(user: UserEnvironment, code: str, where: Path) -> str:
    """Run a script of the user's, whose `/Workspace` is a directory that all machines see; return its output."""
    (user.project / "driver.py").write_text(textwrap.dedent(code).replace("/Workspace", str(where)))
    out, _ = user.run("driver.py", limit_s=RUN_S)
    return out


def test_usage_7_two_nodes_of_eight_and_a_helper_that_shells_out(user: UserEnvironment, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: small\n")
    code = """
        import subprocess
        from serverless_gpu import GPUType, distributed, runtime as rt

        def shell(*words):
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

        @distributed(gpus=16, gpu_type=GPUType.H100, remote=True)
        def train(**kwargs):
            return [rt.get_global_rank(), rt.get_world_size(), rt.get_node_rank(), shell("cat", kwargs["config"])]

        if __name__ == "__main__":
            results = train.distributed(config="/Workspace/config.yaml")
            print("right", results == [[rank, 16, rank // 8, "model: small"] for rank in range(16)])
    """
    assert run_code(user, code, tmp_path).endswith("right True\n")


def test_usage_8_shards_by_global_rank_and_a_bare_return(user: UserEnvironment, tmp_path: Path) -> None:
    code = """
        import glob
        import os
        import pyarrow
        import pyarrow.parquet
        from serverless_gpu import distributed, runtime as rt

        @distributed(gpus=8, gpu_type="a10", remote=True)
        def embed():
            files = sorted(glob.glob("/Workspace/in/*.parquet"))[rt.get_global_rank() :: rt.get_world_size()]
            if not files:
                return
            rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pydict()["number"]]
            table = pyarrow.table({"vector": [2 * row for row in rows]})
            pyarrow.parquet.write_table(table, f"/Workspace/out/{rt.get_global_rank()}.parquet")

        if __name__ == "__main__":
            os.mkdir("/Workspace/in"), os.mkdir("/Workspace/out")
            for part in range(6):
                table = pyarrow.table({"number": range(10 * part, 10 * part + 10)})
                pyarrow.parquet.write_table(table, f"/Workspace/in/{part}.parquet")
            print("results", embed.distributed())
            print("files", sorted(os.listdir("/Workspace/out")))
            done = pyarrow.parquet.read_table("/Workspace/out").to_pydict()["vector"]
            print("doubled", sorted(done) == [2 * number for number in range(60)])
    """
    files = [f"{rank}.parquet" for rank in range(6)]
    out = run_code(user, code, tmp_path)
    assert out.endswith(f"results {[None] * 8}\nfiles {files}\ndoubled True\n")


def test_usage_9_a_ray_cluster_of_the_runs_own_over_three_machines(user: UserEnvironment, tmp_path: Path) -> None:
    code = """
        import os
        import pyarrow
        import pyarrow.parquet
        from serverless_gpu.ray import ray_launch

        @ray_launch(gpus=8, gpu_type="a10", remote=True)
        def embed():
            import ray

            resources = ray.cluster_resources()
            print("has", resources["GPU"], resources["accelerator_type:A10"], len(ray.nodes()))

            class Embedder:
                def __init__(self):
                    self.node = ray.get_runtime_context().get_node_id()

                def __call__(self, batch):
                    batch["vector"] = batch["number"] * 2
                    batch["node"] = [self.node] * len(batch["number"])
                    return batch

            numbers = ray.data.read_parquet("/Workspace/in")
            vectors = numbers.map_batches(Embedder, num_gpus=1, concurrency=2, batch_format="numpy", batch_size=25)
            vectors.write_parquet("/Workspace/out")

        if __name__ == "__main__":
            os.mkdir("/Workspace/in")
            for part in range(4):
                table = pyarrow.table({"number": range(100 * part, 100 * part + 100)})
                pyarrow.parquet.write_table(table, f"/Workspace/in/{part}.parquet")
            print("results", embed.distributed())
            done = pyarrow.parquet.read_table("/Workspace/out").to_pydict()
            print("doubled", sorted(done["vector"]) == [2 * number for number in range(400)])
    """
    out = run_code(user, code, tmp_path)
    assert "has 8.0 3.0 3\n" in out
    assert out.endswith("results [None, None, None]\ndoubled True\n")
