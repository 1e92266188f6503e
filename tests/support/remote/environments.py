"""Helpers of the tests of environments that other tests use as well."""

from __future__ import annotations

WORK = """
import os

def where():
    import toy
    return [toy.VALUE, toy.__file__, os.environ.get("SERVERLESS_GPU_TOKEN"), os.environ["HOME"]]
"""
PROGRAM = """
import work
from serverless_gpu import distributed

print(distributed(gpus=1, gpu_type="H100", remote=True, env="snapshot")(work.where).distributed())
"""
