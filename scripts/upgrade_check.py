"""Checks an upgrade of the server while a node of the previous commit runs a job.

    make upgrade-check            the commit before HEAD
    python -m scripts.upgrade_check --base v0.1.0

    server of BASE, node of BASE ─ a run begins ─▶ server ends ─▶ server of today, same home ─▶ the run succeeds, and
                                                                      a second run succeeds on the node of BASE

`git archive` provides the source of BASE. If the repository lacks that commit (a source archive, a shallow clone), the
program says so and checks nothing. Until the first release, developers edit the only revision of the tables in place.
If the revision has changed since BASE, the program says so and checks nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 120.0
_REVISIONS = "src/serverless_gpu/server/db/migrations/versions"
CALL = """
import sys, time
from pathlib import Path
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="H100", remote=True)
def work(directory):
    Path(directory, "began").touch()
    limit = time.monotonic() + 100
    while not Path(directory, "go").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    return "done"

if __name__ == "__main__":
    print(*work.distributed(sys.argv[1]), flush=True)
"""


def main() -> int:
    """Run the check. Return 0 if no run was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", help="the previous version (default: %(default)s)")
    base = parser.parse_args().base
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", f"{base}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        print(f"NOTHING WAS CHECKED: this repository has no {base}, so there is no version to upgrade from")
        return 0
    if _was_edited_in_place(base):
        print(
            f"NOTHING WAS CHECKED: the tables were edited in place since {base}, so this version cannot open "
            "its database"
        )
        print("hint: name a commit with the current tables: python -m scripts.upgrade_check --base COMMIT")
        return 0
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    try:
        with _source(base, home / "base") as before:
            _check(home, before)
    finally:
        _command(ROOT / "src", home, "stop", check=False)
        shutil.rmtree(home, ignore_errors=True)
    print(f"a run began under {found.stdout.strip()} and ended under this version; its node then ran another run")
    return 0


def _was_edited_in_place(base: str) -> bool:
    """Return True if a table revision of BASE has changed, which is allowed only before a release."""
    words = ["git", "-C", str(ROOT), "diff", "--quiet", "--diff-filter=MD", base, "--", _REVISIONS]
    return subprocess.run(words, check=False).returncode != 0


@contextlib.contextmanager
def _source(base: str, directory: Path) -> Iterator[Path]:
    directory.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", base, "src"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    yield directory / "src"


def _check(home: Path, before: Path) -> None:
    script = home / "call.py"
    script.write_text(CALL)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        # Both servers use this port, because the node does not learn about a new port.
        port = str(probe.getsockname()[1])
    server = _server(before, home, "--port", port)
    directory = home / "first"
    directory.mkdir()
    caller = _call(before, home, script, directory)
    _wait(lambda: (directory / "began").exists(), "the run did not begin")
    _end(server)
    server = _server(
        ROOT / "src", home, "--no-node", "--port", port
    )  # The old node stays, like a node on another machine.
    try:
        (directory / "go").touch()
        _answered(caller)
        directory = home / "second"
        directory.mkdir()
        (directory / "go").touch()
        _answered(_call(ROOT / "src", home, script, directory))
    finally:
        _end(server)


def _environ(source: Path, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SERVERLESS_GPU_", "SGPU_"))}
    own = {"SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_FAKE": "H100:1", "SERVERLESS_GPU_PREWARM": "0"}
    return {**kept, **own, "PYTHONPATH": str(source)}


def _command(source: Path, home: Path, *words: str, check: bool = True) -> None:
    command = [sys.executable, "-m", "serverless_gpu.cli", *words]
    subprocess.run(command, env=_environ(source, home), check=check, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def _server(source: Path, home: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", *options]
    server = subprocess.Popen(command, env=_environ(source, home), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    assert " at http" in line, f"the server of {source} did not start: {line}"
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    server.wait(_LIMIT_S)
    if server.stdout is not None:
        server.stdout.close()


def _call(source: Path, home: Path, script: Path, directory: Path) -> subprocess.Popen[str]:
    words = [sys.executable, str(script), str(directory)]
    return subprocess.Popen(words, env=_environ(source, home), stdout=subprocess.PIPE, text=True)


def _answered(caller: subprocess.Popen[str]) -> None:
    said, _ = caller.communicate(timeout=_LIMIT_S)
    assert caller.returncode == 0 and said.strip().endswith("done"), (
        f"the call ended with exit code {caller.returncode}: {said}"
    )


def _wait(found: object, what: str) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not (callable(found) and found()):
        assert time.monotonic() < limit, what
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
