"""What is measured of the isolation levels, with its bars."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import Row
from benchmarks.stage import Stage

WARM_RATIO_MAX = 1.1
_FIRST_S_MAX = 150.0  # The first round captures the environment with torch, uploads and restores it.
_BESIDE = ("the same at `none`", "the same at `user`")


def warm(quick: bool) -> Row:
    """A warm call in a sandbox beside the same call at the other levels, in turns."""
    return _row("warm", "warm call → results in the caller, 1 rank", rounds=4 if quick else 24, bar=WARM_RATIO_MAX)


def cold(quick: bool) -> Row:
    """The same when the node has no agent and no zygote."""
    return _row("cold", "no agent, no zygote; call → results in the caller, 1 rank", rounds=3 if quick else 12)


def tensor(quick: bool) -> Row:
    """A result of 1 GB from a sandbox."""
    what = "1 GB tensor returned: in the rank → in the caller's hands, read once"
    return _row("tensor", what, rounds=2 if quick else 4, key="read_ms")


def _row(kind: str, what: str, *, rounds: int, bar: float | None = None, key: str = "ms") -> Row:
    names = tuple(f"isolation.{kind}_{level}" for level in ("sandbox", "none", "user"))
    with Stage(names, _BESIDE, round_s_max=_FIRST_S_MAX) as stage:
        stage.play(rounds)
        ours, none, user = (stage.timing(index, label, key) for index, label in enumerate((what, *_BESIDE)))
        ratio = ours.median / none.median
        return Row(
            name=f"sandbox: {what}",
            ours=ours,
            against=(none, user),
            bar="" if bar is None else f"≤ {bar:.1f}× `none`",
            met=None if bar is None else ratio <= bar,
            value=f"{ratio:.2f}× `none`, {user.median / none.median:.2f}× at `user`",
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {
    "sandbox-warm": warm,
    "sandbox-cold": cold,
    "sandbox-tensor": tensor,
}
