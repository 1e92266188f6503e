"""A machine: what is on its disk, its uplink, its supervisors. Each of them dies by itself, and the disk stays.

It speaks the protocol as the real uplink does (`node/uplink/`): the order is on its disk before it is taken, a start is
launched once, user code waits for the first answer, the lease counts from the start of the request that was answered,
an ending goes after the last byte of output, and what was not answered is said again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from blake3 import blake3

from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound, ServerlessGpuError, StaleAttempt
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import FactKind, Reason, State
from serverless_gpu.model.spec import BlobReference
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import node_key
from serverless_gpu.server.records import principals
from serverless_gpu.server.records.nodes import CREWS
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    AttemptSeen,
    Ending,
    File,
    Heartbeat,
    HeartbeatAnswer,
    LogPiece,
    Order,
    Report,
    ReportAnswer,
    ReportNow,
    Start,
)
from serverless_gpu.wire.base import PROTOCOL
from tests.e2e.simulation.network import Link, Network
from tests.e2e.simulation.supervisor import Gang, Kept, Machine, Stretch, Supervisor, Work, ending_json, result_of
from tests.e2e.simulation.timeline import S, Timeline

WHO = Caller(name="node", kind="service", role="agent")
_LOOK_S = 9.0
_PAUSES_S = (0.3, 1.0, 3.0, 5.0)
_PIECE_BYTES = 64
MOMENTS = ("has taken an order", "may begin", "has told an end")
"""Of an attempt on a node; at the last one its receipt is still to come."""
OF_GANGS = ("has offered itself", "has tried the others", "has met the others", "has returned", "was released", "halts")
"""Of a crew with others: each just when the server has answered that."""


class Node:
    """One machine.

    Args:
        time: virtual.
        network: to the server.
        name: of the node.
        devices: what it has.
        ran: where user code is written down.
        work: what an attempt does.

    Attributes:
        reached: called at each of `MOMENTS` and `OF_GANGS`: what is done just then is hardly ever done by chance.
    """

    def __init__(
        self,
        time: Timeline,
        network: Network,
        *,
        name: str,
        devices: Sequence[Device],
        ran: list[Stretch],
        work: Callable[[Start], Work],
    ) -> None:
        self.name, self.time, self.network, self.devices = name, time, network, tuple(devices)
        self.link = Link(name)
        self.machine = Machine(time, name, tuple(device.uuid for device in devices), ran)
        self.kept: dict[Gang, Kept] = {}
        self.taken: set[Gang] = set()
        self.supervisors: dict[Gang, Supervisor] = {}
        self.uplink: Uplink | None = None
        self.work = work
        self.destroyed = False
        self.reached: Callable[[Node, str, str], None] = lambda _node, _moment, _run_id: None
        self._boots = 1
        self.start_uplink()

    def start_uplink(self) -> None:
        """Start the uplink, if it does not run."""
        if self.uplink is None and not self.destroyed:
            self.uplink = Uplink(self)

    def kill_uplink(self) -> None:
        """Kill the uplink: the attempts go on."""
        if self.uplink is not None:
            self.uplink.lives = False
            self.uplink = None

    def kill_supervisor(self, number: int) -> None:
        """Kill one of the supervisors."""
        living = [gang for gang, one in self.supervisors.items() if one.lives]
        if living:
            self.supervisors[living[number % len(living)]].kill()
            self.news(living[number % len(living)])

    def reboot(self) -> None:
        """End everything but the disk; the next boot is another one."""
        self.kill_uplink()
        for supervisor in self.supervisors.values():
            supervisor.kill()
        self.supervisors.clear()
        self._boots += 1
        self.machine.clock._boot_id = f"{self.name}-boot-{self._boots}"

    def destroy(self) -> None:
        """Burn the machine down."""
        self.reboot()
        self.destroyed = True
        self.kept.clear()

    def news(self, gang: Gang) -> None:
        """Have the uplink look at an attempt, if there is one."""
        if self.uplink is not None and gang in self.uplink.lines:
            self.uplink.lines[gang].soon()

    def launch(self, kept: Kept) -> None:
        """Give an attempt a supervisor."""
        gang = kept.gang
        self.supervisors[gang] = Supervisor(self.machine, kept, self.work(kept.order), lambda: self.news(gang))


class Uplink:
    """The process that talks to the server.

    Attributes:
        lives: whether the process does.
        lines: what it reports about each attempt.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.time = node, node.time
        self.lives = True
        self.id = ""
        self.heartbeat_s = 5.0
        self.lines: dict[Gang, Line] = {}
        self._looking = False
        self._rung = False
        for kept in node.kept.values():
            if not kept.abandoned:
                self._find(kept)
        self._hello()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Do something later, if it still lives then."""
        self.time.after(seconds, lambda: event() if self.lives else None)

    def ask(
        self,
        request: Callable[[Services], object],
        heard: Callable[..., None],
        failed: Callable[[ServerlessGpuError], None],
    ) -> None:
        """Ask the server; nobody hears what comes when the process has died meanwhile."""
        self.node.network.ask(
            self.node.link,
            request,
            lambda answer: heard(answer) if self.lives else None,
            lambda error: failed(error) if self.lives else None,
        )

    def ring(self) -> None:
        """Look for orders: the stream has something."""
        self._rung = True
        if self.id and not self._looking:
            self.later(0.01, self._look)

    def _find(self, kept: Kept) -> None:
        """Go on with an attempt that another uplink took."""
        node = self.node
        if kept.stopped is None and not kept.facts and kept.gang not in node.supervisors:
            kept.end(Reason.REFUSED, self.time.now_ns)
            kept.settle(())
        self.lines[kept.gang] = Line(self, kept)

    # --- the node ----------------------------------------------------------------------------------------------------

    def _hello(self) -> None:
        node = self.node
        said = AgentHello(
            name=node.name,
            machine="here",
            instance=f"home-of-{node.name}",
            boot_id=node.machine.clock.boot_id(),
            version=__version__,
            protocol=PROTOCOL,
            python="3.11",
            platform="linux-x86_64",
            devices=node.devices,
            attempts=self._seen(),
            takes=(CREWS,),
        )
        self.id = ""

        def refused(error: ServerlessGpuError) -> None:
            assert not isinstance(error, NotAllowed | InvalidValue), error
            self.later(2.0, self._hello)

        self.ask(lambda services: services.agents.hello(WHO, said), self._welcome, refused)

    def _welcome(self, welcome: AgentWelcome) -> None:
        self.id, self.heartbeat_s = welcome.node, welcome.heartbeat_s
        self._drop(welcome.stale)
        self.later(self.heartbeat_s, self._beat)
        self.later(0.0, self._look)

    def _beat(self) -> None:
        if not self.id:
            return
        said, node_id = Heartbeat(devices=self.node.devices, attempts=self._seen()), self.id

        def heard(answer: HeartbeatAnswer) -> None:
            self._drop(answer.stale)
            self.later(self.heartbeat_s, self._beat)

        def failed(error: ServerlessGpuError) -> None:
            self.later(1.0, self._hello if isinstance(error, NotFound) else self._beat)

        self.ask(lambda services: services.agents.heartbeat(WHO, node_id, said), heard, failed)

    def _seen(self) -> tuple[AttemptSeen, ...]:
        return tuple(
            AttemptSeen(run_id=gang[0], fence=gang[1], state=line.state()) for gang, line in self.lines.items()
        )

    def _drop(self, stale: Sequence[str]) -> None:
        for gang, line in list(self.lines.items()):
            if f"{gang[0]}:{gang[1]}" in stale:
                line.abandon()

    # --- orders ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._looking or not self.id:
            return
        self._looking, self._rung = True, False
        node, node_id = self.node, self.id

        def heard(found: list[Order]) -> None:
            self._looking = False
            taken = [order.seq for order in found if self._obey(order)]
            if taken:
                node.reached(node, MOMENTS[0], found[0].run_id)
                take: Callable[[Services], None] = lambda services: services.agents.take(WHO, node_id, taken)  # noqa: E731
                self.ask(take, lambda _answer: None, lambda _error: None)
            self.later(0.01 if self._rung else _LOOK_S, self._look)

        def failed(error: ServerlessGpuError) -> None:
            self._looking = False
            self.later(1.0, self._hello if isinstance(error, NotFound) and self.id == node_id else self._look)

        def stream(services: Services) -> list[Order]:
            services.hub.listen(node_key(node_id), self.ring)
            agents = services.agents
            return [*agents.waiting(WHO, node_id), *agents.looks(WHO, node_id)]

        self.ask(stream, heard, failed)

    def _obey(self, order: Order) -> bool:
        gang = (order.run_id, order.fence)
        if isinstance(order, Start):
            if gang not in self.node.taken:
                self.node.taken.add(gang)
                kept = self.node.kept[gang] = Kept(order=order)
                self.lines[gang] = Line(self, kept)
                self.node.launch(kept)
            return True
        if isinstance(order, ReportNow):
            if gang in self.lines:
                self.lines[gang].soon()
            return False
        supervisor = self.node.supervisors.get(gang)
        if supervisor is not None:
            if order.released:
                supervisor.release()
            supervisor.stop(order.reason)
        return True


class Line:
    """Reports about one attempt."""

    def __init__(self, uplink: Uplink, kept: Kept) -> None:
        self._uplink, self._node, self._kept, self.gang = uplink, uplink.node, kept, kept.gang
        self._facts = self._logged = self._failures = self._answers = 0
        self._asking = self._again = self.over = self._ending_sent = self._blob_there = False
        self._planned = 0
        self.soon()

    def state(self) -> State:
        """Return what the node sees."""
        self._attend()
        supervisor = self._node.supervisors.get(self.gang)
        if self._kept.stopped is not None or supervisor is None:
            return State.STOPPING
        return supervisor.state

    def soon(self) -> None:
        """Report now, or after the answer that is waited for."""
        self._again = True
        if not self._asking and not self.over:
            self._plan(0.02)

    def abandon(self) -> None:
        """Stop it: it is over for the server. Its files stay."""
        self.over = self._kept.abandoned = True
        self._uplink.lines.pop(self.gang, None)
        supervisor = self._node.supervisors.get(self.gang)
        if supervisor is not None:
            supervisor.abandon()

    def _plan(self, seconds: float) -> None:
        self._planned += 1
        number = self._planned
        self._uplink.later(seconds, lambda: self._report() if number == self._planned else None)

    def _attend(self) -> None:
        """Write what a supervisor that is gone has left out."""
        supervisor = self._node.supervisors.get(self.gang)
        if self._kept.receipt is not None or (supervisor is not None and supervisor.lives):
            return
        if self._kept.stopped is None:
            reason = Reason.SUPERVISOR_KILLED if self._kept.facts else Reason.REFUSED
            self._kept.end(reason, self._uplink.time.now_ns)
        self._kept.settle(self._kept.facts[-1].gpus if self._kept.facts else ())

    def _report(self) -> None:
        if self.over or self._asking:
            return
        self._attend()
        if self._needs_blob():
            self._upload()
            return
        report, asked_ns = self._next(), self._uplink.time.now_ns
        self._asking, self._again = True, False
        order = self._kept.order

        def request(services: Services) -> ReportAnswer:
            return reported(services, order, report)

        def heard(answer: ReportAnswer) -> None:
            self._asking, self._failures = False, 0
            self._answered(report, answer, asked_ns)

        def failed(error: ServerlessGpuError) -> None:
            self._asking = False
            if isinstance(error, StaleAttempt):
                self.abandon()
                return
            assert not isinstance(error, InvalidValue), error
            if isinstance(error, NotFound):
                self._blob_there = False
            self._plan(_PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)])
            self._failures += 1

        self._uplink.ask(request, heard, failed)

    def _answered(self, report: Report, answer: ReportAnswer, asked_ns: int) -> None:
        if self.over:
            return
        if answer.stale:
            self.abandon()
            return
        self._facts = max(self._facts, max((fact.seq + 1 for fact in report.facts), default=0))
        for piece in report.logs:
            self._logged = answer.offsets.get(f"{piece.rank}.stdout", piece.offset + len(piece.data))
        self._ending_sent |= report.ending is not None
        self._answers += 1
        supervisor = self._node.supervisors.get(self.gang)
        if supervisor is not None and supervisor.lives:
            supervisor.renew(lease_end_ns(asked_ns, self._uplink.time.now_ns, answer.partition_grace_s))
            if supervisor.crew is not None:
                supervisor.crew.hear(answer)
            if answer.stop is not None:
                supervisor.stop(answer.stop)
        if report.receipt is not msgspec.UNSET and self._ending_sent:
            self.over = True
            self._uplink.lines.pop(self.gang, None)
            del self._node.kept[self.gang]
            return
        self._reached(report, answer)
        is_behind = self._logged < len(self._kept.log) or (self._kept.stopped is not None and not self._ending_sent)
        self._plan(0.02 if self._again or is_behind else answer.heartbeat_s)

    def _reached(self, report: Report, answer: ReportAnswer) -> None:
        moments = [MOMENTS[1]] if self._answers == 1 else []
        if report.ending is not None:
            moments.append(MOMENTS[2])
        if self._kept.order.crews and report.ending is None:
            said = (report.offer, report.reach, answer.chosen, report.returned, answer.release, report.halt)
            moments += [moment for moment, is_so in zip(OF_GANGS, said, strict=True) if is_so]
        for moment in moments:
            self._node.reached(self._node, moment, self.gang[0])

    def _next(self) -> Report:
        kept = self._kept
        data = bytes(kept.log[self._logged : self._logged + _PIECE_BYTES])
        facts = tuple(kept.facts[self._facts :])
        began = [fact.wall_ns for fact in kept.facts if fact.kind is FactKind.EXEC]
        report = Report(
            state=self.state(),
            world_size=kept.order.world_size,
            gpus=kept.facts[-1].gpus if kept.facts else (),
            exec_ns=began[0] if began else None,
            logs=(LogPiece(rank=kept.ranks[0], stream="stdout", offset=self._logged, data=data),) if data else (),
            facts=facts,
            freed=kept.receipt is not None,
        )
        supervisor = self._node.supervisors.get(self.gang)
        crew = supervisor.crew if supervisor is not None and supervisor.lives else None
        if crew is not None:
            offer, reach = (None, None) if began else (crew.offer, crew.reach)
            report = msgspec.structs.replace(report, offer=offer, reach=reach, returned=crew.returned, halt=crew.halt)
        if kept.stopped is None or self._logged + len(data) < len(kept.log):
            return report
        ending = Ending(
            state=kept.stopped.state,
            reason=kept.stopped.reason,
            began=kept.began,
            stopped=ending_json(kept.stopped),
        )
        receipt = msgspec.UNSET if kept.receipt is None else msgspec.Raw(msgspec.json.encode(kept.receipt))
        return msgspec.structs.replace(report, ending=ending, files=self._results(), receipt=receipt)

    def _results(self) -> tuple[File, ...]:
        assert self._kept.stopped is not None
        if self._kept.stopped.reason is not Reason.COMPLETED:
            return ()
        results = {f"results/{rank}.pkl": result_of(*self.gang, rank) for rank in self._kept.ranks}
        inline = [File(name=name, size=len(data), inline=data) for name, data in results.items()]
        if self._blob_there:
            name, data = next(iter(results.items()))
            blob = BlobReference(size=len(data), parts=(blake3(data).hexdigest(),))
            inline[0] = File(name=name, size=len(data), blob=blob)
        return tuple(inline)

    def _needs_blob(self) -> bool:
        stopped = self._kept.stopped
        wants = stopped is not None and stopped.reason is Reason.COMPLETED and self._node.work(self._kept.order).blob
        return wants and not self._blob_there and not self._ending_sent

    def _upload(self) -> None:
        data = result_of(*self.gang, self._kept.ranks[0])
        self._asking = True

        def heard(_answer: None) -> None:
            self._asking, self._blob_there = False, True
            self._plan(0.02)

        def failed(_error: ServerlessGpuError) -> None:
            self._asking = False
            self._plan(2.0)

        digest = blake3(data).hexdigest()
        self._uplink.ask(lambda services: services.blobs.put(digest, data), heard, failed)


def lease_end_ns(asked_ns: int, _answered_ns: int, grace_s: float) -> int:
    """Return until when an answer lets an attempt go on: it counts from the start of the request."""
    return asked_ns + round(grace_s * S)


def reported(services: Services, order: Start, said: Report) -> ReportAnswer:
    """Apply a report as the gate and its route do."""
    now_ns = services.clock.wall_ns()
    who = services.database.read(lambda connection: principals.authenticate(connection, order.token, now_ns=now_ns))
    assert who.attempt == (order.run_id, order.fence, order.crew)
    return services.reports.receive(who, run_id=order.run_id, fence=order.fence, said=said)
