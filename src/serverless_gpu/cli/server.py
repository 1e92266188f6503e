"""`sgpu up`, `down` and `server`: runs, stops and administers the server.

`sgpu server logs` reads the server log in the home directory, even if the server is not running. The server writes JSON
lines and rotates the log file at a maximum size (`server/core/server_log.py`). The command prints log lines in their
original order. The command prints incomplete or invalid log lines unchanged. After a rotation, the command first reads
the rest of the old log file. The command escapes control characters in log messages.
"""

from __future__ import annotations

import contextlib
import errno
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
from serverless_gpu.cli.service_account import account_option, print_warnings, service_home
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

_NEEDED = (
    *("starlette", "uvicorn", "sqlalchemy", "alembic", "cryptography", "httptools", "prometheus_client", "jinja2"),
    *("argon2", "authlib", "joserfc"),
)
_LOOK_S = 0.5
_HOME_REASON = "the server stores its files in the home directory"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FOLLOW_LOOK_S = 0.2
_LINE_BYTES_MAX = 1 << 20
_LOG_FIELDS = ("ts", "level", "logger", "msg", "traceback")


@click.command()
@click.option("--host", help="Address to listen on (default: loopback).")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the server (default: 7878, or a free port that the server reuses).",
)
@click.option(
    "--database", metavar="URL", help="PostgreSQL database, postgresql://… (default: a file in the home directory)."
)
@click.option("--store", metavar="URL", help="URL of the environment store (s3://…, gs://…, az://…), or a directory.")
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Additional host name of the server. Repeatable."
)
@click.option("--tls-cert", metavar="FILE", help="PEM file of the server's certificate and chain, for https://.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate, in a file that only you can read.")
@click.option(
    "--behind-proxy", multiple=True, metavar="ADDRESS", help="Proxy that terminates TLS for this server. Repeatable."
)
@click.option(
    "--stop-within", metavar="DURATION", help="Maximum time to complete open requests at shutdown (default: 30s)."
)
@click.option("--node/--no-node", default=None, help="Offer this machine's devices to runs of the server.")
@click.option(
    "--partition-grace",
    metavar="DURATION",
    help="Maximum time that a run continues while its node cannot reach the server (default: 15m).",
)
@click.option(
    "--retention",
    metavar="DURATION",
    help="Retention time of ended runs, their output and results (default: 30d).",
)
@click.option(
    "--unsatisfiable-after",
    metavar="DURATION",
    help="Maximum queue time of a run that no node can ever execute (default: 24h).",
)
@click.option(
    "--max-run", metavar="DURATION", help="Maximum duration of an attempt without a usage policy limit (default: 7d)."
)
@click.option("--logs-gib", type=float, metavar="GIB", help="Maximum size of all run output in GiB (default: 100).")
@click.option(
    "--nearby-gib",
    type=float,
    metavar="GIB",
    help="Maximum size of the local cache for environments in a bucket (default: 20). Use 0 for no cache.",
)
@click.option(
    "--on-owner-disabled",
    type=click.Choice(["finish", "stop"]),
    help="Action for the current runs of a disabled user (default: finish).",
)
@click.option("--currency", metavar="CODE", help="Currency of prices and charges (default: USD).")
@click.option("--mlflow/--no-mlflow", default=None, help="Start an MLflow server that tracks remote runs.")
@click.option(
    "--mlflow-store",
    metavar="URL",
    help="MLflow store, for example postgresql://… (default: a store in the home directory).",
)
@click.option("--mlflow-url", metavar="URL", help="MLflow address for other machines, such as a proxy address.")
@click.option("--webhook", metavar="URL", help="URL that receives budget notices and alarms.")
@click.option("--ui/--no-ui", default=None, help="Serve web pages (default).")
@click.option("--path-prefix", metavar="PATH", help="Path below which a proxy serves this server, such as /gpu.")
@click.option(
    "--index-proxy", metavar="ADDRESS:PORT", help="Listen here as a proxy of package indexes (default: no index proxy)."
)
@click.option("--index-url", metavar="URL", help="URL of the index proxy for other machines, such as a proxy address.")
@click.option("--index-open/--no-index-open", default=None, help="Serve the index proxy without tokens.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    help="Engine of the pool (default: local). The ray engine also uses machines that join the pool.",
)
@click.option(
    "--ray-port", type=int, metavar="PORT", help="First of the 100 ports that Ray uses on this machine (default: 7900)."
)
@click.option("--node-address", metavar="IP", help="Address at which joining machines reach this machine.")
@click.option("--ray-address", metavar="HOST:PORT", help="Existing Ray cluster to use instead of starting one.")
@click.option(
    "--ray-token-file", metavar="FILE", help="Token of the existing Ray cluster, in a file that only you can read."
)
@click.option("--tls-ca", metavar="FILE", help="CA certificate for joining machines that do not trust the issuer.")
@click.option(
    "--key-lost",
    is_flag=True,
    default=None,
    help="Start the server even if the key of secrets and unended runs is lost.",
)
@click.option(
    "--accept-rollback", is_flag=True, default=None, help="Accept a database that has lost acknowledged changes."
)
def up(hosts: Sequence[str], behind_proxy: Sequence[str], **options: Any) -> None:
    """Start a server in the foreground.

    By default, the server listens on a loopback address, offers this machine's devices and stores a database in the
    home directory. The server writes its token to a file that only you can read. Scripts and notebooks with the same
    home directory use the server with @distributed(..., remote=True). Users can also set options in environment
    variables (SGPU_PORT, ...) and in server.toml. `sgpu server config` shows the effective settings.
    """
    refuse_incomplete()
    if faults.named():
        say(f"sgpu: warning: {faults.warning()}", err=True)
    home = durable_home("a server stores its database, keys and tokens in the home directory")
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
        lines = (*_address_lines(url, home, mlflow), *_web_lines(settings, url, running))
        for line in (*lines, *_outside_lines(settings, running), *joining):
            say(line)
        if settings.index_proxy is not None:
            say(f"index proxy: {settings.index_proxy.url} (indexes: sgpu index list)")
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
        say("Ray continues for ten minutes, so that a restarted server can use Ray. Stop Ray with `sgpu stop`")
    say(f"the server has stopped. Runs continue for up to {grace} until `sgpu up` starts the server again")


