"""Records what this version stores, for later ones to read: `python -m tests.e2e.stable.record home 2026-11` (as root).

    recorded/<date>/home.tar.gz     a home with runs of this machine, a captured environment
    recorded/<date>/server.tar.gz   the home of a server: people, a policy, a budget, prices, runs that ended
    recorded/<date>/backup.tar.gz   a backup of that server
    recorded/<date>/pickles.json    pickles of what users keep: exceptions, receipts, values
    recorded/<date>/expected.json   what the recording version said of all this

Nothing of the recording machine may get into them: in a mount namespace the package lies in /tmp/recorded, and the
machine is called "recorded". At the end all bytes are searched for this tree's path and the machine's own name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.e2e.stable import pickles
from tests.support.paths import REPOSITORY

HERE = Path(__file__).parent
PLACE = Path("/tmp/recorded")
PYTHON = PLACE / "python" / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
_NAME = "recorded"
_BYTES_MAX = 500_000
_LEFT_OUT = ("server.db.reserve", "agent.log", "monitor.log", "uplink.log")
"""Files that hold nothing a later version reads, or megabytes of nothing."""

ANSWERS = (
    *("runs --json", "show {trains} --json", "show {fails} --json", "metrics {trains} --json"),
    *("env show {environment} --json", "status --json"),
)
"""Commands whose JSON programs of users read, in the home; `{…}` stands for an identifier of the recording."""

SERVER_ANSWERS = (
    *("runs --json", "show {trains} --json", "queue --json", "nodes --json", "pools --json", "share list --json"),
    *("usage --json", "usage --records --json", "budget list --json", "budget show research-2026 --json"),
    *("policy list --json", "policy show careful --json", "price list --json", "user list --json", "team list --json"),
    *("token list --json", "secret list --json", "audit list --json", "server check --json", "whoami --json"),
)
"""The same of a server."""

SCRIPT = """
import sys
import time

import serverless_gpu
from serverless_gpu import distributed, runtime
from serverless_gpu.errors import InvalidValue

REMOTE = sys.argv[1:] == ["remote"]
OPTIONS = {"gpu_type": "H100", "remote": REMOTE, "tags": {"project": "recorded"}, "env": "live"}
if REMOTE:
    OPTIONS["team"] = "research"


@distributed(gpus=2, **OPTIONS)
def trains(epochs, rank=0, world_size=1):
    for epoch in range(epochs):
        print(f"epoch {epoch} of rank {rank}", flush=True)
        time.sleep(0.6)
    print("no learning rate: 0.1 is taken", file=sys.stderr, flush=True)
    return {"rank": rank, "of": world_size, "type": serverless_gpu.GPUType.H100, "loss": [1.5, 0.25]}


@distributed(gpus=2, **OPTIONS)
def fails(rank=0):
    print(f"reading shard {rank}", flush=True)
    if rank == 1:
        raise ValueError("shard 1 has no rows")
    time.sleep(20)


@distributed(gpus=1, **OPTIONS)
def refuses():
    raise InvalidValue("batch size 0", hint="take 1")


@distributed(gpus=1, **OPTIONS, timeout=0.5, grace=0.2)
def takes_long():
    time.sleep(20)


@distributed(gpus=1, **OPTIONS)
def crashes():
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)


@distributed(gpus=1, **OPTIONS)
def doubles(value):
    return 2 * value


def uses_decorated(value):
    return doubles(value)  # in this rank: the decorated function travels with the call


@distributed(gpus=1, **OPTIONS)
def leaves_memory():
    from serverless_gpu.testing import FakeGpus

    FakeGpus().set("FAKE-H100-0", memory_used_bytes=8 << 30)


if __name__ == "__main__":
    runs = {"trains": trains.submit(4)}
    for function in (fails, refuses, takes_long, crashes):
        runs[function.__wrapped__.__name__] = function.submit()
    for name, run in runs.items():
        assert run.wait(60), (name, run.status(), run.waiting_for(), run.last_sentence())
        run.receipt(30)
    if not REMOTE:
        with serverless_gpu.session(gpus=1, gpu_type="H100") as session:
            runs["in_session"] = session.submit(uses_decorated, 2)
            runs["in_session"].result()
        print("session", session.id)
        runs["leaves_memory"] = leaves_memory.submit()
        runs["leaves_memory"].receipt()
    for name, run in runs.items():
        print(name, run.id)
