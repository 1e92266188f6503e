"""Commands around runs against a real server: how it is, who is there, what it has, what would be asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import httpx2
import pytest

from serverless_gpu import distributed
from serverless_gpu.cli.completion import complete_node, complete_pool, complete_user
from serverless_gpu.client.remote.profile import ServerProfile, find_profile, write_profile
from serverless_gpu.doctor.examination import judge
from serverless_gpu.doctor.facts import CheckOutcome, MachineFacts
from serverless_gpu.doctor.probes.servers import look_at_server
from serverless_gpu.errors import InvalidValue, NotAuthenticated, NotFound, ServerNotConfigured, ServerUnavailable
from serverless_gpu.wire.base import API
from tests.e2e.remote.conftest import unsettled
from tests.support.golden import golden
from tests.support.local.observe import nothing_of_a_run, wait_for
from tests.support.remote.commands import sgpu


@pytest.fixture
def joined(served: Path) -> Path:
    """Return the home of a server that its node has joined."""
    wait_for(lambda: '"UP"' in sgpu("node", "list", "--json").stdout, "the node has joined")
    return served


def test_status_says_how_the_server_is(joined: Path) -> None:
    lines = sgpu("status").stdout.splitlines()
    url = find_profile(joined, os.environ).url
    assert any(line.startswith(f"server: {url} · ok · ") and line.endswith("(admin)") for line in lines)
    assert {"queue: 0 running, 0 waiting", "nodes: 1 UP"} <= set(lines), lines
    server = json.loads(sgpu("status", "--json").stdout)["server"]
    assert (server["ok"], server["waiting"], server["nodes"]) == (True, 0, {"UP": 1})


def test_prometheus_gets_a_token_that_is_good_for_figures_only(joined: Path) -> None:
    assert sgpu("user", "create", "prometheus", "--service", "--role", "viewer").exit_code == 0
    made = sgpu("token", "create", "--for", "prometheus", "--scope", "metrics:read", "--expires", "365d")
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with httpx2.Client(base_url=find_profile(joined, os.environ).url + API, headers=headers, timeout=60) as client:
        text = client.get("/metrics").text
        assert 'sgpu_nodes{state="UP"} 1.0' in text and 'sgpu_healthy{check="store"} 1.0' in text
        assert client.get("/runs").status_code == client.get("/nodes").status_code == 403
    found: list[tuple[str, str]] = []

    def are_logged() -> bool:  # by a thread of their own, after the answer
        lines = map(json.loads, sgpu("server", "logs", "--json").stdout.splitlines())
        refused = [(line["principal"], line["route"]) for line in lines if line.get("status") == 403]
        found[:] = sorted(each for each in refused if each[0] == "prometheus")
        return len(found) == 2

    wait_for(are_logged, "both refusals are in the log")
    assert found == [("prometheus", "/nodes"), ("prometheus", "/runs")]


def test_the_doctor_finds_the_server_well(joined: Path) -> None:
    judged = judge(MachineFacts(server=look_at_server(os.environ)))
    said = {check.code: [finding.outcome for finding in findings] for check, findings in judged}
    codes = ("server", "server-answers", "server-token", "server-protocol", "server-nodes", "server-clock")
    assert [said[code] for code in codes] == [[CheckOutcome.OK]] * len(codes)


def test_the_doctor_finds_a_token_that_is_not_taken(served: Path) -> None:
    environ = {**os.environ, "SERVERLESS_GPU_TOKEN": "sgpu_01m7wtgc0mdrq1jtwz87xq3ma4_" + "a" * 43}
    seen = look_at_server(environ)
    assert seen.token_problem and seen.version and not seen.principal


def test_people_teams_and_tokens(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = find_profile(served, os.environ).url
    made = sgpu("user", "create", "carol", "--role", "viewer")
    assert made.exit_code == 0
    assert "carol" in sgpu("user", "list").stdout
    assert "carol" in {each["name"] for each in json.loads(sgpu("user", "list", "--json").stdout)}
    assert sgpu("team", "create", "search").exit_code == 0
    assert sgpu("team", "join", "search", "carol").stdout == "search: carol\n"
    assert "carol" in sgpu("team", "list").stdout
    assert json.loads(sgpu("team", "list", "--json").stdout)
    assert "carol" in sgpu("token", "list").stdout
    again = json.loads(sgpu("token", "create", "--for", "carol", "--expires", "1h", "--json").stdout)
    hers = tmp_path / "home"
    hers.mkdir()
    (tmp_path / "token").write_text(again["secret"])
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_HOME", str(hers))
        assert (
            golden("remote.commands_around.you-carol-viewer")
            in sgpu("login", url, "--token-file", str(tmp_path / "token")).stdout
        )
        assert (hers / "server.json").stat().st_mode & 0o777 == 0o600
        assert sgpu("whoami").stdout == golden("remote.commands_around.carol-viewer-search", url=url)
        assert json.loads(sgpu("whoami", "--json").stdout)["role"] == "viewer"
    assert sgpu("team", "leave", "search", "carol").stdout == "search: no members\n"
    assert sgpu("token", "revoke", again["token"]["id"]).stdout.endswith("is revoked\n")
    assert sgpu("user", "set", "carol", "--disable").stdout == golden("remote.commands_around.carol-viewer-disabled")
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_HOME", str(hers))
        with pytest.raises(NotAuthenticated):
            sgpu("whoami")
    with pytest.raises(NotFound):
        sgpu("user", "set", "nobody-of-that-name", "--enable")
    assert sgpu("user", "set", "carol").exit_code == 2
    assert sgpu("user", "create", "dave", "--role", "king").exit_code == 2


def test_nodes_and_pools(joined: Path) -> None:
    name = json.loads(sgpu("node", "list", "--json").stdout)[0]["name"]
    assert f"{name}  " in sgpu("node", "list").stdout
    assert sgpu("pool", "list").exit_code == 0
    assert sgpu("pool", "set", "spare", "--reserved").stdout == golden("remote.commands_around.spare-reserved-nodes")
    assert "spare" in {each["name"] for each in json.loads(sgpu("pool", "list", "--json").stdout)}
    assert sgpu("node", "forget", name).exit_code == 2
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands_around.node-nowhere"))):
        sgpu("node", "forget", "nowhere", "--i-know-it-is-dead")


def test_the_shell_completes_nodes_pools_and_users(joined: Path) -> None:
    context, parameter = click.Context(click.Command("sgpu")), click.Argument(["name"])
    (node,) = json.loads(sgpu("node", "list", "--json").stdout)
    assert [item.value for item in complete_node(context, parameter, node["name"][:1])] == [node["name"]]
    assert [item.value for item in complete_pool(context, parameter, "def")] == ["default"]
    assert complete_user(context, parameter, "")
    assert complete_node(context, parameter, "no node begins like this") == []
    assert sgpu("node", "show", node["name"]).stdout.split()[:2] == ["node", node["name"]]


def test_a_variable_names_the_pool_of_a_call(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(str.upper)
    monkeypatch.setenv("SGPU_POOL", "nowhere")
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands_around.pool-nowhere-sgpu"))):
        work.submit("a")
    monkeypatch.setenv("SGPU_POOL", "default")
    run = work.submit("a")
    assert run.results(60) == ["A"]
    shown = json.loads(sgpu("show", run.id, "--json").stdout)
    assert (shown["pool"], shown["spec"]["pool"]) == ("default", "default")


def test_clean_deletes_copies_too_and_the_server_still_has_what_they_are_copies_of(served: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(str.upper).submit("a")
    assert run.results(60) == ["A"]
    run.receipt(60)
    wait_for(lambda: nothing_of_a_run(served) and not unsettled(served), "nobody writes there any more")
    copies = served / "remote" / run.id
    assert copies.exists()
    assert f"{run.id}  " in sgpu("clean", "--dry-run", "--older-than", "0s").stdout
    sgpu("clean", run.id)
    assert not copies.exists()
    assert sgpu("show", run.id).exit_code == 0


# --- no server, or one that is away ----------------------------------------------------------------------------------

NEED_A_SERVER = (
    ("whoami",),
    ("node", "list"),
    ("pool", "list"),
    ("node", "forget", "n", "--i-know-it-is-dead"),
    ("pool", "set", "p"),
    ("queue",),
    ("share", "list"),
    ("share", "set", "team", "t", "2"),
    ("policy", "list"),
    ("policy", "set", "p"),
    ("user", "list"),
    ("user", "create", "bob"),
    ("user", "set", "bob", "--disable"),
    ("team", "list"),
    ("team", "create", "t"),
    ("user", "delete", "bob"),
    ("team", "delete", "t"),
    ("pool", "delete", "p"),
    ("node", "show", "n"),
    ("team", "join", "t", "bob"),
    ("team", "leave", "t", "bob"),
    ("token", "list"),
    ("token", "create"),
    ("token", "revoke", "t"),
)


@pytest.mark.parametrize("command", NEED_A_SERVER, ids=" ".join)
def test_without_a_server_a_command_says_so(home: Path, command: tuple[str, ...]) -> None:
    with pytest.raises(ServerNotConfigured, match="none is configured"):
        sgpu(*command)


@pytest.mark.parametrize("command", NEED_A_SERVER, ids=" ".join)
def test_a_server_that_is_away_is_not_waited_for(home: Path, command: tuple[str, ...]) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    with pytest.raises(ServerUnavailable, match="does not answer"):
        sgpu(*command)


def test_without_the_server_what_is_here_is_still_shown(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    status = sgpu("status")
    assert status.exit_code == 0
    assert golden("remote.commands_around.server-http-127") in status.stdout
    assert json.loads(sgpu("status", "--json").stdout)["server"]["ok"] is False
    with pytest.raises(ServerUnavailable, match=re.escape(golden("remote.commands_around.only-runs-machine"))):
        sgpu("runs")


def test_a_server_that_is_away_is_a_message_and_exit_code_75(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    program = [sys.executable, "-m", "serverless_gpu.cli", "node", "list"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("sgpu: the server at http://127.0.0.1:9 does not answer")
    assert "Traceback" not in done.stderr
