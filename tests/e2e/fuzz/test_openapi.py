"""Every route as `docs/openapi.json` describes it, called by schemathesis with what fits and what does not.

    a real server, a run, a node, people ── the document ─▶ schemathesis ─▶ requests as each role
                                                                └─▶ no 5xx, and answers of the shape that is promised

`FUZZ_EXAMPLES` says how many requests each route gets from each caller (`make fuzz`: 200). What is described cannot
say everything: a name must be free, a digest has to be one of bytes that exist. So refusing what fits is no failure
here; accepting what does not fit is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants.self_check import check
from serverless_gpu.version import __version__
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade
from serverless_gpu.wire.agents import AgentHello, AgentWelcome
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.runs import RunRequest, RunView, Target
from tests.support.paths import REPOSITORY
from tests.support.server.served import Served, served

pytestmark = pytest.mark.slow
DOCUMENT = REPOSITORY / "docs" / "openapi.json"
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "1")
BYTES_MAX = 2_000

CONFIGURATION = """
seed = 1
request-timeout = 20.0
max-stream-events = 3
warnings = false
continue-on-failure = true

[phases.examples]
enabled = false
[phases.stateful]
enabled = false

[generation]
database = "none"
codec = "utf-8"

[checks.positive_data_acceptance]
enabled = false
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 411, 413, 415, 422, 431]
"""


class World:
    """A server with something in it.

    Attributes:
        tokens: by role.
        known: what path parameters may be, so that routes are reached beyond "there is no such thing".
    """

    def __init__(self, server: Served) -> None:
        admin = server.connection()
        admin.ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
        made = admin.ask("POST", "/users", PrincipalRequest(name="ada", teams=("search",)), answer=TokenMade)
        self.tokens = {"admin": server.token, "member": made.secret, "agent": server.node_token, "nobody": ""}
        ada = server.connection(made.secret)
        asked = RunRequest(
            id=new_run_id(),
            spec=RunSpec(remote=True),
            target=Target(machine="m", python="3.11", platform="linux-x86_64"),
            context=msgspec.Raw(b"{}"),
            call=b"call",
        )
        run = ada.ask("POST", "/runs", asked, answer=RunView)
        hello = AgentHello(
            name="n1",
            machine="m",
            boot_id="b",
            version=__version__,
            protocol=PROTOCOL,
            python="3.11",
            platform="linux-x86_64",
            devices=(),
            attempts=(),
        )
        node = server.connection(server.node_token).ask("POST", "/agents", hello, answer=AgentWelcome)
        self.known: dict[str, list[str | int]] = {
            "run": [run.id],
            "node": [node.node, "n1"],
            "user": ["ada", "root"],
            "name": ["ada", "default", "results/0.pkl"],
            "team": ["search"],
            "token": [made.token.id],
            "digest": ["0" * 64],
            "fence": [0, 1],
            "rank": [0, 1],
            "stream": ["stdout", "stderr"],
            "prefix": ["units", "gc"],
            "key": ["units/" + "0" * 64],
        }

    def configuration(self, role: str) -> str:
        """Return what schemathesis is told; without a token, nobody learns which methods there are."""
        lines = [CONFIGURATION, f"[checks.unsupported_method]\nenabled = {'false' if role == 'nobody' else 'true'}"]
        for name, values in self.known.items():
            lines += [f"[dictionaries.{name}]", f"values = {msgspec.json.encode(values).decode()}"]
        lines += ["[parameters]"]
        lines += [f'{name} = {{dictionary = "{name}", probability = 0.7}}' for name in self.known]
        return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("fuzzed")) as running:
        yield running


@pytest.fixture(scope="module")
def world(server: Served) -> World:
    return World(server)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "role", [pytest.param("nobody", marks=pytest.mark.spot), "member", "agent", "admin"]
)  # the admin last: it may shut others out
def test_no_request_makes_the_server_fail_or_answer_what_it_does_not_promise(
    server: Served, world: World, role: str, tmp_path: Path
) -> None:
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(world.configuration(role))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run", str(DOCUMENT)]
    token = world.tokens[role]
    headers = ["--header", f"Authorization: Bearer {token}"] if token else []
    done = subprocess.run(
        [*command, "--url", server.url, "--max-examples", EXAMPLES, "--no-color", *headers],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-BYTES_MAX:]
    log = (server.home / "server" / "server.log").read_text()
    assert "Traceback" not in log, log[-6_000:]


def test_what_was_sent_has_broken_nothing(server: Served, world: World) -> None:
    database = Database(f"sqlite:///{server.home}/server/server.db", clock=SystemClock())
    try:
        assert check(database.read).violations == ()
    finally:
        database.close()
