"""Builds the server's components in the order of their dependencies, and stops them in reverse order.

    settings ─▶ database, locked, migrated ─▶ key, first tokens ─▶ storage, hub ─▶ services ─▶ engine ─▶ loops

At shutdown, the loops finish their ticks before the engine closes. The database is the last component to close. If the
server is killed, the stored state is as consistent as after an orderly shutdown.

After a reboot, the server may start while PostgreSQL still replays its log. If PostgreSQL does not answer, the server
retries for `START_S` seconds and logs the reason. The server does not retry after permanent errors, such as a wrong
password or a missing database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import sqlalchemy as sa
from prometheus_client import ProcessCollector

from serverless_gpu.ambient import Clock, machine
from serverless_gpu.engines.base import Engine
from serverless_gpu.engines.local import LocalEngine
from serverless_gpu.engines.ray import start_arguments
from serverless_gpu.engines.ray.driver_client import RayAccess
from serverless_gpu.engines.ray.ray_engine import RayEngine
from serverless_gpu.errors import ServerProblem, ServerUnavailable
from serverless_gpu.model.access_control import NodeIdentity
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.presence import instance_of
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.server.audit import AuditChainWriter
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.billing.usage_rollup import UsageRollup
from serverless_gpu.server.budgets.budget_enforcer import BudgetEnforcer
from serverless_gpu.server.budgets.notice_webhook import NoticeWebhook
from serverless_gpu.server.budgets.spend_alarms import SpendAlarms
from serverless_gpu.server.composition import (
    ServerResources,
    Services,
    compose,
    make_scheduler,
    make_self_check,
)
from serverless_gpu.server.core.disk_space import space_problem
from serverless_gpu.server.core.health import STORE_BOUND_S, STORE_FRESH_S, ServerHealth
from serverless_gpu.server.core.hub import (
    ALARMS,
    AUDIT,
    BUDGETS,
    COLLECTOR,
    LEDGER,
    NOTICES,
    RECONCILER,
    RETENTION,
    SCHEDULER,
    SELF_CHECK,
    USAGE,
    Hub,
)
from serverless_gpu.server.core.loops import LATE_S, Loop, Tick
from serverless_gpu.server.core.server_key import Sealer, read_keys, remove_unnamed
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db import disk_reserve, leader_lock
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.high_water_mark_file import SYNC_S, Checkpoints, MarkFile
from serverless_gpu.server.db.leader_lock import LOOK_S, LeaderLock
from serverless_gpu.server.environments import GarbageCollector
from serverless_gpu.server.http.auth_middleware import Authenticator
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.identity.bootstrap import FileTokens, FirstTokens, first_tokens, join_token
from serverless_gpu.server.operations import backup, rotation
from serverless_gpu.server.operations.server_status import StateMetrics
from serverless_gpu.server.operations.sidecars import RaySidecar, mlflow_checks
from serverless_gpu.server.records import audit, runs, stored_secrets
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.server.runs.retention import Retention
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.server.storage.server_stores import LOOK_MAX, DiskLimits, open_storage, orphan_runs, orphan_sentence

START_S = 60.0
_PAUSE_S = 0.2
_PAUSE_S_MAX = 2.0
_FINAL = ("authentication failed", "does not exist", "no password supplied", "pg_hba.conf")
"""Parts of PostgreSQL error messages after which a retry is useless."""


LOOP_S = 10.0
"""Seconds within which all loops must finish their ticks when the server stops."""
RAY_S = 20.0
"""Seconds for which a starting server waits for Ray's report of its resources."""
SLOW_S = 6 * 3600.0
"""Seconds after which a loop that scans a whole bucket counts as stuck."""
_NAMED_MAX = 5
_PUT_BACK = "restore the key file of the database"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssembledServer:
    """The services of a server, and the lock and tokens that requests need.

    Attributes:
        warnings: messages for the operator who starts the server.
    """

    leader_lock: LeaderLock
    services: Services
    authenticator: Authenticator
    tokens: FirstTokens
    warnings: tuple[str, ...] = ()


