"""Hang detection: decides from a run's last output and from inspections of its ranks.

    output, event ──▶ progress ─── silence ───▶ looks, one window long ─┬▶ all move: progress
                                                                        ├▶ some stand still: WARN, again after twice
                                                                        │  the silence
                                                                        └▶ none moves: END, where that was asked for

What lives here: values and decisions. What must not: clocks, signals, /proc, files; `node/supervisor/hang_watchdog.py`
takes the looks and carries out what is decided.

Silence is no proof: many programs train for hours without a word. So before any warning the ranks are inspected,
`_LOOKS` times over a window that ends with the limit. A rank *moves* when it was seen in two places, or when it used
its CPU. Ranks on several GPUs may wait for each other in a busy loop in C, so there CPU counts only where the main
thread ran Python code between two looks: a program that waits for its GPU at one line nearly all the time is seen
nowhere else, and yet comes by. Others sleep while they wait, and one long call in C is work. A rank gets on, too, when
it stands where one that moves was seen. A warning needs one rank that neither returned nor gets on: in a hang the one
that is missed may well be busy elsewhere, and a warning does no harm. An end needs that no rank moves: while one is at
work the others may rightly wait for it (rank 0 evaluates), and the end is put off by its limit.

Of a gang on several nodes each supervisor only says what it saw, as `RankSeen`, and `gang_hang_detection.py` decides.

Failure cases: the observer itself did not run (a suspended machine, a stopped supervisor), then the time does not
count; a rank without a stack moves when it uses its CPU.
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
"""A rank is seen in no more of them: one look finds it at one place, and perhaps at work."""
WHERE_CHARACTERS_MAX = 300
"""Of a place people read no more; a name in user code may be longer."""
_LOOKS_MIN = _LOOKS // 2  # before anything is decided, also by a supervisor that comes late to them
_INTERVAL_NS_MIN = 50_000_000
_UNOBSERVED_NS = 30_000_000_000  # the supervisor looks every few seconds; a longer gap was not the ranks'
_BUSY = 0.01  # of one CPU; who only asks again and again whether it may go on uses less
_LOOK_MS = 3.0  # of CPU that being looked at takes, at most
_TICK_MS = 10  # the kernel's unit for a process's CPU time: so much may be told late
_GOLDEN = 0.618  # spreads its multiples evenly
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
    """Signs that a rank waits for others, the strongest first."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    SOCKET = "socket"


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one moment."""

    rank: int
    pid: int = 0
    state: str = ""  # the kernel's letter for its main thread, "" when unknown
    channel: str = ""  # where in the kernel its main thread waits, "" when unknown or running
    cpu_ms: int = 0  # CPU time it has used
    main_us: int = 0  # CPU time its main thread has used
    children_ms: int = 0  # CPU time its living descendants have used
    # Whether its main thread has run Python code since the look before, be it only to find that it has to wait on;
    # never in a call that has not come back to Python.
    passed: bool = False
    stack: Stack = Stack()  # its Python stacks; empty when none could be had
    note: str = ""  # why there is no stack, or what else is to be known

    @property
    def blocked(self) -> bool:
        """Return whether its main thread sleeps in the kernel."""
        return self.state in ("S", "D")


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the inspections of one rank, small enough to combine those of all nodes.

    Attributes:
        state: the kernel's letter for its main thread, "" when unknown.
        where: its main thread's place for people, "" when unknown.
        place: the same as a digest, of the last look.
        places: digests of where it was seen; of one that moves the first few.
        moving: whether it was seen in more than one place, or at work.
        signs: of a wait for others, in its last look.
    """

    rank: int
    state: str = ""
    where: str = ""
    place: int = 0
    places: tuple[int, ...] = ()
    moving: bool = False
    signs: tuple[Sign, ...] = ()


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The known progress of a run."""

    since_ns: int  # the last sign of progress
    seen_ns: int  # when this process last inspected the run
    began_ns: int = 0  # when the ranks were first looked at in this silence
    looked_ns: int = 0  # when they were last looked at
    looks: int = 0  # how often they were, in this silence
    first: dict[int, RankInspection] = {}  # the first looks of this silence, by rank
    last: dict[int, RankInspection] = {}
    places: dict[int, frozenset[int]] = {}  # where each rank was seen, as digests
    warned: int = 0
    warned_ever: int = 0  # warnings in all
    spared_ns: int = 0  # when the end was put off, because a rank was at work; 0: it was not


class HangAction(StrEnum):
    """The next step."""

    WAIT = "wait"
    LOOK = "look"
    WARN = "warn"
    END = "end"


class Step(msgspec.Struct, frozen=True):
    """An action, and for WAIT until when (None: nothing will ever be due)."""

    action: HangAction
    at_ns: int | None = None


class HangDeadline(msgspec.Struct, frozen=True):
    """What is done once nothing has happened until then; ranks are looked at for a while before."""

    at_ns: int
    window_ns: int
    action: HangAction


def begin(now_ns: int) -> RunProgress:
    """Return the watch over a run that has just started."""
    return RunProgress(since_ns=now_ns, seen_ns=now_ns)


def progressed(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the watch after a sign of progress."""
    return RunProgress(since_ns=now_ns, seen_ns=now_ns, warned_ever=watch.warned_ever)


