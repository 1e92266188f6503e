"""`sgpu up` with a certificate: runs of this machine need none, others log in with the authority's, SIGHUP renews."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.doctor.probes.servers import look_at_server
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from tests.e2e.remote.calling import answer, called
from tests.support.local.observe import wait_for
from tests.support.local.small_environment import SmallEnvironment, with_requirements
from tests.support.remote.environments import PROGRAM, WORK
from tests.support.server.certificates import Authority

pytestmark = pytest.mark.slow
WAIT_S = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def up(home: Path, authority: Authority) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Yield a server with a certificate for 127.0.0.1, the port of others, and what it says of that."""
    cert, key = authority.sign("127.0.0.1")
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", "--tls-cert", str(cert), "--tls-key", str(key)]
    environ = {**os.environ, "SERVERLESS_GPU_FAKE": "H100:2"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    )
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while not said[-1].startswith("others:") and process.poll() is None:
        said.append(process.stdout.readline())
    found = re.fullmatch(r"others: https://…:(\d+); (.*)\n", said[-1])
    assert found is not None, said
    try:
        yield process, int(found[1]), found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        start_stop.stop_all(Home(home))


def sgpu(*words: str, home: Path, stdin: str = "") -> str:
    """Return what a command of another home says."""
    ran = subprocess.run(
        [sys.executable, "-m", "serverless_gpu.cli", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "SERVERLESS_GPU_HOME": str(home)},
    )
    return ran.stdout + ran.stderr


def test_runs_of_this_machine_need_no_certificate_others_trust_it_and_it_is_renewed(
    up: tuple[subprocess.Popen[str], int, str], home: Path, authority: Authority, tmp_path: Path
) -> None:
    process, port, said = up
    assert "(127.0.0.1) ends in 2" in said
    assert answer(called(tmp_path / "ran", 0)) == "done"
    other, url = tmp_path / "other", f"https://127.0.0.1:{port}"
    token = (home / "server" / "token").read_text()
    assert "CERTIFICATE_VERIFY_FAILED" in sgpu("login", url, home=other, stdin=token)
    assert f"at {url}" in sgpu("login", url, "--ca", str(authority.ca), home=other, stdin=token)
    seen = look_at_server({**os.environ, "SERVERLESS_GPU_HOME": str(other)})
    assert seen.certificate_left_s is not None and 0 < seen.certificate_left_s < 86_400
    before = ssl.get_server_certificate(("127.0.0.1", port), timeout=10)
    authority.sign("127.0.0.1", days=90)
    process.send_signal(signal.SIGHUP)

    def is_renewed() -> bool:
        with contextlib.suppress(ssl.SSLEOFError):  # a handshake in the moment in which it is replaced
            return ssl.get_server_certificate(("127.0.0.1", port), timeout=10) != before
        return False

    wait_for(is_renewed, "the new certificate is in use", WAIT_S)
    assert "(admin)" in sgpu("whoami", home=other)
    left_s = look_at_server({**os.environ, "SERVERLESS_GPU_HOME": str(home)}).certificate_left_s
    assert left_s is not None and 89 * 86_400 < left_s < 90 * 86_400


@pytest.mark.long
def test_an_environment_is_captured_for_a_server_of_an_own_authority(
    up: tuple[subprocess.Popen[str], int, str], home: Path, authority: Authority, tmp_path: Path
) -> None:
    other, token = tmp_path / "other", (home / "server" / "token").read_text()
    assert "at https" in sgpu("login", f"https://127.0.0.1:{up[1]}", "--ca", str(authority.ca), home=other, stdin=token)
    small = SmallEnvironment(tmp_path / "here", *with_requirements("httpx2"))
    small.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    small.write("work.py", WORK)
    out, err = small.run(small.write("program.py", PROGRAM), SERVERLESS_GPU_HOME=str(other), SERVERLESS_GPU_TOKEN="")
    value, toy, *_ = eval(out)[0]
    assert value == "one" and toy.startswith(f"{home}/environments/"), err
