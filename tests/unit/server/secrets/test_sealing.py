"""The server's key, what is sealed with it, and tokens of attempts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import ServerProblem
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.server.core.server_key import Keys, Sealer, parse_attempt_token, read_keys

KEY = bytes(range(32))
SEALER = Sealer(KEY)


@given(st.binary(max_size=300), st.text(max_size=30))
def test_what_was_sealed_opens(data: bytes, about: str) -> None:
    sealed = SEALER.seal(data, about=about)
    assert SEALER.unseal(sealed, about=about) == data
    assert len(data) < 8 or data not in sealed


def test_sealing_twice_gives_different_bytes() -> None:
    assert SEALER.seal(b"x", about="run") != SEALER.seal(b"x", about="run")


@given(st.data())
def test_a_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(SEALER.seal(b"variables", about="run"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ServerProblem):
        SEALER.unseal(bytes(sealed), about="run")


@pytest.mark.parametrize("length", [0, 1, 20, 21, 30])
def test_what_was_cut_is_noticed(length: int) -> None:
    with pytest.raises(ServerProblem):
        SEALER.unseal(SEALER.seal(b"variables", about="run")[:length], about="run")


def test_variables_of_one_run_do_not_open_as_those_of_another() -> None:
    with pytest.raises(ServerProblem, match="another owner"):
        SEALER.unseal(SEALER.seal(b"variables", about="one"), about="another")


def test_another_key_is_said_with_what_to_do() -> None:
    with pytest.raises(ServerProblem, match="another key") as caught:
        Sealer(bytes(32)).unseal(SEALER.seal(b"variables", about="run"), about="run")
    assert "key" in caught.value.hint


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: read_keys(directory).sealing, range(8)))
    assert len(set(made)) == 1
    assert (directory / "key").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert os.listdir(directory) == ["key"]


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ServerProblem, match="5 bytes"):
        read_keys(tmp_path)


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    write_private(tmp_path / "token", b"one")
    write_private(tmp_path / "token", b"two")
    assert (tmp_path / "token").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["token"]


def test_the_token_of_an_attempt_is_the_same_after_a_restart_and_for_no_other_attempt() -> None:
    run_id = new_run_id()
    token = Keys(KEY).attempt_token(run_id, 3)
    assert token == Keys(KEY).attempt_token(run_id, 3)
    others = {Keys(KEY).attempt_token(run_id, 4), Keys(KEY).attempt_token(new_run_id(), 3)}
    assert token[-43:] not in {other[-43:] for other in others | {Keys(bytes(32)).attempt_token(run_id, 3)}}
    assert parse_attempt_token(token) == (run_id, 3, 0)


def test_each_crew_of_a_gang_has_a_token_and_the_first_one_looks_as_if_there_were_no_others() -> None:
    keys, run_id = Keys(KEY), new_run_id()
    assert keys.attempt_token(run_id, 3, 0) == keys.attempt_token(run_id, 3)
    second = keys.attempt_token(run_id, 3, 1, until_s=9)
    assert second.startswith(f"sgpa_{run_id}_3-1_9_") and keys.has_signed(second)
    assert parse_attempt_token(second) == (run_id, 3, 1)
    assert parse_attempt_token(keys.attempt_token(run_id, 3, 255)) == (run_id, 3, 255)
    for made in (second.replace("_3-1_", "_3_"), second.replace("_3-1_", "_3-2_"), second.replace("_3-1_", "_3-01_")):
        assert not keys.has_signed(made)


def test_a_fingerprint_is_the_servers_own() -> None:
    assert Keys(KEY).fingerprint(b"request") == Keys(KEY).fingerprint(b"request")
    others = {Keys(KEY).fingerprint(b"another"), Keys(bytes(32)).fingerprint(b"request")}
    assert len(others | {Keys(KEY).fingerprint(b"request")}) == 3


@pytest.mark.parametrize("token", ["", "sgpa_", "sgpu_" + "0" * 70, "sgpa_" + "0" * 26 + "_²_" + "x" * 43])
def test_what_is_no_token_of_an_attempt_is_told(token: str) -> None:
    assert parse_attempt_token(token) is None
