"""A server that ran at `none` with two users gets sandboxes, as docs/how-to/isolating-users.md describes.

The test runs the commands of the page. In place of a restart of the machine, the test ends the node's processes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu.cli import program
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.node.isolation.principals import PLACE
from tests.e2e.remote.conftest import end_node
from tests.support.remote.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sandboxes")]

_SUBMIT = ("submit", "--gpus", "1", "--gpu-type", "H100", "--env", "live", "--secret", "TOKEN", "--timeout", "1m", "sh")
OLD, NEW = "old-value", "new-value"
"""Values of a secret. The node masks a value, but not its reverse."""
_READ = "id -u; rev $SGPU_SECRETS_DIR/TOKEN; echo; cat {home}/server/key > /dev/null && echo stolen || echo refused"


@pytest.fixture
def members(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the home of a member. The principals of the node get a directory of this test."""
    with (
        tempfile.TemporaryDirectory(prefix="sg-principals-", dir="/var/tmp") as place,
        tempfile.TemporaryDirectory(prefix="sg-", dir="/tmp") as member,
    ):
        os.chmod(place, 0o711)
        monkeypatch.setenv(PLACE, place)
        yield Path(member)


def run(home: Path, *words: str, text: str = "", fails: bool = False) -> str:
    """Run a command with the login of a home. Return its output."""
    environ = {"SERVERLESS_GPU_HOME": str(home)}
    done = CliRunner().invoke(program.sgpu, words, input=text, env=environ, prog_name="sgpu")
    close_all()
    assert (done.exit_code != 0) is fails, f"{words}: {done.output} {done.exception}"
    return f"{done.output}{done.exception}" if fails else done.stdout


def token(text: str) -> str:
    """Return the token that a command printed."""
    return text.splitlines()[-1]


def test_27_upgrade_of_a_running_none_server(
    own_server: ServerProcess, home: Path, members: Path, tmp_path: Path
) -> None:
    run(home, "pool", "set", "default", "--isolation", "none")
    first = token(run(home, "user", "create", "bob"))
    run(members, "login", own_server.url, text=first)
    run(members, "secret", "set", "TOKEN", text=OLD)
    before = run(members, *_SUBMIT, "-c", _READ.format(home=home))
    assert OLD[::-1] in before and "stolen" in before
    (old_run,) = [line.split()[0] for line in run(members, "runs", "--wide").splitlines()[1:]]

    # The commands of the page, in the page's order.
    run(home, "server", "drain", "--wait", "60s")
    run(home, "pool", "set", "default", "--isolation", "sandbox")
    run(home, "down")
    own_server.ended()
    told = run(home, "server", "rotate", "--yes")
    assert "create --for bob" in told and "secret set TOKEN" in told
    end_node(home)
    shutil.rmtree(home / "environments", ignore_errors=True)
    own_server.start()
    assert "revoked" in run(members, "whoami", fails=True)
    run(members, "login", own_server.url, text=token(run(home, "token", "create", "--for", "bob")))
    run(members, "secret", "set", "TOKEN", text=NEW)
    run(home, "server", "resume")

    after = run(members, *_SUBMIT, "-c", _READ.format(home=home))
    assert NEW[::-1] in after and "refused" in after and "stolen" not in after
    new_run = run(members, "runs", "--wide").splitlines()[1].split()[0]
    assert "isolation: sandbox" in run(members, "show", new_run)
    # Earlier runs stay readable for their owner, and hidden from other members.
    assert OLD[::-1] in run(members, "logs", old_run)
    assert "SUCCEEDED" in run(members, "show", old_run)
    run(home, "user", "create", "carol")
    carol = tmp_path / "carol"
    run(carol, "login", own_server.url, text=token(run(home, "token", "create", "--for", "carol")))
    run(carol, "show", old_run, fails=True)
