"""Records an attempt's specification, so that users can inspect and reproduce the run."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.placement import world_size
from serverless_gpu.model.spec import Function, RunSpec
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.base.protocol import Context, Kind, original
from serverless_gpu.node.inside import process_group
from serverless_gpu.node.processes.spawn import load_inside


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `spec.json` in an attempt directory: the run as the caller submitted it."""

    run_id: str
    fence: int
    world_size: int  # Number of ranks on all nodes; 0 for a session.
    spec: RunSpec
    version: str
    kind: Kind = "function"
    session: str = ""  # Name of the session whose devices the run uses, or "".
    gpu_type: str = ""  # GPU type; "" if only the server knows the type.
    tariff: Tariff | None = None  # Price terms; None if only the server knows the tariff.


def write_submission(message: protocol.Launch, version: str) -> None:
    """Write `spec.json`, `environment.json` and, for a function, `_air.py`, without variables' values.

    Raises StorageError if the disk is full or the directory is missing.
    """
    directory, context = Path(message.directory), message.context
    submission = Submission(
        run_id=message.run_id,
        fence=message.fence,
        world_size=ranks_of(message),
        spec=message.spec,
        version=version,
        kind="function" if message.idle_timeout_s is None else "session",
        session=message.session,
        gpu_type=message.candidates[0].type,
        tariff=message.tariff,
    )
    environment = {"python": context.python, "flags": context.flags, "variables": sorted(context.environ)}
    try:
        (directory / "spec.json").write_bytes(msgspec.json.encode(submission))
        (directory / "environment.json").write_bytes(msgspec.json.encode(environment))
        if message.idle_timeout_s is None and isinstance(message.spec.payload, Function):
            air = air_program(
                directory=directory,
                run_id=message.run_id,
                fence=message.fence,
                world_size=ranks_of(message),
                context=context,
                spec=message.spec,
            )
            (directory / "_air.py").write_text(air, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise storage_error(error, directory) from None


def ranks_of(message: protocol.Launch) -> int:
    """Return the number of ranks of a launch on all of its nodes; 0 for a session."""
    nodes = len(message.all_crews)
    ranks = nodes if message.spec.per_node else world_size(message.all_crews)
    return ranks if message.idle_timeout_s is None else 0


_AIR = '''\
"""Run {run_id}, attempt {fence}: the program of every rank.

Reproduce the run by hand, without serverless-gpu:

    torchrun --nproc-per-node={world_size} {path}

The call itself (function, arguments) is in call.pkl beside this file. This program restores the caller's
working directory and paths, loads the runtime of the ranks (standard library only) and calls the function. Each rank
prints its return value.
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
The run itself used a captured copy of the environment (see receipt.json). This program uses the packages and code that
are on this machine now; `sgpu env diff ADDRESS` shows what has changed since.
"""

_PLAIN = RunSpec()


def air_program(
    *, directory: Path, run_id: str, fence: int, world_size: int, context: Context, spec: RunSpec = _PLAIN
) -> str:
    """Return `_air.py`, the readable program with which `torchrun` reproduces a run."""
    paths = "[\n" + "".join(f"    {original(path)!r},\n" for path in context.sys_path) + "]"
    # Quotes and backslashes in the path need escapes, because the path appears in a docstring.
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
        load=load_inside(),
        group=f"os.environ[{process_group.PROCESS_GROUP_VARIABLE!r}] = {spec.init!r}\n" if spec.init else "",
        note=_OF_A_SNAPSHOT if spec.environment == "snapshot" else "",
        directory=str(directory),
    )
