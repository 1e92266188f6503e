"""`sgpu login`: what somebody who got an address and a token does first."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu.cli import program
from serverless_gpu.client.remote.profile import find_profile
from tests.support.server.served import Served


def log_in(server: Served, home: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(home))
    arguments = ["login", server.url, "--token-file", str(server.home / "server" / "token"), *more]
    said = CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")
    assert said.exit_code == 0, said.output
    return said.stdout


def test_an_address_and_a_token_are_enough_to_log_in(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = log_in(server, tmp_path / "laptop", monkeypatch)
    assert server.url in said
    profile = find_profile(tmp_path / "laptop", {})
    assert (profile.url, profile.token, profile.ca) == (server.url, server.token, "")


def test_certificates_are_found_again_from_any_directory(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.pem").write_text("")
    monkeypatch.chdir(tmp_path)
    log_in(server, tmp_path / "laptop", monkeypatch, "--ca", "ca.pem")
    profile = find_profile(tmp_path / "laptop", {})
    assert profile.ca == str(tmp_path / "ca.pem")
