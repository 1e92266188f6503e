"""The composition root: builds every service of the server from its resources, lowest first.

    Resources (settings, clock, database, hub, stores, state in memory) ─▶ compose ─▶ Services ─▶ make_scheduler, …

        LifecycleLayer ─▶ AccessLayer ─▶ NodeLayer ─▶ BillingLayer ─▶ RunLayer

A service takes what it needs as keyword arguments. Only the start of the process and tests import this module.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import Engine
from serverless_gpu.server.audit.chain_writer import Chainer
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.billing.price_service import PriceService
from serverless_gpu.server.billing.usage_reports import UsageReports
from serverless_gpu.server.billing.usage_rollup import Folding
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.budgets.budget_enforcer import Keeper
from serverless_gpu.server.budgets.budget_service import BudgetService
from serverless_gpu.server.budgets.notice_webhook import Notifier
from serverless_gpu.server.budgets.spend_alarms import Alarms
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.encryption import Sealer
from serverless_gpu.server.core.health import ServerHealth
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_key import Keys
from serverless_gpu.server.core.server_metrics import Measures
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.environments.garbage_collection import Collector
from serverless_gpu.server.identity.bootstrap import FileTokens
from serverless_gpu.server.identity.principal_service import PrincipalService
from serverless_gpu.server.invariants.self_check import SelfCheck
from serverless_gpu.server.lifecycle.attempt_tokens import AttemptTokens
from serverless_gpu.server.lifecycle.gang_hangs import GangHangs
from serverless_gpu.server.lifecycle.gang_progress import GangProgress
from serverless_gpu.server.lifecycle.gang_reconciler import GangReconciler
from serverless_gpu.server.lifecycle.liveness import Deliveries, Leases, Looks, Presence
from serverless_gpu.server.lifecycle.owner_suspension import OwnerSuspension
from serverless_gpu.server.lifecycle.rendezvous import RendezvousService
from serverless_gpu.server.lifecycle.rendezvous_state import Meetings
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.lifecycle.requeue import Requeue
from serverless_gpu.server.lifecycle.transitions import Announcer
from serverless_gpu.server.nodes.agent_service import Agents
from serverless_gpu.server.nodes.drain import DrainService
from serverless_gpu.server.nodes.evacuation import Evacuation
from serverless_gpu.server.nodes.join import JoinService
from serverless_gpu.server.nodes.node_admin import NodeRuleService
from serverless_gpu.server.nodes.node_admission import NodeAdmission
from serverless_gpu.server.nodes.node_queries import NodeService
from serverless_gpu.server.operations.state_metrics import Sampling
from serverless_gpu.server.policies.policy_admission import PolicyAdmission
from serverless_gpu.server.policies.policy_service import PolicyService
from serverless_gpu.server.pools.pool_service import PoolService
from serverless_gpu.server.runs.estimates import EstimateService
from serverless_gpu.server.runs.queue_limits import WaitingRoom
from serverless_gpu.server.runs.queue_views import QueueViews
from serverless_gpu.server.runs.retention import Retention
from serverless_gpu.server.runs.run_queries import RunQueries
from serverless_gpu.server.runs.stop_requests import StopService
from serverless_gpu.server.runs.submission import SubmissionService
from serverless_gpu.server.scheduling.engine_reservations import Reserving
from serverless_gpu.server.scheduling.feasibility import Feasibility
from serverless_gpu.server.scheduling.feasibility_cache import FeasibilityMemory
from serverless_gpu.server.scheduling.missed_run_check import SecondLook
from serverless_gpu.server.scheduling.planner_state import Planning
from serverless_gpu.server.scheduling.preemption import Preemptor
from serverless_gpu.server.scheduling.queue_snapshot import Roster
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.server.scheduling.scheduler import Scheduler
from serverless_gpu.server.scheduling.unsatisfiable import UnsatisfiableRuns
from serverless_gpu.server.scheduling.wait_reasons import Sentences
from serverless_gpu.server.secrets.secret_service import SecretService
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.environment_store import Environments
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.server.storage.upload_spool import Spool
from serverless_gpu.wire.pool_join import RayPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerResources:
    """Resources that the services share: opened parts, and state in memory.

    Attributes:
        settings: of the server.
        keys: sign tokens of attempts.
        sealer: encrypts callers' variables.
        leases: last sign of life of each attempt.
        looks: crews that are to report now.
        meetings: rendezvous data of gangs on several nodes.
        gang_progress: progress of gangs on several nodes.
        presence: last sign of life of each node.
        deliveries: orders that left the server.
        sentences: reasons for which runs wait.
        waiting_room: free places in the queue by principal.
        spending: standing of every budget.
        feasible: runs that some node could serve.
        engine_nodes: returns the names of nodes that the engine has, before their agents say hello.
        ray_pool: returns the address of the Ray cluster for nodes that join; None where nodes cannot join.
        unwritable: returns why the database takes no writes, without names; "" if it does.
        low: returns why the database takes no new runs, without names; "" if it does.
    """

    settings: Settings
    clock: Clock
    database: Transactions
    hub: Hub
    keys: Keys
    sealer: Sealer
    logs: Logs
    blobs: Blobs
    environments: Environments
    spool: Spool
    leases: Leases = dataclasses.field(default_factory=Leases)
    looks: Looks = dataclasses.field(default_factory=Looks)
    presence: Presence = dataclasses.field(default_factory=Presence)
    deliveries: Deliveries = dataclasses.field(default_factory=Deliveries)
    meetings: Meetings = dataclasses.field(default_factory=Meetings)
    gang_progress: GangProgress = dataclasses.field(default_factory=GangProgress)
    sentences: Sentences = dataclasses.field(default_factory=Sentences)
    waiting_room: WaitingRoom = dataclasses.field(default_factory=WaitingRoom)
    measures: Measures = dataclasses.field(default_factory=Measures)
    health: ServerHealth = dataclasses.field(default_factory=ServerHealth)
    spending: Spending = dataclasses.field(default_factory=Spending)
    feasible: FeasibilityMemory = dataclasses.field(default_factory=FeasibilityMemory)
    engine_nodes: Callable[[], Collection[str]] = tuple
    ray_pool: Callable[[], RayPool | None] = lambda: None
    low: Callable[[], str] = lambda: ""
    unwritable: Callable[[], str] = lambda: ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LifecycleLayer:
    """Services of the lifecycle of runs: transitions, gangs, reports."""

    announcer: Announcer
    requeue: Requeue
    gang_hangs: GangHangs
    gang_reconciler: GangReconciler
    rendezvous: RendezvousService
    attempt_tokens: AttemptTokens
    reports: ReportService


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessLayer:
    """Services of principals and their secrets."""

    principals: PrincipalService
    owner_suspension: OwnerSuspension
    secrets: SecretService


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeLayer:
    """Services of nodes and pools."""

    node_admission: NodeAdmission
    nodes: NodeService
    node_rules: NodeRuleService
    joins: JoinService
    drain: DrainService
    evacuation: Evacuation
    agents: Agents
    pools: PoolService


@dataclasses.dataclass(frozen=True, kw_only=True)
class BillingLayer:
    """Services of usage policies, prices, usage and budgets."""

    policy_admission: PolicyAdmission
    policies: PolicyService
    prices: PriceService
    usage_reports: UsageReports
    budget_admission: BudgetAdmission
    budgets: BudgetService


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLayer:
    """Services of runs: submission, scheduling, views."""

    preemptor: Preemptor
    feasibility: Feasibility
    submissions: SubmissionService
    stops: StopService
    estimates: EstimateService
    queue_views: QueueViews
    run_queries: RunQueries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services(RunLayer, BillingLayer, NodeLayer, AccessLayer, LifecycleLayer, ServerResources):
    """Every service of the server, and the resources they share."""

    @property
    def by_type(self) -> dict[type, object]:
        """Return services and resources by their class, as handlers of routes name them."""
        hints = typing.get_type_hints(type(self))
        return {
            hints[each.name]: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if isinstance(hints[each.name], type)
        }


def compose(resources: ServerResources) -> Services:
    """Build the graph of services: each layer takes the resources and the layers below it."""
    lifecycle = _lifecycle(resources)
    access = _access(resources, lifecycle)
    nodes = _nodes(resources, lifecycle)
    billing = _billing(resources)
    runs = _runs(resources, lifecycle, billing)
    return Services(**vars(resources), **vars(lifecycle), **vars(access), **vars(nodes), **vars(billing), **vars(runs))


def _lifecycle(r: ServerResources) -> LifecycleLayer:
    announcer = Announcer(hub=r.hub, looks=r.looks, measures=r.measures)
    gang_hangs = GangHangs(
        settings=r.settings,
        clock=r.clock,
        database=r.database,
        hub=r.hub,
        looks=r.looks,
        gang_progress=r.gang_progress,
        announcer=announcer,
    )
    rendezvous = RendezvousService(
        settings=r.settings,
        clock=r.clock,
        database=r.database,
        hub=r.hub,
        leases=r.leases,
        looks=r.looks,
        presence=r.presence,
        meetings=r.meetings,
        announcer=announcer,
    )
    attempt_tokens = AttemptTokens(settings=r.settings, clock=r.clock, keys=r.keys)
    return LifecycleLayer(
        announcer=announcer,
        requeue=Requeue(clock=r.clock, database=r.database, deliveries=r.deliveries, announcer=announcer),
        gang_hangs=gang_hangs,
        gang_reconciler=GangReconciler(clock=r.clock, database=r.database, announcer=announcer),
        rendezvous=rendezvous,
        attempt_tokens=attempt_tokens,
        reports=ReportService(
            settings=r.settings,
            clock=r.clock,
            database=r.database,
            hub=r.hub,
            logs=r.logs,
            blobs=r.blobs,
            leases=r.leases,
            looks=r.looks,
            presence=r.presence,
            measures=r.measures,
            announcer=announcer,
            attempt_tokens=attempt_tokens,
            gang_hangs=gang_hangs,
            rendezvous=rendezvous,
        ),
    )


def _access(r: ServerResources, lifecycle: LifecycleLayer) -> AccessLayer:
    return AccessLayer(
        principals=PrincipalService(
            settings=r.settings, clock=r.clock, database=r.database, hub=r.hub, budgets_changed=r.spending.change
        ),
        owner_suspension=OwnerSuspension(clock=r.clock, database=r.database, announcer=lifecycle.announcer),
        secrets=SecretService(clock=r.clock, database=r.database, sealer=r.sealer),
    )


def _nodes(r: ServerResources, lifecycle: LifecycleLayer) -> NodeLayer:
    node_admission = NodeAdmission(clock=r.clock, database=r.database, presence=r.presence)
    nodes = NodeService(
        settings=r.settings,
        clock=r.clock,
        database=r.database,
        hub=r.hub,
        leases=r.leases,
        presence=r.presence,
        announcer=lifecycle.announcer,
        requeue=lifecycle.requeue,
    )
    return NodeLayer(
        node_admission=node_admission,
        nodes=nodes,
        node_rules=NodeRuleService(clock=r.clock, database=r.database, hub=r.hub, nodes=nodes),
        joins=JoinService(clock=r.clock, database=r.database, presence=r.presence, ray_pool=r.ray_pool),
        drain=DrainService(clock=r.clock, database=r.database, hub=r.hub),
        evacuation=Evacuation(
            clock=r.clock, database=r.database, hub=r.hub, leases=r.leases, announcer=lifecycle.announcer
        ),
        agents=Agents(
            settings=r.settings,
            clock=r.clock,
            database=r.database,
            hub=r.hub,
            sealer=r.sealer,
            looks=r.looks,
            presence=r.presence,
            deliveries=r.deliveries,
            announcer=lifecycle.announcer,
            attempt_tokens=lifecycle.attempt_tokens,
            node_admission=node_admission,
            reports=lifecycle.reports,
            requeue=lifecycle.requeue,
        ),
        pools=PoolService(clock=r.clock, database=r.database, hub=r.hub, nodes=nodes),
    )


def _billing(r: ServerResources) -> BillingLayer:
    budget_admission = BudgetAdmission(settings=r.settings, clock=r.clock, leases=r.leases, spending=r.spending)
    return BillingLayer(
        policy_admission=PolicyAdmission(settings=r.settings, sealer=r.sealer, environments=r.environments),
        policies=PolicyService(clock=r.clock, database=r.database, hub=r.hub, environments=r.environments),
        prices=PriceService(settings=r.settings, clock=r.clock, database=r.database),
        usage_reports=UsageReports(settings=r.settings, clock=r.clock, database=r.database, leases=r.leases),
        budget_admission=budget_admission,
        budgets=BudgetService(
            settings=r.settings,
            clock=r.clock,
            database=r.database,
            hub=r.hub,
            spending=r.spending,
            budget_admission=budget_admission,
        ),
    )


def _runs(r: ServerResources, lifecycle: LifecycleLayer, billing: BillingLayer) -> RunLayer:
    feasibility = Feasibility(
        settings=r.settings, clock=r.clock, presence=r.presence, feasible=r.feasible, engine_nodes=r.engine_nodes
    )
    return RunLayer(
        preemptor=Preemptor(clock=r.clock, database=r.database, measures=r.measures, announcer=lifecycle.announcer),
        feasibility=feasibility,
        submissions=SubmissionService(
            settings=r.settings,
            clock=r.clock,
            database=r.database,
            hub=r.hub,
            keys=r.keys,
            sealer=r.sealer,
            blobs=r.blobs,
            environments=r.environments,
            sentences=r.sentences,
            waiting_room=r.waiting_room,
            measures=r.measures,
            feasible=r.feasible,
            low=r.low,
            budget_admission=billing.budget_admission,
            feasibility=feasibility,
            policy_admission=billing.policy_admission,
        ),
        stops=StopService(clock=r.clock, database=r.database, sentences=r.sentences, announcer=lifecycle.announcer),
        estimates=EstimateService(
            settings=r.settings,
            clock=r.clock,
            database=r.database,
            leases=r.leases,
            sentences=r.sentences,
            budget_admission=billing.budget_admission,
            policy_admission=billing.policy_admission,
        ),
        queue_views=QueueViews(settings=r.settings, clock=r.clock, database=r.database, sentences=r.sentences),
        run_queries=RunQueries(
            clock=r.clock,
            database=r.database,
            hub=r.hub,
            logs=r.logs,
            sentences=r.sentences,
            unwritable=r.unwritable,
            reports=lifecycle.reports,
        ),
    )


def make_alarms(services: Services) -> Alarms:
    """Build the loop that reports unusual spending."""
    return Alarms(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        measures=services.measures,
        spending=services.spending,
    )


def make_chainer(services: Services) -> Chainer:
    """Build the loop that chains entries of the audit."""
    return Chainer(database=services.database)


def make_charging(services: Services) -> Charging:
    """Build the loop that charges attempts."""
    return Charging(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        measures=services.measures,
    )


def make_collector(services: Services) -> Collector:
    """Build the loop that collects garbage in stores."""
    return Collector(
        clock=services.clock, database=services.database, blobs=services.blobs, environments=services.environments
    )


def make_file_tokens(services: Services, *, login: str, renewed: Callable[[], None]) -> FileTokens:
    """Build the loop that renews tokens in files."""
    return FileTokens(
        settings=services.settings, clock=services.clock, database=services.database, login=login, renewed=renewed
    )


def make_keeper(services: Services) -> Keeper:
    """Build the loop that enforces budgets."""
    return Keeper(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        measures=services.measures,
        spending=services.spending,
        announcer=services.announcer,
        budget_admission=services.budget_admission,
    )


def make_notifier(services: Services) -> Notifier:
    """Build the loop that posts notices to the webhook."""
    return Notifier(
        settings=services.settings, clock=services.clock, database=services.database, measures=services.measures
    )


def make_planning(services: Services) -> Planning:
    """Build the planner state of a scheduler."""
    return Planning(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        presence=services.presence,
        sentences=services.sentences,
        roster=make_roster(services),
    )


def make_reconciler(services: Services, *, scheduler: Scheduler, engine: Engine | None = None) -> Reconciler:
    """Build the reconciler; it returns orders through the scheduler."""
    return Reconciler(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        leases=services.leases,
        looks=services.looks,
        presence=services.presence,
        deliveries=services.deliveries,
        gang_progress=services.gang_progress,
        announcer=services.announcer,
        evacuation=services.evacuation,
        gang_reconciler=services.gang_reconciler,
        owner_suspension=services.owner_suspension,
        rendezvous=services.rendezvous,
        scheduler=scheduler,
        engine=engine,
    )


def make_reserving(services: Services, engine: Engine | None) -> Reserving:
    """Build the reservations of a scheduler with its engine."""
    return Reserving(
        database=services.database,
        hub=services.hub,
        deliveries=services.deliveries,
        requeue=services.requeue,
        engine=engine,
    )


def make_retention(services: Services) -> Retention:
    """Build the loop that removes old runs and logs."""
    return Retention(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        logs=services.logs,
        secrets=services.secrets,
    )


def make_roster(services: Services) -> Roster:
    """Build a queue snapshot."""
    return Roster(
        settings=services.settings,
        leases=services.leases,
        spending=services.spending,
        budget_admission=services.budget_admission,
    )


def make_sampling(services: Services) -> Sampling:
    """Build the source of state metrics."""
    return Sampling(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        leases=services.leases,
        presence=services.presence,
        health=services.health,
    )


def make_scheduler(services: Services, *, engine: Engine | None = None) -> Scheduler:
    """Build the scheduler; without an engine, nodes join by themselves."""
    return Scheduler(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        hub=services.hub,
        keys=services.keys,
        sealer=services.sealer,
        leases=services.leases,
        deliveries=services.deliveries,
        sentences=services.sentences,
        measures=services.measures,
        spending=services.spending,
        announcer=services.announcer,
        impossible=make_impossible(services),
        planning=make_planning(services),
        preemptor=services.preemptor,
        reserving=make_reserving(services, engine),
    )


def make_second_look(services: Services) -> SecondLook:
    """Build the check for runs that the scheduler missed."""
    return SecondLook(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        presence=services.presence,
        sentences=services.sentences,
        roster=make_roster(services),
    )


def make_self_check(services: Services) -> SelfCheck:
    """Build the loop that checks invariants."""
    return SelfCheck(
        database=services.database,
        hub=services.hub,
        blobs=services.blobs,
        sentences=services.sentences,
        measures=services.measures,
        spending=services.spending,
        second_look=make_second_look(services),
    )


def make_impossible(services: Services) -> UnsatisfiableRuns:
    """Build the check for runs that no node can serve."""
    return UnsatisfiableRuns(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        sentences=services.sentences,
        feasible=services.feasible,
        announcer=services.announcer,
        feasibility=services.feasibility,
    )


def make_folding(services: Services) -> Folding:
    """Build the loop that rolls usage up."""
    return Folding(database=services.database)
