"""`sgpu up`, `down` and `server`: run the server in the foreground, and administer the server.

`sgpu server logs` reads the log of this home's server, even while the server is not running. The log consists of JSON
lines in files that rotate at a size (`server/core/server_log.py`). The command prints lines in the order in which the
server wrote them. The command prints an incomplete or invalid line unchanged. When the server rotates the log, the
command first reads the old file to its end. Control characters in names and messages cannot affect the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import importlib.util
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock, machine
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import JsonType, json_option, print_json, print_table, say, say_lines, wide_option
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import NotFound, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.scheduling.wait_messages import first_few, sharing_warnings
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.server.core.server_log import KEPT
from serverless_gpu.units import format_bytes, format_duration_ms
from serverless_gpu.version import __version__
from serverless_gpu.wire.server_status import DrainRequest, DrainView

if TYPE_CHECKING:
    from serverless_gpu.server.core.settings import Settings
    from serverless_gpu.server.identity.uid_sharing import Exposure
    from serverless_gpu.server.process import UvicornServer

_NEEDED = ("starlette", "uvicorn", "sqlalchemy", "alembic", "cryptography", "httptools", "prometheus_client")
_LOOK_S = 0.5
_HOME_REASON = "the server stores its files there"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FOLLOW_LOOK_S = 0.2
_LINE_BYTES_MAX = 1 << 20
_LOG_FIELDS = ("ts", "level", "logger", "msg", "traceback")


@click.command()
@click.option("--host", help="Address to listen on (default: loopback).")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port (default: 7878, or a free port that the server reuses)."
)
@click.option("--database", metavar="URL", help="PostgreSQL database, postgresql://… (default: a file in this home).")
@click.option("--store", metavar="URL", help="Store for environments: s3://…, gs://…, az://…, or a directory.")
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Additional host name of the server. Repeatable."
)
@click.option("--tls-cert", metavar="FILE", help="PEM file of the server's certificate and chain, for https://.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate, readable by you alone.")
@click.option(
    "--behind-proxy", multiple=True, metavar="ADDRESS", help="Proxy that terminates TLS for this server. Repeatable."
)
@click.option("--stop-within", metavar="DURATION", help="Time for open requests when the server stops (default: 30s).")
@click.option("--node/--no-node", default=None, help="Offer this machine's devices to runs of the server.")
@click.option(
    "--partition-grace",
    metavar="DURATION",
    help="Time for which a run continues while its node cannot reach the server (default: 15m).",
)
@click.option(
    "--retention",
    metavar="DURATION",
    help="Time for which the server keeps ended runs, their output and results (default: 30d).",
)
@click.option(
    "--unsatisfiable-after",
    metavar="DURATION",
    help="Waiting time of a run that no node can ever serve (default: 24h).",
)
@click.option(
    "--max-run", metavar="DURATION", help="Maximum time of an attempt without a limit of a usage policy (default: 7d)."
)
@click.option("--logs-gib", type=float, metavar="GIB", help="Maximum size of the output of all runs (default: 100).")
@click.option(
    "--nearby-gib",
    type=float,
    metavar="GIB",
    help="Maximum size of local copies of environments in a bucket (default: 20; 0 for none).",
)
@click.option(
    "--on-owner-disabled",
    type=click.Choice(["finish", "stop"]),
    help="Action for runs of a user who may no longer start runs (default: finish).",
)
@click.option("--currency", metavar="CODE", help="Currency of prices and charges (default: USD).")
@click.option("--mlflow/--no-mlflow", default=None, help="Also start an MLflow server, which tracks remote runs.")
@click.option(
    "--mlflow-store", metavar="URL", help="Store of MLflow, for example postgresql://… (default: a store in this home)."
)
@click.option("--mlflow-url", metavar="URL", help="Address of MLflow for other machines, such as that of a proxy.")
@click.option("--webhook", metavar="URL", help="Address that receives budget notices and alarms.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    help="Engine (default: local); ray makes one pool of this machine and those that join.",
)
@click.option(
    "--ray-port", type=int, metavar="PORT", help="First of the hundred ports that Ray uses here (default: 7900)."
)
@click.option("--node-address", metavar="IP", help="Address of this machine for machines that join.")
@click.option("--ray-address", metavar="HOST:PORT", help="Existing Ray cluster to use instead of starting one.")
@click.option("--ray-token-file", metavar="FILE", help="Token of that Ray cluster, in a file that only you can read.")
@click.option("--tls-ca", metavar="FILE", help="Certificate of the issuer, for machines that join and do not trust it.")
@click.option(
    "--key-lost", is_flag=True, default=None, help="Start although the key of secrets and unended runs is lost."
)
@click.option(
    "--accept-rollback", is_flag=True, default=None, help="Continue with a database that lost acknowledged changes."
)
def up(hosts: Sequence[str], behind_proxy: Sequence[str], **options: Any) -> None:
    """Start a server in the foreground.

    Without options the server uses a database in this home, this machine's devices and a loopback address. The server
    writes its token to a file that only you can read. Scripts and notebooks of this home use the server with
    @distributed(..., remote=True). Settings can also come from variables (SGPU_PORT, ...) and from server.toml in the
    home. `sgpu server config` shows the effective values.
    """
    refuse_incomplete()
    if faults.named():
        say(f"sgpu: warning: {faults.warning()}", err=True)
    home = durable_home("a server keeps its database, keys and tokens there")
    settings_module = load("serverless_gpu.server.core.settings")
    settings = settings_module.read_settings(
        home.root,
        {**options, "hosts": tuple(hosts) or None, "behind_proxy": tuple(behind_proxy) or None},
        environ=os.environ,
    )
    for problem in (*settings_module.unknown_variables(os.environ), *disk_warnings(home)):
        say(f"sgpu: warning: {problem}", err=True)

    sidecars = load("serverless_gpu.server.operations.sidecars")
    sidecars.refuse_ray(settings)

    def write_files(url: str, running: UvicornServer) -> list[str]:
        token = (settings.directory / "token").read_text(encoding="ascii").strip()
        write_profile(home.root, ServerProfile(url=url, token=token, embedded=True, machine=machine()))
        said: list[str] = sidecars.offer_joining(settings, url=url, port=running.port, certified=running.certified)
        return said

    def ready(url: str, running: UvicornServer, mlflow: str) -> None:
        joining = write_files(url, running)
        for line in (*_address_lines(url, home, mlflow), *_outside_lines(settings, running), *joining):
            say(line)
        for warning in running.warnings:
            say(f"sgpu: warning: {warning}", err=True)

    try:
        with sidecars.mlflow_sidecar(settings) as complete:
            load("serverless_gpu.server.process").serve(
                complete,
                ready=lambda url, running: ready(url, running, complete.mlflow_url if complete.mlflow else ""),
                announce=lambda line: say(f"sgpu: {line}", err=True),
                decide=decide_sharing,
                renewed=write_files,
            )
    except load("serverless_gpu.server.db.leader_lock").TakenOver as error:
        say_lines(f"sgpu: {error}", err=True)
        sys.exit(load("serverless_gpu.server.operations.systemd").TAKEN_OVER)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise storage_error(error, settings.directory) from error
    grace = format_duration_ms(round(settings.partition_grace_s * 1000))
    if settings.ray is not None:
        say("Ray continues for ten minutes in case the server starts again; `sgpu stop` ends it")
    say(f"the server has stopped; runs continue for up to {grace} until `sgpu up` starts it again")


def decide_sharing(found: Exposure) -> bool | None:
    """Warn if several principals share a uid.

    On a terminal, ask the operator to allow or refuse the shared uid.
    """
    warnings = sharing_warnings(principals=found.principals, closed=found.closed, shared=found.shared)
    for warning in warnings:
        say(f"sgpu: warning: {warning}", err=True)
    if not found.undecided:
        return None
    if found.had_runs:
        say(
            f"sgpu: warning: {', '.join(first_few(found.had_runs))} ran code here already, which could read the "
            "server's key, tokens and secrets; to replace them, press Ctrl-C, run `sgpu server rotate`, and "
            "change the secrets at their source",
            err=True,
        )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    named = ", ".join(first_few(found.undecided))
    return click.confirm(f"May runs of several principals share one operating-system user in {named}?", err=True)


def _address_lines(url: str, home: Home, mlflow: str) -> list[str]:
    return [
        f"serverless-gpu {__version__} at {url}",
        *([f"MLflow at {mlflow} tracks remote runs; it answers in some seconds"] if mlflow else []),
        "scripts and notebooks of this home use this server with @distributed(..., remote=True)",
        f"files: {home.root / 'server'}",
        "Ctrl-C stops the server; runs continue",
    ]


def disk_warnings(home: Home) -> list[str]:
    """Return warnings if the disk has too little space for the server."""
    space, reserve = load("serverless_gpu.server.core.disk_space"), load("serverless_gpu.server.db.disk_reserve")
    free, needed = space.free_bytes(home.root), max(space.KEPT_FREE_BYTES, reserve.LOW_BYTES + reserve.BYTES)
    if free is None or free > needed:
        return []
    return [
        f"the disk of {home.root} has only {format_bytes(free)} left: the server accepts output, results and "
        f"environments above {format_bytes(space.KEPT_FREE_BYTES)} and new runs above "
        f"{format_bytes(reserve.LOW_BYTES)}"
    ]


def _outside_lines(settings: Settings, running: UvicornServer) -> list[str]:
    if running.certificate:
        others = f"others: https://…:{running.port}; {running.certificate}"
        ended = (
            "warning: the certificate has expired, so other machines cannot reach this server; renew it, then "
            "send SIGHUP"
        )
        return [others, ended] if running.is_certificate_over else [others]
    if settings.behind_proxy:
        return [
            f"others: through the proxy at {', '.join(settings.behind_proxy)}, which connects to port {running.port}"
        ]
    return []


def refuse_incomplete() -> None:
    """Raise ServerProblem unless the server's packages are installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerProblem(
            f"a server needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'serverless-gpu[server]'",
        )