class Operator(NamedTuple):
    """Callbacks to the process with which an operator starts a server.

    Attributes:
        announce: called with a message while the start waits for its database.
        decide: called to decide about undecided pools, as in `uid_sharing.settle`.
        renewed: called after the server replaced a token in a file.
    """

    announce: Callable[[str], None] = _log.warning
    decide: Callable[[uid_sharing.Exposure], bool | None] = lambda _exposure: None
    renewed: Callable[[], None] = lambda: None


@contextlib.contextmanager
def assembled(
    settings: Settings, *, url: str, clock: Clock, other: str = "", operator: Operator | None = None
) -> Iterator[AssembledServer]:
    """Build a server, and stop its components at the end of the context.

    Args:
        settings: settings of the server.
        url: the server's address on this machine.
        clock: the clock of this machine.
        other: description of the process that shares the server's directory, or "".
        operator: callbacks of the starting process; None if log messages suffice.

    Raises:
        ServerProblem: the database was rolled back, belongs to another server, or has a newer version. The server also
            raises this error if the key is invalid or does not belong to the database.
        ServerUnavailable: the database does not answer.
    """
    rotation.refuse_unfinished(settings.directory)
    with contextlib.ExitStack() as stack:
        measures = ServerMetrics()
        database = stack.enter_context(contextlib.closing(Database(settings.database, clock=clock, measures=measures)))
        operator = operator or Operator()
        acquire_when_started(database, clock=clock, announce=operator.announce)
        rolled_back = backup.refuse_rollback(settings, database.read, now_ns=clock.wall_ns(), other=other)
        if rolled_back:
            _log.warning("the operator accepts the rollback of the database: %s", rolled_back)
        database.migrate()
        warnings = _unknown_files(settings, database)
        mark = stack.enter_context(contextlib.closing(_marked(settings, database, clock)))
        remove_unnamed(settings.directory)
        backup.settle(database, settings.directory, measures=measures, now_ns=clock.wall_ns())
        node = None
        if settings.node:
            node = NodeIdentity(name=socket.gethostname(), machine=machine(), instance=instance_of(Home(settings.home)))
        tokens = first_tokens(database, settings.directory, login=login(), now_ns=clock.wall_ns(), node=node)
        uid_sharing.settle(database, operator.decide, now_ns=clock.wall_ns())
        keys = read_keys(settings.directory)
        sealer = Sealer(keys.sealing)
        if settings.key_lost:
            _do_without_key(database, sealer, now_ns=clock.wall_ns())
        else:
            _check_key(database, sealer)
        storage = open_storage(
            settings.directory,
            settings.store,
            os.environ,
            clock=clock,
            room=DiskLimits(nearby_bytes_max=settings.nearby_bytes_max),
            measures=measures,
        )
        beside: RaySidecar | None = None
        if settings.ray is not None:
            join_token(database, settings.directory, now_ns=clock.wall_ns())  # Ensure that a join token exists.
            beside = RaySidecar(settings, url=url, node_token=tokens.node_token)
        engines: list[Engine] = []
        services = compose(
            ServerResources(
                settings=settings,
                clock=clock,
                database=database,
                hub=Hub(),
                keys=keys,
                sealer=sealer,
                measures=measures,
                health=ServerHealth(clock),
                low=database.reserve.problem,
                unwritable=lambda: database.write_problem,
                engine_nodes=lambda: [node for each in engines for node in each.nodes()],
                ray_pool=(lambda: None) if beside is None else beside.pool,
                **storage._asdict(),
            )
        )
        _look_after_health(services, database)
        measures.watch(services.make(StateMetrics))
        ProcessCollector(registry=measures.registry)
        engine: Engine | None = None
        if beside is not None:
            engine = _several_machines(services, beside)
            services.health.probe("ray", beside.problem)
        elif settings.node:
            name = socket.gethostname()
            profile = UplinkProfile(url=url, token=tokens.node_token, name=name, upload_s=settings.upload_s)
            engine = LocalEngine(Home(settings.home), settings.directory, profile=profile, environ=os.environ)
        if engine is not None:
            engines.append(engine)
            stack.callback(engine.close)
        stack.enter_context(_looking_after(services, engine, database, beside, mark, operator.renewed))
        services.pools.load()
        yield AssembledServer(
            leader_lock=database.leader_lock,
            services=services,
            authenticator=services.authenticator,
            tokens=tokens,
            warnings=warnings,
        )


