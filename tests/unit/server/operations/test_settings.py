"""Settings: options over variables over `server.toml` over defaults; what is wrong is said with its place."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.cli.server import up
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model.scheduling.values import QueuePolicy
from serverless_gpu.server.core.settings import (
    EffectiveSetting,
    OidcSettings,
    effective_settings,
    option_of,
    read_settings,
)
from tests.support.golden import golden
from tests.support.paths import REPOSITORY


def test_without_anything_said_it_is_sqlite_on_loopback(tmp_path: Path) -> None:
    settings = read_settings(tmp_path)
    assert settings.database == f"sqlite:///{tmp_path}/server/server.db"
    assert (settings.host, settings.port, settings.hosts) == ("127.0.0.1", None, ())
    assert settings.store_place == f"{tmp_path}/server/store"
    assert (settings.partition_grace_s, settings.soft_expiry_s, settings.heartbeat_s) == (900, 60, 5)
    assert (settings.retention_s, settings.logs_bytes_max) == (30 * 86_400, 100 << 30)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text('host = "10.0.0.5"\nport = 80\nhosts = ["a"]\npartition_grace = "2h"\n')
    settings = read_settings(tmp_path, {"port": 0, "database": None})
    assert (settings.host, settings.port, settings.hosts) == ("10.0.0.5", 0, ("a",))
    assert settings.partition_grace_s == 7200
    assert settings.database.startswith("sqlite:///")


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("hots = []", InvalidOption, "'hots'"),
        ('port = "x"', InvalidOption, "port"),
        ("port = 70000", InvalidOption, "65535"),
        ('partition_grace = "1s"', InvalidValue, "partition_grace"),
        ('partition_grace = "soon"', InvalidValue, "partition_grace"),
        ('retention = "59m"', InvalidValue, "retention"),
        ("logs_gib = 0", InvalidOption, "logs_gib"),
        ("port =", InvalidValue, "cannot be read"),
        ("queue = 1", InvalidOption, "queue is a table"),
        ("[queue]\nhalf_live = '7d'", InvalidOption, "'queue_half_live'"),
        ("[queue]\nhalf_life = '7'", InvalidValue, "queue_half_life"),
        ("[queue]\nnearly = 1.5", InvalidOption, "queue_nearly"),
        ("[queue]\nhalf_life = 'never'", InvalidValue, "queue_half_life"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path: Path, line: str, kind: type[Exception], says: str) -> None:
    (tmp_path / "server.toml").write_text(line)
    with pytest.raises(kind, match=says):
        read_settings(tmp_path)


def test_an_unknown_option_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="'prot'") as caught:
        read_settings(tmp_path, {"prot": 1})
    assert "partition_grace" in caught.value.hint


def test_variables_win_over_the_file_and_options_over_both(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text('partition_grace = "2h"\nretention = "2d"\nhosts = ["a"]\nnode = true\n')
    environ = {
        "SGPU_PARTITION_GRACE": "3h",
        "SGPU_HOSTS": "b, c",
        "SGPU_NODE": "no",
        "SGPU_LOGS_GIB": "0.5",
        "SGPU_RUNS_WAITING": "7",
        "SGPU_PORT": "",  # says nothing
        "SGPU_RUN_ID": "somebody else's",
    }
    settings = read_settings(tmp_path, {"partition_grace": "4h"}, environ=environ)
    assert settings.partition_grace_s == 4 * 3600
    assert settings.retention_s == 2 * 86_400
    assert (settings.hosts, settings.node, settings.port) == (("b", "c"), False, None)
    assert (settings.logs_bytes_max, settings.runs_waiting_max) == (1 << 29, 7)


def test_what_was_decided_about_the_queue_is_a_table_of_the_file(tmp_path: Path) -> None:
    assert read_settings(tmp_path).queue == QueuePolicy()
    lines = "half_life = '1d'\nentry_penalty = '0s'\nreservations = 0\nnearly = 0.5\nguard = '2d'\npatience = '5m'"
    (tmp_path / "server.toml").write_text(f"port = 80\n[queue]\n{lines}\npreempt_after = '1h'\npreemptions = 1\n")
    settings = read_settings(tmp_path, environ={"SGPU_QUEUE_PREEMPTIONS": "2", "SGPU_QUEUE_NEARLY": "0.75"})
    assert settings.port == 80
    assert settings.queue == QueuePolicy(
        half_life_s=86_400,
        entry_penalty_s=0,
        reservations=0,
        nearly=0.75,
        patience_s=300,
        guard_s=2 * 86_400,
        preempt_after_s=3_600,
        preemptions_max=2,
    )
    never = read_settings(tmp_path, environ={"SGPU_QUEUE_GUARD": "never", "SGPU_QUEUE_PATIENCE": "never"}).queue
    assert never.guard_s == never.patience_s == math.inf
    found = {each.name: each for each in effective_settings(tmp_path)}
    assert found["queue_half_life"] == EffectiveSetting(
        name="queue_half_life", value="1d", origin=str(tmp_path / "server.toml")
    )


@pytest.mark.parametrize("name", ["node", "key_lost", "accept_rollback", "mlflow"])
@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("FALSE", False)])
def test_a_variable_turns_a_switch_on_or_off(tmp_path: Path, name: str, text: str, value: bool) -> None:
    assert getattr(read_settings(tmp_path, environ={f"SGPU_{name.upper()}": text}), name) is value


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("SGPU_PORT", "x", "SGPU_PORT: Expected `int"),
        ("SGPU_NODE", "perhaps", "SGPU_NODE: 'perhaps' is neither true nor false"),
        ("SGPU_PARTITION_GRACE", "1s", "SGPU_PARTITION_GRACE: partition_grace is 1s"),
        ("SGPU_TLS_CERT", "a.pem", "SGPU_TLS_CERT: tls_cert comes without tls_key"),
        ("SGPU_BEHIND_PROXY", "10.0.0.9,proxy.internal", "SGPU_BEHIND_PROXY: behind_proxy: 'proxy.internal' does not"),
        ("SGPU_BEHIND_PROXY", "0.0.0.0/0", "which includes every address"),
    ],
)
def test_what_is_wrong_in_a_variable_is_said_with_its_name(tmp_path: Path, variable: str, text: str, says: str) -> None:
    with pytest.raises((InvalidOption, InvalidValue), match=says):
        read_settings(tmp_path, environ={variable: text})


def test_what_is_wrong_in_an_option_is_said_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.settings.retention-retention-1s"))):
        read_settings(tmp_path, {"retention": "1s"})


def test_every_setting_says_where_it_comes_from_and_shows_no_password(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('database = "postgresql://sgpu:hunter2@db/sgpu?sslpassword=hunter3&sslmode=require"\n')
    found = effective_settings(
        tmp_path, {"port": 80}, environ={"SGPU_STORE": "s3://bucket/x?secret_access_key=hunter4"}
    )
    said = {each.name: each for each in found}
    shown = "postgresql://sgpu:***@db/sgpu?sslpassword=***&sslmode=require"
    assert said["database"] == EffectiveSetting(name="database", value=shown, origin=str(file))
    assert said["store"] == EffectiveSetting(
        name="store", value="s3://bucket/x?secret_access_key=***", origin="SGPU_STORE"
    )
    assert said["port"] == EffectiveSetting(name="port", value=80, origin="--port")
    assert said["retention"] == EffectiveSetting(name="retention", value="30d", origin="default")
    assert b"hunter" not in msgspec.json.encode(found)


OIDC = 'issuer = "https://login.example/x"\nclient_id = "sgpu"\n'


def test_an_identity_provider_is_a_table_of_the_file(tmp_path: Path) -> None:
    assert read_settings(tmp_path).oidc is None
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    lines = f'client_secret_file = "{secret}"\nteams = ["g=with=vision"]\nroles = ["ops=operator"]\nrole = "none"\n'
    (tmp_path / "server.toml").write_text(f"[oidc]\n{OIDC}{lines}domains = ['@Lab.example']\ncreate = true\n")
    assert read_settings(tmp_path).oidc == OidcSettings(
        issuer="https://login.example/x",
        client_id="sgpu",
        client_secret="s3cret",
        name="login.example",
        teams={"g=with": "vision"},
        roles={"ops": "operator"},
        role="",
        domains=("lab.example",),
        create=True,
    )
    environ = {"SGPU_OIDC_CLIENT_SECRET": "hunter2", "SGPU_OIDC_TEAMS": "a=b, c=d"}
    found = read_settings(tmp_path, environ=environ).oidc
    assert found is not None
    assert (found.client_secret, found.teams) == ("hunter2", {"a": "b", "c": "d"})
    assert b"hunter2" not in msgspec.json.encode(effective_settings(tmp_path, environ=environ))


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ('client_id = "sgpu"', "oidc_issuer"),
        ('issuer = "https://login.example"', "oidc_client_id"),
        ('issuer = "http://login.example"\nclient_id = "x"', "oidc_issuer"),
        ('issuer = "https://u:p@login.example"\nclient_id = "x"', "oidc_issuer"),
        ('issuer = "login.example"\nclient_id = "x"', "oidc_issuer"),
        (f'{OIDC}scopes = ["email"]', "oidc_scopes"),
        (f'{OIDC}roles = ["ops=king"]', "king"),
        (f'{OIDC}roles = ["ops=agent"]', "agent"),
        (f'{OIDC}teams = ["vision"]', "oidc_teams"),
        (f'{OIDC}client_secret_file = "/nonexistent"', "/nonexistent"),
        (f'{OIDC}client_secret_file = "/etc/passwd"', "/etc/passwd"),
    ],
)
def test_a_wrong_identity_provider_is_named(tmp_path: Path, lines: str, name: str) -> None:
    (tmp_path / "server.toml").write_text(f"[oidc]\n{lines}\n")
    with pytest.raises((InvalidOption, InvalidValue)) as caught:
        read_settings(tmp_path)
    assert name in str(caught.value)


def test_every_setting_is_an_option_of_sgpu_up(tmp_path: Path) -> None:
    options = {option for parameter in up.params for option in parameter.opts}
    settings = {option_of(each.name) for each in effective_settings(tmp_path)}
    # Nobody types these: they are a matter of a team.
    assert {name for name in settings - options if not name.startswith(("--queue-", "--oidc-"))} == {"--runs-waiting"}
    assert options - settings == set()


def test_the_reference_says_what_holds_of_the_queue_without_a_setting(tmp_path: Path) -> None:
    reference = (REPOSITORY / "docs" / "reference.md").read_text()
    rows = dict(re.findall(r"^- `(queue_\w+)` \(default `([^`]+)`\): ", reference, re.MULTILINE))
    assert rows == {
        each.name: f"{each.value}" for each in effective_settings(tmp_path) if each.name.startswith("queue_")
    }


def test_every_setting_is_in_the_reference(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption) as caught:
        read_settings(tmp_path, {"prot": 1})
    reference = (REPOSITORY / "docs" / "reference.md").read_text()
    for name in caught.value.hint.removeprefix("settings: ").split(", "):
        assert f"\n- `{name}` (default" in reference, f"docs/reference.md, Settings of a server, lacks {name}"
