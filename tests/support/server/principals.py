"""Helpers of the tests of principals that other tests use as well."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from serverless_gpu.server.composition import Services, guarded
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.auth_middleware import Authenticator
from serverless_gpu.server.identity.bootstrap import first_tokens
from serverless_gpu.server.records import audit
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import API

Answer = tuple[int, Any]


class Api:
    """The server's API on one database."""

    def __init__(self, services: Services, database: Database, clock: FakeClock) -> None:
        self.clock = clock
        self.database = database
        self.alice = ""
        admission = Authenticator(database, clock=clock, keys=services.keys)
        app = guarded(
            services.by_type,
            hub=services.hub,
            clock=services.clock,
            measures=services.measures,
            hosts=["server.test"],
            authenticate=admission.authenticate,
            reach=admission.reach,
        )
        self.client = TestClient(app, base_url="http://server.test")
        made = first_tokens(database, services.settings.directory, login="root", now_ns=clock.wall_ns())
        self.admin, self.node = made.token, made.node_token

    def ask(self, token: str, method: str, path: str, body: object = None) -> Answer:
        """Return status and body of an answer."""
        headers = {"Authorization": f"Bearer {token}"}
        answer = self.client.request(method, API + path, headers=headers, json=body)
        return answer.status_code, answer.json()

    def do(self, token: str, method: str, path: str, body: object = None) -> Any:
        """Return the body of an answer that is a yes."""
        status, said = self.ask(token, method, path, body)
        assert status == 200, said
        return said

    def user(self, name: str, role: str = "member", **more: object) -> str:
        """Make somebody; return their token."""
        secret: str = self.do(self.admin, "POST", "/users", {"name": name, "role": role, **more})["secret"]
        return secret

    def audited(self) -> list[tuple[str, str, str]]:
        """Return who did what to what."""
        return [(one.principal, one.action, one.subject) for one in self.database.read(audit.entries)]
