"""A served server whose PostgreSQL goes away and comes back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.wire.access import PrincipalList, PrincipalRequest, PrincipalView, TokenMade
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.server_status import Health
from tests.support.server.postgres import Cluster
from tests.support.server.served import served

PATIENCE_S = 60.0


def whoami(connection: Connection) -> PrincipalView:
    return connection.ask("GET", "/whoami", answer=PrincipalView)


def test_F35_a_patient_client_gets_its_answer_and_two_lines_when_the_database_restarts(
    tmp_path: Path, postgres: Cluster
) -> None:
    url = postgres.url(postgres.new_database())
    lines: list[str] = []
    with served(tmp_path, database=url) as server:
        patient = server.connection(patience_s=PATIENCE_S, announce=lines.append)
        impatient = server.connection()
        for connection in (patient, impatient):
            assert whoami(connection).role == "admin"
        postgres.stop()
        with pytest.raises(ServerUnavailable):
            whoami(impatient)
        with pytest.raises(ServerUnavailable):
            impatient.ask("POST", "/users", PrincipalRequest(name="eve"), answer=TokenMade)
        with pytest.raises(ServerUnavailable):
            impatient.ask("GET", "/health", answer=Health)
        found: list[PrincipalView] = []
        asking = threading.Thread(target=lambda: found.append(whoami(patient)))
        asking.start()
        postgres.start()
        asking.join(PATIENCE_S)
        assert [one.role for one in found] == ["admin"]
        assert len(lines) in (0, 2)  # none when it was back before the first try
        assert patient.ask("GET", "/health", answer=Health).ok  # once the database is this server's again
        users = impatient.ask("GET", "/users", answer=PrincipalList)
        assert "eve" not in {one.name for one in users.principals}
        assert impatient.ask("POST", "/users", PrincipalRequest(name="eve"), answer=TokenMade).secret
    log = (tmp_path / "server" / "server.log").read_text()
    assert "Traceback" not in log, log


def test_F35_a_server_does_not_start_without_its_database_and_says_so(tmp_path: Path, postgres: Cluster) -> None:
    url = postgres.url("nowhere")
    with pytest.raises(ServerUnavailable, match="nowhere"), served(tmp_path, database=url):
        pass
