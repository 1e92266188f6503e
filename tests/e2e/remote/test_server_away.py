"""Commands and `attach` while the server is away: they wait, or say that it is away; never that there is no run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.ambient import new_run_id
from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import ServerNotConfigured, ServerProblem, ServerUnavailable, StorageError
from serverless_gpu.model.lifecycle.attempt import State
from tests.support.golden import golden
from tests.support.remote.commands import sgpu, spawn, start
from tests.support.remote.fake_server import TOKEN, FakeServer
from tests.support.remote.server_process import ServerProcess
from tests.support.remote.stream import play, train

NOBODY = "http://127.0.0.1:9"
ABOUT_ONE_RUN = (("attach",), ("cancel",), ("show",), ("logs",), ("result",), ("metrics",), ("run", "preempt"))
TEMPORARY = 75


@pytest.fixture
def away(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home whose server does not answer; nobody waits long for it."""
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.2")
    write_profile(home, ServerProfile(url=NOBODY, token=TOKEN))
    return home


def until_stderr_says(process: subprocess.Popen[str], words: str) -> str:
    """Return what a command wrote to stderr until it wrote some words."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said {words!r}: {said}")


# --- B1: a server that is away is not a run that is not there ---------------------------------------------------------


@pytest.mark.parametrize("command", ABOUT_ONE_RUN, ids=" ".join)
@pytest.mark.parametrize("wanted", [new_run_id(), "abc"], ids=["whole", "part"])
def test_22B1_a_command_about_a_run_says_that_the_server_is_away(
    away: Path, command: tuple[str, ...], wanted: str
) -> None:
    with pytest.raises(
        ServerUnavailable, match=golden("remote.server_away.run-machine-server", wanted=wanted)
    ) as raised:
        sgpu(*command, wanted)
    assert golden("local.results.run") not in str(raised.value)
    assert exit_code(raised.value) == TEMPORARY


@pytest.mark.parametrize("command", ["attach", "show", "logs", "result"])
def test_22B1_the_latest_run_is_not_taken_from_this_machine_alone(away: Path, command: str) -> None:
    with pytest.raises(ServerUnavailable, match=re.escape(golden("remote.server_away.latest-run-may"))):
        sgpu(command)


def test_22B1_a_list_of_runs_is_of_this_machine_and_ends_with_75(away: Path) -> None:
    with spawn("runs", "--json") as listing:
        out, err = listing.communicate(timeout=60)
    assert (listing.returncode, out) == (TEMPORARY, "[]\n")
    assert "does not answer" in err and golden("remote.commands_around.only-runs-machine") in err


def test_22B1_cancel_without_a_name_does_not_say_that_nothing_runs(away: Path) -> None:
    done = sgpu("cancel")
    assert done.exit_code == 2
    assert golden("remote.server_away.none-running-here") in done.stderr


@pytest.mark.parametrize("command", ["queue", "usage"])
def test_22B1_other_commands_end_at_once_with_75(away: Path, command: str) -> None:
    with spawn(command) as asking:
        out, err = asking.communicate(timeout=60)
    assert (asking.returncode, out) == (TEMPORARY, "")
    assert err.startswith(f"sgpu: the server at {NOBODY} does not answer") and "waiting" not in err


def test_22B1_a_token_that_is_refused_is_not_a_run_that_is_not_there(
    fake: FakeServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.refuse_tokens = True
    with pytest.raises(ServerProblem, match=re.escape(golden("remote.server_away.token-valid-any"))):
        sgpu("show", new_run_id())


def test_22B1_attach_in_python_says_that_the_server_is_away(away: Path) -> None:
    with pytest.raises(ServerUnavailable, match="does not answer"):
        serverless_gpu.attach(new_run_id())


def test_22B1_attach_in_python_says_that_the_server_is_not_named_well(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", NOBODY)
    with pytest.raises(ServerNotConfigured, match="SERVERLESS_GPU_TOKEN is not"):
        serverless_gpu.attach(new_run_id())


def test_22B1_a_command_waits_for_a_server_that_is_started_again(fake: FakeServer, home: Path) -> None:
    script = fake.script()
    run = train.submit(0.1)
    script.say(State.RUNNING)
    fake.stop()
    with spawn("cancel", run.id) as waiting:
        assert "the server at" in until_stderr_says(waiting, "does not answer; waiting for it")
        fake.start()
        out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert out.startswith("CANCELLED") and golden("remote.server_away.server-back-after") in err


def test_22B1_how_a_run_ended_is_told_after_a_real_server_was_killed(own_server: ServerProcess) -> None:
    run = start("sh", "-c", "exit 3")
    run.wait(60)
    own_server.kill()
    with spawn("attach", run.id) as attached:
        until_stderr_says(attached, "does not answer; waiting for it")
        own_server.start()
        _, err = attached.communicate(timeout=60)
    assert (attached.returncode, golden("local.results.run") in err) == (3, False), err


# --- B5: address and token changed at once ---------------------------------------------------------------------------


def elsewhere(fake: FakeServer, home: Path, *, embedded: bool = True) -> None:
    """Start a server again on another port, with other tokens."""
    before = fake.port
    fake.port = 0
    fake.token = "sgpu_another_0000000000000000000000000000"
    fake.start()
    assert fake.port != before
    write_profile(home, ServerProfile(url=fake.url, token=fake.token, principal="alice", embedded=embedded))


def ask(run: serverless_gpu.Run[object]) -> object:
    """Ask the server, by a request and not by a stream."""
    return run.status()


def wait(run: serverless_gpu.Run[object]) -> object:
    """Listen until it has ended."""
    return run.results(timeout=60)


@pytest.mark.parametrize("use", [ask, wait])
def test_22B5_a_call_finds_its_server_when_port_and_token_changed(
    fake: FakeServer, home: Path, tmp_path: Path, use: Callable[[serverless_gpu.Run[object]], object]
) -> None:
    script = fake.script()
    run = train.submit(0.1)
    fake.stop()
    play(script, tmp_path, 7)
    elsewhere(fake, home)
    assert use(run) is not None
    assert run.results(timeout=60) == [7]


def test_22B5_a_command_that_waits_finds_its_server_when_port_and_token_changed(fake: FakeServer, home: Path) -> None:
    fake.script().say(State.RUNNING)
    run = train.submit(0.1)
    fake.stop()
    with spawn("cancel", run.id) as waiting:
        until_stderr_says(waiting, "does not answer; waiting for it")
        elsewhere(fake, home)
        out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out[:9]) == (0, "CANCELLED"), err


def test_22B5_another_server_or_another_principal_is_not_asked(
    fake: FakeServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.2")
    fake.script()
    run = train.submit(0.1)
    fake.stop()
    elsewhere(fake, home, embedded=False)  # `sgpu login` to a server that somebody else started
    fake.seen.clear()
    with pytest.raises(ServerUnavailable, match="does not answer"):
        run.status()
    write_profile(home, ServerProfile(url=fake.url, token=fake.token, principal="bob", embedded=True))
    with pytest.raises(ServerUnavailable, match="does not answer"):
        run.status()
    assert not fake.seen


# --- B2: what is to last is not kept in a temporary directory ---------------------------------------------------------

KEEPING = (
    (("up", "--port", "0"), "a server stores its database, keys and tokens in the home directory"),
    (("server", "config"), "the server stores its files in the home directory"),
    (("server", "logs"), "the server stores its log in the home directory"),
    (("secret", "delete", "--local", "TOKEN"), "`sgpu secret` stores secrets in the home directory"),
    (("mlflow",), "the MLflow server stores its runs in the home directory"),
    (("queue",), "its server.json names the server"),
)


@pytest.mark.parametrize(("command", "why"), KEEPING, ids=[" ".join(command) for command, _ in KEEPING])
def test_22B2_a_command_that_keeps_something_refuses_a_home_that_cannot_be_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], why: str
) -> None:
    spare = tmp_path / "t"
    spare.mkdir()
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "home"
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(wanted))
    monkeypatch.setenv("TMPDIR", str(spare))
    with spawn(*command) as asked:
        out, err = asked.communicate(timeout=60)
    assert (asked.returncode, out) == (1, ""), err
    assert err == golden("remote.server_away.sgpu-cannot-written", wanted=wanted, why=why)
    assert list(spare.iterdir()) == []


def test_22B2_a_remote_call_refuses_a_home_whose_server_cannot_be_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StorageError, match=golden("remote.server_away.cannot-written-server")):
        train.submit(0.1)


def test_22B2_a_remote_call_goes_on_in_a_temporary_directory_where_variables_name_the_server(
    fake: FakeServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", fake.url)
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", TOKEN)
    fake.script()
    with pytest.warns(UserWarning, match=re.escape(golden("remote.server_away.cannot-written"))):
        distributed(gpus=1, gpu_type="H100", remote=True, env="live")(len).submit("abc")
    assert len(fake.runs) == 1
