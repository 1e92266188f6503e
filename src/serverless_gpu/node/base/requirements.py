"""Requirements of an agent or an uplink, checked once before it starts."""

from __future__ import annotations

from serverless_gpu.node.base.filesystems import require_flock
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.kernel import require_pidfd


def require_for_runs(home: Home) -> None:
    """Refuse a machine or a home that cannot control runs; raises HardwareError or StorageError."""
    require_pidfd()
    for directory in (home.root, home.sockets()):
        require_flock(directory)
