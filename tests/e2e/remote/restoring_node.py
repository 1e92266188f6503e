"""A node that restores an environment from a server, in a process of its own: `restore` as the node's agent calls it.

python -m tests.e2e.remote.restoring_node URL TOKEN SNAPSHOT HOME      prints the bytes that it fetched
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.server_store import ServedStore


def start(url: str, token: str, snapshot: str, home: Path) -> subprocess.Popen[str]:
    """Start such a process."""
    command = [sys.executable, "-m", "tests.e2e.remote.restoring_node", url, token, snapshot, str(home)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    """Wait for its end; return the bytes that it fetched."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return int(out)


def main(url: str, token: str, snapshot: str, home: str) -> None:
    """Restore it as a tree of links."""
    store = ServedStore(f"sgpu+{url}", token)
    print(
        restore(
            snapshot, StoreBlobs(store), UnitCache(Path(home)), way=RestoreMethod(mode="links", why="asked")
        ).fetched_bytes
    )
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