def acquire_when_started(database: Database, *, clock: Clock, announce: Callable[[str], None]) -> None:
    """Wait until the database answers, and acquire its leader lock.

    Raises:
        ServerProblem: another server uses the database.
        ServerUnavailable: the database does not answer within `START_S`, or refuses this server.
    """
    until_ns = clock.boottime_ns() + round(START_S * 1e9)
    pause_s, waiting = _PAUSE_S, False
    while True:
        try:
            database.acquire()
        except ServerUnavailable as error:
            if not is_temporary(error.message) or clock.boottime_ns() + pause_s * 1e9 > until_ns:
                raise
            if not waiting:
                waiting = True
                announce(f"{error.message}; waiting for the database, {START_S:.0f} s at most")
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        else:
            if waiting:
                announce("the database answers now")
            return


def is_temporary(message: str) -> bool:
    """Return True if the error message suggests that the database is still starting."""
    return not any(words in message for words in _FINAL)


def _marked(settings: Settings, database: Database, clock: Clock) -> MarkFile:
    """Assign the server's generation, and update the high-water mark after each commit."""
    position = database.number(now_ns=clock.wall_ns())
    path, place = backup.mark_path(settings), backup.place_of(settings)
    mark = MarkFile(path, position, now_ns=clock.wall_ns(), place=place)
    database.on_commit(mark.commit)
    return mark


def _unknown_files(settings: Settings, database: Database) -> tuple[str, ...]:
    """Report the files of unknown runs before a loop can delete these files."""
    unknown = orphan_runs(settings.directory, database.read, limit=LOOK_MAX)
    if not unknown:
        return ()
    found = orphan_sentence(unknown, settings.directory)
    _log.error("%s", found)
    return (found,)


def _several_machines(services: Services, beside: RaySidecar) -> Engine:
    """Return the Ray engine, which spans all joined machines."""
    engine = RayEngine(
        beside.directory / "engine",
        access=RayAccess(
            address=beside.cluster.address,
            node_address=beside.cluster.node_address,
            pool=beside.key,
            variables=start_arguments.variables(beside.cluster.token_file),
        ),
        python=sys.executable,
        news=lambda: services.hub.touch(SCHEDULER),
    )
    if beside.was_there and not engine.ready(RAY_S):
        _log.warning("new gangs wait for Ray, which has not reported within %s s", RAY_S)
    return engine


