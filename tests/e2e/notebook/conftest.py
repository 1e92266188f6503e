"""One home and one kernel for all notebook tests that leave them as they were; a kernel of its own for the others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from serverless_gpu.testing import stop_agent
from tests.support.local.observe import cancel_all, nothing_of_a_run, wait_for
from tests.support.notebook.kernel import Kernel, started

FAKES = "H100:4"

DEFINE = """
import os, time
from serverless_gpu import attach, distributed

@distributed(gpus=2, gpu_type="H100")
def work(n, rank, world_size):
    print(f"rank {rank} works")
    return n * rank

@distributed(gpus=2, gpu_type="H100")
def hold(path, rank):
    print("holding")
    open(os.path.join(path, f"started-{rank}"), "w").close()
    while not os.path.exists(os.path.join(path, "go")):
        time.sleep(0.01)
    return "held"
"""


@pytest.fixture(scope="session")
def notebook_home() -> Iterator[Path]:
    """Yield the home of the notebook tests; its agent ends with them."""
    directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    yield directory
    stop_agent(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def at_home(notebook_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the home, known to this process too, and require that no run outlives the test."""
    for name in list(os.environ):
        if name.startswith(("SERVERLESS_GPU_", "SGPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(notebook_home))
    yield notebook_home
    try:
        wait_for(lambda: nothing_of_a_run(notebook_home), "every run of the test has ended")
    finally:
        cancel_all(notebook_home)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory the notebook lies in."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="session")
def session_kernel(notebook_home: Path, folder: Path) -> Iterator[Kernel]:
    """Yield the kernel that most tests share, functions defined."""
    with started(folder, SERVERLESS_GPU_HOME=str(notebook_home), SERVERLESS_GPU_FAKE=FAKES) as kernel:
        assert kernel.run(DEFINE).error == ("", "")
        yield kernel


@pytest.fixture
def kernel(session_kernel: Kernel, at_home: Path) -> Kernel:
    """Return the shared kernel."""
    return session_kernel


@pytest.fixture
def new_kernel(at_home: Path, tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    """Yield a function that starts a kernel of the test's own, functions defined."""
    with ExitStack() as stack:

        def start() -> Kernel:
            environ = {"SERVERLESS_GPU_HOME": str(at_home), "SERVERLESS_GPU_FAKE": FAKES}
            kernel = stack.enter_context(started(tmp_path, **environ))
            assert kernel.run(DEFINE).error == ("", "")
            return kernel

        yield start