def decide_sharing(found: Exposure) -> bool | None:
    """Warn if several principals share a UID.

    On a terminal, ask the operator to allow or forbid the shared UID.
    """
    warnings = sharing_warnings(
        principals=found.principals, closed=found.closed, shared=found.shared, isolated=found.isolated
    )
    for warning in warnings:
        say(f"sgpu: warning: {warning}", err=True)
    if not found.undecided:
        return None
    if found.had_runs:
        say(
            f"sgpu: warning: {', '.join(first_few(found.had_runs))} already ran code on this machine. "
            "The code could read the server's key, tokens and secrets. To replace the key and tokens, press Ctrl-C "
            "and run `sgpu server rotate`. Then "
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
        *([f"MLflow at {mlflow} tracks remote runs (ready in a few seconds)"] if mlflow else []),
        "scripts and notebooks with this home directory use the server with @distributed(..., remote=True)",
        f"files: {home.root / 'server'}",
        "Ctrl-C stops the server. Runs continue",
    ]


def _web_lines(settings: Settings, url: str, running: UvicornServer) -> list[str]:
    """Return the address of the web pages.

    Only a terminal receives a one-time link, because others may read a log.
    """
    if not settings.ui:
        return []
    if not sys.stdout.isatty():
        return [f"web pages: {url}/ui; `sgpu web` opens them and signs you in"]
    return [f"web pages: {url}{running.sign_in_path()} (signs you in, once; later: sgpu web)"]


def disk_warnings(home: Home) -> list[str]:
    """Return a warning if the disk has too little free space for the server."""
    space, reserve = load("serverless_gpu.server.core.disk_space"), load("serverless_gpu.server.db.disk_reserve")
    free, needed = space.free_bytes(home.root), max(space.KEPT_FREE_BYTES, reserve.LOW_BYTES + reserve.BYTES)
    if free is None or free > needed:
        return []
    return [
        f"the disk of {home.root} has only {format_bytes(free)} free. The server accepts output, results and "
        f"environments above {format_bytes(space.KEPT_FREE_BYTES)} and new runs above "
        f"{format_bytes(reserve.LOW_BYTES)}"
    ]


