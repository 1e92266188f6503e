"""Defines bodies about the server's health, version and drain, and the settings for administrators.

The routes `/health` and `/version` are public:

    GET /health    → Health     503 with the same body while a check fails
    GET /version   → Version
    GET /metrics   → the text format of Prometheus
    GET /drain     → DrainView        for callers who may see nodes
    PUT /drain       DrainRequest → DrainView
    GET /server    → ServerReport     for administrators: settings, disk, database and backups
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class HealthCheck(Answer, frozen=True, kw_only=True):
    """The health of one component of the server.

    Attributes:
        name: name of the component: database, store, environments, disk, mlflow, claim, server, or a loop (scheduler,
            reconciler, …).
        problem: the component's failure as a sentence without names of users, or "".
        ms: duration of the health check up to now, in milliseconds.
    """

    name: str
    ok: bool
    problem: str = ""
    ms: float = 0.0


class Health(Answer, frozen=True, kw_only=True):
    """The health of the server, with a list of problems and the result of each health check."""

    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[HealthCheck, ...] = ()


class Version(Answer, frozen=True, kw_only=True):
    """Version and protocol of the server.

    Attributes:
        protocol: protocol version of the server. `protocols` contains all versions that the server accepts. A server
            with protocol 1 sends no `protocols`.
        machine: `ambient.machine()` of the server, by which a client detects that it runs on the same machine.
        mlflow: address of the server's MLflow for clients and nodes, or "". The server's MLflow tracks runs whose
            caller configured no MLflow.
        joinable: True if other machines can join the server. A run may then start on a machine without the caller's
            files.
        sandboxes: True if runs of a pool start in sandboxes, which do not show the caller's files.
    """

    version: str
    protocol: int
    machine: str
    mlflow: str = ""
    joinable: bool = False
    sandboxes: bool = False
    protocols: tuple[int, ...] = ()


class DrainRequest(Request, frozen=True, kw_only=True):
    """Start or end the drain of the server, with a reason for users who wait."""

    on: bool
    note: str = ""


class DrainView(Answer, frozen=True, kw_only=True):
    """The state of the server's drain, with its principal, start time and reason.

    Attributes:
        going: number of running runs.
        waiting: number of waiting runs.
    """

    on: bool
    by: str = ""
    since_ns: int = 0
    note: str = ""
    going: int = 0
    waiting: int = 0


class SettingView(Answer, frozen=True, kw_only=True):
    """A setting in force.

    Attributes:
        value: value as text, without passwords in addresses.
        origin: source of the value: an option, an environment variable, a file, or "default".
    """

    name: str
    value: str
    origin: str


class BackupView(Answer, frozen=True, kw_only=True):
    """The last backup of the server.

    Attributes:
        path: directory of the backup on the machine that made the backup.
        made_ns: time of the backup, in nanoseconds since 1970.
        files: number of files. `bytes` is their total size.
        has_database: False if the backup does not contain the database, because PostgreSQL needs its own dump.
        verified_ns: time of the last verification, or None if no verification is known.
        problem: reason why the verification failed, or "".
    """

    path: str
    made_ns: int
    files: int
    bytes: int
    has_database: bool
    verified_ns: int | None = None
    problem: str = ""


class ServerReport(Answer, frozen=True, kw_only=True):
    """State of the server for administrators.

    Attributes:
        started_ns: start of the server process, in nanoseconds since 1970.
        directory: directory of the server's files.
        disk_free: free bytes on the disk of the directory, or None if unknown. `disk_total` is the disk's size.
        database: kind of the database: "sqlite" or "postgresql".
        database_bytes: size of the database, or None if unknown.
        store: place of environments, without passwords. `store_free` is its free space in bytes, or None if unknown.
        backup: last backup, or None if the server has no record of a backup.
        settings: settings in force.
    """

    started_ns: int
    directory: str
    disk_free: int | None
    disk_total: int | None
    database: str
    database_bytes: int | None
    store: str
    store_free: int | None
    backup: BackupView | None
    settings: tuple[SettingView, ...]
