"""Where the server keeps bytes: opened once, from what it was told.

<home>/server/logs/       output of ranks                       always here
<home>/server/incoming/   large bodies until they are whole     always here
blobs                     <home>/server/blobs, or <store>/blobs where the store is a bucket
environments              <home>/server/store, or the store
<home>/server/nearby/     copies of what nodes read of it       where the store is a bucket
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.store_urls import is_remote, open_store
from serverless_gpu.server.core.disk_space import KEPT_FREE_BYTES
from serverless_gpu.server.core.server_metrics import Measures
from serverless_gpu.server.storage import object_cache
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.environment_store import Environments
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.server.storage.metered_store import MeasuredStore
from serverless_gpu.server.storage.upload_spool import Spool

STORE_S = 40.0
"""How long one request waits for a bucket: less than whoever asks waits for the answer, so that they ask again."""


class DiskLimits(NamedTuple):
    """How much of each disk is left free, and what copies of a bucket's objects may take of it; 0 for none."""

    kept_free_bytes: int = KEPT_FREE_BYTES
    nearby_bytes_max: int = 20 << 30


_USUAL = DiskLimits()


class Storage(NamedTuple):
    """What the server keeps bytes with; the fields are those of `composition.Resources`."""

    logs: Logs
    blobs: Blobs
    environments: Environments
    spool: Spool


def open_storage(
    directory: Path,
    store: str,
    environ: Mapping[str, str],
    *,
    clock: Clock,
    room: DiskLimits = _USUAL,
    measures: Measures | None = None,
) -> Storage:
    """Return what the server keeps bytes with; nothing is looked at or made yet.

    Args:
        directory: of the server's files, which exists.
        store: url or path of the store of environments, or "" for the server's own directory.
        environ: where credentials of object stores come from.
        clock: the machine's.
        room: what may be taken of disks.
        measures: where calls to stores are counted.

    Raises:
        InvalidValue: the store's url is none.
        StoreUnavailable: it is an object store, and obstore is not installed.
    """

    def opened(place: str | Path, name: str) -> Store:
        return MeasuredStore(open_store(place, environ, bound_s=STORE_S), name=name, measures=measures or Measures())

    parts = f"{store.rstrip('/')}/blobs" if is_remote(store) else directory / "blobs"
    return Storage(
        logs=Logs(directory / "logs", kept_free_bytes=room.kept_free_bytes),
        blobs=Blobs(opened(parts, "blobs"), clock=clock, kept_free_bytes=room.kept_free_bytes),
        environments=Environments(
            opened(store or directory / "store", "environments"),
            clock=clock,
            kept_free_bytes=room.kept_free_bytes,
            nearby=(directory / object_cache.DIRECTORY, room.nearby_bytes_max)
            if room.nearby_bytes_max and is_remote(store)
            else None,
        ),
        spool=Spool(directory / "incoming", kept_free_bytes=room.kept_free_bytes),
    )
