"""Hang detection from a run's last output and from inspections of its ranks.

    output, event ──▶ progress ── silence ──▶ inspections in one window ┬▶ all move: progress
                                                                        ├▶ some do not move: WARN, again after twice
                                                                        │  the silence
                                                                        └▶ none moves: END, where the user set a limit

The module contains only values and decisions. The decisions use no clocks, signals, /proc or files.
`node/supervisor/hang_watchdog.py` inspects the ranks and carries out the decisions.

Silence does not prove a hang, because many programs train for hours without output. Before any warning, the supervisor
therefore inspects the ranks `_LOOKS` times, over a window that ends with the limit. A rank *moves* if the inspections
find two different stacks, or if the rank uses CPU time.

Ranks on several GPUs may wait for each other in a busy loop in C. For ranks on several GPUs, CPU time counts as work
only if the main thread ran Python code between two inspections. A program that waits for its GPU at one line nearly all
the time still runs some Python code. One long call in C counts as work for ranks that do not share several GPUs,
because those ranks sleep while they wait.

A rank also makes progress if its stack equals a stack of a moving rank. The supervisor warns when a rank that has not
returned makes no progress. The supervisor warns even if one rank is busy, because other ranks may wait for that rank
forever. A superfluous warning does no harm. The supervisor ends a run only when no rank moves. While one rank works,
other ranks can legitimately wait, for example for an evaluation on rank 0. While a rank works, the hang detection
postpones the end by one limit.

For a gang on several nodes, each supervisor only reports `RankSeen`. `gang_hang_detection.py` makes the decisions.

Failure cases: Time in which the supervisor did not run, for example on a suspended machine, does not count as silence.
A rank without a stack moves if the rank uses CPU time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from serverless_gpu.model.hangs.stacks import (
    Stack,
    StackFrame,
    at_socket,
    delegates,
    in_backward,
    in_collective,
    uses_torch,
)
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Attempt, Limits, State

WARNINGS_MAX = 5
WINDOW_NS_MAX = 300_000_000_000
_EARLY_NS = 60_000_000_000
_LOOKS = 16
PLACES_MAX = 3 * _LOOKS
"""Maximum number of stack digests per rank."""
WHERE_CHARACTERS_MAX = 300
"""Maximum number of characters of a code location in messages. Function names in user code may be longer."""
_LOOKS_MIN = _LOOKS // 2  # Minimum number of inspections before a decision, also for a supervisor that starts late.
_INTERVAL_NS_MIN = 50_000_000
# Maximum gap between observations in nanoseconds. A longer gap shows that the supervisor process did not run.
_UNOBSERVED_NS = 30_000_000_000
_BUSY = 0.01  # Minimum CPU share of one core that counts as work. Polling in a waiting rank uses a smaller CPU share.
_LOOK_MS = 3.0  # Maximum CPU milliseconds that an inspection itself consumes in a rank.
_TICK_MS = 10  # Resolution and maximum delay of the kernel's CPU times, in milliseconds.
_GOLDEN = 0.618  # Golden ratio minus 1, whose multiples modulo 1 are spread evenly.
STOPPED, TRACED = "T", "t"
_WAIT_CHANNELS = (
    "sk_wait",
    "tcp_",
    "inet_csk_accept",
    "unix_stream",
    "unix_accept",
    "skb_wait",
    "__skb_wait",
    "do_epoll_wait",
    "ep_poll",
    "poll_schedule",
    "do_poll",
    "do_sys_poll",
    "do_select",
)


class Sign(StrEnum):
    """Signs that a rank waits for other ranks, from strongest to weakest."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    SOCKET = "socket"


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Observed state of one rank at the time of an inspection."""

    rank: int
    pid: int = 0
    state: str = ""  # State letter of the main thread in /proc, or "" when unknown.
    channel: str = ""  # Kernel function in which the main thread waits, or "" when unknown or running.
    cpu_ms: int = 0  # CPU time of the rank process in milliseconds.
    main_us: int = 0  # CPU time of the main thread in microseconds.
    children_ms: int = 0  # CPU time of all living descendant processes in milliseconds.
    # True if the main thread ran Python code since the last inspection, even for polling only. A call in C that has not
    # returned to Python does not count as Python code.
    passed: bool = False
    stack: Stack = Stack()  # Python stacks of the rank, or an empty value if the rank provided no stacks.
    note: str = ""  # Reason for a missing stack, or another remark about the inspection.

    @property
    def blocked(self) -> bool:
        """Return True when the main thread sleeps in the kernel."""
        return self.state in ("S", "D")


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A compact summary of one rank's inspections, which the server combines for all nodes.

    Attributes:
        state: state letter of the main thread in /proc, or "" when unknown.
        where: the main thread's code location as text for users, or "" when unknown.
        place: digest of the main thread's stack in the last inspection.
        places: digests of the stacks in all inspections. A moving rank reports only a few digests.
        moving: True if the rank had more than one stack, or used CPU time.
        signs: signs that the rank waits for other ranks, from the last inspection.
    """

    rank: int
    state: str = ""
    where: str = ""
    place: int = 0
    places: tuple[int, ...] = ()
    moving: bool = False
    signs: tuple[Sign, ...] = ()


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run, as observed by the supervisor."""

    since_ns: int  # Time of the last sign of progress.
    seen_ns: int  # Time of the supervisor's last observation of the run.
    began_ns: int = 0  # Time of the first inspection in the current silence.
    looked_ns: int = 0  # Time of the last inspection of the ranks.
    looks: int = 0  # Number of inspections in the current silence.
    first: dict[int, RankInspection] = {}  # The first inspection in the current silence, by rank.
    last: dict[int, RankInspection] = {}
    places: dict[int, frozenset[int]] = {}  # Digests of each rank's stacks, by rank.
    warned: int = 0
    warned_ever: int = 0  # Number of hang warnings in the whole run.
    # Time at which the detection postponed the end because a rank worked, or 0 without a postponement.
    spared_ns: int = 0


class HangAction(StrEnum):
    """The next action of the supervisor's hang detection."""

    WAIT = "wait"
    LOOK = "look"
    WARN = "warn"
    END = "end"


