"""Answers requests of node agents, and defines their routes.

    hello ─▶ the server stores the node; after another boot of its machine, its attempts have certainly ended;
             another machine under its name: refused while the first is present or may still run attempts;
             unconfirmed orders of its attempts: confirmed; its attempts that the server has ended: stale
    heartbeat ─▶ the node is present; its devices; stale attempts
    orders ─▶ all unconfirmed orders of the node, repeated until it confirms; no start of a gang before an engine has
             reserved it

A node may report only about itself. If a node names another node's attempt, the server answers that the attempt is
stale. The server requests a new hello from a forgotten or unknown node.

A node is one installation on one machine. A node's token is valid only for the node's own installation
(`node_admission.py`). While a node is present or may still have active runs, the server refuses other nodes with the
same name. If the server admitted a second node with the same name, the second node would receive orders for the first
node.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from functools import partial
from typing import Annotated

import msgspec
import sqlalchemy as sa
from anyio import to_thread

from serverless_gpu import ambient, faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import (
    InvalidValue,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    ServerProblem,
    ServerStorageFull,
    TooLarge,
)
from serverless_gpu.model.access_control import HelloDecision
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.rendezvous import ADDRESSES_MAX, kind_of
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp
from serverless_gpu.model.node_keys import NodeKeys, order_text
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER, Hub, node_key
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import PROOF, Call, Query, Routes, Stream, writing
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.attempt_tokens import AttemptTokens
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries, Requeue
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, ReportRequests, TransitionResult
from serverless_gpu.server.nodes import node_admission
from serverless_gpu.server.nodes.canaries import CanaryService
from serverless_gpu.server.nodes.device_samples import DeviceSamples
from serverless_gpu.server.nodes.egress_policies import EgressPolicies
from serverless_gpu.server.nodes.node_admission import JoinService, NodeAdmission
from serverless_gpu.server.nodes.node_sessions import NodeSessions
from serverless_gpu.server.nodes.tunnel_relay import TunnelRelay
from serverless_gpu.server.records import attempts, audit, crews, nodes, pools, runs, stored_secrets
from serverless_gpu.server.records import orders as order_rows
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.crews import CrewId, Gang
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.server.records.orders import OPEN_MAX, StoredOrder
from serverless_gpu.wire import node_crypto
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    AttemptSeen,
    Heartbeat,
    HeartbeatAnswer,
    KeyRequest,
    Order,
    OrdersTaken,
    PrivatePart,
    ReportNow,
    SessionAnswer,
    SessionChallenge,
    SessionRequest,
    Start,
    Stop,
    StreamedOrder,
    clock_text,
)
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX, PROTOCOLS
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest, RayPool

DEVICES_MAX = 1024
ATTEMPTS_MAX = 10_000
PYTHONS_MAX = 64
TAKES_MAX = 64
MAX_RUN = "max_run"
"""Capability of nodes that support `RunSpec.max_run_s`. Nodes without this capability receive the smaller limit as
`timeout`."""
PYTHON_CHARACTERS_MAX = 16
SEEN_EVERY_S = 15.0
"""Minimum seconds between two writes of a node's last message time, unless other data has changed."""
SEND_AGAIN_S = 15.0
LOOK_AGAIN_S = 1.0
ALIVE_S = 10.0
"""Seconds between keep-alive messages of an idle stream."""
_OUTSIDE = ("IPv4", "IPv6")
_log = logging.getLogger(__name__)


