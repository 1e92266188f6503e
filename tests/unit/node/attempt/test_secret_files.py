"""Secrets before and after the server: how they are named, where their files are, who removes those."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu import faults, runtime
from serverless_gpu.client.launch import local_secrets
from serverless_gpu.errors import InvalidOption, InvalidValue, SecretMissing, StorageError
from serverless_gpu.model import secrets
from serverless_gpu.model.spec import make_spec
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.secret_files import SecretSweeper
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import SecretRequest, SecretValue
from tests.support.golden import golden

IN_MEMORY = pytest.mark.skipif(not secret_files.is_in_memory(), reason="/dev/shm is not in memory here")


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Return the directory of an attempt."""
    directory = tmp_path / "runs" / "r" / "1"
    directory.mkdir(parents=True)
    return directory


def names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("sgpu-secrets-")}


def spec(**options: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    made = make_spec(1, "H100", False, None, options, ())
    return made.secrets, made.secret_variables


def test_secrets_are_named_and_some_are_variables_too() -> None:
    assert spec() == ((), {})
    assert spec(secrets=["A", "B"]) == (("A", "B"), {})
    assert spec(secrets={"A": "TOKEN", "B": None}) == (("A", "B"), {"A": "TOKEN"})


@pytest.mark.parametrize("wrong", ["A", b"A", 3, [1], {"A": 1}])
def test_what_names_no_secrets_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidOption):
        spec(secrets=wrong)


@pytest.mark.parametrize(
    "wrong",
    [[""], ["."], [".."], ["a/b"], [".of"], ["a\n"], ["x" * 65], ["ä"], ["A", "A"], [f"A{n}" for n in range(33)]]
    + [{"A": variable} for variable in ("", "A=B", "SGPU_RANK", "SERVERLESS_GPU_TOKEN", "1A", "A B")],
)
def test_names_that_could_be_something_else_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue):
        spec(secrets=wrong)


def test_what_is_printed_has_no_value() -> None:
    assert "hunter2" not in repr(SecretRequest(value=b"hunter2")) + repr(
        SecretValue(name="A", text="A@1", value=b"hunter2")
    )
    assert secrets.Pinned(name="A", version=2, team="search").text == "search/A@2"


@IN_MEMORY
def test_they_lie_in_memory_and_only_their_user_can_read_them(attempt: Path) -> None:
    before = names()
    place = secret_files.write(attempt, {"A": b"hunter2\xff", "B": b"b"})
    assert place.parent == Path("/dev/shm") and secret_files.note(place) == ""
    assert (place / "A").read_bytes() == b"hunter2\xff" and (place / "B").read_bytes() == b"b"
    assert stat.S_IMODE(place.lstat().st_mode) == 0o700
    assert stat.S_IMODE((place / "A").lstat().st_mode) == 0o400
    again = secret_files.write(attempt, {"A": b"new"})  # launched again: nothing of before stays
    assert not place.exists() and (again / "A").read_bytes() == b"new"
    secret_files.remove(attempt)
    assert names() == before and not (attempt / "secrets").exists()
    secret_files.remove(attempt)


def test_without_memory_they_lie_in_the_attempt(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_files, "is_in_memory", lambda: False)
    place = secret_files.write(attempt, {"A": b"hunter2"})
    assert place == attempt / "secrets" and golden("node.secrets.node-disk") in secret_files.note(place)
    assert stat.S_IMODE(place.lstat().st_mode) == 0o700
    secret_files.remove(attempt)
    assert not place.exists()


