"""What has to be there before an agent or an uplink is started: asked once, by whoever starts it, before it starts."""

from __future__ import annotations

from serverless_gpu.node.base.filesystems import require_flock
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.kernel import require_pidfd


def require_for_runs(home: Home) -> None:
    """Refuse a machine or a home on which no run could be looked after.

    Args:
        home: the home directory.

    Raises:
        HardwareError: processes cannot be followed here.
        StorageError: the file system of the home, or of the sockets' directory, grants no locks or cannot be written.
    """
    require_pidfd()
    for directory in (home.root, home.sockets()):
        require_flock(directory)