class Step(msgspec.Struct, frozen=True):
    """Next step of the hang detection. `at_ns` is the time of the following step after WAIT, or None."""

    action: HangAction
    at_ns: int | None = None


class HangDeadline(msgspec.Struct, frozen=True):
    """Action if a silence lasts until `at_ns`. Inspections begin `window_ns` before `at_ns`."""

    at_ns: int
    window_ns: int
    action: HangAction


def begin(now_ns: int) -> RunProgress:
    """Return the initial progress of a run that has just started."""
    return RunProgress(since_ns=now_ns, seen_ns=now_ns)


def progressed(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the run's progress after output or another sign of activity."""
    return RunProgress(since_ns=now_ns, seen_ns=now_ns, warned_ever=watch.warned_ever)


def observed(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the run's progress after an observation. A pause of the supervisor ends the silence."""
    if now_ns - watch.seen_ns > _UNOBSERVED_NS:
        return progressed(watch, now_ns)
    return msgspec.structs.replace(watch, seen_ns=now_ns)


def next_step(watch: RunProgress, limits: Limits, now_ns: int) -> Step:
    """Return the next step of the supervisor's hang detection."""
    due = due_of(watch, limits)
    if due is None:
        return Step(HangAction.WAIT)
    start_ns = due.at_ns - due.window_ns
    if now_ns < start_ns:
        return Step(HangAction.WAIT, start_ns)
    if now_ns >= due.at_ns and watch.looks >= _LOOKS_MIN:
        return Step(due.action)
    # Wait between 0.5 and 1.5 intervals, so that inspections do not coincide with periodic work.
    uneven_ns = round(due.window_ns // _LOOKS * (0.5 + watch.looks * _GOLDEN % 1))
    next_ns = watch.looked_ns + max(_INTERVAL_NS_MIN, uneven_ns)
    if watch.looks and now_ns < next_ns:
        return Step(HangAction.WAIT, next_ns if watch.looks < _LOOKS_MIN else min(next_ns, due.at_ns))
    return Step(HangAction.LOOK)


def may_spin(world_size: int, kinds: Collection[DeviceKind]) -> bool:
    """Return True if ranks may use CPU time only to wait for each other, as in NCCL calls."""
    return world_size > 1 and DeviceKind.GPU in kinds


def looked(watch: RunProgress, looks: Sequence[RankInspection], now_ns: int, *, spins: bool) -> RunProgress:
    """Return the run's progress after an inspection of all ranks that have not returned."""
    had_looks = watch.looks
    watch = noted(watch, looks, now_ns, spins=spins)
    return progressed(watch, now_ns) if had_looks and not _still(watch.places) else watch


def noted(watch: RunProgress, looks: Sequence[RankInspection], now_ns: int, *, spins: bool) -> RunProgress:
    """Return the run's progress with an inspection added, without the conclusions of `looked`."""
    elapsed_ms = (now_ns - watch.looked_ns) / 1e6
    places = {}
    for look in looks:
        before = watch.last.get(look.rank)
        place = _place(look, before, elapsed_ms, watch.looks, spins)
        places[look.rank] = watch.places.get(look.rank, frozenset()) | place
    last = {look.rank: look for look in looks}
    return msgspec.structs.replace(
        watch,
        began_ns=watch.began_ns if watch.looks else now_ns,
        looked_ns=now_ns,
        looks=watch.looks + 1,
        first={**last, **{rank: look for rank, look in watch.first.items() if rank in last}},
        last=last,
        places=places,
    )


def warned(watch: RunProgress) -> RunProgress:
    """Return the run's progress after a hang warning."""
    return msgspec.structs.replace(watch, warned=watch.warned + 1, warned_ever=watch.warned_ever + 1)


def spared(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the run's progress after a postponed end.

    The returned progress has no inspections. The detection postpones the end because ranks can legitimately wait for a
    working rank.
    """
    return msgspec.structs.replace(watch, spared_ns=now_ns, looks=0, first={}, last={}, places={})


def moving(watch: RunProgress) -> frozenset[int]:
    """Return the ranks that moved, for which inspections found more than one stack or CPU usage."""
    return frozenset(rank for rank, places in watch.places.items() if len(places) > 1)


def returned_early(attempt: Attempt, returned_ns: int | None, now_ns: int) -> bool:
    """Return True if running ranks may wait forever for ranks that returned long ago."""
    others_run = attempt.has_peers or len(attempt.returned) < attempt.world_size
    is_waiting = attempt.state is State.RUNNING and others_run
    return is_waiting and returned_ns is not None and now_ns - returned_ns >= _EARLY_NS


def seen(watch: RunProgress) -> tuple[RankSeen, ...]:
    """Return a summary of each rank's inspections."""
    return tuple(_seen(look, watch.places.get(rank, frozenset())) for rank, look in sorted(watch.last.items()))


def divide(
    looks: Collection[RankInspection], returned: Collection[int], moved: Collection[int]
) -> tuple[list[int], list[int]]:
    """Divide one node's ranks into waiting ranks and other ranks, as `divided` does."""
    ranks = [msgspec.structs.replace(_seen(look, frozenset()), moving=look.rank in moved) for look in looks]
    return divided(ranks, returned)


def divided(ranks: Collection[RankSeen], returned: Collection[int]) -> tuple[list[int], list[int]]:
    """Divide ranks into ranks that wait for other ranks and ranks that do not, each in order.

    The function uses the strongest sign that some ranks have and others lack. From strongest to weakest, the signs are
    a collective, a blocked backward pass and a wait at a socket. If no sign distinguishes the ranks, the largest group
    of ranks with the same stack counts as waiting. Ranks that returned do not count as waiting.
    """
    everybody = sorted({one.rank for one in ranks} | set(returned))
    able = [one for one in ranks if one.state not in (STOPPED, TRACED)]
    waiting: set[int] = set()
    for sign in Sign:
        waiting = {one.rank for one in able if sign in one.signs}
        if waiting:
            break
    if not waiting or len(waiting) == len(everybody):
        # Use the stack with the most ranks. For equally large groups, prefer ranks that do not move, and then the
        # lowest rank.
        sizes = Counter(one.place for one in able)
        best = min(able, key=lambda one: (-sizes[one.place], one.moving, one.rank), default=None)
        waiting = {one.rank for one in able if best is not None and one.place == best.place}
    return sorted(waiting), [rank for rank in everybody if rank not in waiting]


def are_still(ranks: Collection[RankSeen]) -> bool:
    """Return True if any rank does not move and has a different stack from all moving ranks."""
    return _still({one.rank: frozenset(one.places) for one in ranks})


def _seen(look: RankInspection, places: frozenset[int]) -> RankSeen:
    frames = look.stack.frames
    signs = []
    if in_collective(frames):
        signs.append(Sign.COLLECTIVE)
    if look.blocked and in_backward(frames):
        signs.append(Sign.BACKWARD)
    # For two ranks without torch, only the socket sign shows which rank waits, because each stack belongs to one rank.
    channel = look.channel.startswith(_WAIT_CHANNELS)
    if (channel or (not look.channel and at_socket(frames))) and not uses_torch(frames):
        signs.append(Sign.SOCKET)
    return RankSeen(
        rank=look.rank,
        state=look.state,
        where=look.stack.where()[:WHERE_CHARACTERS_MAX],
        place=_digest(_texts(frames)),
        places=tuple(sorted(places)[:PLACES_MAX]),
        moving=len(places) > 1,
        signs=tuple(signs),
    )


def _place(
    look: RankInspection, before: RankInspection | None, elapsed_ms: float, number: int, spins: bool
) -> frozenset[int]:
    """Return digests of a rank's stack, or no digests for a stopped or unknown rank."""
    if look.state in (STOPPED, TRACED):
        return frozenset()
    frames = look.stack.frames
    used_ms = 0.0 if before is None else _used_ms(look, before, spins)
    found: set[tuple[str, ...]] = (
        {("busy", str(look.rank), str(number))} if used_ms > _BUSY * elapsed_ms + _LOOK_MS else set()
    )
    if frames:  # A missing stack does not count as a changed stack.
        found.add(_texts(frames))
    return frozenset(map(_digest, found))


def _texts(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    """Return a stack without directories, because paths of the same file may differ between nodes."""
    return tuple(frame.text() for frame in frames)


def _digest(texts: tuple[str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode("utf-8", "replace"), digest_size=7).digest())


def _used_ms(look: RankInspection, before: RankInspection, spins: bool) -> float:
    """Return the CPU milliseconds since the last inspection that count as work."""
    frames = look.stack.frames
    used_ms = 0.0
    if look.passed or not spins:
        used_ms += (look.main_us - before.main_us) / 1e3
    # Without Python frames, or while the main thread waits for other threads, use the CPU time of the whole process.
    if not frames or (delegates(frames) and (look.passed or not spins)):
        used_ms += max(0, look.cpu_ms - before.cpu_ms - _TICK_MS)
    if not frames or delegates(frames):  # Count child processes, which may work for the rank.
        used_ms += max(0, look.children_ms - before.children_ms - _TICK_MS)
    return used_ms


def _still(places: Mapping[int, frozenset[int]]) -> bool:
    """Return True if any rank does not move and has a different stack from all moving ranks."""
    lively = {place for own in places.values() if len(own) > 1 for place in own}
    return any(len(own) < 2 and not own & lively for own in places.values())


def due_of(watch: RunProgress, limits: Limits) -> HangDeadline | None:
    """Return the next deadline of a silence, or None without limits."""
    dues = []
    if limits.hang_timeout_ns is not None:
        limit_ns = limits.hang_timeout_ns
        dues.append(HangDeadline((watch.spared_ns or watch.since_ns) + limit_ns, _window_ns(limit_ns), HangAction.END))
    if limits.hang_warning_ns is not None and watch.warned_ever < WARNINGS_MAX:
        limit_ns = limits.hang_warning_ns
        dues.append(HangDeadline(watch.since_ns + (limit_ns << watch.warned), _window_ns(limit_ns), HangAction.WARN))
    # If the warning and the end have the same deadline, the end takes precedence.
    return min(dues, key=lambda due: due.at_ns, default=None)


def _window_ns(limit_ns: int) -> int:
    return min(WINDOW_NS_MAX, limit_ns // 2)
