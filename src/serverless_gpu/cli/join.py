"""`sgpu join`: makes this machine a node of a server while the command runs.

sgpu join HOST    Ray's processes, which start the uplink    machine of a Ray pool
sgpu join         the uplink                                 node of a server without Ray
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.client.remote.profile import check_address
from serverless_gpu.errors import ServerlessGpuError, ServerProblem
from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.server_attempt_record import open_attempts
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.presence import LEFT
from serverless_gpu.version import __version__

if TYPE_CHECKING:
    from serverless_gpu.engines.ray.pool_join import JoinFile


@click.command()
@click.argument("host", metavar="HOST[:PORT]", required=False, default="")
@click.option(
    "--token-file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Copy of the first machine's server/join.json, which only you can read.",
)
@click.option("--name", help="Name of the node (default: the host name).")
@click.option(
    "--node-address",
    metavar="IP",
    help="Address of this machine for other nodes (default: the address that routes to HOST).",
)
@click.option(
    "--ray-port",
    type=int,
    metavar="PORT",
    help="First of the 100 ports that Ray uses (default: the first Ray port of HOST).",
)
@click.option(
    "--server",
    metavar="URL",
    help="Server address as seen from this machine (default: the address in the join file).",
)
@click.option("--unit", is_flag=True, help="Former name of `sgpu node unit`, for your own account.")
def join(host: str, token_file: Path, **options: Any) -> None:
    """Make this machine a node of a server.

    HOST is the address of the machine on which `sgpu up --engine ray` runs. Without HOST, the machine joins a server
    that uses no Ray. The machine remains a node while `sgpu join` runs. After Ctrl-C, the server places no new runs on
    the machine. Running runs continue. `sgpu node unit` prints a systemd unit for the command.
    """
    if options["unit"]:
        say(
            "sgpu: `sgpu join --unit` is now called `sgpu node unit`. The next release removes the former name",
            err=True,
        )
        load("serverless_gpu.cli.node_unit").print_node_unit(click.get_current_context().params, getpass.getuser())
        return
    home = durable_home("a node stores run reports in the home directory until the server acknowledges the reports")
    joining = load("serverless_gpu.engines.ray.pool_join")
    file = joining.read_join_file(token_file)
    if options["server"]:
        file = msgspec.structs.replace(file, server=options["server"])
    check_address(file.server)
    if not host:
        if options["node_address"] or options["ray_port"]:
            raise click.UsageError("--node-address and --ray-port need HOST, the first machine of a Ray pool")
        _join_without_ray(home, file, options["name"] or socket.gethostname())
        return
    wish = joining.JoinOptions(
        host=host,
        file=file,
        path=token_file,
        name=options["name"] or socket.gethostname(),
        address=options["node_address"] or "",
        port=options["ray_port"],
    )
    with _join_lock(home, joining.DIRECTORY), _signal_pipe() as stop:
        ready = joining.prepare(wish, home, os.environ)

        def started() -> None:
            say(
                f"{wish.name} offers {ready.offer} to the pool of {file.server}. "
                f"Ray uses ports {ready.ports} on this machine"
            )

        say(f"starting Ray on this machine with the Ray head {ready.plan.head}")
        keeper = load("serverless_gpu.engines.ray.ray_keeper").RayKeeper(
            ready.plan, say=lambda sentence: say(f"sgpu: {sentence}", err=True), started=started
        )
        try:
            keeper.keep(stop)
        finally:
            _leave(home, ready.profile, wish.name)


def _join_without_ray(home: Home, file: JoinFile, name: str) -> None:
    """Enrol this machine, and keep its uplink running until a signal arrives."""
    enrolment = load("serverless_gpu.node.uplink.enrolment")
    with _join_lock(home, enrolment.DIRECTORY), _signal_pipe() as stop:
        profile = enrolment.enrol(home, server=file.server, token=file.token, ca=file.ca, name=name)
        try:
            enrolment.keep(home, profile, os.environ, stop, say=lambda sentence: say(f"{name} {sentence}"))
        finally:
            _leave(home, profile, name)


def _leave(home: Home, profile: Path, name: str) -> None:
    """Drain this node. Current runs on the node continue."""
    with contextlib.suppress(OSError):
        (profile.parent / LEFT).touch(mode=0o600)
    count = sum(1 for _ in open_attempts(home.runs, str(profile)))
    if not count:
        with contextlib.suppress(ServerlessGpuError):
            start_stop.stop(home, profile)
        say(f"{name} has left the pool. No runs were running on this machine")
        return
    runs, how = ("1 run continues", "it ends") if count == 1 else (f"{count} runs continue", "they end")
    say(f"{name} has left the pool and gets no new runs. {runs} here, and this machine reports to the server how {how}")


@contextlib.contextmanager
def _join_lock(home: Home, name: str) -> Iterator[None]:
    """Hold the lock that allows one `sgpu join` per home directory.

    Raise ServerProblem if another process holds the lock.
    """
    directory = home.root / name
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = hold(directory / "keeper.lock", f"{os.getpid()} {__version__}")
    if lock is None:
        raise ServerProblem(
            "another `sgpu join` already runs with this home directory",
            hint="stop the other `sgpu join` first (Ctrl-C)",
        )
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _signal_pipe() -> Iterator[int]:
    """Yield a descriptor that becomes readable after SIGINT (Ctrl-C), SIGTERM or SIGHUP."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def tell(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(writing, b"x")

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
