"""What ranks, stems and zygotes say, which run code of the user's: understood, or refused in one of the ways that their
readers know. In this process: many more words a second than with real ones."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.environment.restore.interpreters import LoadedModules
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.lifecycle.attempt import Attempt, Event, GangPlaced, Limits, RankExecuting
from serverless_gpu.model.lifecycle.attempt_lifecycle import IllegalAttemptTransition, advance
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.agent.zygotes import Zygote
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.inside.raycluster import link
from serverless_gpu.node.uplink import attempt_launch
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Start
from tests.e2e.fuzz.conftest import ASKED
from tests.e2e.fuzz.frames import Frame, bodies, frames, messages, values
from tests.support.node.gang import Line

OF_A_RANK = ("standby", "forked", "problem", "exec", "enter", "returned", "failed", "exited", "say", "empty")
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "rank": st.integers(-1, 3),
    "at": st.integers(0, 2**70),
    "status": st.integers(-1, 2**70),
    "peak": st.integers(0, 2**70),
    "stack": st.integers(-1, 100),
    "pid": st.just(os.getpid()),
    "pids": st.dictionaries(st.text("01", max_size=2), values, max_size=3),
    "version": st.just(6),
    "cgroups": st.lists(st.text(max_size=9), max_size=2),
    "failure": st.dictionaries(st.sampled_from(["kind", "type", "message", "gpu_oom", "peer_lost"]), values),
    "unstored": st.dictionaries(st.sampled_from(["pkl", "json", "../../x"]), st.text(max_size=9), max_size=3),
    "text": st.text(),
    "detail": st.text(),
}


@contextlib.contextmanager
def no_descriptor_stays() -> Iterator[None]:
    """Require that as many descriptors are open afterwards as before."""
    before = _descriptors()
    yield
    assert _descriptors() == before


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that this look is made with
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@ASKED
@given(said=st.lists(frames(bodies | messages(list(OF_A_RANK), FIELDS, "event")), max_size=8))
def test_what_a_rank_says_is_an_event_or_refused(said: list[Frame], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("attempt")
    (directory / "failures").mkdir()
    with no_descriptor_stays():
        line = Line(directory)
        attempt = Attempt(run_id="01run", fence=1, world_size=1, limits=Limits())
        attempt, _ = advance(attempt, GangPlaced(), 1)
        for number, frame in enumerate(said, 2):
            frame.send(line.rank.sock)
            try:
                events: list[Event] = line.gang.hear() or []
            except (OSError, ValueError):
                continue
            for event in events:
                assert not isinstance(event, RankExecuting) or event.rank == 0, "there is no other rank"
                with contextlib.suppress(IllegalAttemptTransition):
                    attempt, _ = advance(attempt, event, number)
        written = [path.relative_to(directory).parts for path in directory.rglob("*") if path.is_file()]
        assert all(parts in (("failures", "0.pkl"), ("failures", "0.json")) for parts in written), written
        line.gang.close()
        line.rank.close()


def zygote(channel: Channel) -> Zygote:
    """Return a zygote of which there is nothing but the channel, and of which one stem was asked for."""
    made = cast(Any, Zygote.__new__(Zygote))
    made.channel, made.environment, made.loaded = channel, None, LoadedModules()
    made.ready = made.dead = False
    made.cold = ""
    made._asked, made._stems, made._takers = deque([None]), deque(), deque()
    made._stamps, made._packages = {}, {}
    made._problem = lambda: "it said what cannot be"
    return cast(Zygote, made)


OF_A_ZYGOTE: dict[str, st.SearchStrategy[object]] = {
    "modules": st.lists(st.text(max_size=9) | values, max_size=3),
    "packages": st.dictionaries(st.text(max_size=5), values, max_size=3),
    "names": st.lists(values, max_size=3),
    "libraries": st.none() | st.lists(values, max_size=3),
    "reason": st.text(max_size=20),
    "pid": st.just(os.getpid()) | st.integers(),
}


@ASKED
@given(st.lists(frames(bodies | messages(["ready", "cold", "stem"], OF_A_ZYGOTE, "event")), max_size=6))
def test_what_a_zygote_says_is_understood_or_the_zygote_is_given_up(said: list[Frame]) -> None:
    with no_descriptor_stays():
        ours, theirs = pair()
        made = zygote(ours)
        for frame in said:
            frame.send(theirs.sock)
            if not made.hear():
                assert made.dead
                break
        theirs.close()
        made.close()


@ASKED
@given(st.lists(st.binary(max_size=40) | bodies.map(lambda body: len(body).to_bytes(4, "big") + body), max_size=5))
def test_a_link_between_nodes_takes_frames_or_says_nonsense(pieces: list[bytes]) -> None:
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        try:
            assert all(isinstance(message, dict) for message in link.unpack(buffer))
        except link.NonsenseError:
            return
        assert len(buffer) <= link.FRAME_BYTES_MAX + 4 + len(piece), "what waits for its end is bounded"


ORDERS = st.builds(
    Start,
    seq=st.integers(0, 9),
    run_id=st.text(max_size=30) | st.sampled_from(["../../etc", "", ".", "01m81bbs0t40xvrnzm8jwqpxmm", "a/b", "\0"]),
    fence=st.integers(-2, 3),
    token=st.text(max_size=9),
    spec=st.just(RunSpec()),
    gpu_type=st.text(max_size=9) | st.sampled_from(["H100", "CPU"]),
    world_size=st.integers(-3, 2**40),
    context=values.map(lambda value: msgspec.Raw(msgspec.json.encode(str(value)))) | st.just(msgspec.Raw(b"{}")),
    snapshot=st.text(max_size=9),
    submitted_ns=st.integers(-(2**62), 2**62),
    partition_grace_s=st.floats(allow_nan=False, allow_infinity=False),
)


@ASKED
@given(order=ORDERS)
def test_an_order_makes_a_directory_of_its_run_or_is_refused(
    order: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("node") / "home"
    (root / "runs").mkdir(parents=True)
    greeting = protocol.Greeting(
        protocol=protocol.PROTOCOL, version="1", pid=1, devices=(), own_types=(), prices={}, problem=""
    )
    try:
        taken = attempt_launch.take_order(Home(root), order, root / "node.json")
        assert taken is not None and taken[0].parent == root / "runs" / order.run_id
        attempt_launch.make_launch(order, taken[0], greeting, clock=FakeClock(), store=StoreLocation(""), waited_ns=0)
    except (ServerlessGpuError, OSError):
        pass
    outside = [path for path in root.parent.rglob("*") if path != root and root / "runs" not in (path, *path.parents)]
    assert outside == [], outside
