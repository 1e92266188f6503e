"""Output that the server's disk has no room for: the run ends, and a line says what is missing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.composition import Services
from serverless_gpu.server.storage import logs
from tests.support.golden import golden
from tests.support.server.reporting import CALM, COMPLETED, RESULTS, clock, piece, run_id, say, services

pytestmark = pytest.mark.any_database

__all__ = ["clock", "run_id", "services"]


def test_F40_output_that_there_was_no_room_for_is_said_where_it_is_missing(
    services: Services, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(services, run_id, logs=(piece(b"one\n"),))
    monkeypatch.setattr(logs, "free_bytes", lambda _fd: 0)
    assert say(services, run_id, logs=(piece(b"two\n", 4),)).offsets == {"0.stdout": 4}
    ending = msgspec.structs.replace(COMPLETED, log_ends={"1.stdout": 3_000_000})
    said: dict[str, Any] = {"logs": (piece(b"two\n", 4),), "files": RESULTS, "ending": ending}
    for _ in range(2):  # also when its answer is lost, and there is room again
        assert say(services, run_id, State.STOPPING, **said) == CALM
        first, second = (
            services.logs.read(run_id, 1, rank=rank, stream="stdout", limit=1000).decode() for rank in range(2)
        )
        where = f"node n1, runs/{run_id}/1/logs/{{}} in the agent's home"
        why = f"the server's disk was full when the run ended; the output is on {where}"
        assert first == golden("server.missing_output.one-missing", format=why.format("0.stdout"))
        assert second == f"\n— 3.0 MB missing ({why.format('1.stdout')}) —\n"
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["2.stdout", "-1.stdout", "0.other", "0", "../0.stdout"])
def test_output_that_an_attempt_cannot_have_is_not_said_to_be_missing(
    services: Services, run_id: str, name: str
) -> None:
    with pytest.raises(InvalidValue):
        say(
            services,
            run_id,
            State.STOPPING,
            files=RESULTS,
            ending=msgspec.structs.replace(COMPLETED, log_ends={name: 1}),
        )