def _outside_lines(settings: Settings, running: UvicornServer) -> list[str]:
    if running.certificate:
        others = f"others: https://…:{running.port}; {running.certificate}"
        ended = (
            "warning: other machines cannot reach this server, because its certificate has expired. Renew the "
            "certificate, then send SIGHUP to the server"
        )
        return [others, ended] if running.is_certificate_over else [others]
    if settings.behind_proxy:
        return [f"other machines: through the proxy at {', '.join(settings.behind_proxy)} to port {running.port}"]
    return []


def refuse_incomplete() -> None:
    """Raise ServerProblem if a package that the server needs is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerProblem(
            f"the server needs packages that are not installed: {', '.join(missing)}",
            hint="run pip install 'serverless-gpu[server]'",
        )


@click.command()
@click.option(
    "--wait", default="2m", show_default=True, metavar="DURATION", help="Maximum time to wait until the server stops."
)
def down(wait: str) -> None:
    """Stop the server of this home.

    Before stopping, the server completes open requests. Running runs continue. Nodes report the continued runs to the
    server after the next server start.
    """
    limit_s = duration_s("--wait", wait)
    directory = durable_home(_HOME_REASON).root / "server"
    listener = load("serverless_gpu.server.http.listener")
    pid = listener.lock_holder(directory)
    if pid is None:
        say("no server is running in this home directory")
        return
    os.kill(pid, signal.SIGTERM)
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
    while listener.lock_holder(directory) == pid:
        if clock.boottime_ns() > deadline_ns:
            raise ServerProblem(
                f"the server (process {pid}) has not stopped within {wait}",
                hint=f"increase --wait, or read the server log: {directory / 'server.log'}",
            )
        time.sleep(_LOOK_S)
    say("the server has stopped. Runs continue")


@click.group("server")
def server_group() -> None:
    """Configure, drain and back up a server."""


@server_group.command()
@wide_option
@json_option(JsonType("cli.json_types:Setting", is_list=True))
def config(wide: bool, as_json: bool) -> None:
    """Print all settings and their origin.

    Command line options override environment variables (SGPU_PORT). Environment variables override server.toml. The
    output hides passwords in URLs.
    """
    refuse_incomplete()
    home = durable_home(_HOME_REASON)
    settings = load("serverless_gpu.server.core.settings")
    settings.read_settings(home.root, environ=os.environ)
    said = settings.effective_settings(home.root, environ=os.environ)
    if as_json:
        print_json(said)
        return
    rows = [[each.name, each.text, each.origin] for each in said]
    print_table(["SETTING", "VALUE", "ORIGIN"], rows, wide=wide)


@server_group.command()
@account_option
def unit(account: str) -> None:
    """Print a systemd unit for the server.

    The server runs as the account of --account, without capabilities. The unit uses the settings in server.toml. Runs
    continue while systemd restarts the unit. For a server without a node (node = false), the unit restricts files,
    devices and system calls. The home is SERVERLESS_GPU_HOME, or /var/lib/serverless-gpu/server for another account.
    """
    refuse_incomplete()
    home = service_home(account, "server")
    settings = load("serverless_gpu.server.core.settings").read_settings(home, environ=os.environ)
    units = load("serverless_gpu.server.operations.systemd_units")
    there = units.ServerInstallation(
        command=(sys.executable, "-m", "serverless_gpu.cli", "up"),
        account=account,
        home=home,
        node=settings.node or settings.ray is not None,  # Ray needs rights that the restrictions remove.
        tls=bool(settings.tls_cert),
        stopping_s=settings.stopping_s,
        writable=[Path(place) for place in (settings.store, settings.mlflow_store) if place.startswith("/")],
    )
    click.echo(units.server_unit(there), nl=False)
    print_warnings(account)


@server_group.command()
@click.option("--note", default="", metavar="TEXT", help="Reason that waiting runs display.")
@click.option("--wait", "wait", metavar="DURATION", help="Maximum time to wait until the last run ends.")
def drain(note: str, wait: str | None) -> None:
    """Start no new runs on the server.

    The drain survives server restarts and lasts until `sgpu server resume`. Running runs continue. During the drain,
    the server accepts and queues new runs. The queue message of each new run names the operator and the reason for the
    drain.
    """
    limit_s = duration_s("--wait", wait) if wait is not None else 0.0
    with server(patience_s=limit_s) as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=True, note=note), answer=DrainView)
        say(f"no new runs start: {_drain_text(view)}")
        clock, said = SystemClock(), view.going
        deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
        while view.going and clock.boottime_ns() < deadline_ns:
            time.sleep(_LOOK_S)
            view = connection.ask("GET", "/drain", answer=DrainView)
            if view.going != said:
                said = view.going
                say(_drain_text(view))
    if wait is not None and view.going:
        raise ServerProblem(f"{view.going} runs are still running after {wait}", hint="list the runs with `sgpu runs`")


@server_group.command()
def resume() -> None:
    """Start waiting runs again after a drain."""
    with server() as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=False), answer=DrainView)
    say(f"waiting runs start again: {_drain_text(view)}")


@server_group.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def backup(directory: Path) -> None:
    """Back up the server into DIRECTORY.

    The server can keep running during the backup. The backup contains the database, the key, tokens, rank output,
    payload parts and environments. Protect the backup like the server's own files. The command links unchanged files to
    the previous backup. Before the backup, dump a PostgreSQL database, which the backup does not include.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    load("serverless_gpu.server.operations.rotation").refuse_unfinished(settings.directory)
    made = load("serverless_gpu.server.operations.backup").back_up(settings, directory.absolute(), clock=SystemClock())
    files = made.manifest.files
    size = format_bytes(sum(entry.size for entry in files.values()))
    say(f"{made.path}: {len(files)} files, {size} ({made.linked} files are unchanged since the previous backup)")
    if made.manifest.database != "sqlite":
        say(
            "the backup does not include the database. Dump the database with pg_dump --format=custom --file=… DATABASE"
        )
    if "://" in settings.store:
        say("the backup does not include environments and parts, which are in the bucket")


