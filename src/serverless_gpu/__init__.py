"""A function runtime for GPUs that a team owns.

from serverless_gpu import distributed

@distributed(gpus=2, gpu_type="CPU") def hello(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"

hello.distributed()    # ['rank 0 of 2', 'rank 1 of 2']
"""

from __future__ import annotations

import importlib
import os

from serverless_gpu.version import __version__ as __version__

if not os.path.isdir(__path__[0]):
    raise ImportError(
        f"serverless_gpu cannot run from an archive ({__path__[0]}): ranks and the agent are separate "
        "interpreters that load package files. Install serverless_gpu with `pip install serverless-gpu`, "
        "or unpack the zipapp, shiv or pex archive"
    )

# Type checkers treat the name `TYPE_CHECKING` as true. Importing
# `TYPE_CHECKING` from `typing` would dominate the package's import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from serverless_gpu.client.decorator import DistributedFunction as DistributedFunction
    from serverless_gpu.client.decorator import distributed as distributed
    from serverless_gpu.client.runs.attachment import attach as attach
    from serverless_gpu.client.runs.run import Run as Run
    from serverless_gpu.client.runs.run_list import RunList as RunList
    from serverless_gpu.client.runs.run_list import as_completed as as_completed
    from serverless_gpu.client.session import Session as Session
    from serverless_gpu.client.session import session as session
    from serverless_gpu.compute import GPUType as GPUType
    from serverless_gpu.model.receipt import Receipt as Receipt

__all__ = ["DistributedFunction", "GPUType", "Receipt", "Run", "RunList", "Session", "as_completed", "attach"]
__all__ += ["distributed", "errors", "session"]

# `__getattr__` imports each public name on first use, so that `import serverless_gpu` takes a few milliseconds.
_ORIGINS = {
    "DistributedFunction": "serverless_gpu.client.decorator",
    "distributed": "serverless_gpu.client.decorator",
    "Run": "serverless_gpu.client.runs.run",
    "RunList": "serverless_gpu.client.runs.run_list",
    "as_completed": "serverless_gpu.client.runs.run_list",
    "attach": "serverless_gpu.client.runs.attachment",
    "Session": "serverless_gpu.client.session",
    "session": "serverless_gpu.client.session",
    "GPUType": "serverless_gpu.compute",
    "Receipt": "serverless_gpu.model.receipt",
    # IPython calls `load_ipython_extension` for `%load_ext serverless_gpu`.
    "load_ipython_extension": "serverless_gpu.client.notebook",
}
_MODULES = ("compute", "errors", "launcher", "ray", "runtime", "testing")


def __getattr__(name: str) -> object:
    load = importlib.import_module("serverless_gpu.lazy_import").load
    if name in _ORIGINS:
        return globals().setdefault(name, getattr(load(_ORIGINS[name]), name))
    if name in _MODULES:
        return load(f"serverless_gpu.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
