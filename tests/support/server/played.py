"""A node that a test plays by hand, over HTTP as a real one would."""

from __future__ import annotations

import sys

from serverless_gpu.ambient import machine
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import AgentHello, AgentWelcome, Order, OrdersTaken, Report, ReportAnswer, Start, Stop
from serverless_gpu.wire.base import PROTOCOL
from tests.support.server.served import Served


class Played:
    """One node with CPU slots.

    Args:
        server: it joins.
        slots: how many.
    """

    def __init__(self, server: Served, *, slots: int = 4) -> None:
        self._server = server
        self._slots = slots
        self._connection = server.connection(server.node_token)
        self.id = ""

    def join(self, *, boot_id: str = "boot-1") -> AgentWelcome:
        """Say hello."""
        devices = tuple(
            Device(uuid=f"cpu-{slot}", index=slot, type="CPU", memory_bytes=0, kind=DeviceKind.CPU)
            for slot in range(self._slots)
        )
        hello = AgentHello(
            name="played",
            machine=machine(),
            boot_id=boot_id,
            version=__version__,
            protocol=PROTOCOL,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            platform="linux-x86_64",
            devices=devices,
        )
        welcome = self._connection.ask("POST", "/agents", hello, answer=AgentWelcome)
        self.id = welcome.node
        return welcome

    def order(self) -> Start:
        """Wait for the next order to start something, and take it."""
        for order in self._connection.stream("GET", f"/agents/{self.id}/orders", answer=Order):
            self._take(order)
            if isinstance(order, Start):
                return order
        raise AssertionError("the stream of orders ended")

    def stop_order(self) -> Stop:
        """Wait for the next order to stop something, and take it."""
        for order in self._connection.stream("GET", f"/agents/{self.id}/orders", answer=Order):
            self._take(order)
            if isinstance(order, Stop):
                return order
        raise AssertionError("the stream of orders ended")

    def report(self, start: Start, said: Report) -> ReportAnswer:
        """Report about an attempt, with its own token."""
        path = f"/attempts/{start.run_id}/{start.fence}/report"
        return self._server.connection(start.token).ask("POST", path, said, answer=ReportAnswer)

    def _take(self, order: Order) -> None:
        path = f"/agents/{self.id}/orders/ack"
        self._connection.ask("POST", path, OrdersTaken(seqs=(order.seq,)), answer=type(None))
