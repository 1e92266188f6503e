"""Makes this machine a node of a server without Ray, and keeps the node's uplink running.

    enrol ── token of the node ─▶ accepted: keep the token
         └── token of the join file ─▶ server: a token for this home ─▶ profile
    keep  ── every few seconds: does the uplink run? ─▶ no: start it
         └── signal ─▶ return. The uplink and the runs of the node continue

    $SERVERLESS_GPU_HOME/node/    profile.json  ca.pem  keeper.lock  left

The server needs no engine for such a node, because the uplink connects to the server.

Failure cases: If the server refuses the join file, `enrol` raises the server's error. If the server does not answer, a
node that has joined before starts its uplink, which repeats its requests. If the uplink cannot start, `keep` reports
the problem once and tries again.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import machine
from serverless_gpu.errors import (
    InvalidValue,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    ServerlessGpuError,
    ServerUnavailable,
)
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile
from serverless_gpu.node.uplink.node_session import open_session
from serverless_gpu.node.uplink.presence import LEFT, instance_of
from serverless_gpu.node.uplink.server import UplinkProfile, read_profile, write_profile
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest

DIRECTORY = "node"
"""Directory of an enrolled machine's files in its home."""
EVERY_S = 2.0
_PROFILE, _CA = "profile.json", "ca.pem"


def enrol(home: Home, *, server: str, token: str, ca: str, name: str) -> Path:
    """Get a token for this machine, and return the path of its profile.

    `token` is the token of a join file. `ca` contains trusted certificates, or "" for the system's certificates. A
    machine that has joined before keeps its own token.

    Raises NotAuthenticated, NotAllowed, ServerUnavailable or StorageError.
    """
    directory = home.root / DIRECTORY
    path, trusted = directory / _PROFILE, directory / _CA
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca:
            write_private(trusted, ca.encode())
        wanted, keys = UplinkProfile(url=server, token="", ca=str(trusted) if ca else "", name=name), NodeKeyFile(home)
        if not _is_enrolled(path, wanted, keys):
            own = {"name": name, "machine": machine(), "instance": instance_of(home)}
            request = JoinRequest(**own, ray=False, keys=keys.current.public)
            with contextlib.closing(Connection(server, token, ca=wanted.ca)) as connection:
                answer = connection.ask("POST", "/agents/join", request, answer=JoinAnswer)
            write_profile(path, msgspec.structs.replace(wanted, token=answer.token))
            if answer.waits:
                hint = f"run `sgpu node approve {name}` with the server's home, then this command again"
                key = keys.current.public.fingerprint
                raise NotAllowed(f"{answer.waits}; the key of this node is {key}", hint=hint)
        (directory / LEFT).unlink(missing_ok=True)
    except NotAuthenticated as error:
        raise NotAuthenticated(
            f"the server at {server} does not accept the join file: {error.message}",
            hint="run `sgpu node invite` with the server's home, and copy the new join file to this machine",
        ) from None
    except OSError as error:
        raise storage_error(error, directory) from error
    return path


def keep(home: Home, profile: Path, environ: Mapping[str, str], stop: int, *, say: Callable[[str], None]) -> None:
    """Keep the uplink of a profile running until the descriptor `stop` is readable."""
    known: str | None = None
    while True:
        try:
            start_stop.ensure(home, profile, environ)
            problem = ""
        except ServerlessGpuError as error:
            problem = f"cannot start its uplink: {error.message}"
        if problem != known:
            say(problem or f"is a node of {read_profile(profile).url}")
            known = problem
        if select.select([stop], [], [], EVERY_S)[0]:
            return


def _is_enrolled(path: Path, wanted: UplinkProfile, keys: NodeKeyFile) -> bool:
    """Return True if the server accepts this machine's token and key, or if it does not answer."""
    try:
        profile = read_profile(path)
    except InvalidValue:
        return False
    if (profile.url, profile.name) != (wanted.url, wanted.name):
        return False
    with contextlib.closing(Connection(wanted.url, profile.token, ca=wanted.ca)) as connection:
        try:
            open_session(connection, profile.token, keys)
        except (NotAuthenticated, NotFound):
            return False
        except ServerUnavailable:
            return True  # The uplink repeats its requests until the server answers.
    return True
