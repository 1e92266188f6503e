"""Simulated nodes in a process of their own, which talk to a real server as uplinks do: over HTTP, with own tokens.

    stdin  ◀── one line of JSON: Nodes          stdout ──▶ one line of JSON at the end: what was answered, and refused
    a thread per node: SimulatedAgent.step      a thread per node: its stream of orders

It ends when its standard input does.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec

from benchmarks.load.asking import Asker
from serverless_gpu.ambient import SystemClock
from serverless_gpu.engines.simulated_engine import CrewKey, SimulatedAgent, SimulatedWork
from serverless_gpu.errors import NotFound, ServerUnavailable
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    Heartbeat,
    HeartbeatAnswer,
    Order,
    OrdersTaken,
    Report,
    ReportAnswer,
)

T = TypeVar("T")
_STEP_S = 0.1
_AGAIN_S = 0.5


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to be.

    Attributes:
        tokens: one for each node.
        devices: of each node, as `SERVERLESS_GPU_FAKE` says them.
        run_s: how long every run takes.
    """

    url: str
    tokens: tuple[str, ...]
    devices: str = "H100:100"
    run_s: float = 60.0
    output: str = "one line of output\n"


class Said(msgspec.Struct, kw_only=True):
    """What the nodes asked and were answered.

    Attributes:
        answers: how many, by kind of request and status; 0 for none at all.
        began: attempts whose user code began.
        twice: runs whose user code began more than once.
    """

    answers: dict[str, int]
    began: int = 0
    twice: int = 0


class OverHttp:
    """What one node says, and hears."""

    def __init__(self, url: str, token: str, answers: Counter[str]) -> None:
        self._url, self._token, self._answers = url, token, answers
        self._asker = Asker(url, token)
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._listening = threading.Event()

    def hello(self, hello: AgentHello) -> AgentWelcome:
        """Introduce a node."""
        welcome = self._ask("hello", "/agents", hello, AgentWelcome)
        if not self._listening.is_set():
            self._listening.set()
            threading.Thread(target=self._listen, args=(welcome.node,), daemon=True).start()
        return welcome

    def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Say that a node is there."""
        return self._ask("heartbeat", f"/agents/{node}/heartbeat", heartbeat, HeartbeatAnswer)

    def orders(self, node: str) -> Sequence[Order]:
        """Return what has come by the stream."""
        found: list[Order] = []
        try:
            while True:
                found.append(self._orders.get_nowait())
        except Empty:
            return found

    def take(self, node: str, taken: OrdersTaken) -> None:
        """Say what was taken."""
        self._ask("take", f"/agents/{node}/orders/ack", taken, None)

    def report(self, token: str, gang: CrewKey, report: Report) -> ReportAnswer:
        """Say what is new about an attempt."""
        return self._ask("report", f"/attempts/{gang[0]}/{gang[1]}/report", report, ReportAnswer, token=token)

    def _ask(self, kind: str, path: str, body: object, answer: type[T] | None, *, token: str = "") -> T:
        try:
            status, said = self._asker.ask("POST", path, body, token=token)
        except ServerUnavailable:
            self._answers[f"{kind} 0"] += 1
            raise
        self._answers[f"{kind} {status}"] += 1
        if status == 404:
            raise NotFound(said.decode())
        if status >= 300:
            raise ServerUnavailable(f"{kind} was answered with {status}: {said[:300]!r}")
        return msgspec.json.decode(said, type=answer) if answer is not None else None  # type: ignore[return-value] # T is None then

    def _listen(self, node: str) -> None:
        decoder, pause = msgspec.json.Decoder(Order), threading.Event()
        while True:
            try:
                for event in Asker(self._url, self._token).events(f"/agents/{node}/orders"):
                    if event:
                        self._orders.put(decoder.decode(event))
            except ServerUnavailable:
                self._answers["orders 0"] += 1
            pause.wait(_AGAIN_S)


def main() -> None:
    """Be nodes until standard input ends."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Nodes)
    answers: Counter[str] = Counter()
    work = SimulatedWork(run_s=asked.run_s, output=asked.output.encode())
    agents = [
        SimulatedAgent(
            OverHttp(asked.url, token, answers),
            name=f"node-{number:03}",
            devices=parse_fake(asked.devices),
            clock=SystemClock(),
            work=lambda _start: work,
        )
        for number, token in enumerate(asked.tokens)
    ]
    over = threading.Event()
    threads = [threading.Thread(target=_step, args=(agent, over), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join(30)
    runs = Counter(one.run_id for agent in agents for one in agent.executions)
    said = Said(answers=dict(answers), began=sum(runs.values()), twice=sum(1 for count in runs.values() if count > 1))
    print(msgspec.json.encode(said).decode(), flush=True)


def _step(agent: SimulatedAgent, over: threading.Event) -> None:
    while not over.wait(_STEP_S):
        agent.step()


if __name__ == "__main__":
    main()
