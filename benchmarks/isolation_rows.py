"""What is measured of sandboxes, with its bars."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import Row
from benchmarks.stage import Stage

WARM_RATIO_MAX = 1.1
_BESIDE = ("the same where all runs share a uid",)


def warm(quick: bool) -> Row:
    """A warm call in a sandbox beside the same call where all runs share a uid, in turns."""
    return _row("warm", "warm call → results in the caller, 1 rank", rounds=4 if quick else 24, bar=WARM_RATIO_MAX)


def cold(quick: bool) -> Row:
    """The same when the node has no agent and no zygote."""
    return _row("cold", "no agent, no zygote; call → results in the caller, 1 rank", rounds=3 if quick else 12)


def tensor(quick: bool) -> Row:
    """A result of 1 GB from a sandbox."""
    return _row("tensor", "1 GB tensor returned: in the rank → in the caller's hands", rounds=2 if quick else 7)


def _row(kind: str, what: str, *, rounds: int, bar: float | None = None) -> Row:
    with Stage((f"isolation.{kind}_sandbox", f"isolation.{kind}_none"), _BESIDE) as stage:
        stage.play(rounds)
        ours = stage.timing(0, what)
        ratio = ours.median / stage.timing(1, _BESIDE[0]).median
        return Row(
            name=f"sandbox: {what}",
            ours=ours,
            against=stage.against(),
            bar="" if bar is None else f"≤ {bar:.1f}× without a sandbox",
            met=None if bar is None else ratio <= bar,
            value=f"{ratio:.2f}×",
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {
    "sandbox-warm": warm,
    "sandbox-cold": cold,
    "sandbox-tensor": tensor,
}
