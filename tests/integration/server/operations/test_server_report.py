"""What an administrator reads about the server: settings with their origin, disk, database and the last backup."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.operations.backup import back_up, verify_and_record
from serverless_gpu.wire.server_status import ServerReport
from tests.support.server.served import served
from tests.support.web.browser import make_user


def test_an_administrator_reads_settings_and_backups_and_nobody_else(tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "backups"
    webhook = "https://bot:hunter2@hooks.example.com/x"
    with served(home, webhook=webhook) as server:

        def report() -> ServerReport:
            return server.connection().ask("GET", "/server", answer=ServerReport)

        settings = {one.name: (one.value, one.origin) for one in report().settings}
        assert settings["webhook"] == ("https://bot:***@hooks.example.com/x", "--webhook")
        assert settings["currency"] == ("USD", "default")
        assert report().backup is None
        assert (report().database, report().directory) == ("sqlite", str(home / "server"))
        assert (report().database_bytes or 0) > 100_000
        with pytest.raises(NotAllowed):
            server.connection(make_user(server, "oscar", role="operator")).ask("GET", "/server", answer=ServerReport)

        made = back_up(read_settings(home), place, clock=SystemClock())
        backup = report().backup
        assert backup is not None
        assert (backup.path, backup.files, backup.has_database) == (str(made.path), len(made.manifest.files), True)
        assert (backup.verified_ns, backup.problem) == (None, "")
        verify_and_record(made.path, clock=SystemClock())
        backup = report().backup
        assert backup is not None
        assert backup.verified_ns is not None

        (made.path / "server" / "key").write_bytes(b"altered")
        with pytest.raises(InvalidValue):
            verify_and_record(made.path, clock=SystemClock())
        backup = report().backup
        assert backup is not None
        assert "key" in backup.problem
        # The record of a backup is no part of the next backup, and a verified backup stays a base for links.
        again = back_up(read_settings(home), place / "other", clock=SystemClock())
        assert not any("last_backup" in name for name in again.manifest.files)