@click.command()
@click.option(
    "--wait", default="2m", show_default=True, metavar="DURATION", help="Wait at most this long until the server stops."
)
def down(wait: str) -> None:
    """Stop the server of this home.

    The server finishes open requests first. Running runs continue. The nodes of these runs report to the server after
    its next start.
    """
    limit_s = duration_s("--wait", wait)
    directory = durable_home(_HOME_REASON).root / "server"
    listener = load("serverless_gpu.server.http.listener")
    pid = listener.lock_holder(directory)
    if pid is None:
        say("no server of this home is running")
        return
    os.kill(pid, signal.SIGTERM)
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
    while listener.lock_holder(directory) == pid:
        if clock.boottime_ns() > deadline_ns:
            raise ServerProblem(
                f"the server (process {pid}) has not stopped within {wait}",
                hint=f"wait longer (--wait), or read the server's log: {directory / 'server.log'}",
            )
        time.sleep(_LOOK_S)
    say("the server has stopped; runs continue")


@click.group("server")
def server_group() -> None:
    """Configure, drain and back up a server."""


@server_group.command()
@wide_option
@json_option(JsonType("cli.json_types:Setting", is_list=True))
def config(wide: bool, as_json: bool) -> None:
    """Print all settings and their origin.

    An option overrides a variable (SGPU_PORT), which overrides server.toml in the home. The command hides passwords in
    addresses.
    """
    refuse_incomplete()
    home = durable_home(_HOME_REASON)
    settings = load("serverless_gpu.server.core.settings")
    settings.read_settings(home.root, environ=os.environ)
    said = settings.effective_settings(home.root, environ=os.environ)
    if as_json:
        print_json(said)
        return
    rows = [[each.name, _setting_text(each.value), each.origin] for each in said]
    print_table(["SETTING", "VALUE", "ORIGIN"], rows, wide=wide)


