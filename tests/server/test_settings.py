"""Settings: options over `server.toml` over defaults, and what is wrong is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.server.settings import read_settings


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


def test_every_setting_is_in_the_reference(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption) as caught:
        read_settings(tmp_path, {"prot": 1})
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    for name in caught.value.hint.removeprefix("settings: ").split(", "):
        assert f"| `{name}` |" in reference, f"docs/reference.md, Settings of a server, lacks {name}"
