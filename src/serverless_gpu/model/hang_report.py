"""What a person reads about a run that stands still: one sentence, and the file with every rank's stacks.

Text from values; when there is something to say is decided in `hangs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from serverless_gpu.model.hangs import STOPPED, TRACED, Look
from serverless_gpu.units import format_duration_ms

RANK_CHARACTERS_MAX = 256 << 10
_RANKS_LISTED = 8
_PLACES_LISTED = 3
_STACKS_TOLD = 4
_STACK_CHARACTERS_MAX = 4_000
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait of the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A run that stands still, as far as it is known.

    Attributes:
        waiting: ranks that wait for others.
        elsewhere: ranks that do not.
        looks: the last look at each rank that has not returned, by rank.
        first: the first look of this silence.
        moving: ranks that were seen to move.
        silent_ms: how long nothing was heard.
        watched_ms: how long the ranks were looked at.
    """

    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...]
    looks: dict[int, Look]
    first: dict[int, Look]
    moving: frozenset[int]
    silent_ms: int
    watched_ms: int


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for people, the first few of many: ``rank 3``, ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:_RANKS_LISTED]))
    more = f" and {len(ranks) - _RANKS_LISTED} more" if len(ranks) > _RANKS_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def sentence(finding: Finding) -> str:
    """Return in one line who waits, and for whom."""
    return f"no output for {format_duration_ms(finding.silent_ms)}, and {_who_waits(finding)}"


def stacks(finding: Finding) -> dict[int, str]:
    """Return the main stacks of the few ranks that explain it most: those elsewhere, else those that wait."""
    running = [rank for rank in finding.elsewhere if rank in finding.looks] or list(finding.waiting)
    chosen = [finding.looks[rank] for rank in running[:_STACKS_TOLD]]
    return {look.rank: _main(look)[:_STACK_CHARACTERS_MAX] for look in chosen}


def report(finding: Finding, title: str, ranks: Iterable[int]) -> str:
    """Return the text of the file with all stacks.

    Args:
        finding: what was found.
        title: which run, and when.
        ranks: of the run, on this node.
    """
    rows = [_row(finding, rank) for rank in ranks]
    parts = [
        f"{title}\n{sentence(finding)}",
        "rank  pid        now, where in the kernel, CPU used in the last "
        f"{format_duration_ms(finding.watched_ms)}\n" + "\n".join(rows),
        *(_section(finding, look) for _, look in sorted(finding.looks.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _who_waits(finding: Finding) -> str:
    if not finding.waiting:
        return _elsewhere(finding)
    there = _grouped(finding.looks[rank] for rank in finding.waiting)
    if not finding.elsewhere:
        return f"every rank waits ({_joined(_standing(*group) for group in there)})"
    who = f"{ranks_text(finding.waiting)} {'waits' if len(finding.waiting) == 1 else 'wait'}"
    place = f" in {there[0][0]}" if len(there) == 1 and there[0][0] else ""
    return f"{who}{place}: {_elsewhere(finding)}"


def _elsewhere(finding: Finding) -> str:
    looks = [finding.looks[rank] for rank in finding.elsewhere if rank in finding.looks]
    stopped = [look.rank for look in looks if look.state == STOPPED]
    traced = [look.rank for look in looks if look.state == TRACED]
    others = [look for look in looks if look.state not in (STOPPED, TRACED)]
    gone = [rank for rank in finding.elsewhere if rank not in finding.looks]
    parts = [f"{ranks_text(stopped)} {_be(stopped)} stopped (SIGSTOP)"] if stopped else []
    parts += [f"{ranks_text(traced)} {_be(traced)} stopped by a debugger"] if traced else []
    parts += [
        f"{ranks_text(ranks)} {_be(ranks)} {'busy' if finding.moving.issuperset(ranks) else 'elsewhere'}"
        + (f", in {place}" if place else "")
        for place, ranks in _grouped(others)
    ]
    parts += [f"{ranks_text(gone)} {'has' if len(gone) == 1 else 'have'} returned"] if gone else []
    return _joined(parts)


def _grouped(looks: Iterable[Look]) -> list[tuple[str, list[int]]]:
    """Return ranks by the place where they stand, in order of the first of them."""
    groups: dict[str, list[int]] = {}
    for look in sorted(looks, key=lambda look: look.rank):
        groups.setdefault(look.stack.where(), []).append(look.rank)
    return list(groups.items())


def _standing(place: str, ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} in {place}" if place else f"{ranks_text(ranks)} in an unknown place"


def _joined(parts: Iterable[str]) -> str:
    shown = list(parts)
    return ", ".join([*shown[:_PLACES_LISTED], *(["and more"] if len(shown) > _PLACES_LISTED else [])])


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _row(finding: Finding, rank: int) -> str:
    look = finding.looks.get(rank)
    if look is None:
        return f"{rank:<5} {'':<10} has returned"
    used_ms = look.cpu_ms - finding.first.get(rank, look).cpu_ms
    parts = [_STATES.get(look.state, "unknown"), *([look.channel] if look.channel else [])]
    parts += [format_duration_ms(max(0, used_ms)), *([look.note] if look.note else [])]
    return f"{rank:<5} {look.pid:<10} {', '.join(parts)}"


def _section(finding: Finding, look: Look) -> str:
    role = "waits" if look.rank in finding.waiting else "elsewhere"
    lines = [f"---- rank {look.rank} ({role}) ----"]
    if look.note:
        lines.append(look.note)
    lines.append(f"main thread (most recent call first):\n{_main(look)}")
    text = "\n".join(lines)
    if len(text) > RANK_CHARACTERS_MAX:
        text = f"{text[:RANK_CHARACTERS_MAX]}\n... {len(text) - RANK_CHARACTERS_MAX} characters left out"
    return text


def _main(look: Look) -> str:
    return look.stack.main.body() if look.stack.main is not None and look.stack.frames else "  (no stack)"
