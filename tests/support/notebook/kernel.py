"""A real Jupyter kernel that a test drives cell by cell, as a front end would.

One kernel process, nbclient in front of it on a loop of its own. What a cell showed is looked at as a front end shows
it: stream text joined, a display that was updated in its last state.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

LIMIT_S = 100
LOOK_S = 0.02
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SPEC = {
    "display_name": "test",
    "language": "python",
}


class Shown:
    """What one cell showed, while it runs and after."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def text(self, stream: str | None = None) -> str:
        """Return what was written to stdout, to stderr, or to both."""
        found = [output for output in self._outputs("stream") if stream in (None, output["name"])]
        return "".join(output["text"] for output in found)

    def displayed(self, kind: str = "text/plain") -> list[str]:
        """Return what `display` showed, the last state of each."""
        return [output["data"].get(kind, "") for output in self._outputs("display_data")]

    @property
    def result(self) -> str:
        """Return the value the cell ends with, as text; "" when there is none."""
        return "".join(output["data"]["text/plain"] for output in self._outputs("execute_result"))

    @property
    def error(self) -> tuple[str, str]:
        """Return the name and the text of the exception that ended the cell."""
        return next(((output["ename"], output["evalue"]) for output in self._outputs("error")), ("", ""))

    @property
    def number(self) -> int:
        """Return the number in front of the cell."""
        return int(self.cell["execution_count"])

    @property
    def traceback(self) -> str:
        """Return the traceback as a person reads it."""
        lines = [line for output in self._outputs("error") for line in output["traceback"]]
        return _COLOUR.sub("", "\n".join(lines))

    def _outputs(self, kind: str) -> list[Any]:
        return [output for output in self.cell.outputs if output["output_type"] == kind]


class Kernel:
    """A kernel and its notebook.

    Args:
        runner: the loop that nbclient lives on.
        client: set up, its kernel started.
    """

    def __init__(self, runner: asyncio.Runner, client: NotebookClient) -> None:
        self._runner = runner
        self._client = client
        self._manager: Any = client.km

    @property
    def pid(self) -> int:
        """Return the kernel's process."""
        return int(self._manager.provisioner.pid)

    def run(
        self,
        source: str,
        *,
        interrupt_when: Callable[[Shown], object] | None = None,
        look: Callable[[Shown], None] | None = None,
    ) -> Shown:
        """Run a cell to its end, and return what it showed; an exception is shown, not raised.

        Args:
            source: its text.
            interrupt_when: press "interrupt" as soon as this is true.
            look: called again and again while the cell runs.
        """
        return self._runner.run(self._run(source, interrupt_when, look))

    def interrupt(self) -> None:
        """Press "interrupt"."""
        self._runner.run(self._manager.interrupt_kernel())

    def shut_down(self) -> None:
        """Ask the kernel to end, as closing a notebook does."""
        self._runner.run(self._manager.shutdown_kernel())

    def die(self, source: str, *, when: Callable[[], object]) -> None:
        """Run a cell, and kill the kernel when it has come so far."""
        self._runner.run(self._die(source, when))

    async def _run(
        self,
        source: str,
        interrupt_when: Callable[[Shown], object] | None,
        look: Callable[[Shown], None] | None,
    ) -> Shown:
        shown, task = self._start(source)
        while not task.done():
            if look is not None:
                look(shown)
            if interrupt_when is not None and interrupt_when(shown):
                interrupt_when = None
                await self._manager.interrupt_kernel()
            await asyncio.wait([task], timeout=LOOK_S)
        assert interrupt_when is None, f"the cell ended before it could be interrupted: {shown.cell.outputs}"
        with suppress(CellExecutionError):
            task.result()
        return shown

    async def _die(self, source: str, when: Callable[[], object]) -> None:
        _, task = self._start(source)
        while not when():
            assert not task.done(), "the cell ended before its kernel was killed"
            await asyncio.sleep(LOOK_S)
        os.kill(self.pid, signal.SIGKILL)
        with suppress(DeadKernelError):
            await task

    def _start(self, source: str) -> tuple[Shown, asyncio.Task[object]]:
        cell = nbformat.v4.new_code_cell(source)
        cells = self._client.nb.cells
        cells.append(cell)
        return Shown(cell), asyncio.ensure_future(self._client.async_execute_cell(cell, len(cells) - 1))


@contextmanager
def started(directory: Path, python: str = sys.executable, **environ: str) -> Iterator[Kernel]:
    """Yield a kernel whose notebook lies in a directory.

    Args:
        directory: the kernel's working directory.
        python: its interpreter, which has ipykernel.
        environ: variables for the kernel beside this process's own.
    """
    ours = ("SERVERLESS_GPU_", "SGPU_", "PYTEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with tempfile.TemporaryDirectory(prefix="sgk-", dir="/tmp") as own:
        spec = Path(own) / "kernels" / "under_test"
        spec.mkdir(parents=True)
        argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({**_SPEC, "argv": argv}), encoding="utf-8")
        jupyter = {"JUPYTER_PATH": own, "JUPYTER_RUNTIME_DIR": own, "IPYTHONDIR": f"{own}/ipython"}
        before = {name: os.environ.get(name) for name in jupyter}
        os.environ.update(jupyter)
        try:
            with asyncio.Runner() as runner:
                client = NotebookClient(
                    nbformat.v4.new_notebook(),
                    timeout=LIMIT_S,
                    kernel_name="under_test",
                    resources={"metadata": {"path": str(directory)}},
                )
                stack = AsyncExitStack()
                runner.run(
                    stack.enter_async_context(client.async_setup_kernel(env={**inherited, **jupyter, **environ}))
                )
                try:
                    yield Kernel(runner, client)
                finally:
                    runner.run(stack.aclose())
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