class AgentService:
    """Answers requests of agents."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        sealer: Sealer,
        looks: ReportRequests,
        presence: Presence,
        deliveries: OrderDeliveries,
        announcer: Announcer,
        attempt_tokens: AttemptTokens,
        node_admission: NodeAdmission,
        reports: ReportService,
        requeue: Requeue,
        canaries: CanaryService,
        egress_policies: EgressPolicies,
        device_samples: DeviceSamples,
        tunnel_relay: TunnelRelay,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._sealer = sealer
        self._looks = looks
        self._presence = presence
        self._deliveries = deliveries
        self._announcer = announcer
        self._attempt_tokens = attempt_tokens
        self._node_admission = node_admission
        self._reports = reports
        self._requeue = requeue
        self._canaries = canaries
        self._egress_policies = egress_policies
        self._device_samples = device_samples
        self._tunnel_relay = tunnel_relay

    def hello(self, who: Caller, said: AgentHello) -> AgentWelcome:
        """Admit a joining or reconnecting node."""
        _check(said)
        try:
            answer = self._database.read(lambda connection: self._judged(connection, who, said))
            if answer in (HelloDecision.PENDING, HelloDecision.ELSEWHERE):
                raise self._node_admission.ask(who, said)
            return self._joined(who, said)
        except NotAllowed as error:
            self._node_admission.note_refusal(who, said, error)
            raise

    def _judged(self, connection: sa.Connection, who: Caller, said: AgentHello) -> HelloDecision:
        answer = node_admission.check(connection, who, said)
        before = nodes.named(connection, said.name)
        if answer is HelloDecision.ELSEWHERE and before is not None:
            there = self._presence.is_there(before.id, now_ns=self._clock.boottime_ns())
            _refuse_another(connection, before, said, there=there)
        return answer

    def _joined(self, who: Caller, said: AgentHello) -> AgentWelcome:
        at_ns = self._clock.wall_ns()
        new_id = ambient.new_run_id()
        before = self._database.read(lambda connection: nodes.named(connection, said.name))
        if before is not None and before.principal == who.name and _is_rebooted(said, before):
            self._requeue.give_back_on(
                before.id, f"{said.name} restarted before it received the order", boot_id=before.boot_id
            )

        def work(connection: sa.Connection) -> tuple[StoredNode, tuple[str, ...], list[TransitionResult], list[Gang]]:
            node, before = self._written(connection, who, said, new_id=new_id, at_ns=at_ns)
            told = _rebooted(connection, node, before, at_ns=at_ns) if before is not None else []
            stale = _stale(connection, node.id, said.attempts)
            kept = [(seen.run_id, seen.fence) for seen in said.attempts if f"{seen.run_id}:{seen.fence}" not in stale]
            if kept:
                runs_of = [run_id for run_id, _ in kept]
                stored_secrets.mark_used(connection, node.id, runs_of=runs_of, at_ns=at_ns)
            order_rows.take_starts(connection, node.id, kept, at_ns=at_ns)
            return node, stale, told, kept

        node, stale, told, kept = self._database.write(work)
        faults.reach("after_hello_before_answer")
        for run_id, fence in kept:
            self._deliveries.send(run_id, fence)  # An earlier server process sent the order.
        for one in told:
            self._announcer.announce(one)
        self._presence.heard(node.id, now_ns=self._clock.boottime_ns())
        self._hub.touch(SCHEDULER)
        settings = self._settings
        return AgentWelcome(
            node=node.id,
            heartbeat_s=settings.heartbeat_s,
            partition_grace_s=settings.partition_grace_s,
            stale=stale,
            at_ns=self._clock.wall_ns(),
        )

    def heartbeat(self, who: Caller, node_id: str, said: Heartbeat) -> HeartbeatAnswer:
        """Store a node's heartbeat, and return its stale attempts and new attempt tokens."""
        _check_devices(said)
        at_ns = self._clock.wall_ns()
        node, stale, tokens, egress, bound = self._database.read(
            lambda connection: (
                _own(connection, who, node_id, said.instance, said.process),
                _stale(connection, node_id, said.attempts),
                self._attempt_tokens.wanted(connection, node_id, said.renew),
                self._egress_policies.news(connection, node_id, said.egress),
                nodes.find(connection, who.token_id),
            )
        )
        news = _beaten(node.hello, said) != node.hello
        if news or not 0 <= at_ns - node.seen_ns <= SEEN_EVERY_S * 1e9:
            # A node counts as present even if a full disk prevents the write of its heartbeat.
            with contextlib.suppress(ServerStorageFull):
                self._database.write(lambda connection: _note(connection, who, node_id, said, at_ns=at_ns))
        self._device_samples.add(node_id, said.samples, wall_ns=at_ns)
        if self._presence.heard(node_id, now_ns=self._clock.boottime_ns()) or news:
            self._hub.touch(SCHEDULER)
        if self._presence.read_clock(node_id, said.clock):
            _log.warning("node %s %s", node.name, clock_text(said.clock) or "has a correct clock again")
        rotate = bound is not None and bound.rotate_ns is not None
        at_ns = self._clock.wall_ns()
        return HeartbeatAnswer(stale=stale, tokens=tokens, at_ns=at_ns, egress=egress, rotate=rotate)

    def check(self, who: Caller, node_id: str, instance: str = "", process: str = "") -> None:
        """Raise `NotFound` unless the caller may receive the orders of a node."""
        self._database.read(lambda connection: _own(connection, who, node_id, instance, process))

    def waiting(
        self, who: Caller, node_id: str, instance: str = "", process: str = "", *, told: Collection[int] = frozenset()
    ) -> list[Order]:
        """Return the unconfirmed orders of a node, and mark these orders as sent.

        Exclude orders with numbers in `told`.
        """

        broken: list[tuple[StoredOrder, str]] = []

        def work(connection: sa.Connection) -> list[Order]:
            node = _own(connection, who, node_id, instance, process)
            found: list[Order] = []
            for stored in order_rows.waiting(connection, node_id):
                if stored.seq in told:
                    continue
                try:
                    order = self._order(connection, stored, node)
                # If the server cannot decrypt a run's variables, only this run fails.
                except ServerProblem as error:
                    broken.append((stored, error.message))
                else:
                    found += [order] if order is not None else []
            return found

        found = self._database.read(work)
        for stored, why in broken:
            self._requeue.give_back(stored.run_id, stored.fence, why)
        deliveries = self._deliveries
        return [order for order in found if isinstance(order, Stop) or deliveries.send(order.run_id, order.fence)]

    def looks(self, who: Caller, node_id: str) -> list[ReportNow]:
        """Return the attempts that a node must report now, with news for each attempt.

        If the node does not support gangs on several nodes, the list is empty.
        """
        asked = self._looks.of(node_id)
        if not asked:
            return []

        def work(connection: sa.Connection) -> list[ReportNow]:
            node = _own(connection, who, node_id)
            return [self._look(connection, crew) for crew in asked] if node.takes_crews else []

        return self._database.read(work)

    def _look(self, connection: sa.Connection, crew: CrewId) -> ReportNow:
        news = self._reports.gang_news(connection, crew)
        return ReportNow(
            run_id=crew[0],
            fence=crew[1],
            offers=news.offers,
            chosen=news.chosen,
            release=news.release,
            peer_failed=news.peer_failed,
        )

    def take(self, who: Caller, node_id: str, seqs: Sequence[int]) -> None:
        """Record that a node has confirmed orders."""
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            _own(connection, who, node_id)
            stored_secrets.mark_used(connection, node_id, seqs=seqs, at_ns=at_ns)
            order_rows.take(connection, node_id, seqs, at_ns=at_ns)

        self._database.write(work)
        faults.reach("after_ack_before_answer")

    def _written(
        self, connection: sa.Connection, who: Caller, said: AgentHello, *, new_id: str, at_ns: int
    ) -> tuple[StoredNode, StoredNode | None]:
        """Store a node's row after a hello, and return the new and the previous row."""
        before = nodes.named(connection, said.name)
        answer = node_admission.check(connection, who, said)
        pool = _pool(connection, before, said, at_ns=at_ns)
        node = StoredNode(
            id=new_id if before is None else before.id,
            name=said.name,
            machine=said.machine,
            boot_id=said.boot_id,
            principal=who.name,
            pool=pool,
            hello=msgspec.structs.replace(said, attempts=()),
            seen_ns=at_ns,
            forgotten_ns=None,
            token_id=who.token_id,
        )
        if before is None:
            node_admission.settle(connection, who, said, answer, at_ns=at_ns)
            nodes.insert(connection, node)
            detail = {"name": node.name, "pool": pool}
            audit.record(connection, who=who, action=Action.NODE_JOIN, subject=node.id, now_ns=at_ns, detail=detail)
            return node, None
        if before.principal != who.name:
            raise NotAllowed(
                f"the node {said.name!r} belongs to the principal {before.principal}",
                hint="give this node another name",
            )
        there = self._presence.is_there(before.id, now_ns=self._clock.boottime_ns())
        _refuse_another(connection, before, said, there=there)
        if before.token_id == who.token_id:  # Two processes must not share a node token.
            self._node_admission.refuse_second_process(before, said)
        node_admission.settle(connection, who, said, answer, at_ns=at_ns)
        nodes.change(connection, node)
        return node, before

    def _order(self, connection: sa.Connection, order: StoredOrder, node: StoredNode) -> Order | None:
        """Return an order for its node, or None if the attempt has ended or the server holds the order back."""
        if order.kind == "stop":
            if order.stop is None:
                return None
            attempt = attempts.find(connection, order.run_id, order.fence)
            released = attempt is not None and attempt.released
            return Stop(seq=order.seq, run_id=order.run_id, fence=order.fence, reason=order.stop, released=released)
        run = runs.find(connection, order.run_id)
        if run is None or run.attempt is None or run.fence != order.fence:
            return None
        if self._deliveries.is_held_back(run.id, run.fence, [crew.node for crew in run.attempt.crews]):
            return None
        payload = runs.payload(connection, order.run_id)
        if payload is None:
            return None
        crew, spec = run.attempt.crews[order.crew], run.spec_now
        # Nodes of earlier versions support only the time limit `timeout`, which bounds one attempt.
        if MAX_RUN not in node.hello.takes:
            spec = msgspec.structs.replace(spec, timeout_s=spec.limit_s)
        context = msgspec.Raw(self._sealer.unseal(payload.context_sealed, about=run.id))
        values = stored_secrets.values(connection, self._sealer, run, run.attempt.secrets, run.spec.secret_variables)
        start = Start(
            seq=order.seq,
            run_id=run.id,
            fence=order.fence,
            token=self._attempt_tokens.first(crew.id, takes=node.hello.takes),
            spec=spec,
            gpu_type=run.attempt.gpu_type,
            world_size=run.attempt.world_size,
            context=context,
            call=payload.call,
            snapshot=run.snapshot,
            owner=run.owner,
            submitted_ns=run.created_ns,
            partition_grace_s=crew.grace_s,
            secrets=values,
            without=tuple(one.uuid for one in node.rules.quarantined),
            tariff=run.attempt.tariff,
            crews=tuple(one.place for one in run.attempt.crews) if run.attempt.num_nodes > 1 else (),
            crew=crew.number,
            nonce=run.attempt.nonce,
            isolation=pools.level(connection, node.pool),
            egress=self._egress_policies.of(connection, node.pool),
        )
        return start if node.hello.keys is None else _sealed(start, node.hello.keys)

    async def stream(
        self, who: Caller, node_id: str, instance: str = "", process: str = ""
    ) -> AsyncIterator[StreamedOrder | None]:
        """Yield a node's orders repeatedly until the node confirms each order. Yield None as a keep-alive."""
        orders_of_node = self._orders(who, node_id, instance, process)
        with self._presence.streaming(node_id):
            async with contextlib.aclosing(orders_of_node) as found:
                async for order in found:
                    yield order

    async def _orders(
        self, who: Caller, node_id: str, instance: str, process: str
    ) -> AsyncGenerator[StreamedOrder | None]:
        sent: dict[int, int] = {}
        begun = ""  # Last canary that this stream has sent.
        opened: frozenset[str] = frozenset()  # Tunnels that this stream has sent.
        hub, clock, key = self._hub, self._clock, node_key(node_id)
        while not hub.closed:
            seen = hub.version(key)
            now_ns = clock.boottime_ns()
            sent = {seq: sent_ns for seq, sent_ns in sent.items() if now_ns - sent_ns <= SEND_AGAIN_S * 1e9}
            look = partial(self.waiting, who, node_id, instance, process, told=frozenset(sent))
            for order in await to_thread.run_sync(look):
                sent[order.seq] = now_ns
                yield order
                faults.reach("after_order_left")
            # The server repeats each report request until the report arrives, because nodes do not confirm such
            # requests.
            looks = await to_thread.run_sync(self.looks, who, node_id) if self._looks.of(node_id) else []
            for asked in looks:
                yield asked
            canary = self._canaries.of(node_id)
            if canary is not None and canary.id != begun:
                begun = canary.id
                yield canary
            tunnels = self._tunnel_relay.wanted(node_id)
            for tunnel in tunnels:
                if tunnel.id not in opened:
                    yield tunnel
            opened = frozenset(tunnel.id for tunnel in tunnels)
            if await hub.changed(key, seen, LOOK_AGAIN_S if looks else ALIVE_S) == seen and not looks:
                yield None


