"""`ray_launch` before anything starts: options, in whose words they are refused, and the Ray that must be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import serverless_gpu
from tests.support.client.ray_launch import make_ray_package

SOURCE = Path(serverless_gpu.__path__[0]).parent


def test_looking_imports_nothing_and_finds_what_is_there(tmp_path: Path) -> None:
    make_ray_package(tmp_path)
    (tmp_path / "ray" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "ray-2.58.0.dist-info").mkdir()
    (tmp_path / "ray-2.58.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.58.0\n")
    code = "from serverless_gpu.client.launch.preflight import find_ray; print(*find_ray())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["2.58.0", str(tmp_path / "ray" / "__init__.py")]


def test_a_driver_that_imports_the_door_loads_nothing_of_the_client() -> None:
    code = (
        "from serverless_gpu.ray import ray_init; import sys; "
        "print([name for name in sys.modules if name == 'ray' or name.startswith('serverless_gpu.client')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"
