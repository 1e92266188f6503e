"""Helpers of the tests of runs api that other tests use as well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from serverless_gpu.ambient import machine, new_run_id
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import (
    RunRequest,
    RunView,
    StreamMessage,
    Target,
)

SECRET = "hunter2-in-a-variable"


def request(run_id: str = "", *, call: bytes | None = b"call", **spec: Any) -> RunRequest:
    return RunRequest(
        id=run_id or new_run_id(),
        spec=RunSpec(remote=True, resources=Resources(gpus=1, gpu_type="CPU"), **spec),
        target=Target(machine=machine(), python="3.11", platform="linux-x86_64"),
        context=msgspec.Raw(msgspec.json.encode({"variables": {"PASSWORD": SECRET}})),
        call=call,
    )


def submit(connection: Connection, **fields: Any) -> RunView:
    return connection.ask("POST", "/runs", request(**fields), answer=RunView)


class Reader:
    """Somebody who watches a run in a thread of their own."""

    def __init__(self, stream: Iterator[StreamMessage]) -> None:
        self.messages: list[StreamMessage] = []
        self._more = threading.Condition()
        self._over = False
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for message in self._stream:
                with self._more:
                    self.messages.append(message)
                    self._more.notify_all()
        finally:
            with self._more:
                self._over = True
                self._more.notify_all()

    def until(self, kind: type, count: int = 1) -> list[StreamMessage]:
        """Wait for so many messages of a kind; return all there are."""

        def there() -> bool:
            return self._over or sum(isinstance(message, kind) for message in self.messages) >= count

        with self._more:
            assert self._more.wait_for(there, 60), self.messages
            return list(self.messages)

    def all(self) -> list[StreamMessage]:
        """Wait for the end of the stream; return all messages."""
        self._thread.join(60)
        assert not self._thread.is_alive(), self.messages
        return self.messages