def _sealed(start: Start, keys: NodeKeys) -> Start:
    """Return an order whose context and secrets only the node with the keys can read."""
    private = msgspec.json.encode(PrivatePart(context=start.context, secrets=start.secrets))
    about = order_text(start.run_id, start.fence, start.crew)
    return msgspec.structs.replace(
        start, context=msgspec.Raw(b"{}"), secrets=(), sealed=node_crypto.sealed(keys, private, about=about)
    )


def _refuse_another(connection: sa.Connection, before: StoredNode, said: AgentHello, *, there: bool) -> None:
    """Refuse a node if another node with the same name is present or may have active runs."""
    other_machine = before.machine != said.machine
    # A restarted container has a new machine identifier but keeps its installation.
    known = bool(before.hello.instance and said.instance)
    other_home = before.hello.instance != said.instance if known else other_machine
    rebooted = not other_machine and before.boot_id != said.boot_id
    what = "another machine" if other_machine else "another home of this machine"
    if there and (other_machine or (other_home and not rebooted)):
        raise NotAllowed(
            f"a node named {said.name!r} is already connected from {what}", hint="give this node another name"
        )
    if not other_home or rebooted:
        return
    going_on = crews.open_on(connection, before.id)
    if going_on:
        raise NotAllowed(
            f"a node named {said.name!r} was registered from {what}, and {len(going_on)} of its runs may still be "
            "running",
            hint=f"give this node another name, or run `sgpu node forget {said.name}` if the other node is dead",
        )


