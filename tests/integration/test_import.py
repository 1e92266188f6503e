"""What importing the package costs: nothing heavy, in a fresh process; and every public name is there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import serverless_gpu

HEAVY = {
    "IPython",
    "accelerate",
    "cloudpickle",
    "fastapi",
    "httpx",
    "mlflow",
    "msgspec",
    "numpy",
    "pandas",
    "pydantic",
    "pynvml",
    "ray",
    "requests",
    "sqlalchemy",
    "torch",
    "uvicorn",
}

SOURCE = Path(serverless_gpu.__path__[0]).parent


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh process has loaded after `code`."""
    program = f"{code}\nimport sys; print(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "SERVERLESS_GPU_PREWARM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    return set(ast.literal_eval(done.stdout))


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import serverless_gpu")
    assert loaded & HEAVY == set()
    assert "serverless_gpu" in loaded


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    code = (
        "import sys, serverless_gpu; rooms = [n for n in sys.modules if n.startswith('serverless_gpu.')]; print(rooms)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ast.literal_eval(done.stdout) == ["serverless_gpu.version"]


@pytest.mark.parametrize(
    "code",
    [
        "from serverless_gpu import distributed",
        "from serverless_gpu import distributed\n@distributed(gpus=2, gpu_type='H100')\ndef f(): ...",
        "from serverless_gpu.launcher import distributed",
        "from serverless_gpu import load_ipython_extension",
        "import serverless_gpu.client.display.notebook_display",
        "from serverless_gpu import Run, attach, Receipt, GPUType, DistributedFunction",
    ],
    ids=["distributed", "decorated", "launcher", "magic", "notebook", "everything"],
)
def test_what_a_user_imports_loads_no_user_library(code: str) -> None:
    assert loaded_by(code) & (HEAVY - {"msgspec"}) == set()


def test_a_command_loads_no_user_library_and_not_the_doctor() -> None:
    assert loaded_by("import serverless_gpu.cli.program") & (HEAVY - {"msgspec"}) == set()
    code = "import sys, serverless_gpu.cli.program; print([name for name in sys.modules if 'gpu.doctor' in name])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ast.literal_eval(done.stdout) == []


@pytest.mark.parametrize("name", ["runtime", "errors", "compute"])
def test_what_runs_inside_ranks_is_standard_library_only(name: str) -> None:
    assert loaded_by(f"import serverless_gpu.{name}") & HEAVY == set()


def imported_beside(directory: Path, code: str) -> str:
    """Return the last lines that a script writes which has `code` and lies in a directory."""
    script = directory / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 1, done.stdout
    return "\n".join(done.stderr.splitlines()[-2:])


@pytest.mark.parametrize("name", ["uuid", "logging", "select", "dis", "numbers", "platform"])
def test_a_file_that_hides_a_module_of_python_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("def load():\n    return 1\n")
    said = f"cannot be imported: {file} shadows Python's standard module {name}\nhint: rename {file}"
    told = imported_beside(tmp_path, "from serverless_gpu import distributed")
    assert told == f"ImportError: serverless_gpu.client.decorator {said}"


def test_another_error_inside_of_an_import_is_told_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("class Struct:\n    pass\nStruct.fields\n")
    told = imported_beside(tmp_path, "from serverless_gpu import distributed")
    assert told.endswith(
        "ImportError: serverless_gpu.client.decorator cannot be imported: "
        "type object 'Struct' has no attribute 'fields'"
    )