@contextlib.contextmanager
def _looking_after(
    services: Services,
    engine: Engine | None,
    database: Database,
    beside: RaySidecar | None,
    mark: MarkFile,
    renewed: Callable[[], None],
) -> Iterator[None]:
    """Run the server's loops, which the hub wakes."""
    scheduler = make_scheduler(services, engine=engine)
    reconciler = services.make(Reconciler, scheduler=scheduler, engine=engine)

    def alone(tick: Tick) -> Tick:
        def tick_alone(now_ns: int) -> int | None:
            database.leader_lock.require()
            return tick(now_ns)

        return tick_alone

    def look(now_ns: int) -> int:
        database.leader_lock.look()
        return now_ns + round(LOOK_S * 1e9)

    checkpoints = Checkpoints(database, mark)

    def keep_mark(now_ns: int) -> int:
        mark.sync(audit=database.read(leader_lock.newest_audit_seq), now_ns=services.clock.wall_ns())
        checkpoints.tick(now_ns)
        return now_ns + round(SYNC_S * 1e9)

    def tend(now_ns: int) -> int:
        database.reserve.tend()
        services.environments.tend()
        return now_ns + round(disk_reserve.EVERY_S * 1e9)

    def loop(name: str, tick: Tick, *, late_s: float = LATE_S) -> Loop:
        return Loop(name, tick, clock=services.clock, late_s=late_s, measures=services.measures)

    loops = {
        "claim": loop("claim", look),
        "mark": loop("mark", alone(keep_mark)),
        "reserve": loop("reserve", alone(tend)),
        SCHEDULER: loop("scheduler", alone(scheduler.tick)),
        RECONCILER: loop("reconciler", alone(reconciler.tick)),
        COLLECTOR: loop("collector", alone(services.make(GarbageCollector).tick), late_s=SLOW_S),
        RETENTION: loop("retention", alone(services.make(Retention).tick), late_s=SLOW_S),
        BUDGETS: loop("budgets", alone(services.make(BudgetEnforcer).tick)),
        ALARMS: loop("alarms", alone(services.make(SpendAlarms).tick), late_s=SLOW_S),
        NOTICES: loop("notices", alone(services.make(NoticeWebhook).tick)),
        AUDIT: loop("audit", alone(services.make(AuditChainWriter).tick)),
        LEDGER: loop("ledger", alone(services.make(Charging).tick)),
        USAGE: loop("usage", alone(services.make(UsageRollup).tick), late_s=SLOW_S),
        "tokens": loop("tokens", alone(services.make(FileTokens, login=login(), renewed=renewed).tick)),
        SELF_CHECK: loop("self-check", make_self_check(services).tick, late_s=SLOW_S),
    }
    if beside is not None:
        loops["ray"] = loop("ray", beside.tick)
    for key, each in loops.items():
        services.health.watch(each.name, each.problem)
        services.hub.listen(key, each.ring)
        each.start()
    try:
        yield
    finally:
        for each in loops.values():
            each.stop(timeout_s=0)
        deadline_ns = services.clock.boottime_ns() + round(LOOP_S * 1e9)
        for name, each in loops.items():
            if not each.stop(timeout_s=max(0.0, (deadline_ns - services.clock.boottime_ns()) / 1e9)):
                _log.warning("the loop %s did not finish its tick within %s s", name, LOOP_S)


def _look_after_health(services: Services, database: Database) -> None:
    """Register the server's health checks. Each loop reports its own health."""
    health, settings = services.health, services.settings
    health.probe("database", lambda: database.problem(now_ns=services.clock.wall_ns()))
    health.probe("store", services.blobs.try_store, fresh_s=STORE_FRESH_S, bound_s=STORE_BOUND_S)
    health.probe("environments", services.environments.try_store, fresh_s=STORE_FRESH_S, bound_s=STORE_BOUND_S)
    health.probe("disk", lambda: space_problem(settings.directory))
    health.probe("database_disk", database.reserve.problem)
    for check in mlflow_checks(settings):
        health.probe("mlflow", check)
    health.watch("server", lambda: "the server is stopping" if services.hub.closed else "")
    health.watch(
        "claim", lambda: "" if database.leader_lock.is_held else "the database does not belong to this server any more"
    )


def _check_key(database: Database, sealer: Sealer) -> None:
    """Refuse to start with a key that cannot decrypt the stored variables and secrets."""
    sealed = database.read(runs.sealed_unfinished)
    if sealed and not any(sealer.is_mine(context) for context in sealed):
        raise ServerProblem(
            "the server's key does not belong to its database: unfinished runs were sealed with another key",
            hint=f"{_PUT_BACK}, or start with --key-lost, which ends the unfinished runs and deletes the secrets",
        )
    others = database.read(lambda connection: stored_secrets.sealed_by_another(connection, sealer))
    if names := sorted({name for _whose, name, _version in others}):
        raise ServerProblem(
            f"the server's key does not belong to its database: secrets were sealed with another key ({_some(names)})",
            hint=f"{_PUT_BACK}, or start with --key-lost, which deletes the secrets, and set the secrets again",
        )


def _do_without_key(database: Database, sealer: Sealer, *, now_ns: int) -> None:
    """Delete the secrets that the server's key cannot decrypt."""

    def work(connection: sa.Connection) -> list[str]:
        names = stored_secrets.take_away_sealed_by_another(connection, sealer)
        if names:
            detail: dict[str, object] = {"key_lost": True}
            for name in names:
                audit.record(
                    connection, who=SERVER, action=Action.SECRET_DELETE, subject=name, now_ns=now_ns, detail=detail
                )
        return names

    if names := database.write(work):
        _log.warning("set the secrets %s again, because the server has deleted them with the lost key", _some(names))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


def login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # In some containers, the user id has no name.
        return ""
