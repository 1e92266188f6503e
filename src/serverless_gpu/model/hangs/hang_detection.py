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
from typing import Annotated

import msgspec

from serverless_gpu.model.hangs.hang_report import STACKS_TOLD, hang_sentence
from serverless_gpu.model.hangs.stacks import (
    Stack,
    StackFrame,
    at_socket,
    delegates,
    in_backward,
    in_collective,
    ranks_on,
    uses_torch,
)
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Attempt, Hang, Limits, State
from serverless_gpu.model.placement import CrewPlace, numbered

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


_WINDOW_NS_MIN = 500_000_000
_EARLY = 4  # crews say that they are silent when looks are due, and the way here takes a moment


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """A crew whose ranks have said nothing for a while.

    Attributes:
        number: of the silence: each has another one.
        ms: how long it has lasted.
    """

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 52)]


class InspectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A crew is to look at its ranks for so long, and to say under this number what it saw."""

    number: int
    window_ms: int


class CrewObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A crew's observation of its ranks.

    Attributes:
        number: of the `InspectionRequest`.
        ranks: that have not returned.
        returned: those that have.
        stacks: Python stacks of a few of them, by rank.
    """

    number: int
    ranks: tuple[RankSeen, ...]
    returned: tuple[int, ...] = ()
    stacks: dict[int, str] = {}


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict that all crews get.

    Attributes:
        number: from 1 on; files with stacks have it in their names.
        sentence: who waits for whom, on which nodes; "" once a warning is taken back.
        ends: whether the run is ended for it.
        hang: the same for programs.
    """

    number: int
    sentence: str
    ends: bool = False
    hang: Hang | None = None


class CrewSilent(msgspec.Struct, frozen=True):
    """A crew that says nothing: since when, and when it was heard of, by the clock of the decider."""

    number: int
    since_ns: int
    heard_ns: int
    returned: bool


class GangWatch(msgspec.Struct, frozen=True, kw_only=True):
    """The known progress of a gang."""

    # Crews whose ranks were silent for a while, by number; the others are at work.
    silent: Mapping[int, CrewSilent] = msgspec.field(default_factory=dict)
    watch: RunProgress = RunProgress(since_ns=0, seen_ns=0)  # warnings so far; its looks are the nodes'
    ask: InspectionRequest | None = None  # what crews are to look for
    seen: Mapping[int, CrewObservation] = msgspec.field(default_factory=dict)  # what they saw, by number
    judgement: Judgement | None = None


def with_observation(
    gang: GangWatch, crew: int, silence: Silence | None, seen: CrewObservation | None, *, returned: bool, now_ns: int
) -> GangWatch:
    """Return what is known after a crew was heard of."""
    before = gang.silent.get(crew)
    others = {number: one for number, one in gang.silent.items() if number != crew}
    if silence is None and not returned:
        return _at_work(msgspec.structs.replace(gang, silent=others), now_ns) if before is not None else gang
    number, since_ns = (0, now_ns) if silence is None or returned else (silence.number, now_ns - silence.ms * 1_000_000)
    is_same = before is not None and (before.number, before.returned) == (number, returned)
    if is_same and before is not None:
        since_ns = min(since_ns, before.since_ns)  # its first word may have been faster than this one
    now = CrewSilent(number, since_ns, now_ns, returned)
    gang = msgspec.structs.replace(gang, silent={**others, crew: now})
    if not is_same:
        gang = _at_work(gang, gang.watch.since_ns)
    if seen is not None and gang.ask is not None and seen.number == gang.ask.number:
        gang = msgspec.structs.replace(gang, seen={**gang.seen, crew: seen})
    return gang


def decide(
    gang: GangWatch, limits: Limits, crews: Sequence[CrewPlace], *, per_node: bool, now_ns: int, fresh_ns: int
) -> GangWatch:
    """Return what is known after what is due now was decided.

    A crew that was silent for longer than `fresh_ns` counts as silent itself.
    """
    if gang.judgement is not None and gang.judgement.ends:
        return gang
    known = [gang.silent.get(crew.number) for crew in crews]
    silent = [one for one in known if one is not None and now_ns - one.heard_ns <= fresh_ns]
    if len(silent) < len(crews) or all(one.returned for one in silent):
        return gang
    watch = msgspec.structs.replace(
        gang.watch, since_ns=max(gang.watch.since_ns, *(one.since_ns for one in silent)), seen_ns=now_ns
    )
    gang = msgspec.structs.replace(gang, watch=watch)
    due = due_of(watch, limits)
    if due is None or now_ns < due.at_ns - due.window_ns - due.window_ns // _EARLY:
        return gang
    if gang.ask is None:
        window_ns = max(_WINDOW_NS_MIN, due.at_ns - now_ns if now_ns < due.at_ns else due.window_ns)
        # By the time, so that no answer to a decider that has forgotten everything is taken for one to this.
        asked = InspectionRequest(number=now_ns, window_ms=window_ns // 1_000_000)
        return msgspec.structs.replace(gang, ask=asked, seen={})
    awaited = {crew.number for crew, one in zip(crews, silent, strict=True) if not one.returned}
    if now_ns < due.at_ns or not awaited <= gang.seen.keys():
        return gang
    return _judged(gang, due, crews, per_node=per_node, now_ns=now_ns)


def _judged(
    gang: GangWatch, due: HangDeadline, crews: Sequence[CrewPlace], *, per_node: bool, now_ns: int
) -> GangWatch:
    ranks = [rank for seen in gang.seen.values() for rank in seen.ranks]
    if not ranks or not are_still(ranks):
        return _at_work(gang, now_ns)
    watch = gang.watch
    at_work = due.action is HangAction.END and any(rank.moving for rank in ranks)
    if at_work:
        watch = spared(watch, now_ns)
    gang = msgspec.structs.replace(gang, ask=None, watch=watch)
    if at_work and watch.warned:
        return gang  # said already, and nothing else is to be done
    returned = [
        number for crew in crews if gang.silent[crew.number].returned for number in numbered(crew, per_node=per_node)
    ]
    returned += [number for seen in gang.seen.values() for number in seen.returned]
    waiting, elsewhere = divided(ranks, returned)
    named = ranks_on(crews, per_node=per_node)
    silent_ms = (now_ns - watch.since_ns) // 1_000_000
    number = 1 if gang.judgement is None else gang.judgement.number + 1
    judgement = Judgement(
        number=number,
        sentence=hang_sentence(ranks, waiting, elsewhere, silent_ms, named),
        ends=due.action is HangAction.END and not at_work,
        hang=Hang(
            waiting=tuple(waiting),
            elsewhere=tuple(elsewhere),
            stacks=_stacks(gang.seen.values(), waiting, elsewhere),
            file=f"hang-*-{number}.txt",
        ),
    )
    return msgspec.structs.replace(gang, watch=warned(watch), judgement=judgement)


def _stacks(seen: Collection[CrewObservation], waiting: Sequence[int], elsewhere: Sequence[int]) -> dict[int, str]:
    """Return stacks of the few ranks that explain it most: those elsewhere, else those that wait."""
    known = {rank: text for one in seen for rank, text in one.stacks.items()}
    chosen = [rank for rank in elsewhere if rank in known] or [rank for rank in waiting if rank in known]
    return {rank: known[rank] for rank in chosen[:STACKS_TOLD]}


def _at_work(gang: GangWatch, since_ns: int) -> GangWatch:
    """Return the watch after a sign of progress: asks start over, and a standing warning is withdrawn."""
    judgement = gang.judgement
    if judgement is not None and not judgement.ends and judgement.sentence:
        judgement = Judgement(number=judgement.number, sentence="")
    return GangWatch(silent=gang.silent, watch=progressed(gang.watch, since_ns), judgement=judgement)
