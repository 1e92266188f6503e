"""Builds all server services from their shared resources (the composition root).

    ServerResources (settings, clock, database, hub, stores, state in memory) ─▶ compose ─▶ Services ─▶ Services.make

Each service declares its dependencies as keyword arguments of its constructor. `compose` passes the resource or service
with the argument's name. `Services` lists all services in dependency order. Only the server's entry point and tests
import this module. `application` declares all routes, and `guarded` adds the middleware.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import starlette.routing
from starlette.applications import Starlette

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import Engine, EngineNode
from serverless_gpu.server import audit, environment_catalog, environments, policies, pools, secrets
from serverless_gpu.server.billing import price_service, usage_reports
from serverless_gpu.server.billing.price_service import PriceService
from serverless_gpu.server.billing.usage_reports import UsageReports
from serverless_gpu.server.budgets import budget_service
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.budgets.budget_service import BudgetService
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.health import ServerHealth
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_key import Keys, Sealer
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.environment_catalog import EnvironmentCatalog
from serverless_gpu.server.http.access_log import AccessLogMiddleware
from serverless_gpu.server.http.auth_middleware import Authenticate, Authenticator, AuthMiddleware, Reach
from serverless_gpu.server.http.proxy_middleware import ProxyMiddleware
from serverless_gpu.server.http.routing import JSON_API, Route, Routes
from serverless_gpu.server.identity import (
    device_service,
    oidc_service,
    password_service,
    principal_service,
    session_service,
)
from serverless_gpu.server.identity.device_service import DeviceService
from serverless_gpu.server.identity.oidc_service import OidcService
from serverless_gpu.server.identity.password_service import PasswordService
from serverless_gpu.server.identity.principal_service import PrincipalService
from serverless_gpu.server.identity.session_service import SessionService
from serverless_gpu.server.index_proxy import index_service
from serverless_gpu.server.index_proxy.index_catalog import IndexCatalog
from serverless_gpu.server.index_proxy.index_service import IndexService
from serverless_gpu.server.index_proxy.index_tokens import IndexTokens
from serverless_gpu.server.index_proxy.request_log import IndexRequestLog
from serverless_gpu.server.invariants.self_check import MissedRunCheck, SelfCheck
from serverless_gpu.server.lifecycle import reports
from serverless_gpu.server.lifecycle.attempt_tokens import AttemptTokens
from serverless_gpu.server.lifecycle.gang_hangs import GangHangs, GangProgress
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.lifecycle.owner_suspension import OwnerSuspension
from serverless_gpu.server.lifecycle.rendezvous import RendezvousService, RendezvousStates
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries, Requeue
from serverless_gpu.server.lifecycle.transitions import Announcer, ReportRequests
from serverless_gpu.server.nodes import agent_service, canaries, device_views, drain, node_service, tunnel_relay
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.nodes.canaries import CanaryService
from serverless_gpu.server.nodes.device_samples import DeviceSamples
from serverless_gpu.server.nodes.device_views import DeviceViews
from serverless_gpu.server.nodes.drain import DrainService
from serverless_gpu.server.nodes.egress_policies import EgressPolicies
from serverless_gpu.server.nodes.node_admission import JoinService, NodeAdmission
from serverless_gpu.server.nodes.node_rules import Evacuation
from serverless_gpu.server.nodes.node_service import NodeRuleService, NodeService
from serverless_gpu.server.nodes.node_sessions import NodeSessions
from serverless_gpu.server.nodes.tunnel_relay import TunnelRelay
from serverless_gpu.server.operations import server_report, server_status
from serverless_gpu.server.operations.server_report import ServerReports
from serverless_gpu.server.policies import PolicyAdmission, PolicyService
from serverless_gpu.server.pools import PoolService
from serverless_gpu.server.runs import (
    comparison,
    estimates,
    log_search,
    queue_views,
    rerun,
    run_details,
    run_service,
    run_telemetry,
    tunnels,
)
from serverless_gpu.server.runs.comparison import Comparisons
from serverless_gpu.server.runs.estimates import EstimateService
from serverless_gpu.server.runs.queue_views import QueueViews
from serverless_gpu.server.runs.rerun import RerunService
from serverless_gpu.server.runs.run_service import RunQueries, StopService
from serverless_gpu.server.runs.submission import QueueLimits, SubmissionService
from serverless_gpu.server.runs.tunnels import TunnelService
from serverless_gpu.server.scheduling.feasibility import Feasibility, FeasibilityCache, UnsatisfiableRuns
from serverless_gpu.server.scheduling.gang_reservations import EngineReservations
from serverless_gpu.server.scheduling.planner_state import PlannerSync
from serverless_gpu.server.scheduling.queue_snapshot import QueueSnapshot
from serverless_gpu.server.scheduling.scheduler import Preemptor, Scheduler
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons
from serverless_gpu.server.secrets import SecretService
from serverless_gpu.server.storage import blobs
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.server.storage.upload_spool import UploadSpool
from serverless_gpu.server.web import pages
from serverless_gpu.server.web.api_calls import ApiCalls
from serverless_gpu.server.web.site import Site
from serverless_gpu.wire.nodes import RayPool

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerResources:
    """Shared resources of the services: database, stores, and in-memory state.

    Attributes:
        settings: settings of the server.
        keys: keys that sign the tokens of attempts.
        sealer: encrypts callers' variables.
        leases: time of the last heartbeat of each attempt.
        looks: gangs whose supervisors must report now.
        meetings: rendezvous data of gangs on several nodes.
        gang_progress: progress of gangs on several nodes.
        presence: time of the last heartbeat of each node.
        deliveries: orders that the server has sent.
        sentences: reasons why runs wait.
        waiting_room: free queue slots by principal.
        spending: current state of every budget.
        feasible: cache of runs that at least one node could execute.
        engine_nodes: returns the engine's nodes, even before their agents register.
        ray_pool: returns the address of the Ray cluster for nodes that join; None where nodes cannot join.
        unwritable: returns why the database accepts no writes, or "" while the database accepts writes.
        low: returns why the database accepts no new runs, or "" while the database accepts new runs.
    """

    settings: Settings
    clock: Clock
    database: Transactions
    hub: Hub
    keys: Keys
    sealer: Sealer
    logs: Logs
    blobs: Blobs
    environments: EnvironmentStore
    spool: UploadSpool
    leases: Leases = dataclasses.field(default_factory=Leases)
    looks: ReportRequests = dataclasses.field(default_factory=ReportRequests)
    presence: Presence = dataclasses.field(default_factory=Presence)
    deliveries: OrderDeliveries = dataclasses.field(default_factory=OrderDeliveries)
    meetings: RendezvousStates = dataclasses.field(default_factory=RendezvousStates)
    gang_progress: GangProgress = dataclasses.field(default_factory=GangProgress)
    sentences: WaitReasons = dataclasses.field(default_factory=WaitReasons)
    waiting_room: QueueLimits = dataclasses.field(default_factory=QueueLimits)
    measures: ServerMetrics = dataclasses.field(default_factory=ServerMetrics)
    health: ServerHealth = dataclasses.field(default_factory=ServerHealth)
    spending: Spending = dataclasses.field(default_factory=Spending)
    feasible: FeasibilityCache = dataclasses.field(default_factory=FeasibilityCache)
    engine_nodes: Callable[[], Collection[EngineNode]] = tuple
    ray_pool: Callable[[], RayPool | None] = lambda: None
    low: Callable[[], str] = lambda: ""
    unwritable: Callable[[], str] = lambda: ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services(ServerResources):
    """Resources and services that handlers, loops and tests share, in dependency order."""

    # Run lifecycle
    announcer: Announcer
    requeue: Requeue
    gang_hangs: GangHangs
    rendezvous: RendezvousService
    attempt_tokens: AttemptTokens
    reports: ReportService

    # Principals and their secrets
    principals: PrincipalService
    owner_suspension: OwnerSuspension
    secrets: SecretService
    sessions: SessionService
    devices: DeviceService
    passwords: PasswordService
    oidc: OidcService
    authenticator: Authenticator

    # Nodes and pools
    node_admission: NodeAdmission
    node_sessions: NodeSessions
    device_samples: DeviceSamples
    nodes: NodeService
    device_views: DeviceViews
    node_rules: NodeRuleService
    joins: JoinService
    drain: DrainService
    evacuation: Evacuation
    egress_policies: EgressPolicies
    canaries: CanaryService
    tunnel_relay: TunnelRelay
    agents: AgentService
    pools: PoolService

    # Package indexes
    index_catalog: IndexCatalog
    index_tokens: IndexTokens
    index_log: IndexRequestLog
    indexes: IndexService

    # Usage policies, prices, usage and budgets
    policy_admission: PolicyAdmission
    policies: PolicyService
    prices: PriceService
    usage_reports: UsageReports
    budget_admission: BudgetAdmission
    budgets: BudgetService

    # Runs
    preemptor: Preemptor
    feasibility: Feasibility
    submissions: SubmissionService
    stops: StopService
    estimates: EstimateService
    queue_views: QueueViews
    run_queries: RunQueries
    reruns: RerunService
    tunnels: TunnelService
    comparisons: Comparisons

    # Server and environments, for administrators and pages
    environment_catalog: EnvironmentCatalog
    server_reports: ServerReports

    # Web pages
    api_calls: ApiCalls
    site: Site

    def make(self, kind: Callable[..., T], **own: object) -> T:
        """Build an unshared component, such as a loop. `own` contains additional constructor arguments."""
        return _build(kind, vars(self), **own)

    @property
    def by_type(self) -> dict[type, object]:
        """Return services and resources by class, as route handlers request them."""
        return {kind: getattr(self, name) for name, kind in kinds(type(self)).items()}


def compose(resources: ServerResources) -> Services:
    """Build all services in dependency order."""
    parts = dict(vars(resources))
    for name, kind in kinds(Services).items():
        if name not in parts:
            # `compose` passes the budget callback, because the `principals` package must not import `budgets`.
            own = {"budgets_changed": resources.spending.change} if kind is PrincipalService else {}
            parts[name] = _build(kind, parts, **own)
    return Services(**parts)


def kinds(of: type[ServerResources]) -> dict[str, type]:
    """Return each field's class by field name. The result omits callable fields."""
    hints = typing.get_type_hints(of)
    return {each.name: hints[each.name] for each in dataclasses.fields(of) if isinstance(hints[each.name], type)}


