"""Rounds of the environment rows as one would do without us: freeze, find, tar, zstd, venv-pack, uv.

What is worked on is named by variables that the row sets (`SGPU_BENCH_TREE`, …). What a round writes goes into a
directory of its own and stays until the benchmarks end.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import environment_sets as sets
from benchmarks.environment_sets import now_ns


def uv_freeze(directory: str) -> dict[str, object]:
    """`uv pip freeze`: the versions of the distributions, no file looked at."""
    return _timed([_named("SGPU_BENCH_UV"), "pip", "freeze", "--quiet", "--python", str(_tree() / "bin" / "python")])


def pip_freeze(directory: str) -> dict[str, object]:
    """`pip freeze` of the same environment."""
    return _timed([sys.executable, "-m", "pip", "--python", str(_tree() / "bin" / "python"), "freeze"])


def find(directory: str) -> dict[str, object]:
    """`find -printf` of size and time of every file: what a look at everything costs in C, without a comparison."""
    return _timed(["find", str(_tree()), "-printf", r"%p %s %T@ %i %m\n"])


def tar_zstd(directory: str) -> dict[str, object]:
    """`tar | zstd -1 -T0` into a file; nobody asks whether it is on the disk."""
    packed = new_directory() / "environment.tar.zst"
    command = f"tar -C {shlex.quote(str(_tree()))} -cf - . | zstd -1 -T0 -q -o {shlex.quote(str(packed))}"
    return _timed(["sh", "-c", command]) | {"mb": packed.stat().st_size / 1e6}


def venv_pack(directory: str) -> dict[str, object]:
    """`venv-pack` as it comes."""
    packed = new_directory() / "environment.tar.gz"
    times = _timed([sys.executable, "-m", "venv_pack", "--quiet", "--prefix", str(_tree()), "--output", str(packed)])
    return times | {"mb": packed.stat().st_size / 1e6}


def zstd_tar(directory: str) -> dict[str, object]:
    """`zstd -d | tar x` of what `tar | zstd` made."""
    to = new_directory()
    packed = Path(_named("SGPU_BENCH_TAR"))
    sets.settle()
    return _timed(["sh", "-c", f"zstd -d -q -c {shlex.quote(str(packed))} | tar -C {shlex.quote(str(to))} -xf -"])


def newest_wheel(directory: str) -> dict[str, object]:
    """The wheel of the newer torch, as an installer downloads it."""
    wheel = max(Path(_named("SGPU_BENCH_TORCH")).glob("torch-*.whl"))
    return {"ms": 0, "mb": wheel.stat().st_size / 1e6}


def uv_sync(directory: str) -> dict[str, object]:
    """`uv pip sync` into an empty venv, everything in its cache: it links the files."""
    prefix = new_directory() / "venv"
    python = sets.new_venv(prefix)
    command = [_named("SGPU_BENCH_UV"), "pip", "sync", "--quiet", "--no-index", "--python", str(python)]
    sets.settle()
    return _timed([*command, "--find-links", _named("SGPU_BENCH_WHEELS"), _named("SGPU_BENCH_PINS")])


def new_directory() -> Path:
    """Return a new directory that outlives the round."""
    return Path(tempfile.mkdtemp(prefix="round-", dir=_named("SGPU_BENCH_ROUNDS")))


def _timed(command: list[str]) -> dict[str, object]:
    started_ns = now_ns()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"ms": (now_ns() - started_ns) / 1e6}


def _tree() -> Path:
    return Path(_named("SGPU_BENCH_TREE"))


def _named(variable: str) -> str:
    return os.environ[variable]
