"""Runs the server's sidecars: Ray (`--engine ray`) and MLflow (`--mlflow`).

Ray sidecar and join file:

    refuse_ray    checks before any start: Ray is missing, an address is wrong, other users can read a token
    RaySidecar    files and keeper (`engines/ray/ray_keeper.py`), maintained by a loop; Ray outlives the server

    join file     server/join.json: the server's address, and a token with which one machine may join within a day

    server/ray/   token  node.json  keeper.json  keeper.lock  keeper.log  ray.log  engine/

With `ray_address`, another machine runs the Ray head, and the server's machine joins the Ray cluster as a normal node.
Ray answers only requests from machines in its cluster.

The MLflow sidecar ends with the server. By default, MLflow serves the tracking store in the server's home directory.
Users therefore also see runs that they tracked without a server. The server replaces an MLflow server that another
Python interpreter runs for the same store.

    sgpu up ── keeper (`node/mlflow_server/`), in the server's interpreter ── MLflow, on loopback
       ├─ a thread starts another keeper if the keeper is killed
       └─ /version has its address: runs whose caller configured no tracking use this address

Failure cases:

* If Ray dies or its keeper is killed, the server restarts the keeper. `/health` reports an outage of Ray. A Ray outage
  does not affect running runs.

* If Ray does not start, the server continues without Ray. The server shows the reason for new gangs that wait for other
  machines.

* If MLflow is not installed, the server refuses to start. The server also refuses to start if it has remote users and
  its MLflow listens on loopback.

* If MLflow fails, the server continues and restarts MLflow after a pause. `/health` reports the reason for an MLflow
  failure.

* If the server is killed, the keeper of MLflow ends after the kernel has closed its pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock, machine
from serverless_gpu.engines.ray import ray_keeper, ray_machine, start_arguments
from serverless_gpu.engines.ray.pool_join import JOIN_FILE_NAME, JoinFile, write_join_file
from serverless_gpu.engines.ray.ray_keeper import KeeperPlan, unreachable
from serverless_gpu.engines.ray.start_arguments import ClusterAddress
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, ServerProblem
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import readers
from serverless_gpu.node.mlflow_server.server import ServerFiles, kept, look, place_of, start_keeper, stop_server
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.core.settings import RaySettings, Settings
from serverless_gpu.server.http import tls
from serverless_gpu.server.http.auth_middleware import LOOPBACK
from serverless_gpu.server.http.listener import host_names
from serverless_gpu.wire.nodes import RayPool

EVERY_S = 5.0
_RAY_TOKEN_BYTES = 32
_MLFLOW_NEEDS = ("mlflow", "flask")  # The package mlflow-skinny lacks flask.
_MLFLOW_ENDS_S = 30.0
_MLFLOW_LOOK_S = 0.05
_MLFLOW_LOOKS = 600
_MLFLOW_TRIES = 5
_MLFLOW_PAUSE_S = 1.0
_log = logging.getLogger(__name__)


def refuse_ray(settings: Settings) -> None:
    """Raise an error if Ray cannot run with these settings."""
    if settings.ray is None:
        return
    ray_machine.check_ray()
    address = node_address(settings, settings.ray)
    ray_machine.check_own(address)
    if settings.ray.address:
        _given_token(settings.ray)
        why = unreachable(settings.ray.address)
        if why:
            raise ServerProblem(
                f"no Ray answers at {settings.ray.address}: {why}",
                hint="set --ray-address to the address of the cluster's head",
            )
    if ray_keeper.running(_directory(settings)) is None:
        taken = ray_machine.taken_port(settings.ray.port, address)
        if taken is not None:
            raise ServerProblem(
                f"another process uses port {taken} of Ray's range {start_arguments.port_range(settings.ray.port)}",
                hint="choose another range of a hundred ports: --ray-port 8100",
            )


def node_address(settings: Settings, ray: RaySettings) -> str:
    """Return the address at which other machines reach this machine."""
    if ray.node_address:
        return ray.node_address
    if ray.address:
        return ray_machine.own_address(ray.address.rpartition(":")[0].strip("[]"))
    try:
        return start_arguments.check_node_address(settings.host)
    except InvalidValue:
        return ray_machine.own_address()


class RaySidecar:
    """Keeps Ray running on this machine."""

    def __init__(self, settings: Settings, *, url: str, node_token: str) -> None:
        assert settings.ray is not None
        self._settings, self._ray = settings, settings.ray
        self.directory = _directory(settings)  # Directory of Ray's files.
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._address = node_address(settings, self._ray)
        self._token = _given_token(self._ray) if self._ray.address else _own_token(self.directory)
        self._version = ray_machine.check_ray()
        self._plan = self._prepared(url, node_token)
        self._problem = ""
        # True if Ray was already running at the server's start.
        self.was_there = ray_keeper.running(self.directory) is not None
        self._ensure()

    @property
    def cluster(self) -> ClusterAddress:
        """Return the Ray cluster's address for this machine."""
        head = self._ray.address or start_arguments.joined(self._address, self._ray.port)
        token_file = str(self.directory / ray_machine.TOKEN)
        return ClusterAddress(address=head, token_file=token_file, node_address=self._address)

    @property
    def key(self) -> str:
        """Return the key that separates this server's gangs from other servers' gangs in the Ray cluster."""
        return sha256(f"{machine()}:{self._settings.directory}")[:12]

    def pool(self) -> RayPool:
        """Return the Ray cluster data for a machine that joins the pool."""
        return RayPool(
            address=self.cluster.address,
            port=self._ray.port,
            token=self._token,
            version=self._version,
            python=ray_machine.python_version(),
            problem=unreachable(self.cluster.address),
        )

    def tick(self, now_ns: int) -> int:
        """Start Ray's keeper unless it runs, and return the time of the next check."""
        self._ensure()
        return now_ns + round(EVERY_S * 1e9)

    def problem(self) -> str:
        """Return the reason for which the Ray cluster does not answer, or ""."""
        if self._problem:
            return self._problem
        why = unreachable(self.cluster.address)
        log = self.directory / "keeper.log"
        return f"Ray's head at {self.cluster.address} does not answer: {why}; {log}" if why else ""

    def _prepared(self, url: str, node_token: str) -> KeeperPlan:
        settings, name = self._settings, socket.gethostname()
        profile = settings.directory / "node.json" if settings.node else None
        files = ray_machine.RayMachineFiles(home=Home(settings.home), directory=self.directory, profile=profile)
        if profile is not None:
            write_profile(profile, UplinkProfile(url=url, token=node_token, name=name, upload_s=settings.upload_s))
        devices = ray_machine.devices_of(files.home) if settings.node else ()
        node = ray_machine.node_of(name, self._address, self._ray.port, files, devices)
        return ray_machine.prepare_machine(node, files, self._token, os.environ, head=self._ray.address)

    def _ensure(self) -> None:
        try:
            owner = self._settings.directory / "lock"
            if ray_keeper.ensure(self.directory, self._plan, owner, os.environ):
                _log.info("the server has started Ray: %s", self.cluster.address)
        except ServerlessGpuError as error:
            if error.message != self._problem:
                _log.warning("%s", error.message)
            self._problem = error.message
        else:
            self._problem = ""