@server_group.command()
@json_option(JsonType("server.invariants.self_check:CheckResult"))
def check(as_json: bool) -> None:
    """Check the invariants of the database.

    The command changes nothing. The server can keep running during the check. After a violation, the command exits with
    1. The command also reports a database rollback, and files of runs that are missing from the database.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    database_module = load("serverless_gpu.server.db.database")
    path = settings.database.partition("sqlite:///")[2]
    if path and not Path(path).exists():
        raise ServerProblem(
            f"this home directory has no server: {path} does not exist", hint="start a server with `sgpu up`"
        )
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
            say(f"too large for this check: {what}")
        say(f"{len(checked.violations)} violations in {checked.runs} runs")
    if checked.violations or lost:
        sys.exit(1)


@server_group.command()
@click.argument("backup", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(backup: Path) -> None:
    """Verify the files of a backup."""
    refuse_incomplete()
    manifest = load("serverless_gpu.server.operations.backup").verify_and_record(backup, clock=SystemClock())
    say(f"{backup} is intact: {len(manifest.files)} files")


@server_group.command()
@click.argument("backup", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--nothing-ran-since",
    is_flag=True,
    help="Start waiting runs, because the server did not run after the backup.",
)
def restore(backup: Path, nothing_ran_since: bool) -> None:
    """Restore a server from BACKUP.

    The home directory must not contain a server. Start the restored server with `sgpu up`. A waiting run in the backup
    may have started after the backup. Therefore the server marks waiting runs as LOST. The owners of LOST runs must
    submit the runs again. A running run continues if its node still executes the run. The restore reactivates tokens
    and secrets that you revoked or deleted after the backup. Revoke reactivated tokens and delete reactivated secrets
    again.
    """
    refuse_incomplete()
    home = durable_home(_HOME_REASON)
    manifest = load("serverless_gpu.server.operations.backup").restore(
        home, backup, nothing_ran_since=nothing_ran_since
    )
    say(f"{home.root / 'server'}: {len(manifest.files)} files restored")
    if manifest.database != "sqlite":
        say(
            "the backup does not include the database. Before `sgpu up`, "
            "restore the database with pg_restore --dbname=DATABASE …"
        )
    if not nothing_ran_since:
        say(
            "at its start, the server marks waiting runs as LOST, "
            "because these runs may have started after the backup. `sgpu audit list` "
            "shows the number of LOST runs"
        )


@server_group.command()
@click.option("--yes", "certain", is_flag=True, help="Rotate the key without asking for confirmation.")
def rotate(certain: bool) -> None:
    """Replace the server's key and all tokens.

    Rotate the key if code of several principals shared one operating-system user. Also rotate the key if other users
    could read the server's directory. Stop the server first. The command encrypts secrets and environment variables of
    unended runs with the new key. Change each secret at its source, because the rotation does not change secret values.
    The command revokes every token and creates new tokens for this machine's administrator and node. If the rotation is
    interrupted, run the command again. `sgpu up` refuses to start until the rotation is complete.
    """
    refuse_incomplete()
    settings = load("serverless_gpu.server.core.settings").read_settings(
        durable_home(_HOME_REASON).root, environ=os.environ
    )
    if not certain:
        click.confirm("Revoke every token of this server, and replace its key?", abort=True, err=True)
    login = load("serverless_gpu.server.startup").login()
    rotated = load("serverless_gpu.server.operations.rotation").rotate(settings, clock=SystemClock(), login=login)
    sealed = (
        f"{_count_text(len(rotated.secrets), 'secret')} and variables of unended runs are encrypted with the new key"
    )
    say(f"the server has a new key. {sealed}")
    say(f"this machine's new tokens are in {settings.directory}. `sgpu up` installs the new tokens")
    for name, count in rotated.revoked:
        say(f"{name}: {_count_text(count, 'token')} revoked. Create a new token with: sgpu token create --for {name}")
    for node in rotated.nodes:
        say(
            f"node {node}: the node token is revoked. "
            "Join the node again with a new token before the partition grace of its runs ends"
        )
    for secret in rotated.secrets:
        of = f"team {secret.team}" if secret.team else secret.owner
        say(f"secret {secret.name} of {of}: change the secret at its source, then run: sgpu secret set {secret.name}")
    if rotated.is_ray_given:
        say("Ray uses the token in --ray-token-file. Replace the token where you start the Ray cluster")
    say("also replace, at their source, passwords and keys in server.toml, SGPU_* variables and the file of --tls-key")


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _drain_text(view: DrainView) -> str:
    return f"{view.going} running, {view.waiting} waiting"


@server_group.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Print new log lines until Ctrl-C.")
@click.option(
    "--run",
    "run_id",
    default="",
    metavar="RUN",
    help="Print only log lines about this run (identifier or identifier prefix).",
)
@click.option(
    "--level",
    type=click.Choice(_LEVELS, case_sensitive=False),
    default="DEBUG",
    help="Minimum level of the printed log lines.",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Number of log lines from the end of the log.",
)
@json_option(JsonType("cli.json_types:LogLine"), text="Print the original log lines, one JSON object per line.")
def server_logs(follow: bool, run_id: str, level: str, lines: int, as_json: bool) -> None:
    """Print the server log in the home directory."""
    path = durable_home("the server stores its log in the home directory").root / "server" / "server.log"
    if not path.exists():
        raise NotFound(
            f"the server log {path} does not exist", hint="start a server with `sgpu up`, which writes this log"
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
            hint=f"the server deletes the oldest log lines. Show the run with `sgpu show {run_id}`",
        )
    while follow:
        for line in filter(is_wanted, followed.more()):
            show(line)
        time.sleep(_FOLLOW_LOOK_S)


class FollowedFile:
    """Follows the current log file across rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._held = b""

    def more(self) -> Iterator[bytes]:
        """Yield the complete log lines since the last call."""
        while True:
            if self._fd < 0 and not self._open():
                return
            yield from self._lines()
            try:
                is_same = os.fstat(self._fd).st_ino == self._path.stat().st_ino
            except FileNotFoundError:  # The server is renaming the log file.
                return
            if is_same:
                return
            yield from self._lines()  # Read the rest of the renamed log file.
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
    """Yield the lines of all log files, oldest first. `followed` reads the current log file."""
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
    # The message of an access log line already contains the fields `method` and `route`.
    said = (*_LOG_FIELDS, "method", "route") if found.get("logger") == "access" else _LOG_FIELDS
    about = " ".join(f"{name}={value}" for name, value in found.items() if name not in said)
    told = f"{found.get('ts', '')} {found.get('level', '')!s:<7} {found.get('logger', '')}: {found.get('msg', '')}"
    # A line break in a message must not start another output line.
    told = (told + (f"  ({about})" if about else "")).replace("\n", "⏎")
    return "\n    ".join([told, *str(found.get("traceback", "")).splitlines()])