def make_scheduler(services: Services, *, engine: Engine | None = None) -> Scheduler:
    """Build the scheduler. Without an engine, nodes register with the server themselves."""
    return services.make(
        Scheduler,
        impossible=services.make(UnsatisfiableRuns),
        planning=make_planning(services),
        reserving=services.make(EngineReservations, engine=engine),
    )


def make_planning(services: Services) -> PlannerSync:
    """Build the scheduler's planner state."""
    return services.make(PlannerSync, roster=services.make(QueueSnapshot))


def make_self_check(services: Services) -> SelfCheck:
    """Build the self-check loop, which checks invariants."""
    return services.make(SelfCheck, second_look=services.make(MissedRunCheck, roster=services.make(QueueSnapshot)))


def _build(kind: Callable[..., T], parts: dict[str, object], **own: object) -> T:
    named = inspect.signature(kind).parameters
    return kind(**{name: parts[name] for name in named if name in parts and name not in own}, **own)


ROUTES: tuple[Routes, ...] = (
    agent_service.routes,
    reports.routes,
    audit.routes,
    blobs.routes,
    budget_service.routes,
    canaries.routes,
    drain.routes,
    environments.routes,
    environment_catalog.routes,
    estimates.routes,
    device_views.routes,
    index_service.routes,
    node_service.routes,
    pools.routes,
    policies.routes,
    price_service.routes,
    principal_service.routes,
    queue_views.routes,
    run_service.routes,
    run_details.routes,
    comparison.routes,
    rerun.routes,
    secrets.routes,
    server_report.routes,
    server_status.routes,
    session_service.routes,
    device_service.routes,
    password_service.routes,
    oidc_service.routes,
    usage_reports.routes,
    log_search.routes,
    run_telemetry.routes,
    tunnels.routes,
    tunnel_relay.routes,
)
"""Routes of the JSON API. Add each new route module to this list."""