def _pool(connection: sa.Connection, before: StoredNode | None, said: AgentHello, *, at_ns: int) -> str:
    """Return a known node's current pool, or the pool in a new node's hello."""
    if before is not None and before.forgotten_ns is None:
        return before.pool
    if said.pool in ("", pools.DEFAULT):
        pools.ensure(connection, pools.DEFAULT, at_ns=at_ns)
        return pools.DEFAULT
    found = pools.find(connection, said.pool)
    if found is None or found.kind == pools.RESERVED:
        what = "there is no pool" if found is None else "an operator must add nodes to the reserved pool"
        raise NotAllowed(
            f"{what} {said.pool!r}",
            hint=f"join without a pool, and ask an operator to run: sgpu pool set {said.pool} --node {said.name}",
        )
    return said.pool


def _own(connection: sa.Connection, who: Caller, node_id: str, instance: str = "", process: str = "") -> StoredNode:
    node = nodes.get(connection, node_id)
    if node is None or node.forgotten_ns is not None or node.principal != who.name:
        raise NotFound(f"{who.name} has no node {node_id!r}", hint="the agent must send its hello again")
    if node.revoked_ns is not None:
        raise NotAuthenticated(f"the node {node.name!r} was revoked")
    if node.token_id != who.token_id:
        raise NotFound(
            f"node {node_id!r} has sent a hello with another token", hint="the agent must send its hello again"
        )
    if instance and node.hello.instance not in ("", instance):
        raise NotFound(f"node {node_id!r} now belongs to another home", hint="the agent must send its hello again")
    if process and node.hello.process not in ("", process):
        raise NotFound(
            f"another process has sent a hello as node {node_id!r}", hint="the agent must send its hello again"
        )
    return node