"""


def record(date: str) -> int:
    """Record a folder, in namespaces of its own; return an exit status."""
    target = HERE / "recorded" / date
    if target.exists():
        print(f"{target} is there already, and recordings are never written again: name another one")
        return 1
    shutil.rmtree(PLACE, ignore_errors=True)
    for name in ("python", "packages", "src", "project", "user", "out"):
        (PLACE / name).mkdir(parents=True)
    (PLACE / "project" / "work.py").write_text(SCRIPT, encoding="utf-8")
    steps = f"""
        hostname {_NAME}
        mount --bind "$1" {PLACE}/python
        mount --bind "$2" {PLACE}/packages
        mount --bind "$3/src" {PLACE}/src
        cd "$3"
        exec {sys.executable} -m tests.e2e.stable.recording
    """
    paths = [sys.base_prefix, sysconfig.get_path("purelib"), str(REPOSITORY)]
    words = ["unshare", "--mount", "--uts", "sh", "-ec", steps, "sh", *paths]
    status = subprocess.run(words, check=False).returncode
    if status == 0:
        status = _checked(PLACE / "out", forbidden=[str(REPOSITORY), sys.base_prefix, f'"{socket.gethostname()}"'])
    if status == 0:
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(PLACE / "out", target, copy_function=shutil.copyfile)
        print(f"recorded {target}")
    shutil.rmtree(PLACE, ignore_errors=True)
    return status


def unpacked(date: str, name: str, target: Path) -> Path:
    """Unpack one of a recording's archives; return where."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tarfile.open(HERE / "recorded" / date / f"{name}.tar.gz", "r:gz") as tar:
        tar.extractall(target, filter="tar")
    return target