def observed(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the watch after a turn of the observer; time in which it did not run does not count as silence."""
    if now_ns - watch.seen_ns > _UNOBSERVED_NS:
        return progressed(watch, now_ns)
    return msgspec.structs.replace(watch, seen_ns=now_ns)


def next_step(watch: RunProgress, limits: Limits, now_ns: int) -> Step:
    """Return what to do now."""
    due = due_of(watch, limits)
    if due is None:
        return Step(HangAction.WAIT)
    start_ns = due.at_ns - due.window_ns
    if now_ns < start_ns:
        return Step(HangAction.WAIT, start_ns)
    if now_ns >= due.at_ns and watch.looks >= _LOOKS_MIN:
        return Step(due.action)
    # Half to one and a half times the length: the looks must not keep step with what is regular.
    uneven_ns = round(due.window_ns // _LOOKS * (0.5 + watch.looks * _GOLDEN % 1))
    next_ns = watch.looked_ns + max(_INTERVAL_NS_MIN, uneven_ns)
    if watch.looks and now_ns < next_ns:
        return Step(HangAction.WAIT, next_ns if watch.looks < _LOOKS_MIN else min(next_ns, due.at_ns))
    return Step(HangAction.LOOK)


def may_spin(world_size: int, kinds: Collection[DeviceKind]) -> bool:
    """Return whether ranks may use their CPU all the time only to wait for each other, as they do in NCCL's calls."""
    return world_size > 1 and DeviceKind.GPU in kinds


def looked(watch: RunProgress, looks: Sequence[RankInspection], now_ns: int, *, spins: bool) -> RunProgress:
    """Return the watch after a look at all ranks that have not returned."""
    had_looks = watch.looks
    watch = noted(watch, looks, now_ns, spins=spins)
    return progressed(watch, now_ns) if had_looks and not _still(watch.places) else watch


def noted(watch: RunProgress, looks: Sequence[RankInspection], now_ns: int, *, spins: bool) -> RunProgress:
    """Return the watch with a look at all ranks that have not returned, whatever that means for them; see `looked`."""
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
    """Return the watch after a warning."""
    return msgspec.structs.replace(watch, warned=watch.warned + 1, warned_ever=watch.warned_ever + 1)


def spared(watch: RunProgress, now_ns: int) -> RunProgress:
    """Return the watch after an end that was put off: a rank at work may be what the others rightly wait for.

    From here on the ranks are judged by new looks.
    """
    return msgspec.structs.replace(watch, spared_ns=now_ns, looks=0, first={}, last={}, places={})


def moving(watch: RunProgress) -> frozenset[int]:
    """Return the ranks that were seen in more than one place."""
    return frozenset(rank for rank, places in watch.places.items() if len(places) > 1)


def returned_early(attempt: Attempt, returned_ns: int | None, now_ns: int) -> bool:
    """Return whether ranks returned long ago while others still run: they may be waiting for those for ever."""
    others_run = attempt.has_peers or len(attempt.returned) < attempt.world_size
    is_waiting = attempt.state is State.RUNNING and others_run
    return is_waiting and returned_ns is not None and now_ns - returned_ns >= _EARLY_NS


def seen(watch: RunProgress) -> tuple[RankSeen, ...]:
    """Return what the looks of a watch come to, by rank."""
    return tuple(_seen(look, watch.places.get(rank, frozenset())) for rank, look in sorted(watch.last.items()))


def divide(
    looks: Collection[RankInspection], returned: Collection[int], moved: Collection[int]
) -> tuple[list[int], list[int]]:
    """Return which ranks wait for others and which are elsewhere, as `divided`."""
    ranks = [msgspec.structs.replace(_seen(look, frozenset()), moving=look.rank in moved) for look in looks]
    return divided(ranks, returned)


def divided(ranks: Collection[RankSeen], returned: Collection[int]) -> tuple[list[int], list[int]]:
    """Return which ranks wait for others and which are elsewhere.

    The strongest evidence that tells some from others decides: frames of a collective, a blocked backward pass, a wait
    at a socket; where none does, the ranks that stand in the same place, most of them together, are taken to wait.

    Returns the ranks that wait and the ranks elsewhere, each in order. Ranks that returned are elsewhere.
    """
    everybody = sorted({one.rank for one in ranks} | set(returned))
    able = [one for one in ranks if one.state not in (STOPPED, TRACED)]
    waiting: set[int] = set()
    for sign in Sign:
        waiting = {one.rank for one in able if sign in one.signs}
        if waiting:
            break
    if not waiting or len(waiting) == len(everybody):
        # The ranks in the place where most stand; on a tie those that do not move, then the lowest.
        sizes = Counter(one.place for one in able)
        best = min(able, key=lambda one: (-sizes[one.place], one.moving, one.rank), default=None)
        waiting = {one.rank for one in able if best is not None and one.place == best.place}
    return sorted(waiting), [rank for rank in everybody if rank not in waiting]


def are_still(ranks: Collection[RankSeen]) -> bool:
    """Return whether some rank neither moves nor stands where one that moves was seen."""
    return _still({one.rank: frozenset(one.places) for one in ranks})


def _seen(look: RankInspection, places: frozenset[int]) -> RankSeen:
    frames = look.stack.frames
    signs = []
    if in_collective(frames):
        signs.append(Sign.COLLECTIVE)
    if look.blocked and in_backward(frames):
        signs.append(Sign.BACKWARD)
    # Needed for two ranks without torch: neither place has more, and only this tells who waits from who is missed.
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
    """Return where a rank is, as digests; nothing where the kernel has stopped it, or nothing is known."""
    if look.state in (STOPPED, TRACED):
        return frozenset()
    frames = look.stack.frames
    used_ms = 0.0 if before is None else _used_ms(look, before, spins)
    found: set[tuple[str, ...]] = (
        {("busy", str(look.rank), str(number))} if used_ms > _BUSY * elapsed_ms + _LOOK_MS else set()
    )
    if frames:  # a stack that did not come once is no other place
        found.add(_texts(frames))
    return frozenset(map(_digest, found))


def _texts(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    """Return a stack as it is on any node: the same file may lie elsewhere there."""
    return tuple(frame.text() for frame in frames)


def _digest(texts: tuple[str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode("utf-8", "replace"), digest_size=7).digest())


def _used_ms(look: RankInspection, before: RankInspection, spins: bool) -> float:
    """Return the CPU time since the look before that was work."""
    frames = look.stack.frames
    used_ms = 0.0
    if look.passed or not spins:
        used_ms += (look.main_us - before.main_us) / 1e3
    if not frames or (delegates(frames) and (look.passed or not spins)):  # another program, or threads at work for it
        used_ms += max(0, look.cpu_ms - before.cpu_ms - _TICK_MS)
    if not frames or delegates(frames):  # others may be at work for it
        used_ms += max(0, look.children_ms - before.children_ms - _TICK_MS)
    return used_ms


def _still(places: Mapping[int, frozenset[int]]) -> bool:
    """Return whether some rank neither moves nor stands where one that moves was seen."""
    lively = {place for own in places.values() if len(own) > 1 for place in own}
    return any(len(own) < 2 and not own & lively for own in places.values())


def due_of(watch: RunProgress, limits: Limits) -> HangDeadline | None:
    """Return what a silence leads to next, or None where nothing ever does."""
    dues = []
    if limits.hang_timeout_ns is not None:
        limit_ns = limits.hang_timeout_ns
        dues.append(HangDeadline((watch.spared_ns or watch.since_ns) + limit_ns, _window_ns(limit_ns), HangAction.END))
    if limits.hang_warning_ns is not None and watch.warned_ever < WARNINGS_MAX:
        limit_ns = limits.hang_warning_ns
        dues.append(HangDeadline(watch.since_ns + (limit_ns << watch.warned), _window_ns(limit_ns), HangAction.WARN))
    return min(dues, key=lambda due: due.at_ns, default=None)  # of two at the same time the end


def _window_ns(limit_ns: int) -> int:
    return min(WINDOW_NS_MAX, limit_ns // 2)
