"""Scripts of entry points are what pip writes, and run whatever the path of their interpreter is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.environment.restore.cache.unit_metadata import script


@pytest.mark.parametrize("name", ["plain", "with space", "with $dollar `tick`", "long" * 50, 'quo"te'])
def test_a_script_runs_whatever_the_path_of_its_interpreter_is(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name / "bin"
    directory.mkdir(parents=True)
    (directory / "python").symlink_to(sys.executable)
    (tmp_path / "module.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n")
    program = directory / "program"
    program.write_text(script("module:main", str(directory / "python")))
    program.chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([program, "a b", "c"], capture_output=True, text=True, check=False, env=environ)
    assert done.stdout == "['a b', 'c']\n", done.stderr