@IN_MEMORY
def test_23A9_memory_that_is_full_refuses_and_nothing_goes_to_the_disk(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, writes = names(), iter([OSError(28, "No space left on device")])

    def full_once(_point: str) -> None:
        for error in writes:
            raise error

    monkeypatch.setattr(faults, "reach", full_once)
    with pytest.raises(StorageError, match=re.escape(golden("node.secrets.cannot-take-secrets"))):
        secret_files.write(attempt, {"A": b"hunter2"})
    assert names() == before and list(attempt.iterdir()) == []


def test_a_link_that_a_rank_has_replaced_removes_nothing_else(attempt: Path, tmp_path: Path) -> None:
    precious = tmp_path / "sgpu-secrets-01234567"
    precious.mkdir()
    (precious / "thesis").touch()
    (attempt / "secrets").symlink_to(precious)
    secret_files.remove(attempt)
    assert (precious / "thesis").exists() and not (attempt / "secrets").is_symlink()


@IN_MEMORY
def test_what_nobody_looks_after_is_swept(attempt: Path) -> None:
    clock = FakeClock()
    sweeper = SecretSweeper(clock)
    place = secret_files.write(attempt, {"A": b"a"})
    sweeper.tend((), ended=False)
    clock.advance(60)  # about to be launched
    sweeper.tend((), ended=False)
    assert place.exists()
    lock = hold(attempt / "supervisor.lock", "")
    assert lock is not None
    clock.advance(90 * 60)  # looked after
    sweeper.tend((), ended=False)
    assert place.exists()
    (attempt / "stopped.json").touch()
    sweeper.tend((), ended=True)  # still looked after
    assert place.exists()
    os.close(lock)
    sweeper.tend((), ended=True)
    assert not place.exists()


@IN_MEMORY
def test_what_was_never_launched_is_swept_after_a_while(attempt: Path) -> None:
    clock = FakeClock()
    sweeper = SecretSweeper(clock)
    place, empty = secret_files.write(attempt, {"A": b"a"}), Path("/dev/shm/sgpu-secrets-00000000")
    empty.mkdir(mode=0o700)
    for _ in range(60):
        sweeper.tend((), ended=False)
        assert place.exists() and empty.exists()
        clock.advance(60)
    sweeper.tend((), ended=False)
    assert not place.exists() and not empty.exists()


@IN_MEMORY
@pytest.mark.parametrize("set_by_s", [-86_400, 86_400])
def test_F30_a_clock_that_is_set_costs_nobody_his_secrets(attempt: Path, set_by_s: int) -> None:
    clock = FakeClock(wall_ns=time.time_ns())
    place = secret_files.write(attempt, {"A": b"a"})
    clock.step_wall(set_by_s)
    SecretSweeper(clock).tend((), ended=True)
    assert place.exists()
    secret_files.remove(attempt)


@IN_MEMORY
def test_an_attempt_that_waits_for_hours_keeps_its_secrets(attempt: Path) -> None:
    clock = FakeClock()
    ours, of_another_home = SecretSweeper(clock), SecretSweeper(clock)
    place = secret_files.write(attempt, {"A": b"a"})
    for _ in range(3 * 60):
        ours.tend([attempt], ended=False)
        of_another_home.tend((), ended=True)
        clock.advance(60)
    assert place.exists()
    secret_files.remove(attempt)


def test_a_home_has_secrets_for_runs_of_this_machine(tmp_path: Path) -> None:
    home = Home(tmp_path)
    local_secrets.write(home, "A", b"one")
    local_secrets.write(home, "A", b"two")
    assert local_secrets.names(home) == ["A"]
    path = tmp_path / "secrets" / "A"
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    local_secrets.delete(home, "A")
    assert local_secrets.names(home) == []
    with pytest.raises(SecretMissing):
        local_secrets.delete(home, "A")
    with pytest.raises(InvalidValue):
        local_secrets.write(home, "A", b"")


def test_a_rank_reads_what_it_was_given_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGPU_SECRETS_DIR", raising=False)
    with pytest.raises(SecretMissing, match=re.escape(golden("node.secrets.given-secrets"))):
        runtime.secret("A")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "A").write_text("hunter2", encoding="utf-8")
    (tmp_path / "B").touch()
    monkeypatch.setenv("SGPU_SECRETS_DIR", str(tmp_path / "in"))
    assert runtime.secret("A") == "hunter2"
    for name in ("B", "../B", "", ".."):
        with pytest.raises(SecretMissing):
            runtime.secret(name)


def test_a_request_of_the_first_protocol_names_no_variables() -> None:
    assert msgspec.json.decode(b'{"value":"aHVudGVyMg=="}', type=SecretRequest).value == b"hunter2"


def test_27_only_files_of_the_owner_are_read_as_secrets(attempt: Path) -> None:
    place = secret_files.write(attempt, {"A": b"hunter2", "B": b"b"})
    try:
        assert secret_files.read(place, os.geteuid()) == {"A": b"hunter2", "B": b"b"}
        with pytest.raises(PermissionError, match="another owner"):
            secret_files.read(place, os.geteuid() + 1)
        (place / "C").symlink_to("/etc/passwd")
        with pytest.raises(OSError, match="C"):
            secret_files.read(place, os.geteuid())
        (place / "C").unlink()
        os.link(place / "A", place / "C")
        with pytest.raises(PermissionError, match="a single file"):
            secret_files.read(place, os.geteuid())
    finally:
        secret_files.remove(attempt)
