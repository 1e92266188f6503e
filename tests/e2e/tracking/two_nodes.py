"""A gang on two nodes of the simulated engine.

The server places no gang on two nodes yet: here, two agents get the same gang, as they will from an engine that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.engines.simulated_engine import SimulatedAgent, SimulatedTelemetry, SimulatedWork
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.spec import Resources, RunSpec, Tracking
from serverless_gpu.testing import FakeClock
from serverless_gpu.tracking.mlflow import MlflowTracker
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    Heartbeat,
    HeartbeatAnswer,
    Order,
    OrdersTaken,
    Report,
    ReportAnswer,
    Start,
)

RUN_ID = "01m80r2f7qk3v9b6n1cdtwon0d"
GPUS = 8
RUN_S = 300.0


class OneGang:
    """A server that has every node start the same gang."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def hello(self, hello: AgentHello) -> AgentWelcome:
        return AgentWelcome(node=hello.name, heartbeat_s=5.0, partition_grace_s=900.0)

    def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return HeartbeatAnswer()

    def orders(self, node: str) -> Sequence[Order]:
        return (self._start,)

    def take(self, node: str, taken: OrdersTaken) -> None:
        pass

    def report(self, token: str, gang: tuple[str, int], report: Report) -> ReportAnswer:
        return ReportAnswer()


def run_on_two_nodes(directory: Path, uri: str, experiment: str) -> None:
    """Have a gang live for five simulated minutes on two nodes with eight GPUs each, tracked in an MLflow server."""
    clock = FakeClock(wall_ns=SystemClock().wall_ns() - round(RUN_S * 1e9))
    start = Start(
        seq=1,
        run_id=RUN_ID,
        fence=1,
        token="",
        spec=RunSpec(
            name="train",
            resources=Resources(gpus=2 * GPUS, gpu_type="H100"),
            tracker=Tracking(experiment=experiment, run_name=f"jobTaskRun-{RUN_ID}"),
        ),
        gpu_type="H100",
        world_size=GPUS,
        context=msgspec.Raw(b"{}"),
        submitted_ns=clock.wall_ns(),
    )
    nodes: list[tuple[SimulatedAgent, SimulatedTelemetry]] = []
    for rank in (1, 0):  # the second node is there first, and waits for the run that the first one makes
        devices = tuple(
            Device(uuid=f"n{rank}-{index}", index=index, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE)
            for index in range(GPUS)
        )
        agent = SimulatedAgent(
            OneGang(start), name=f"node-{rank}", devices=devices, clock=clock, work=lambda _: SimulatedWork(run_s=RUN_S)
        )
        telemetry = agent.observer = SimulatedTelemetry(
            directory / agent.name, node_rank=rank, num_nodes=2, clock=clock, tracker=lambda: MlflowTracker(uri, {})
        )
        nodes.append((agent, telemetry))
    for _ in range(round(RUN_S) + 2):
        for agent, _telemetry in nodes:
            agent.step()
        clock.advance(1.0)
    for agent, telemetry in nodes:
        assert telemetry.close(60), f"{agent.name} has not told MLflow everything"
