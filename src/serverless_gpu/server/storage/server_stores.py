"""Opens all stores of the server, and finds orphaned files of runs without a database row.

    <home>/server/logs/       output of ranks                       always on this disk
    <home>/server/incoming/   large bodies until they are complete  always on this disk
    blobs                     <home>/server/blobs, or <store>/blobs if the store is a bucket
    environments              <home>/server/store, or the store
    <home>/server/nearby/     copies of objects that nodes read     if the store is a bucket

Orphaned files are evidence that the database or its disk has lost rows. The server creates the following files only
after the run's row is durable:

    server/logs/<run>/     output of ranks
    server/gangs/<gang>    gangs placed by the machine's own engine

If retention deletes a run, the server adds an entry to the audit log. If a run has files but neither a row nor an audit
entry, the database has lost the acknowledged run. A starting server logs lost runs before any loop deletes their files.
`sgpu server check` reports lost runs at any time, and retention does not delete their output.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.base import Store, Stored
from serverless_gpu.environment.stores.store_urls import is_remote, open_store
from serverless_gpu.errors import EnvironmentProblem, StorageError
from serverless_gpu.server.core.disk_space import KEPT_FREE_BYTES
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.records import runs
from serverless_gpu.server.storage import object_cache
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.server.storage.upload_spool import UploadSpool

STORE_S = 40.0
"""Seconds for which a request waits for a bucket. The client's timeout is longer."""
LOOK_MAX = 2_000
"""Maximum number of newest runs that a starting server looks up, because a database rollback loses the newest rows."""
_NAMED_MAX = 5
_PLACES = ("logs", "gangs")
_RUN = re.compile(r"([0-9a-hjkmnp-tv-z]{26})(:[0-9]+)?")
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""Function with the signature of `Database.read`."""


class DiskLimits(NamedTuple):
    """The minimum free space on each disk, and the maximum size of the object cache."""

    kept_free_bytes: int = KEPT_FREE_BYTES
    nearby_bytes_max: int = 20 << 30


_USUAL = DiskLimits()


class Storage(NamedTuple):
    """All stores of the server. The field names match the fields of `composition.ServerResources`."""

    logs: Logs
    blobs: Blobs
    environments: EnvironmentStore
    spool: UploadSpool


def open_storage(
    directory: Path,
    store: str,
    environ: Mapping[str, str],
    *,
    clock: Clock,
    room: DiskLimits = _USUAL,
    measures: ServerMetrics | None = None,
) -> Storage:
    """Return the server's stores without accessing or creating any files.

    Args:
        directory: existing directory of the server's files.
        store: url or path of the store of environments, or "" for the server's own directory.
        environ: environment variables with credentials of object stores.
        clock: the clock of this machine.
        room: limits of disk usage.
        measures: metrics that count calls to stores.
    """

    def opened(place: str | Path, name: str) -> Store:
        return MeteredStore(
            open_store(place, environ, bound_s=STORE_S), name=name, measures=measures or ServerMetrics()
        )

    parts = f"{store.rstrip('/')}/blobs" if is_remote(store) else directory / "blobs"
    return Storage(
        logs=Logs(directory / "logs", kept_free_bytes=room.kept_free_bytes),
        blobs=Blobs(opened(parts, "blobs"), clock=clock, kept_free_bytes=room.kept_free_bytes),
        environments=EnvironmentStore(
            opened(store or directory / "store", "environments"),
            clock=clock,
            kept_free_bytes=room.kept_free_bytes,
            nearby=(directory / object_cache.DIRECTORY, room.nearby_bytes_max)
            if room.nearby_bytes_max and is_remote(store)
            else None,
        ),
        spool=UploadSpool(directory / "incoming", kept_free_bytes=room.kept_free_bytes),
    )


class MeteredStore(Store):
    """A store wrapper that counts and times the calls."""

    def __init__(self, store: Store, *, name: str, measures: ServerMetrics) -> None:
        self._store, self._name, self._measures = store, name, measures
        self.url = store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, or a byte range of the object."""
        with self._counted("get"):
            return self._store.get(key, start, length)

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects."""
        with self._counted("put"):
            self._store.put(objects)
        self._measures.upload_bytes.labels(self._name).inc(sum(len(data) for data in objects.values()))

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the given keys whose objects exist."""
        with self._counted("present"):
            return self._store.present(keys)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all stored objects below a prefix.

        The metrics omit the duration of a listing, because the caller controls the pace.
        """
        return self._store.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        with self._counted("delete"):
            self._store.delete(keys)

    def free_bytes(self) -> int | None:
        """Return the free space of the store in bytes, or None if unknown."""
        return self._store.free_bytes()

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        try:
            with self._measures.store.labels(self._name, operation).time():
                yield
        except (EnvironmentProblem, StorageError, OSError):  # For the metrics, a missing object is a valid answer.
            self._measures.store_errors.labels(self._name, operation).inc()
            raise


def orphan_runs(directory: Path, read: Read, *, limit: int | None = None) -> list[str]:
    """Return the runs that have files on the disk but no row in the database."""
    names = (name for place in _PLACES for name in _names(directory / place))
    newest = sorted({match[1] for match in map(_RUN.fullmatch, names) if match}, reverse=True)[:limit]

    def known(connection: sa.Connection) -> set[str]:
        found = set(runs.endings(connection, newest))
        return found | runs.removed(connection, sorted(set(newest) - found))

    return sorted(set(newest) - read(known)) if newest else []


def orphan_sentence(run_ids: list[str], directory: Path) -> str:
    """Return a message for the operator about orphaned runs."""
    more = f" and {len(run_ids) - _NAMED_MAX} more" if len(run_ids) > _NAMED_MAX else ""
    return (
        f"{directory} has files of {len(run_ids)} runs that the database does not know: "
        f"{', '.join(run_ids[:_NAMED_MAX])}{more}. The database or its disk lost these runs. Their output is in "
        f"{directory / 'logs'}. Delete the output when you no longer need it"
    )


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(directory)
    return []
