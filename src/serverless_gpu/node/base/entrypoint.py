"""Text of programs that run in the user's interpreter: what starts a zygote, and `_air.py`.

Neither needs anything of ours installed there: both load the stdlib-only runtime in `inside/` from its directory, under
the name `_sgpu_inside`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Context, original
from serverless_gpu.node.inside import process_group
from serverless_gpu.node.inside import protocol as inside_protocol

INSIDE = Path(__file__).resolve().parents[1] / "inside"

_LOAD = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_sgpu_inside", {init!r}, submodule_search_locations=[{directory!r}])
runtime = sys.modules["_sgpu_inside"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
"""

_AIR = '''\
"""Run {run_id}, attempt {fence}: what every rank executes.

Reproduce it by hand, outside of serverless-gpu:

    torchrun --nproc-per-node={world_size} {path}

The call itself (function, arguments) is in call.pkl beside this file. This program puts the interpreter where the
caller was, loads the runtime that every rank uses (standard library only) and calls the function; each rank prints what
it returned.
{note}"""

import os
import sys

os.chdir({cwd!r})
os.umask({umask:#o})
sys.argv = {argv!r}
sys.path[:] = {sys_path}
{group}
# The runtime, loaded from its own directory so that nothing has to be installed.
{load}
from _sgpu_inside import reproduce  # noqa: E402

if __name__ == "__main__":
    sys.exit(reproduce.main({directory!r}, world_size={world_size}))
'''


_OF_A_SNAPSHOT = """
The run itself used a captured copy of the environment (receipt.json says which). This program uses packages and code as
they are on this machine now; `sgpu env diff ADDRESS` tells what has changed since.
"""

_PLAIN = RunSpec()


def zygote_program(channel_fd: int, preload: Sequence[str], inside: Path = INSIDE) -> str:
    """Return the program for `python -c` that becomes a zygote; `inside` is the directory of the runtime."""
    call = f"zygote.main({channel_fd}, {inside_protocol.VERSION}, {list(preload)!r})"
    return _load(inside) + "from _sgpu_inside import zygote\n" + call + "\n"


def launcher_program(plan_fd: int, channel_fd: int, inside: Path = INSIDE) -> str:
    """Return the program that enters what contains a zygote, and becomes it (`inside/launcher.py`)."""
    return _load(inside) + f"from _sgpu_inside import launcher\nlauncher.main({plan_fd}, {channel_fd})\n"


def air_program(
    *, directory: Path, run_id: str, fence: int, world_size: int, context: Context, spec: RunSpec = _PLAIN
) -> str:
    """Return `_air.py`, the readable program with which `torchrun` reproduces a run."""
    paths = "[\n" + "".join(f"    {original(path)!r},\n" for path in context.sys_path) + "]"
    # Escaped for a docstring: any path may be a home.
    quoted = shlex.quote(str(directory / "_air.py")).replace("\\", "\\\\").replace('"', '\\"')
    return _AIR.format(
        run_id=run_id,
        fence=fence,
        world_size=world_size,
        path=quoted.encode("utf-8", "backslashreplace").decode(),
        cwd=original(context.cwd),
        umask=context.umask,
        argv=[original(argument) for argument in context.argv],
        sys_path=paths,
        load=_load(INSIDE),
        group=f"os.environ[{process_group.VARIABLE!r}] = {spec.init!r}\n" if spec.init else "",
        note=_OF_A_SNAPSHOT if spec.environment == "snapshot" else "",
        directory=str(directory),
    )


def _load(inside: Path) -> str:
    return _LOAD.format(init=str(inside / "__init__.py"), directory=str(inside))
