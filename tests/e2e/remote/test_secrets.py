"""Secrets of runs with real processes (F70): where ranks find them, and that nothing of them is left anywhere."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from serverless_gpu import Run, distributed
from serverless_gpu import runtime as rt
from serverless_gpu.cli import program
from serverless_gpu.errors import RunError, SecretMissing
from tests.support.golden import golden
from tests.support.local.observe import supervisor, wait_for
from tests.support.local.ranks import announce, wait_for_file

TOKEN = f"hunter2-{secrets.token_hex(8)}"
OTHER = f"correct-horse-{secrets.token_hex(8)}"


@pytest.fixture
def where(tmp_path: Path) -> str:
    """Return a directory in which ranks announce themselves and look for what they wait for."""
    return str(tmp_path)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def look(where: str) -> dict[str, object]:
    """Return what a rank sees of its secrets, but none of them."""
    directory = Path(os.environ["SGPU_SECRETS_DIR"])
    first = {name: hashlib.sha256(rt.secret(name).encode()).hexdigest() for name in ("TOKEN", "OTHER")}
    announce(where, f"rank{rt.get_global_rank()}")
    wait_for_file(where, "go")
    words = Path("/proc/self/cmdline").read_bytes() + Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return {
        "first": first,
        "then": {name: hashlib.sha256(rt.secret(name).encode()).hexdigest() for name in ("TOKEN", "OTHER")},
        "variable": hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest(),
        "others": sorted(name for name in os.environ if name in ("TOKEN", "OTHER")),
        "modes": [oct(path.stat().st_mode & 0o7777) for path in (directory, directory / "TOKEN")],
        "directory": str(directory),
        "argument": rt.secret("TOKEN").encode() in words,
    }


def sgpu(*arguments: str, said: str = "") -> Result:
    result = CliRunner().invoke(program.sgpu, list(arguments), input=said, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def submit(where: str, *, remote: bool) -> Run[dict[str, object]]:
    named = {"TOKEN": "MY_TOKEN", "OTHER": None}
    return distributed(gpus=2, gpu_type="H100", remote=remote, quiet=True, secrets=named)(look).submit(where)


def nothing_is_left(home: Path, directory: str) -> None:
    """Check that no file of a home has a value, and that the run's files of them are gone."""
    wait_for(lambda: not Path(directory).exists(), "the run's secrets are removed")
    values = [text.encode() for text in (TOKEN, OTHER)]
    forms = [form for value in values for form in (value, base64.b64encode(value), value.hex().encode())]
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # server and node go on, and replace files of theirs
                data = path.read_bytes()
                assert not any(form in data for form in forms), path


@pytest.mark.slow
def test_F70_a_run_has_its_secrets_to_its_end_whatever_becomes_of_them_on_the_server(served: Path, where: str) -> None:
    assert "TOKEN@1 is set" in sgpu("secret", "set", "TOKEN", said=TOKEN + "\n").output
    file = Path(where, "other")
    file.write_text(OTHER, encoding="utf-8")
    sgpu("secret", "set", "OTHER", "--file", str(file))
    file.unlink()
    listed = sgpu("secret", "list").output
    assert re.search(r"^TOKEN +1 +[a-z]+ ", listed, re.MULTILINE) and TOKEN not in listed
    run = submit(where, remote=True)
    wait_for(lambda: all(Path(where, f"rank{rank}").exists() for rank in range(2)), "ranks have read them")
    sgpu("secret", "set", "TOKEN", said="rotated")
    sgpu("secret", "delete", "OTHER")
    Path(where, "go").touch()
    for seen in run.results(60):
        assert seen["first"] == seen["then"] == {"TOKEN": digest(TOKEN), "OTHER": digest(OTHER)}
        assert seen["variable"] == digest(TOKEN) and seen["others"] == [] and seen["argument"] is False
        assert seen["modes"] == ["0o700", "0o400"] and str(seen["directory"]).startswith("/dev/shm/sgpu-secrets-")
    nothing_is_left(served, str(seen["directory"]))
    assert run.receipt(60).secrets == ("TOKEN@1", "OTHER@1")
    assert "TOKEN@1, OTHER@1" in sgpu("show", run.id).output
    with pytest.raises(SecretMissing, match=re.escape(golden("remote.secrets.secret-other"))):
        submit(where, remote=True)


@pytest.mark.slow
def test_F70_secrets_are_removed_when_the_supervisor_is_killed(served: Path, where: str) -> None:
    sgpu("secret", "set", "TOKEN", said=TOKEN)
    sgpu("secret", "set", "OTHER", said=OTHER)
    run = submit(where, remote=True)
    wait_for(lambda: all(Path(where, f"rank{rank}").exists() for rank in range(2)), "ranks have read them")
    link = served / "runs" / run.id / "1" / "secrets"
    directory = os.readlink(link)
    supervisor(served, run.id).kill()
    with pytest.raises(RunError):
        run.results(60)
    nothing_is_left(served, directory)
    wait_for(lambda: not link.is_symlink(), "and what led there")


@pytest.mark.slow
def test_a_run_of_this_machine_has_secrets_of_its_home(served: Path, where: str) -> None:
    with pytest.raises(SecretMissing, match=re.escape(golden("remote.secrets.home-secret-token"))):
        submit(where, remote=False)
    sgpu("secret", "set", "--local", "TOKEN", said=TOKEN)
    sgpu("secret", "set", "--local", "OTHER", said=OTHER)
    assert sgpu("secret", "list", "--local").output == "OTHER\nTOKEN\n"
    Path(where, "go").touch()
    run = submit(where, remote=False)
    for seen in run.results(60):
        assert seen["first"] == {"TOKEN": digest(TOKEN), "OTHER": digest(OTHER)}
    assert run.receipt(60).secrets == ("TOKEN", "OTHER")
    for name in ("TOKEN", "OTHER"):
        sgpu("secret", "delete", "--local", name)
    nothing_is_left(served, str(seen["directory"]))


@pytest.mark.slow
def test_secrets_of_a_run_of_this_machine_are_removed_when_its_supervisor_is_killed(served: Path, where: str) -> None:
    sgpu("secret", "set", "--local", "TOKEN", said=TOKEN)
    sgpu("secret", "set", "--local", "OTHER", said=OTHER)
    run = submit(where, remote=False)
    wait_for(lambda: all(Path(where, f"rank{rank}").exists() for rank in range(2)), "ranks have read them")
    directory = os.readlink(served / "runs" / run.id / "1" / "secrets")
    supervisor(served, run.id).kill()
    with pytest.raises(RunError):
        run.results(60)
    for name in ("TOKEN", "OTHER"):
        sgpu("secret", "delete", "--local", name)
    nothing_is_left(served, directory)
