"""The server opens nothing of what it is given: pickles that go off when they are opened, in every place for bytes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import BlobReference, Function
from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.core.server_key import read_keys, sha256
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.routing import BYTES, JSON, Route
from serverless_gpu.wire.agents import AgentHello, Ending, File, LogPiece, Report
from serverless_gpu.wire.base import API
from tests.support.environment.servers import ended, first_line_with
from tests.support.server.samples import sample
from tests.support.server.stored import add_node, add_people, add_run, place

DETONATED = 33
PAYLOAD = "serverless_gpu.node.inside.payload"
_SERVER = """
import os, sys
from pathlib import Path

def watch(event, arguments):
    if event == "pickle.find_class":
        os.write(2, b"something was unpickled")
        os._exit(%d)

sys.addaudithook(watch)
from serverless_gpu.server.process import serve
from serverless_gpu.server.core.settings import read_settings
serve(read_settings(Path(sys.argv[1]), {"port": 0, "node": False}), ready=lambda url, _: print(url, flush=True))
"""


class Bomb:
    """Goes off when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.canary,)


class Audited(NamedTuple):
    """A server in a process of its own that ends when anything is unpickled in it."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]

    def client(self, token: str) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url + API, headers={"Authorization": f"Bearer {token}"}, verify=False, timeout=20
        )


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Audited]:
    command = [sys.executable, "-c", _SERVER % DETONATED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with ended(process):
        assert process.stdout is not None
        url = first_line_with(process, process.stdout.fileno(), rb"http://127\.0\.0\.1:\d+")
        yield Audited(url, tmp_path, process)


def bombs(canary: Path) -> list[bytes]:
    """Return pickles of each protocol; as a file of numpy's, one of them, too."""
    plain = [pickle.dumps(Bomb(canary), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    return [*plain, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + plain[2]]


def started_run(home: Path, payload: bytes) -> tuple[str, str]:
    """Write a run with an attempt, as scheduler and API do; return its identifier and the attempt's token."""
    database = Database(f"sqlite:///{home}/server/server.db", clock=SystemClock())
    add_people(database, "alice")
    add_node(database)
    said = {**msgspec.to_builtins(sample(AgentHello, b"")), "keys": None}
    hello = msgspec.json.encode(said).decode()
    database.write(lambda connection: connection.execute(tables.nodes.update().values(hello_json=hello)))
    called = Function(call=BlobReference(size=len(payload), parts=(blake3(payload).hexdigest(),)))
    run_id = add_run(database, payload=called)
    fence = place(database, run_id)
    token = read_keys(home / "server").attempt_token(run_id, fence)
    change = tables.crews.update().values(token_sha256=sha256(token))
    database.write(lambda connection: connection.execute(change))
    database.close()
    return run_id, token


def test_it_would_go_off(tmp_path: Path) -> None:
    """So what the other test shows is worth something: a process that watches ends, another one makes the canary."""
    for number, bomb in enumerate(bombs(tmp_path / "canary")[:-1]):
        pickle.loads(bomb)
        (tmp_path / "canary").rmdir()
        watched = _SERVER.partition("from serverless_gpu")[0] % DETONATED + f"import pickle; pickle.loads({bomb!r})"
        done = subprocess.run([sys.executable, "-c", watched], capture_output=True, timeout=60, check=False)
        assert done.returncode == DETONATED, number
    assert not (tmp_path / "canary").exists()


def test_a_pickle_in_every_place_for_bytes_is_kept_or_refused_and_never_opened(
    audited: Audited, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    admin, node = ((audited.home / "server" / name).read_text().strip() for name in ("token", "node.token"))
    run_id, attempt = started_run(audited.home, bombs(canary)[-2])
    answered: dict[str, set[int]] = {}
    for token in (attempt, node, admin, admin):  # the last reads what the one before has put
        with audited.client(token) as client:
            for bomb in bombs(canary):
                for route in api_routes():
                    path = filled(route, run_id, bomb)
                    status = sent(client, route, path, bomb, run_id)
                    answered.setdefault(f"{route.method} {route.path}", set()).add(status)
                    assert audited.process.poll() is None, (route.method, route.path)
                    assert not canary.exists(), (route.method, route.path)
    assert not {name: seen for name, seen in answered.items() if seen & {500}}
    for accepted in (
        "PUT /blobs/{digest}",
        "GET /attempts/{run}/{fence}/blobs/{digest}",
        "PUT /environments/objects/{key:path}",
        "GET /environments/objects/{key:path}",
        "GET /runs/{run}/logs/{rank}/{stream}",
        "GET /runs/{run}/files",
    ):
        assert answered[accepted] & {200, 204}, (accepted, answered[accepted])


def filled(route: Route, run_id: str, bomb: bytes) -> str:
    """Return the path of a route with something in it that is there, where anything is."""
    digest = blake3(bomb).hexdigest()
    parts = {"run": run_id, "fence": "1", "rank": "0", "stream": "stdout", "digest": digest, "key": f"packs/{digest}"}
    path = route.path
    for name in route.parts:
        value = parts.get(name, "results/0.pkl" if f"{{{name}:path}}" in path else "name")
        path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
    return path


def sent(client: httpx2.Client, route: Route, path: str, bomb: bytes, run_id: str) -> int:
    """Send a request with the bomb wherever its route takes bytes; return the status of the answer."""
    headers = {"Content-Type": route.content_type} if route.content_type else {}
    content = None
    if route.content_type == BYTES:
        content = bomb
    elif route.content_type == JSON:
        content = msgspec.json.encode(sample(route.body, bomb, {"fence": 1, "run_id": run_id, "rank": 0, "offset": 0}))
    with client.stream(route.method, path, content=content, headers=headers) as response:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.read()
        return response.status_code


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "client.launch.environment_process",
        "node.agent.agent",
        "node.agent.restore_process",
        "node.supervisor.session",
        "node.supervisor.supervisor",
        "node.uplink.process",
    ],
)
def test_processes_of_a_node_and_commands_have_nothing_in_them_that_unpickles(module: str) -> None:
    program = f"import sys; import serverless_gpu.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"pickle", "_pickle", "cloudpickle", "multiprocessing", PAYLOAD} & set(loaded.stdout.split())


def test_commands_show_what_others_left_behind_and_open_none_of_it(audited: Audited, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bomb = bombs(canary)[-2]
    run_id, token = started_run(audited.home, bomb)
    names = ("results/0.pkl", "failures/0.pkl", "failures/0.json", "failures/0.stack", "hang-1.txt")
    report = Report(
        state=State.STOPPING,
        world_size=1,
        exec_ns=1,
        logs=(LogPiece(rank=0, stream="stdout", offset=0, data=bomb),),
        files=tuple(File(name=name, size=len(bomb), inline=bomb) for name in names),
        ending=Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True),
    )
    with audited.client(token) as client:
        headers = {"Content-Type": JSON}
        sent = client.post(f"/attempts/{run_id}/1/report", content=msgspec.json.encode(report), headers=headers)
        assert sent.status_code == 200, sent.text
    program = _SERVER.partition("from serverless_gpu")[0] % DETONATED + "from serverless_gpu.cli import main; main()"
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(audited.home)}  # where the server's own user finds its token
    for command in (
        "runs",
        f"show {run_id}",
        f"logs {run_id}",
        f"result {run_id} --output {tmp_path}",
        "status",
        "nodes",
        "pools",
        f"cancel {run_id}",
    ):
        arguments = [sys.executable, "-c", program, *command.split()]
        done = subprocess.run(arguments, capture_output=True, env=environ, timeout=60, check=False)
        assert done.returncode != DETONATED and not canary.exists(), command
        assert b"Traceback" not in done.stderr, (command, done.stderr)
