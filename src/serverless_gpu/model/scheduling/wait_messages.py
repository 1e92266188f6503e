"""Formats messages about a wait: the needed devices, their current holders, and the latest time.

    needs 8 H100 on one node; 5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; you are 2nd
    └─ need ───────────────┘  └─ free ───┘  └─ holder ────── release ─────────────────────┘  └─ place ─┘

The text "until 14:20 at the latest" shows a declared time (`timeout`). The text "until about 14:20" shows a time
learned from earlier runs. The message omits unknown times. The message rounds a latest time up to the minute, so that
the displayed time is never too early. Each list in a message has at most three names. The module also contains the
messages about principals that share one operating-system user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from serverless_gpu.model.scheduling.values import DeviceHolder, StartEstimate, Wait, WaitReason
from serverless_gpu.units import format_duration_ms

Clock = Callable[[int], str]
"""Formats a time for its reader, such as ``"14:20"`` or ``"Mon 14:20"``."""

NAMED_MAX = 3
REMEDY = "sgpu pool set {pool} --isolation none"
SANDBOX_REMEDY = "sgpu pool set {pool} --isolation sandbox"
REVOKE = "sgpu pool set {pool} --isolation unset"
_MINUTE_NS = 60_000_000_000
_SPARE_MIN_S = 60.0
_UNSEEN = "the scheduler has not examined the run yet"
# Wait reasons whose text replaces all other parts of the message.
_INSTEAD = (WaitReason.HELD, WaitReason.ISOLATION, WaitReason.UNSATISFIABLE)


def sentence(wait: Wait, clock: Clock) -> str:
    """Return the message that explains a wait."""
    if wait.reason in _INSTEAD and wait.words:
        if wait.ends_ns is None:
            return wait.words
        return f"{wait.words}; the run waits for a suitable node until {latest(wait.ends_ns, clock)} at the latest"
    there = [] if wait.reason is WaitReason.UNSATISFIABLE else [*_there(wait, clock), *_start(wait, clock)]
    parts = [_needing(wait), *there, wait.words, f"you are {ordinal(wait.place)}" if wait.place else ""]
    return "; ".join(part for part in parts if part) or _UNSEEN


def estimate_text(estimate: StartEstimate, clock: Clock) -> str:
    """Return the message with the estimated start of a run and its basis."""
    basis = f": {estimate.basis}" if estimate.basis else ""
    if estimate.impossible:
        return f"never{basis}"
    place = f"; {ordinal(estimate.place)} in line" if estimate.place else ""
    if estimate.at_ns is None:
        return f"unknown{basis}{place}"
    names = [estimate.node] if estimate.node else first_few(estimate.nodes)
    where = f" on {', '.join(names)}" if names else ""
    if not estimate.place:
        return f"at once{where}{basis}"
    return f"{_at(estimate.at_ns, clock, is_bound=estimate.is_bound)}{where}{basis}{place}"


def ordinal(number: int) -> str:
    """Return a number as an English ordinal, such as ``"1st"`` or ``"22nd"``."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def first_few(texts: Sequence[str]) -> list[str]:
    """Return the first texts of a list, with a final entry for the number of omitted texts."""
    more = len(texts) - NAMED_MAX
    return [*texts[:NAMED_MAX], f"{more} more"] if more > 0 else list(texts)


def _needing(wait: Wait) -> str:
    name = wait.gpu_type or "GPU"
    if wait.whole:
        return f"needs every {name} of a node" + (f" ({wait.count})" if wait.count else "")
    if not wait.count:
        return ""
    if len(wait.nodes) > 1:
        return f"needs {wait.count} {name} on {len(wait.nodes)} nodes"
    return f"needs {wait.count} {name}" + (" on one node" if wait.one_node and wait.count > 1 else "")


def _there(wait: Wait, clock: Clock) -> list[str]:
    """Return message parts about free devices on the node and holders of missing devices."""
    if wait.reason is WaitReason.CALENDAR:
        return [_calendar(wait, clock), *_holding(wait.holders, clock)]
    if wait.reason is WaitReason.AWAY and not wait.node:
        return []
    parts = [_free(wait, clock), *_holding(wait.holders, clock)]
    if wait.outside:
        parts.append(f"{wait.outside} in use outside of this server, or in quarantine")
    return parts


def _free(wait: Wait, clock: Clock) -> str:
    if not wait.node and not wait.free and wait.one_node:
        return _UNSEEN if wait.reason is WaitReason.TURN else ""
    free = _free_on(wait)
    if not wait.free:
        return free
    if wait.ahead:
        since = "" if wait.kept_ns is None else f", from {clock(wait.kept_ns)} on"
        return f"{free}, kept for {wait.ahead}, which is ahead{since}"
    if wait.reason is WaitReason.RESERVED:
        return f"{free}, kept for runs that are ahead"
    return f"{free}, and other runs are ahead" if wait.reason is WaitReason.TURN else free


def _free_on(wait: Wait) -> str:
    if not wait.nodes or not wait.free:
        names = [wait.node] if wait.node else first_few([part.node for part in wait.nodes])
        return f"{wait.free or 'none'} free" + (f" on {', '.join(names)}" if names else "")
    first, *others = wait.nodes
    texts = [f"{first.node} has {first.free or 'none'} free"]
    return ", ".join(first_few([*texts, *(f"{part.node} {part.free or 'none'}" for part in others)]))


def _calendar(wait: Wait, clock: Clock) -> str:
    name = wait.node or "the node"
    whose = f"{wait.owner}'s" if wait.owner else "its owner's"
    if wait.free:
        start = f" from {clock(wait.turns_ns)} on" if wait.turns_ns is not None else ""
        return f"{wait.free} free on {name}, which is {whose}{start}: only runs that end before may start there"
    return f"{name} is {whose} now" if wait.turns_ns is None else f"{name} is {whose} until {clock(wait.turns_ns)}"


