"""Reports settings, disk, database and backups of the server to administrators."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.server.core.disk_space import free_bytes
from serverless_gpu.server.core.settings import Settings, without_passwords
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading
from serverless_gpu.server.operations.backup import last_backup
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.server_status import BackupView, ServerReport, SettingView

_LOGS = ("", "-wal")
"""Suffixes of the files of an SQLite database."""


class ServerReports:
    """Makes reports about the server."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, environments: EnvironmentStore
    ) -> None:
        self._settings = settings
        self._database = database
        self._environments = environments
        self._started_ns = clock.wall_ns()

    def report(self) -> ServerReport:
        """Return the state of the server."""
        settings = self._settings
        kind = sa.make_url(settings.database).get_backend_name()
        return ServerReport(
            started_ns=self._started_ns,
            directory=str(settings.directory),
            disk_free=free_bytes(settings.directory),
            disk_total=_total_bytes(settings.directory),
            database=kind,
            database_bytes=self._sqlite_bytes() if kind == "sqlite" else self._database.read(_postgresql_bytes),
            store=without_passwords(settings.store_place),
            store_free=self._environments.free_bytes(),
            backup=_backup(settings),
            settings=tuple(
                SettingView(name=each.name, value=each.text, origin=each.origin) for each in settings.effective
            ),
        )

    def _sqlite_bytes(self) -> int | None:
        place = sa.make_url(self._settings.database).database
        sizes = [_size(f"{place}{suffix}") for suffix in _LOGS] if place else []
        return sum(sizes) if any(sizes) else None


def _backup(settings: Settings) -> BackupView | None:
    found = last_backup(settings)
    if found is None:
        return None
    record, verification = found
    return BackupView(
        path=record.path,
        made_ns=record.made_ns,
        files=record.files,
        bytes=record.bytes,
        has_database=record.has_database,
        verified_ns=None if verification is None else verification.at_ns,
        problem="" if verification is None else verification.problem,
    )


def _postgresql_bytes(connection: sa.Connection) -> int | None:
    size: int | None = connection.scalar(sa.text("SELECT pg_database_size(current_database())"))
    return size


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _total_bytes(place: Path) -> int | None:
    try:
        disk = os.statvfs(place)
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize or None


routes = Routes("server")


@routes.get("/server", needs=reading("settings"))
def show_server(call: Call, server_reports: ServerReports) -> ServerReport:
    """Return the settings in force, the disk, the database and the last backup."""
    return server_reports.report()