@server_group.command()
def unit() -> None:
    """Print a systemd unit for the server.

    A restart of the unit does not end runs.
    """
    refuse_incomplete()
    home = durable_home(_HOME_REASON)
    systemd = load("serverless_gpu.server.operations.systemd")
    settings = load("serverless_gpu.server.core.settings").read_settings(home.root, environ=os.environ)
    there = systemd.Installation(
        command=(sys.executable, "-m", "serverless_gpu.cli", "up"),
        user=getpass.getuser(),
        home=home.root,
        node=settings.node or settings.ray is not None,  # Ray needs permissions that the unit's sandbox removes.
        tls=bool(settings.tls_cert),
        stopping_s=settings.stopping_s,
    )
    click.echo(systemd.unit(there), nl=False)


@server_group.command()
@click.option("--note", default="", metavar="TEXT", help="Reason that waiting runs show.")
@click.option("--wait", "wait", metavar="DURATION", help="Wait until no run is left, at most this long.")
def drain(note: str, wait: str | None) -> None:
    """Start no new runs on the server.

    The drain lasts until `sgpu server resume`, also across restarts. Running runs continue. The server accepts new
    runs. New runs wait, with a message that names the operator and the reason of the drain.
    """
    limit_s = duration_s("--wait", wait) if wait is not None else 0.0
    with server(patience_s=limit_s) as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=True, note=note), answer=DrainView)
        say(f"no new runs start; {_drain_text(view)}")
        clock, said = SystemClock(), view.going
        deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
        while view.going and clock.boottime_ns() < deadline_ns:
            time.sleep(_LOOK_S)
            view = connection.ask("GET", "/drain", answer=DrainView)
            if view.going != said:
                said = view.going
                say(_drain_text(view))
    if wait is not None and view.going:
        raise ServerProblem(f"{view.going} runs are still running after {wait}", hint="`sgpu runs` lists them")