def _note(connection: sa.Connection, who: Caller, node_id: str, said: Heartbeat, *, at_ns: int) -> None:
    """Store a heartbeat in the node's row, unless an operator moved or forgot the node since the read."""
    node = _own(connection, who, node_id, said.instance, said.process)
    nodes.heard(connection, node, hello=_beaten(node.hello, said), seen_ns=at_ns)


def _beaten(hello: AgentHello, said: Heartbeat) -> AgentHello:
    return msgspec.structs.replace(
        hello,
        devices=said.devices,
        pythons=said.pythons,
        unavailable=said.unavailable,
        draining=said.draining,
        problem=said.problem,
        degraded=said.degraded,
        findings=said.findings,
    )


def _is_rebooted(now: AgentHello | StoredNode, before: StoredNode) -> bool:
    return before.machine == now.machine and before.boot_id != now.boot_id


def _rebooted(connection: sa.Connection, node: StoredNode, before: StoredNode, *, at_ns: int) -> list[TransitionResult]:
    """Abandon a node's attempts from before the last boot of its machine.

    If another machine uses the node's name, runs may still be active on the first machine. The server abandons no
    attempts when another machine takes over a node's name.
    """
    if not _is_rebooted(node, before):
        return []
    note = Note(at_ns=at_ns, detail=f"{node.name} reported a new boot")
    told: list[TransitionResult] = []
    for crew in crews.open_on(connection, node.id):
        run = runs.find(connection, crew.run_id) if crew.boot_id == before.boot_id else None
        if run is not None and run.fence == crew.fence:
            event = GivenUp(reason=Reason.NODE_REBOOTED)
            told.append(transitions.apply_to_crew(connection, run, crew.number, event, note=note))
    return told