def _holding(holders: Sequence[DeviceHolder], clock: Clock) -> list[str]:
    # Merge runs with the same title into one entry with the latest release time.
    merged: dict[tuple[str, bool, bool], DeviceHolder] = {}
    for holder in holders:
        key = (holder.title, holder.is_leaving, holder.asked_ns is not None)
        merged[key] = _together(merged[key], holder) if key in merged else holder
    return first_few([_holder(holder, clock) for holder in merged.values()])


def _holder(holder: DeviceHolder, clock: Clock) -> str:
    where = f" on {holder.node}" if holder.node else ""
    if holder.is_leaving:
        until = ""
        if holder.until_ns is not None:
            until = (
                f" by {latest(holder.until_ns, clock)}" if holder.is_bound else f" by about {clock(holder.until_ns)}"
            )
        return f"{holder.title} was asked to release its {holder.count}{where}{until}"
    until = f" until {_about(holder.until_ns, clock, is_bound=holder.is_bound)}" if holder.until_ns is not None else ""
    if holder.likely_ns is not None:
        until += f", about {clock(holder.likely_ns)} by earlier runs of that name"
    if holder.asked_ns is not None and (holder.until_ns is None or holder.asked_ns < holder.until_ns):
        until = f"{until}{', and' if until else ' and'} is preempted at {clock(holder.asked_ns)}"
    return f"{holder.title} holds {holder.count}{where}{until}"


def _together(one: DeviceHolder, other: DeviceHolder) -> DeviceHolder:
    known = one.until_ns is not None and other.until_ns is not None
    likely_ns = None
    if known and (one.likely_ns is not None or other.likely_ns is not None):
        likely_ns = max(one.likely_ns or one.until_ns or 0, other.likely_ns or other.until_ns or 0)
    return msgspec.structs.replace(
        one,
        count=one.count + other.count,
        until_ns=max(one.until_ns or 0, other.until_ns or 0) if known else None,
        likely_ns=likely_ns,
        asked_ns=None if one.asked_ns is None or other.asked_ns is None else max(one.asked_ns, other.asked_ns),
        is_bound=one.is_bound and other.is_bound,
        node=_joined(one.node, other.node),
    )


def _joined(nodes: str, node: str) -> str:
    """Append a node name to a list of names, replacing names beyond `NAMED_MAX` by "others"."""
    names = nodes.split(", ")
    if node in names:
        return nodes
    return f"{nodes}, {node}" if len(names) < NAMED_MAX else f"{', '.join(names[: NAMED_MAX - 1])}, others"


def _start(wait: Wait, clock: Clock) -> list[str]:
    """Return the message parts about the start time and about a time limit that allows an immediate start."""
    parts = []
    if wait.at_ns is not None:
        learned = "" if wait.likely_ns is None else f", about {clock(wait.likely_ns)} by earlier runs of those names"
        parts.append(f"it starts {_at(wait.at_ns, clock, is_bound=wait.is_bound)}{learned}")
    if wait.spare_s >= _SPARE_MIN_S:
        spare = format_duration_ms(round(wait.spare_s) * 1000)
        parts.append(f"with timeout= of at most {spare} it would start now")
    return parts


def _at(at_ns: int, clock: Clock, *, is_bound: bool) -> str:
    return f"at {_about(at_ns, clock, is_bound=is_bound)}"


def _about(at_ns: int, clock: Clock, *, is_bound: bool) -> str:
    return f"{latest(at_ns, clock)} at the latest" if is_bound else f"about {clock(at_ns)}"


def latest(at_ns: int, clock: Clock) -> str:
    """Return a latest time as text, rounded up to the full minute."""
    return clock(-(-at_ns // _MINUTE_NS) * _MINUTE_NS)


def isolation_sentence(pools: Sequence[str]) -> str:
    """Return a message about the isolation that makes a second principal's run wait, with the remedy."""
    verb = "runs" if len(pools) == 1 else "run"
    return (
        f"{_named(pools)} {verb} the code of one principal only, because all runs there share one operating-system "
        f"user. An administrator can give each principal a sandbox: `{SANDBOX_REMEDY.format(pool=pools[0])}`. "
        f"Where agents do not run as root, an administrator can share the user: `{REMEDY.format(pool=pools[0])}`"
    )


def sharing_warnings(
    *, principals: Sequence[str], closed: Sequence[str], shared: Sequence[str], isolated: Sequence[str] = ()
) -> list[str]:
    """Return the warnings to operators about principals that share one operating-system user.

    A server without any pool gets the warning about its future pool `default`.
    """
    if not principals:
        return []
    who, found = ", ".join(first_few(principals)), []
    if shared:
        found.append(
            f"all runs in {_named(shared)} share one operating-system user. The code of {who} can read secrets "
            "and results of other users. On the server's machine, this code can also read the server's key and tokens. "
            f"Give each principal a sandbox with `{SANDBOX_REMEDY.format(pool=shared[0])}`, or end the sharing for new "
            f"runs with `{REVOKE.format(pool=shared[0])}`"
        )
    if closed or not (shared or isolated):
        waiting = closed or ["default"]
        found.append(
            f"runs of {who} wait in {_named(waiting)} with the reason isolation, because all runs there share one "
            f"operating-system user. To give each principal a sandbox, use "
            f"`{SANDBOX_REMEDY.format(pool=waiting[0])}`. To share the user, use `{REMEDY.format(pool=waiting[0])}`"
        )
    return found


def _named(pools: Sequence[str]) -> str:
    return f"pool{'s' if len(pools) > 1 else ''} {', '.join(first_few(pools))}"