@server_group.command()
def resume() -> None:
    """Start waiting runs again after a drain."""
    with server() as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=False), answer=DrainView)
    say(f"waiting runs start again; {_drain_text(view)}")


@server_group.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def backup(directory: Path) -> None:
    """Back up the server into DIRECTORY.

    The server may run at the same time. The backup has the database, the key, tokens, output of ranks, parts and
    environments. Protect the backup like the server. Unchanged files are links to the previous backup. Dump a
    PostgreSQL database first, because the backup does not include it.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    load("serverless_gpu.server.operations.rotation").refuse_unfinished(settings.directory)
    made = load("serverless_gpu.server.operations.backup").back_up(settings, directory.absolute(), clock=SystemClock())
    files = made.manifest.files
    size = format_bytes(sum(entry.size for entry in files.values()))
    say(f"{made.path}: {len(files)} files, {size}; {made.linked} of them unchanged since the previous backup")
    if made.manifest.database != "sqlite":
        say("the backup does not include the database; dump it first: pg_dump --format=custom --file=… DATABASE")
    if "://" in settings.store:
        say("the backup does not include environments and parts, which are in the bucket")


@server_group.command()
@json_option(JsonType("server.invariants.self_check:CheckResult"))
def check(as_json: bool) -> None:
    """Check the invariants of the database.

    The command only reads, and the server may run at the same time. The command prints each violation, and then exits
    with 1. The command also reports a database that was rolled back, and files of runs that the database does not have.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    database_module = load("serverless_gpu.server.db.database")
    path = settings.database.partition("sqlite:///")[2]
    if path and not Path(path).exists():
        raise ServerProblem(f"there is no server in this home: {path} does not exist", hint="`sgpu up` starts a server")
    rollback = load("serverless_gpu.server.operations.backup")
    with contextlib.closing(database_module.Database(settings.database, clock=SystemClock())) as database:
        lost = rollback.rollback_evidence(settings, database.read)
        checked = load("serverless_gpu.server.invariants.self_check").check(database.read)
    if as_json:
        print_json(msgspec.structs.replace(checked, lost=lost))
    else:
        for sentence in lost:
            say(sentence)
        for violation in checked.violations:
            say(f"{violation}")
        for what in checked.skipped:
            say(f"too large to check: {what}")
        say(f"{len(checked.violations)} violations in {checked.runs} runs")
    if checked.violations or lost:
        sys.exit(1)