def offer_joining(settings: Settings, *, url: str, port: int, certified: Sequence[str] = ()) -> list[str]:
    """Write the join file if the server uses Ray, and return messages for the operator.

    `url` is the server's URL for this machine. Other machines use `port` and the certificate's host names in
    `certified`.
    """
    if settings.ray is None:
        return []
    token = (settings.directory / "join.token").read_text(encoding="ascii").strip()
    address = node_address(settings, settings.ray)
    server = server_url(settings, url=url, port=port, address=address, certified=certified)
    ca = ""
    if settings.tls_ca:
        ca = Path(settings.tls_ca).read_text(encoding="ascii")
    elif settings.tls_cert:
        certificate = Path(settings.tls_cert).read_text(encoding="ascii", errors="replace")
        # Another machine can verify a self-signed server certificate only with a copy of the certificate.
        ca = certificate if tls.is_its_own(certificate) else ""
    path = settings.directory / JOIN_FILE_NAME
    write_join_file(path, JoinFile(server=server, token=token, ca=ca))
    ports = start_arguments.port_range(settings.ray.port)
    lines = [f"Ray at {settings.ray.address or start_arguments.joined(address, settings.ray.port)}, ports {ports}"]
    head = settings.ray.address.rpartition(":")[0] or address
    if urlsplit(server).scheme == "http":
        why = "this server listens only on loopback. Start it with --host, --tls-cert and --tls-key"
        if not ipaddress.ip_address(address).is_loopback:
            return [*lines, f"other machines cannot join yet: {why}"]
        return [
            *lines,
            f"another home of this machine joins with: sgpu join {head} --token-file {path} "
            "--name NAME --node-address IP --ray-port PORT",
            f"other machines cannot join yet: {why}",
        ]
    return [
        *lines,
        f"another machine joins with a copy of {path}. Treat this file like a password:",
        f"  sgpu join {head} --token-file {JOIN_FILE_NAME}",
        "the token admits one machine within a day. For more machines: sgpu node invite --uses 10",
    ]


