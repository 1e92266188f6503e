"""Helpers of the tests of commands that other tests use as well."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.runs.run import Run
from serverless_gpu.model.spec import Command, Resources, RunSpec
from tests.support.cli.cli import sgpu as sgpu


def start(
    *argv: str, gpus: int = 1, name: str = "said", resume: bool = False, environment: Literal["live", "auto"] = "auto"
) -> Run[None]:
    """Start a program through the server."""
    spec = RunSpec(
        name=name,
        remote=True,
        environment=environment,
        resources=Resources(gpus=gpus, gpu_type="H100"),
        payload=Command(argv=argv, per="rank"),
        quiet=True,
        resume=resume,
    )
    return launch_command(spec)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start the command as a process of its own."""
    program = [sys.executable, "-m", "serverless_gpu.cli", *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
