"""Records what an attempt was asked for, so that a run is readable, and repeatable by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.placement import world_size
from serverless_gpu.model.spec import Function, RunSpec
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.entrypoint import air_program
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.base.protocol import Kind


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `spec.json` in an attempt's directory: the run as it was asked for."""

    run_id: str
    fence: int
    world_size: int  # ranks on all nodes; 0 for a session
    spec: RunSpec
    version: str
    kind: Kind = "function"
    session: str = ""  # whose devices it uses, or ""
    gpu_type: str = ""  # "" where only a server knows
    tariff: Tariff | None = None  # None where only a server knows


def write_submission(message: protocol.Launch, version: str) -> None:
    """Write `spec.json`, `environment.json` and, of a function, `_air.py`; values of variables stay out.

    Raises StorageError when the disk is full, or the directory is gone.
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
    """Return how many ranks a launch has, on all of its nodes; a session has none."""
    nodes = len(message.all_crews)
    ranks = nodes if message.spec.per_node else world_size(message.all_crews)
    return ranks if message.idle_timeout_s is None else 0
