"""What is secret stands in no file of the server: unique values everywhere, every kind of error, then a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.runs.submission import SubmissionService
from serverless_gpu.wire.access import PrincipalRequest, TokenMade, TokenRequest
from serverless_gpu.wire.base import API
from tests.support.golden import golden
from tests.support.server.runs_api import request
from tests.support.server.served import Served, served
from tests.support.server.walk import path_of

VALUE = "canary-of-a-callers-variable"
ARGUMENT = "canary-in-a-path-or-query"
PASSWORD = "canary-password-of-the-database"


def everything(home: Path) -> dict[str, bytes]:
    """Return what is in the files of the server, but those that hold tokens and the key by purpose."""
    kept = {"token", "node.token", "key"}
    paths = (path for path in (home / "server").rglob("*") if path.is_file() and path.name not in kept)
    return {str(path.relative_to(home)): path.read_bytes() for path in paths}


def submitted(client: httpx2.Client, **changes: Any) -> httpx2.Response:
    body = msgspec.json.decode(msgspec.json.encode(request()))
    body["context"] = {"variables": {"PASSWORD": VALUE}}
    return client.post("/runs", json={**body, **changes})


def force_errors(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Have a server refuse and fail in many ways, each with secrets in the request; return the statuses."""
    statuses = {submitted(client).status_code, submitted(client, id="no").status_code}
    statuses.add(submitted(client, unknown=VALUE).status_code)
    statuses.add(submitted(client, spec=VALUE).status_code)
    statuses.add(client.post("/runs", content=VALUE.encode()).status_code)
    for route in api_routes():
        path = path_of(route).removeprefix(API)
        statuses.add(client.request("PATCH", path, params={"q": ARGUMENT}).status_code)
        statuses.add(client.request(route.method, f"{path}/{ARGUMENT}").status_code)
    for token in (f"sgpu_{new_run_id()}_{'b' * 43}", f"sgpa_{new_run_id()}_1_{'a' * 43}", "Bearer"):
        statuses.add(client.get("/runs", headers={"Authorization": f"Bearer {token}"}).status_code)

    def fail(service: Any, who: Any, said: Any) -> Any:
        raise RuntimeError(f"a bug, beside {client.headers['Authorization']} and postgresql://sgpu:{PASSWORD}@db/sgpu")

    with monkeypatch.context() as patched:
        patched.setattr(SubmissionService, "submit", fail)
        answer = submitted(client)
    statuses.add(answer.status_code)
    if answer.status_code == 500:
        assert f"request {answer.headers['SGPU-Request']}" in answer.text
    return statuses


def test_no_token_and_no_variable_of_a_caller_is_in_any_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [VALUE, ARGUMENT, PASSWORD]
    with served(home) as server:
        secrets += [server.token, server.node_token, *tokens(server)]
        statuses: set[int] = set()
        for secret in secrets[3:]:
            with httpx2.Client(
                base_url=server.url + API, headers={"Authorization": f"Bearer {secret}"}, timeout=60
            ) as client:
                statuses |= force_errors(client, monkeypatch)
    assert statuses >= {200, 400, 401, 403, 404, 405, 500}
    files = everything(home)
    assert {"server/server.log", "server/server.db"} <= set(files)
    log = files["server/server.log"].decode()
    assert golden("server.no_secrets.bug-beside-bearer") in log and '"route":"/runs"' in log and '"status":500' in log
    for secret in secrets:
        bare = secret.split("_", 2)[-1]  # the part of a token that nobody else knows
        found = [name for name, data in files.items() if secret.encode() in data or bare.encode() in data]
        assert found == [], (secret, found)


def tokens(server: Served) -> list[str]:
    """Return tokens of several kinds."""
    admin = server.connection()
    member = admin.ask("POST", "/users", PrincipalRequest(name="alice", role="member"), answer=TokenMade)
    scoped = admin.ask("POST", "/tokens", TokenRequest(scopes=("read",)), answer=TokenMade)
    return [member.secret, scoped.secret]