def all_routes() -> list[Route]:
    """Return every route of the server."""
    return [route for routes in (*ROUTES, *pages.ROUTES) for route in routes.all]


def api_routes() -> list[Route]:
    """Return the routes of the JSON API."""
    return [route for routes in ROUTES for route in routes.all]


def application(routes: Sequence[Route]) -> Starlette:
    """Return the ASGI application without middleware."""
    declared = []
    for route in routes:
        served = starlette.routing.Route(route.full_path, route.serve, methods=[route.method])
        # Starlette adds HEAD to GET routes, but `AuthMiddleware` knows only the declared methods.
        served.methods = {route.method}
        declared.append(served)
    app = Starlette(routes=declared)
    app.router.redirect_slashes = False
    return app


def guarded(
    provided: Mapping[type, object],
    *,
    hub: Hub,
    clock: Clock,
    measures: ServerMetrics,
    hosts: Sequence[str],
    authenticate: Authenticate,
    reach: Reach,
    authenticate_session: Authenticate | None = None,
    proxies: tuple[str, ...] = (),
    base: str = "",
) -> AccessLogMiddleware:
    """Return the application behind the access log, proxy and authentication middleware.

    Without `authenticate_session`, the application serves no web pages.
    """
    routes = [route.bound(provided) for route in all_routes() if authenticate_session or route.mount is JSON_API]
    api_calls = provided[ApiCalls]
    assert isinstance(api_calls, ApiCalls)
    api_calls.bind(routes)
    authenticated = AuthMiddleware(
        application(routes),
        clock=clock,
        measures=measures,
        routes=routes,
        hosts=hosts,
        authenticate=authenticate,
        reach=reach,
        authenticate_session=authenticate_session,
        base=base,
    )
    return AccessLogMiddleware(ProxyMiddleware(authenticated, hub=hub, proxies=proxies), measures=measures, clock=clock)