def server_url(settings: Settings, *, url: str, port: int, address: str, certified: Sequence[str]) -> str:
    """Return the server's URL for other machines, with a host name of its certificate or of a proxy."""
    if settings.tls_cert:
        usable = [
            name for name in certified if not name.startswith("*") and name not in ("localhost", "127.0.0.1", "::1")
        ]
        said = [name for name in settings.hosts if name not in usable]
        name = address if address in usable else next(iter((*settings.hosts, *usable, *said, address)))
        return f"https://{f'[{name}]' if ':' in name else name}:{port}"
    if settings.hosts:  # Without a certificate, a proxy handles TLS for the names in `hosts`.
        return f"https://{settings.hosts[0]}"
    return url


def _given_token(ray: RaySettings) -> str:
    path = Path(ray.token_file)
    try:
        others = readers(path)
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be read: {error.strerror}", hint="set --ray-token-file to the file with the cluster's token"
        ) from None
    if others:
        raise InvalidValue(f"{path} gives access to the cluster, and {others}", hint=f"chmod 600 {path}")
    return start_arguments.check_token(text)


def _own_token(directory: Path) -> str:
    path = directory / ray_machine.TOKEN
    try:
        return start_arguments.check_token(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, InvalidValue):
        return os.urandom(_RAY_TOKEN_BYTES).hex()


def _directory(settings: Settings) -> Path:
    return settings.directory / "ray"


@contextlib.contextmanager
def mlflow_sidecar(settings: Settings) -> Iterator[Settings]:
    """Run an MLflow server while the server runs, and yield the settings with MLflow's URL."""
    if not settings.mlflow:
        yield settings
        return
    _refuse_mlflow(settings)
    place = _mlflow_files(settings)
    place.make()
    host = urlsplit(settings.mlflow_url).hostname
    beside = _MlflowKeeper(place, ",".join([*host_names(settings), *([host] if host else [])]))
    try:
        uri = beside.start()
        yield msgspec.structs.replace(settings, mlflow_url=settings.mlflow_url or uri)
    finally:
        beside.close()


def mlflow_checks(settings: Settings) -> tuple[Callable[[], str], ...]:
    """Return the health check of the MLflow sidecar, or nothing without `--mlflow`."""
    if not settings.mlflow:
        return ()
    place = _mlflow_files(settings)

    def problem() -> str:
        found = look(place, SystemClock())
        return f"MLflow: {found.problem}" if found.problem else ""

    return (problem,)


def _mlflow_files(settings: Settings) -> ServerFiles:
    return place_of(Home(settings.home), settings.mlflow_store)


def _refuse_mlflow(settings: Settings) -> None:
    missing = [name for name in _MLFLOW_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerProblem(
            f"--mlflow needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'serverless-gpu[server,mlflow]'",
        )
    if any(name not in LOOPBACK for name in host_names(settings)) and not settings.mlflow_url:
        raise InvalidValue(
            "other machines may use this server, but they cannot reach its MLflow, which listens on loopback",
            hint="put a TLS proxy in front of MLflow, and give its address: --mlflow-url https://…",
        )


class _MlflowKeeper:
    """Runs the MLflow keeper, and restarts a killed keeper from a thread.

    `hosts` contains additional host names of the MLflow server, separated by commas.
    """

    def __init__(self, place: ServerFiles, hosts: str) -> None:
        self._place, self._hosts = place, hosts
        # The keeper holds the read end of a pipe, and stops when the server process closes the write end or dies.
        self._its, self._ours = os.pipe()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="mlflow", daemon=True)
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the keeper, and return the URL of its MLflow server."""
        self._keeper, uri = self._started()
        self._thread.start()
        return uri

    def close(self) -> None:
        """Stop the keeper."""
        self._closing.set()
        os.close(self._ours)
        stop_server(self._place)
        if self._thread.is_alive():
            self._thread.join(_MLFLOW_ENDS_S)
        os.close(self._its)

    def _started(self) -> tuple[subprocess.Popen[bytes], str]:
        for _ in range(_MLFLOW_TRIES):
            # Stop an MLflow server of another interpreter before each try, because a tracked run may restart that
            # server.
            stop_server(self._place)
            keeper = start_keeper(self._place, sys.executable, os.environ, owner=self._its, hosts=self._hosts)
            for _ in range(_MLFLOW_LOOKS):
                serving = kept(self._place)
                if serving is not None and self._place.noted().keeper == keeper.pid:
                    return keeper, serving.uri
                if keeper.poll() is not None or self._closing.wait(_MLFLOW_LOOK_S):
                    break
        wrote = self._place.directory / "keeper.log"
        raise ServerProblem("the keeper of MLflow's server did not start", hint=f"it wrote: {wrote}")

    def _look_after(self) -> None:
        while not self._closing.is_set():
            if self._keeper is not None:
                self._keeper.wait()
            if self._closing.wait(_MLFLOW_PAUSE_S):
                return
            try:
                self._keeper = self._started()[0]
            except (ServerlessGpuError, OSError) as error:
                _log.warning("MLflow's server: %s", error)
