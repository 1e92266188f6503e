"""A held session as others see it: commands, handles, and whoever waits for its devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import serverless_gpu
from serverless_gpu import attach, distributed
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import InvalidValue, SessionEnded
from tests.support.golden import golden
from tests.support.local.observe import agent, announced, held_locks, wait_for
from tests.support.local.ranks import stay


def test_who_waits_for_a_session_of_their_own_is_told(warm: Path) -> None:
    with serverless_gpu.session(gpus=8, gpu_type="H100", quiet=True):
        run = distributed(gpus=2, gpu_type="H100", quiet=True)(len).submit("ab")
        wait_for(run.waiting_for, "it waits")
        assert run.waiting_for().endswith(
            "that session is open in this process: call session.distributed(...), or close the session"
        )
        run.cancel()
        run.wait()


def test_the_command_cancels_a_session_with_its_runs(warm: Path, where: str) -> None:
    session = serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True)
    run = session.submit(stay, where)
    announced(Path(where), "rank1")
    done = CliRunner().invoke(sgpu, ["cancel", session.id])
    assert done.exit_code == 0, done.output
    first, second = done.output.splitlines()
    assert first.startswith(f"run {run.id} CANCELLED: 2 GPUs verified free")
    assert second.startswith("SUCCEEDED: 2 GPUs verified free")
    wait_for(lambda: "ended" in repr(session), "its owner knows")
    with pytest.raises(SessionEnded, match=re.escape(golden("local.session_seen.ended-elsewhere"))):
        session.submit(stay, where)
    assert held_locks(warm) == []


def test_a_session_is_one_also_for_an_agent_that_did_not_start_it(own: Path) -> None:
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as held:
        agent(own).kill()
        assert held.distributed(len, "ab") == [2], "the next call starts a new agent"
        shown = CliRunner().invoke(sgpu, ["status"]).output
    line = next(line for line in shown.splitlines() if held.id in line)
    assert re.fullmatch(rf"running: session {held.id} · supervisor pid \d+ · adopted", line), shown


def test_a_handle_of_a_session_says_what_it_is(own: Path) -> None:
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as held:
        run = held.submit(len, "ab")
        assert attach(run.id).session == held.id
        handle = attach(held.id)
        for ask in (handle.result, handle.results, handle.logs):
            with pytest.raises(InvalidValue) as caught:
                ask()
            assert caught.value.message == golden("local.session_seen.session-receipt-but", id=held.id)
    assert str(attach(held.id).receipt()).startswith(f"session {held.id} · SUCCEEDED\n1 H100 (fake) · 1 run · ")
