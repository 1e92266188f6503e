"""`sgpu up`: the server, in the foreground, until Ctrl-C."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from serverless_gpu import faults
from serverless_gpu.ambient import machine
from serverless_gpu.cli.output import say, say_lines
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.model.scheduling.wait_messages import sharing_warnings, some
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.units import format_bytes, format_duration_ms
from serverless_gpu.version import __version__

if TYPE_CHECKING:
    from serverless_gpu.server.core.settings import Settings
    from serverless_gpu.server.identity.uid_sharing import Exposure
    from serverless_gpu.server.process import Running

_NEEDED = ("starlette", "uvicorn", "sqlalchemy", "alembic", "cryptography", "httptools", "prometheus_client")


@click.command()
@click.option("--host", help="Address to listen on; loopback without it.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 7878 without it, or a free one that is remembered.")
@click.option("--database", metavar="URL", help="postgresql://…; a file in this home without it.")
@click.option("--store", metavar="URL", help="Where environments go: s3://…, gs://…, az://…, or a directory.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A further name it answers to. Repeatable.")
@click.option("--tls-cert", metavar="FILE", help="The server's certificate and its chain, PEM: others use https://.")
@click.option("--tls-key", metavar="FILE", help="The certificate's key; only you may read it.")
@click.option(
    "--behind-proxy", multiple=True, metavar="ADDRESS", help="A proxy that speaks TLS for this server. Repeatable."
)
@click.option("--stop-within", metavar="DURATION", help="How long requests may take when it is to stop; 30s.")
@click.option("--node/--no-node", default=None, help="Whether this machine's devices can be used through it.")
@click.option("--partition-grace", metavar="DURATION", help="How long a run goes on when its node hears nothing; 15m.")
@click.option("--retention", metavar="DURATION", help="How long ended runs are kept, with output and results; 30d.")
@click.option(
    "--unsatisfiable-after", metavar="DURATION", help="How long a run waits for what nothing can ever serve; 24h."
)
@click.option("--max-run", metavar="DURATION", help="The longest an attempt runs where no usage policy says it; 7d.")
@click.option("--logs-gib", type=float, metavar="GIB", help="What the output of all runs may take; 100.")
@click.option(
    "--nearby-gib", type=float, metavar="GIB", help="What copies of environments in a bucket take here; 20. 0: none."
)
@click.option(
    "--on-owner-disabled",
    type=click.Choice(["finish", "stop"]),
    help="Runs of somebody who may start none any more; finish.",
)
@click.option("--currency", metavar="CODE", help="Of prices, and of what is charged; USD.")
@click.option("--mlflow/--no-mlflow", default=None, help="Start an MLflow server, too; remote runs are tracked there.")
@click.option(
    "--mlflow-store", metavar="URL", help="Where MLflow keeps them: postgresql://…; the home's own without it."
)
@click.option("--mlflow-url", metavar="URL", help="Where other machines find MLflow: a proxy in front of its port.")
@click.option("--webhook", metavar="URL", help="Who is told of budgets that are nearly used up, and of alarms.")
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), help="ray: one pool of this machine and those that join; local."
)
@click.option("--ray-port", type=int, metavar="PORT", help="The first of the hundred ports that Ray uses here; 7900.")
@click.option("--node-address", metavar="IP", help="Of this machine, for those that join.")
@click.option("--ray-address", metavar="HOST:PORT", help="A Ray cluster that is there already, in place of our own.")
@click.option("--ray-token-file", metavar="FILE", help="With that one's token; only you may read it.")
@click.option("--tls-ca", metavar="FILE", help="Who issued the certificate, for machines that join and do not know it.")
@click.option("--key-lost", is_flag=True, default=None, help="Start without the key of unended runs and secrets.")
@click.option(
    "--accept-rollback", is_flag=True, default=None, help="Go on with a database that lost what was acknowledged."
)
def up(hosts: Sequence[str], behind_proxy: Sequence[str], **options: Any) -> None:
    """Start a server: a queue in front of this machine's GPUs, or a team's.

    Without options it needs nothing: a database in this home, this machine's devices, loopback only, a token in a file
    that only you can read. Your scripts and notebooks find it: @distributed(..., remote=True). Settings can also stand
    in variables (SGPU_PORT, ...) and in server.toml in the home; `sgpu server config` shows which hold.
    """
    refuse_incomplete()
    if faults.named():
        say(f"warning: {faults.warning()}", err=True)
    home = durable_home("a server keeps its database, keys and tokens there")
    settings_room = load("serverless_gpu.server.core.settings")
    settings = settings_room.read_settings(
        home.root,
        {**options, "hosts": tuple(hosts) or None, "behind_proxy": tuple(behind_proxy) or None},
        environ=os.environ,
    )
    for problem in (*settings_room.unknown(os.environ), *disk_warnings(home)):
        say(f"warning: {problem}", err=True)

    ray_beside = load("serverless_gpu.server.operations.sidecars")
    ray_beside.refuse(settings)

    def write_files(url: str, running: Running) -> list[str]:
        token = (settings.directory / "token").read_text(encoding="ascii").strip()
        write_profile(home.root, ServerProfile(url=url, token=token, embedded=True, machine=machine()))
        said: list[str] = ray_beside.offer_joining(settings, url=url, port=running.port, certified=running.certified)
        return said

    def ready(url: str, running: Running, mlflow: str) -> None:
        joining = write_files(url, running)
        for line in (*_told(url, home, mlflow), *_outside(settings, running), *joining):
            say(line)
        for warning in running.warnings:
            say(f"warning: {warning}", err=True)

    try:
        with load("serverless_gpu.server.operations.sidecars").mlflow_beside(settings) as complete:
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
        say("Ray goes on for ten minutes, for a server that is started again; `sgpu stop` ends it")
    say(f"the server has stopped; runs go on for up to {grace}, until `sgpu up` starts it again")


def decide_sharing(found: Exposure) -> bool | None:
    """Warn of principals that share a uid; on a terminal, ask the operator to decide an open question."""
    warnings = sharing_warnings(principals=found.principals, closed=found.closed, shared=found.shared)
    for warning in warnings:
        say(f"warning: {warning}", err=True)
    if not found.undecided:
        return None
    if found.had_runs:
        say(
            f"warning: {', '.join(some(found.had_runs))} ran code here already: it could read the server's key, tokens "
            "and secrets; to replace them: Ctrl-C, `sgpu server rotate`, then change the secrets at their source",
            err=True,
        )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    named = ", ".join(some(found.undecided))
    return click.confirm(f"May runs of several principals share one operating-system user in {named}?", err=True)


def _told(url: str, home: Home, mlflow: str) -> list[str]:
    return [
        f"serverless-gpu {__version__} at {url}",
        *([f"MLflow at {mlflow}, in some seconds: remote runs are tracked there"] if mlflow else []),
        "your scripts and notebooks find it by themselves: @distributed(..., remote=True)",
        f"files: {home.root / 'server'}",
        "Ctrl-C stops the server; runs go on",
    ]


def disk_warnings(home: Home) -> list[str]:
    """Return warnings about a disk that limits the server."""
    space, reserve = load("serverless_gpu.server.core.disk_space"), load("serverless_gpu.server.db.disk_reserve")
    free, needed = space.free_bytes(home.root), max(space.KEPT_FREE_BYTES, reserve.LOW_BYTES + reserve.BYTES)
    if free is None or free > needed:
        return []
    return [
        f"the disk of {home.root} has {format_bytes(free)} left: output, results and environments are taken while it "
        f"has more than {format_bytes(space.KEPT_FREE_BYTES)}, new runs more than {format_bytes(reserve.LOW_BYTES)}"
    ]


def _outside(settings: Settings, running: Running) -> list[str]:
    if running.certificate:
        others = f"others: https://…:{running.port}; {running.certificate}"
        ended = "warning: the certificate has ended, so no other machine reaches this server: renew it, then SIGHUP"
        return [others, ended] if running.is_certificate_over else [others]
    if settings.behind_proxy:
        return [f"others: by the proxy at {', '.join(settings.behind_proxy)}, which asks port {running.port}"]
    return []


def refuse_incomplete() -> None:
    """Raise ServerProblem unless the server's packages are installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerProblem(
            f"a server needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'serverless-gpu[server]'",
        )