def contents(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files in an archive."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


_OWN_KEYS = ("free", "total", "tags", "custom_tags")  # objects whose keys are not ours


def shape(value: object) -> Any:
    """Return the fields of a JSON value and what sort of value each has; of a list that of its first element."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def parsed(text: str) -> Any:
    """Return the JSON that a command printed: one value, or one for each line."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def lacks(now: Any, then: Any, path: str = "") -> list[str]:
    """Return the fields that a shape had then and has no longer, or that are of another sort."""
    if path.rpartition(".")[2] in _OWN_KEYS:
        return []
    if isinstance(now, dict) and isinstance(then, dict):
        gone = [f"{path}.{key} is gone" for key in then if key not in now]
        return gone + [line for key in then if key in now for line in lacks(now[key], then[key], f"{path}.{key}")]
    if isinstance(now, list) and isinstance(then, list):
        return lacks(now[0], then[0], f"{path}[]") if now and then else []
    if now == then or "NoneType" in (now, then):
        return []
    return [f"{path} was {then}, and is {now}"]


def _checked(out: Path, *, forbidden: list[str]) -> int:
    size = sum(path.stat().st_size for path in out.iterdir())
    problems = [f"{size} bytes, more than {_BYTES_MAX}"] if size > _BYTES_MAX else []
    for path in out.iterdir():
        files = contents(path) if path.name.endswith(".tar.gz") else [(path.name, path.read_bytes())]
        for name, data in files:
            problems += [
                f"{path.name}: {name} has {word!r}" for word in forbidden if word.encode() in data + name.encode()
            ]
    for problem in problems:
        print(f"not recorded: {problem}")
    return 1 if problems else 0


# --- in the namespaces ------------------------------------------------------------------------------------------------


def _record_inside() -> None:
    out = PLACE / "out"
    expected: dict[str, Any] = {"python": [*sys.version_info[:2]], "runs": {}, "remote runs": {}}
    _write_json(out / "pickles.json", pickles.recorded())

    home = PLACE / "home"
    with _home(home):
        expected["runs"] = _calls(home)
        expected["environment"] = _environment(home)
        known = {**expected["runs"], "environment": expected["environment"]}
        expected["answers"] = {words: _answer(home, words, known) for words in ANSWERS}
    _pack(home, out / "home.tar.gz")

    served = PLACE / "served"
    with _home(served):
        expected["remote runs"], expected["server answers"] = _serve(served)
    _pack(served, out / "server.tar.gz")
    _pack(PLACE / "backup", out / "backup.tar.gz")
    _write_json(out / "expected.json", expected)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _home(home: Path) -> Iterator[None]:
    """Make a home, and end what works in it."""
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text("[retention]\ndays = 0\ngib = 0\n\n[prices]\nH100 = 2.5\n", encoding="utf-8")
    (home / "server.toml").write_text('retention = "3650d"\n', encoding="utf-8")
    try:
        yield
    finally:
        _sgpu(home, "stop")


def _environ(home: Path) -> dict[str, str]:
    return {
        "HOME": str(PLACE / "user"),
        "LOGNAME": "alice",
        "USER": "alice",
        "LANG": "C.UTF-8",
        "PATH": f"{PLACE}/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": f"{PLACE}/src:{PLACE}/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SERVERLESS_GPU_HOME": str(home),
        "SERVERLESS_GPU_FAKE": "H100:2",
        "SERVERLESS_GPU_PREWARM": "0",
        "SERVERLESS_GPU_PRELOAD": "json",
    }


def _run(home: Path, *words: str, text: str = "", **environ: str) -> str:
    done = subprocess.run(
        [str(PYTHON), *words],
        env={**_environ(home), **environ},
        cwd=PLACE / "project",
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _sgpu(home: Path, *words: str, text: str = "") -> str:
    return _run(home, "-m", "serverless_gpu.cli", *words, text=text)


def _calls(home: Path, *words: str) -> dict[str, str]:
    said = _run(home, "work.py", *words)
    pairs = [line.split() for line in said.splitlines() if not line.startswith("[rank")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _environment(home: Path) -> str:
    """Capture a small environment: one distribution and the project's code."""
    venv = PLACE / "small"
    subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    notes = site / "greeting-1.0.dist-info"
    notes.mkdir()
    (site / "greeting.py").write_text('TEXT = "hello from a recorded environment"\n', encoding="utf-8")
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n", encoding="utf-8")
    (notes / "RECORD").write_text("greeting.py,,\ngreeting-1.0.dist-info/METADATA,,\n", encoding="utf-8")
    # Without PYTHONPATH: what it names would belong to the environment.
    begin = (
        f"import sys; sys.path[:0] = ['{PLACE}/src', '{PLACE}/packages']; from serverless_gpu.cli import main; main()"
    )
    words = ["env", "capture", "--python", str(venv / "bin" / "python"), "--json"]
    return str(json.loads(_run(home, "-c", begin, *words, PYTHONPATH=""))["address"])


def _serve(home: Path) -> tuple[dict[str, str], dict[str, Any]]:
    words = [str(PYTHON), "-m", "serverless_gpu.cli", "up", "--port", "0"]
    server = subprocess.Popen(words, env=_environ(home), cwd=PLACE / "project", stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " at http" in line, line
        for command in (
            "user add bob",
            "team add research",
            "team join research alice",
            "price set H100 2.5",
            "pool set default --isolation none",
            "share set team research 2",
            "policy set careful --max-run 1h --require-tag project",
            "policy attach careful --team research",
            "budget set research-2026 --team research --money 100 --per month --hard",
        ):
            _sgpu(home, *command.split())
        _sgpu(home, "secret", "set", "HF_TOKEN", text="recorded-secret\n")
        runs = _calls(home, "remote")
        answers = {words: _answer(home, words, runs) for words in SERVER_ANSWERS}
        _sgpu(home, "server", "backup", str(PLACE / "backup"))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return runs, answers


def _answer(home: Path, words: str, known: Mapping[str, str]) -> Any:
    return shape(parsed(_sgpu(home, *words.format(**known).split())))


def _pack(directory: Path, archive: Path) -> None:
    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        name = member.name.rpartition("/")[2]
        if name in _LEFT_OUT or not (member.isfile() or member.isdir() or member.issym()):
            return None
        return member

    with tarfile.open(archive, "w:gz", compresslevel=9, format=tarfile.PAX_FORMAT) as tar:
        tar.add(directory, arcname=".", filter=kept)


if __name__ == "__main__":
    os.umask(0o077)
    _record_inside()