@server_group.command()
@click.argument("backup", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(backup: Path) -> None:
    """Verify the files of a backup."""
    refuse_incomplete()
    manifest = load("serverless_gpu.server.operations.backup").verify(backup)
    say(f"{backup} is intact: {len(manifest.files)} files")


@server_group.command()
@click.argument("backup", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--nothing-ran-since",
    is_flag=True,
    help="Confirm that the server did not run after the backup, so that waiting runs start.",
)
def restore(backup: Path, nothing_ran_since: bool) -> None:
    """Restore a server from BACKUP.

    The home must not contain a server. Start the restored server with `sgpu up`. A run that waits in the backup may
    have run after the backup. Therefore waiting runs become LOST, and the owners must submit these runs again. A
    running run continues if its node still has the run. Tokens that were revoked after the backup are valid again, and
    secrets that were deleted after the backup exist again. Revoke these tokens and delete these secrets again.
    """
    refuse_incomplete()
    home = durable_home(_HOME_REASON)
    manifest = load("serverless_gpu.server.operations.backup").restore(
        home, backup, nothing_ran_since=nothing_ran_since
    )
    say(f"{home.root / 'server'}: {len(manifest.files)} files restored")
    if manifest.database != "sqlite":
        say("the backup does not include the database; restore it before `sgpu up`: pg_restore --dbname=DATABASE …")
    if not nothing_ran_since:
        say(
            "when the server starts, waiting runs become LOST, because they may have run since; `sgpu audit list` "
            "counts them"
        )


@server_group.command()
@click.option("--yes", "certain", is_flag=True, help="Do not ask for confirmation.")
def rotate(certain: bool) -> None:
    """Replace the server's key and all tokens.

    Use this command if code of several principals shared one operating-system user. Also use this command if other
    users could read the server's directory. Stop the server first. The command seals secrets and variables of unended
    runs with the new key. The command does not change the values of secrets, so change each secret at its source. The
    command revokes every token and creates new tokens for this machine's administrator and node. If the command is
    killed, run the command again. `sgpu up` refuses to start until the rotation is complete.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    if not certain:
        click.confirm("Revoke every token of this server, and replace its key?", abort=True, err=True)
    login = load("serverless_gpu.server.startup").login()
    rotated = load("serverless_gpu.server.operations.rotation").rotate(settings, clock=SystemClock(), login=login)
    sealed = f"{_count_text(len(rotated.secrets), 'secret')} and variables of unended runs are sealed with the new key"
    say(f"the server has a new key; {sealed}")
    say(f"new tokens of this machine are in {settings.directory}; `sgpu up` gives them to this home and its node")
    for name, count in rotated.revoked:
        say(f"{name}: {_count_text(count, 'token')} revoked; create a new one with: sgpu token create --for {name}")
    for node in rotated.nodes:
        say(f"node {node}: its token is revoked; join again with a new token within the partition grace of its runs")
    for secret in rotated.secrets:
        of = f"team {secret.team}" if secret.team else secret.owner
        say(f"secret {secret.name} of {of}: change it at its source, then: sgpu secret set {secret.name}")
    if rotated.is_ray_given:
        say("Ray uses the token of --ray-token-file; change it where you start that cluster")
    say("change at their source: passwords and keys in server.toml, SGPU_* variables and the file of --tls-key")


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _drain_text(view: DrainView) -> str:
    return f"{view.going} running, {view.waiting} waiting"


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value in (None, "") else str(value)


@server_group.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until Ctrl-C.")
@click.option(
    "--run",
    "run_id",
    default="",
    metavar="RUN",
    help="Only lines about this run; a prefix of its identifier is enough.",
)
@click.option(
    "--level",
    type=click.Choice(_LEVELS, case_sensitive=False),
    default="DEBUG",
    help="Only lines of this level and above.",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Number of lines, from the end of the log.",
)
@json_option(JsonType("cli.json_types:LogLine"), text="Print the lines of the file unchanged, one JSON object each.")
def server_logs(follow: bool, run_id: str, level: str, lines: int, as_json: bool) -> None:
    """Print the log of this home's server."""
    path = durable_home("the server stores its log there").root / "server" / "server.log"
    if not path.exists():
        raise NotFound(
            f"there is no log of a server at {path}", hint="start a server with `sgpu up`; it writes its log there"
        )

    def is_wanted(line: bytes) -> bool:
        found = _parse_line(line)
        if run_id and not str(found.get("run", "")).startswith(run_id):
            return False
        return found.get("level") not in _LEVELS[: _LEVELS.index(level.upper())]

    def show(line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\n")
        for each in (text if as_json else _log_line_text(line)).split("\n"):
            say(each)

    followed = FollowedFile(path)
    kept = deque((line for line in _kept_lines(path, followed) if is_wanted(line)), maxlen=lines)
    for line in kept:
        show(line)
    if run_id and lines and level.upper() == _LEVELS[0] and not kept and not follow:
        raise NotFound(
            f"{path} has no line about run {run_id}",
            hint=f"the server deletes the oldest lines; `sgpu show {run_id}` shows the run",
        )
    while follow:
        for line in filter(is_wanted, followed.more()):
            show(line)
        time.sleep(_FOLLOW_LOOK_S)


class FollowedFile:
    """Follows the current log file from the last read position, also after a rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._held = b""

    def more(self) -> Iterator[bytes]:
        """Yield the complete lines that were written since the last call."""
        while True:
            if self._fd < 0 and not self._open():
                return
            yield from self._lines()
            try:
                is_same = os.fstat(self._fd).st_ino == self._path.stat().st_ino
            except FileNotFoundError:  # The server is renaming the file.
                return
            if is_same:
                return
            yield from self._lines()  # Read the unread lines of the old file, which the server has renamed.
            os.close(self._fd)
            self._fd, self._held = -1, b""

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _lines(self) -> Iterator[bytes]:
        while data := os.read(self._fd, _LINE_BYTES_MAX):
            *whole, self._held = (self._held + data).split(b"\n")
            if len(self._held) > _LINE_BYTES_MAX:
                whole, self._held = [*whole, self._held], b""
            yield from whole


def _kept_lines(path: Path, followed: FollowedFile) -> Iterator[bytes]:
    """Yield the lines of all log files, oldest first. `followed` reads the current file."""
    for number in range(KEPT, 0, -1):
        try:
            with open(f"{path}.{number}", "rb") as file:
                yield from file
        except FileNotFoundError:
            continue
    yield from followed.more()


def _parse_line(line: bytes) -> Mapping[str, object]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _log_line_text(line: bytes) -> str:
    found = _parse_line(line)
    if not found:
        return line.decode("utf-8", "replace").rstrip("\n")
    # Fields that the message of an access log line already contains.
    said = (*_LOG_FIELDS, "method", "route") if found.get("logger") == "access" else _LOG_FIELDS
    about = " ".join(f"{name}={value}" for name, value in found.items() if name not in said)
    told = f"{found.get('ts', '')} {found.get('level', '')!s:<7} {found.get('logger', '')}: {found.get('msg', '')}"
    # A line break in a message must not begin another line.
    told = (told + (f"  ({about})" if about else "")).replace("\n", "⏎")
    return "\n    ".join([told, *str(found.get("traceback", "")).splitlines()])
