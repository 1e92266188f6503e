"""What is measured of calls through a server, and of the server, with its bars."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.remote import QUEUED
from benchmarks.report import Row
from benchmarks.stage import Stage

WARM_MS_MAX = 150.0
UP_MS_MAX = 2_000.0
RESTART_MS_MAX = 10_000.0
_PREPARED_S_MAX = 300.0  # the first round fills a queue


def warm(quick: bool) -> Row:
    """A call through a server on this machine beside the same call without one, in turns."""
    with Stage(("remote.warm", "remote.warm_local"), ("the same call without a server",)) as stage:
        stage.play(4 if quick else 24)
        ours = stage.timing(0, "call → results in the caller, 1 rank")
        return Row(
            name="warm-remote: call → results in the caller, 1 rank",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {WARM_MS_MAX:.0f} ms",
            met=ours.median <= WARM_MS_MAX,
            value=f"{ours.median:.0f} ms",
            also=(
                stage.timing(0, "through the server, call → first line", "enter_ms"),
                stage.timing(1, "without one, call → first line", "enter_ms"),
            ),
            problems=stage.problems(),
        )


def cold(quick: bool) -> Row:
    """The same when the node has no agent and no zygote."""
    with Stage(("remote.cold", "remote.cold_local"), ("the same call without a server",)) as stage:
        stage.play(3 if quick else 12)
        return Row(
            name="cold-remote: no agent, no zygote; call → results in the caller, 1 rank",
            ours=stage.timing(0, "call → results in the caller"),
            against=stage.against(),
            also=(stage.timing(0, "through the server, call → first line", "enter_ms"),),
            problems=stage.problems(),
        )


def tensor(quick: bool) -> Row:
    """A result of 1 GB through the server's blobs, beside a file that is pickled and loaded."""
    with Stage(("remote.tensor", "neighbours.pickled_tensor"), ("pickle to a file and back",)) as stage:
        stage.play(2 if quick else 7)
        ours = stage.timing(0, "in the rank → in the caller's hands, read once", "read_ms")
        return Row(
            name="1 GB tensor returned through a server: in the rank → in the caller's hands, read once",
            ours=ours,
            against=(stage.timing(1, "pickle to a file and back, read once", "read_ms"),),
            problems=stage.problems(),
        )


def up(quick: bool) -> Row:
    """`sgpu up` until it answers, and its memory then, beside the libraries it is made of."""
    with Stage(("remote.up", "remote.libraries"), ("its libraries, imported",)) as stage:
        stage.play(3 if quick else 12)
        ours = stage.timing(0, "`sgpu up --no-node` → it answers")
        memory = stage.timing(0, "memory of the idle server", "mb")
        return Row(
            name="`sgpu up`: start → it answers",
            ours=ours,
            against=stage.against(),
            bar=f"< {UP_MS_MAX / 1000:.0f} s",
            met=ours.median < UP_MS_MAX,
            value=f"{ours.median / 1000:.2f} s, {memory.median:.0f} MB idle",
            also=(memory, stage.timing(1, "memory of its libraries alone", "mb")),
            problems=stage.problems(),
        )


def restart(quick: bool) -> Row:
    """A server with a long queue is started again, until a node that joins has an order; beside a short queue."""
    names = ("remote.restart_full", "remote.restart_short")
    with Stage(names, ("the same with 100",), round_s_max=_PREPARED_S_MAX) as stage:
        stage.play(2 if quick else 7)
        ours = stage.timing(0, f"start → first order, {QUEUED:,} runs wait")
        return Row(
            name=f"restart with {QUEUED:,} runs that wait → a node has its first order",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {RESTART_MS_MAX / 1000:.0f} s",
            met=ours.median <= RESTART_MS_MAX,
            value=f"{ours.median / 1000:.2f} s",
            also=(stage.timing(0, "until it answers", "ready_ms"),),
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {
    "remote-warm": warm,
    "remote-cold": cold,
    "remote-tensor": tensor,
    "up": up,
    "restart": restart,
}