def _stale(connection: sa.Connection, node_id: str, seen: Sequence[AttemptSeen]) -> tuple[str, ...]:
    """Return the reported gangs that have ended or that do not run on the node."""
    stale: list[str] = []
    for one in seen:
        crew = crews.on_node(connection, one.run_id, one.fence, node_id)
        if crew is None or crew.is_stale(one.state):
            stale.append(f"{one.run_id}:{one.fence}")
    return tuple(stale)


def _check(said: AgentHello) -> None:
    if said.protocol not in PROTOCOLS:
        spoken = " and ".join(str(protocol) for protocol in PROTOCOLS)
        older = "the server first" if said.protocol > max(PROTOCOLS) else "the node"
        raise InvalidValue(
            f"node {said.name[:64]!r} uses protocol {said.protocol}, but this server supports {spoken}",
            hint=f"upgrade serverless-gpu on {older}",
        )
    if not said.name.isprintable() or not 0 < len(said.name) <= LABEL_CHARACTERS_MAX:
        raise InvalidValue(f"a node cannot be named {said.name[:64]!r}", hint="use 1 to 256 printable characters")
    if len(said.pool) > NAME_CHARACTERS_MAX or not said.pool.isprintable():
        raise InvalidValue(f"a pool cannot be named {said.pool[:64]!r}", hint="use up to 64 printable characters")
    if len(said.takes) > TAKES_MAX or any(len(word) > NAME_CHARACTERS_MAX for word in said.takes):
        raise InvalidValue(
            f"a node may announce at most {TAKES_MAX} capabilities of at most {NAME_CHARACTERS_MAX} characters"
        )
    if max(len(said.machine), len(said.boot_id), len(said.instance), len(said.process)) > NAME_CHARACTERS_MAX:
        raise InvalidValue("machine, boot_id, instance and process may have at most 64 characters each")
    if len(said.addresses) > ADDRESSES_MAX or not all(kind_of(address) in _OUTSIDE for address in said.addresses):
        raise InvalidValue(f"a node may report at most {ADDRESSES_MAX} addresses of its interfaces")
    _check_devices(said)


