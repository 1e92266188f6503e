"""Calls through a real server whose ranks import a captured copy of the caller's environment."""

from __future__ import annotations

from pathlib import Path

from tests.support.local.small_environment import SmallEnvironment, with_requirements
from tests.support.remote.environments import PROGRAM, WORK


def test_a_captured_environment_goes_through_the_store_of_the_server(served: Path, tmp_path: Path) -> None:
    small = SmallEnvironment(tmp_path / "here", *with_requirements("httpx2"))
    small.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    small.write("work.py", WORK)
    program = small.write("program.py", PROGRAM)
    out, err = small.run(program, SERVERLESS_GPU_TOKEN="", HOME="/nowhere")
    value, toy, token, home = eval(out)[0]
    assert (value, token) == ("one", None) and home != "/nowhere"
    assert toy.startswith(f"{served}/environments/"), toy
    assert "capturing the environment" in err
    small.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'two'\n"})
    out, err = small.run(program, SERVERLESS_GPU_TOKEN="", HOME="/nowhere")
    assert eval(out)[0][0] == "two" and "environment changed: toy" in err