def _check_devices(said: AgentHello | Heartbeat) -> None:
    if len(said.devices) > DEVICES_MAX or len(said.unavailable) > DEVICES_MAX:
        raise InvalidValue(f"a node may report at most {DEVICES_MAX} devices")
    if len(said.findings) > DEVICES_MAX:
        raise InvalidValue(f"a node may report at most {DEVICES_MAX} findings")
    if len(said.pythons) > PYTHONS_MAX or any(len(python) > PYTHON_CHARACTERS_MAX for python in said.pythons):
        raise InvalidValue(f"a node may report at most {PYTHONS_MAX} Python versions, each of a few characters")
    if isinstance(said, Heartbeat) and len(said.samples) > DEVICES_MAX:
        raise InvalidValue(f"a node may report the values of at most {DEVICES_MAX} devices")
    if len(said.attempts) > ATTEMPTS_MAX:
        raise InvalidValue(f"a node may report at most {ATTEMPTS_MAX} attempts")


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("agents")


class OrdersQuery(Query, frozen=True, kw_only=True):
    """Query parameters of an order stream: installation and process of the node."""

    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""  # Identifier of the node's installation.
    process: Annotated[str, msgspec.Meta(max_length=64)] = ""  # Process of the node's uplink, as in its hello.


@routes.post("/agents/challenge", needs=PROOF)
def challenge(call: Call, node_sessions: NodeSessions) -> SessionChallenge:
    """Return a text that the node signs to open a session."""
    return node_sessions.challenge(call.who)


@routes.post("/agents/session", needs=PROOF)
def open_session(call: Call, node_sessions: NodeSessions, body: SessionRequest) -> SessionAnswer:
    """Open a session for a node that proves its key."""
    return node_sessions.open(call.who, body)


@routes.post("/agents/key", needs=writing("agents"))
def replace_key(call: Call, node_sessions: NodeSessions, body: KeyRequest) -> SessionAnswer:
    """Replace the key of a node after an administrator's request."""
    return node_sessions.replace_key(call.who, body)


@routes.post("/agents", needs=writing("agents"))
def hello(call: Call, agents: AgentService, body: AgentHello) -> AgentWelcome:
    """Admit a joining or reconnecting node."""
    return agents.hello(call.who, body)


@routes.post("/agents/join", needs=writing("joining"))
def join(call: Call, joins: JoinService, body: JoinRequest) -> JoinAnswer:
    """Exchange the token of a join file for the data that a machine needs to join the pool."""
    return joins.join(call.who, body)


@routes.get("/agents/ray", needs=writing("agents"))
def ray_pool(call: Call, joins: JoinService) -> RayPool:
    """Return the Ray cluster data that a node needs to join again after a restart."""
    return joins.ray_pool(call.who)


@routes.post("/agents/{node}/heartbeat", needs=writing("agents"))
def heartbeat(call: Call, agents: AgentService, node: str, body: Heartbeat) -> HeartbeatAnswer:
    """Store the devices and attempts in a node's heartbeat."""
    return agents.heartbeat(call.who, node, body)


@routes.get("/agents/{node}/orders", needs=writing("orders"))
async def orders(call: Call, agents: AgentService, node: str, query: OrdersQuery) -> Stream[StreamedOrder]:
    """Stream the orders of a node. The stream repeats unconfirmed orders."""
    await call.in_thread(
        lambda: agents.check(call.who, node, query.instance, query.process)
    )  # Check the caller before the stream begins, so that the request can fail.
    return Stream(agents.stream(call.who, node, query.instance, query.process))


@routes.post("/agents/{node}/orders/ack", needs=writing("orders"))
def take_orders(call: Call, agents: AgentService, node: str, body: OrdersTaken) -> None:
    """Confirm orders, so that the server stops repeating these orders."""
    if len(body.seqs) > OPEN_MAX:
        raise TooLarge(
            f"the request confirms {len(body.seqs)} orders, which is over the limit",
            hint=f"confirm at most {OPEN_MAX} orders in one request",
        )
    agents.take(call.who, node, body.seqs)
