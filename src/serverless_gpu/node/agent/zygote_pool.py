"""The agent's zygote pool: chooses the interpreter for a caller and explains cold starts.

    owner and context ─▶ key ─▶ running zygote, unchanged, with the same packages?  ─yes▶ a stem of it: warm
                     │ no
                     ▼
                     a new zygote, or (if none can be kept) an interpreter for this run only: cold, with a reason

A zygote's key includes the restored environment. If no zygote has the requested snapshot, the pool may move a zygote
from another snapshot (`Zygote.move`). All files that the moved zygote has loaded must be equal in the old and the new
snapshot.

The pool keeps the zygotes of open sessions. The pool limits the number and the memory of other zygotes
(`zygote_policy.py`), and ends the least recently used zygotes first. The pool also ends zygotes that were idle for ten
minutes.

The zygote of a principal's sandbox runs code of this principal. The pool ends such a zygote after an abnormal end of an
attempt and after a change of its mounts. The pool also ends the zygote if its sandbox contains processes of no run. The
next run starts a new zygote.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
from collections.abc import Callable, Collection

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.agent.environments import RestoredEnvironment
from serverless_gpu.node.agent.zygote_policy import MEMORY_BYTES_MIN, MEMORY_SHARE, ZygoteUsage, abnormal_end, excess
from serverless_gpu.node.agent.zygotes import Containment, Key, ProblemTaker, Zygote, ZygoteRequest, first_run, kill
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import UNKNOWN_OWNER, Stem, Stopped, ZygoteStatus
from serverless_gpu.node.isolation.inspection import strangers_text
from serverless_gpu.node.processes.process_tree import CgroupRoot, memory_limit_bytes
from serverless_gpu.node.processes.spawn import open_log, preload
from serverless_gpu.node.spawner.verbs import Spawner

IDLE_S = 600.0
PRELOAD_S = 120.0  # Seconds until the pool gives up a preload that hangs on a file system or a driver.
_REMEMBERED_MAX = 64
_CLOSING_LOOKS = 100
_CLOSING_PAUSE_S = 0.01
_WEIGH_S = 2.0  # Seconds between two measurements of a zygote's memory.
_RETRY_S = 10.0  # Seconds until the agent tries again to keep a failed interpreter warm.

Giver = Callable[[Stem, int], None]


class ZygotePool:
    """All zygotes of an agent, indexed by `Key`."""

    def __init__(
        self,
        home: Home,
        log: int,
        cgroups: CgroupRoot,
        selector: selectors.BaseSelector,
        clock: Clock,
        spawner: Spawner,
    ) -> None:
        self._home = home
        self._spawner = spawner
        self._log = log
        self._cgroups = cgroups
        self._selector = selector
        self._clock = clock
        self._zygotes: dict[Key, Zygote] = {}
        self._one_shots: list[Zygote] = []  # Interpreters without preloaded modules, each for one run.
        # Maps the key of an interpreter that cannot stay warm to the reason and the boottime of its failure.
        self._cold: dict[Key, tuple[str, int]] = {}
        self._gone: dict[Key, str] = {}  # Maps each key to the reason why its last zygote ended.
        self._kept: frozenset[Key] = frozenset()  # Zygote keys of open sessions.
        self._preload = preload(os.environ)
        # Zygotes of principals by the pids of stems that running attempts use.
        self._used: dict[int, Zygote] = {}
        self._suspects: list[Zygote] = []  # Zygotes whose sandbox the pool must inspect.
        self._memory_max = _memory_max()
        self._weigh_ns = 0
        self._ending: list[Containment] = []  # Cgroup containments of ended zygotes that still have processes.
        self.became_ready = False
        self.on_stranger: Callable[[str], object] = lambda sentence: None  # Receives a finding for operators.

    @property
    def ending(self) -> bool:
        """Return True while the pool still kills processes of ended zygotes."""
        return bool(self._ending)

    def statuses(self) -> tuple[ZygoteStatus, ...]:
        """Return the status of each zygote and of each interpreter that cannot stay warm."""
        warm = (
            ZygoteStatus(
                pid=each.process.pid,
                python=each.key.python,
                state="ready" if each.ready else "starting",
                environment=each.key.environment,
                owner=each.key.owner,
                memory_bytes=each.memory_bytes,
            )
            for each in self._zygotes.values()
        )
        cold = (
            ZygoteStatus(python=key.python, state="cold", reason=why, environment=key.environment, owner=key.owner)
            for key, (why, _) in self._cold.items()
        )
        return (*warm, *cold)

    def prewarm(self, request: ZygoteRequest, ranks: int) -> None:
        """Start or keep a zygote for a caller whose next run has `ranks` ranks. Raises OSError."""
        key = request.key
        self._leave_deleted(key, request.environment)
        if key not in self._cold and request.owner != UNKNOWN_OWNER:
            self._warm(key, request).ranks = max(1, ranks)

    def give_stem(self, request: ZygoteRequest, ranks: int, give: Giver, fail: ProblemTaker) -> None:
        """Give a caller's run a stem from a zygote. Raises OSError if the interpreter cannot start.

        The zygote keeps `ranks` standby processes for the next run. `give` receives the stem and a descriptor that the
        receiver must close. If no stem can start, `fail` receives the reason.
        """
        context = request.context
        zygote, why = self._choose(request)
        warm = zygote.ready and not why
        zygote.used_ns, zygote.ranks = self._clock.boottime_ns(), ranks

        def hand_over(source: Zygote, pid: int, fd: int, reason: str, *, is_warm: bool = False) -> None:
            if source.principal is not None:
                self._used[pid] = source
            cgroups = source.stem_cgroups.pop(pid, ())
            give(Stem(pid=pid, cgroups=cgroups, warm=is_warm, warm_reason=reason), fd)

        def take(pid: int, fd: int) -> None:
            elsewhere = zygote.differs(context.packages)
            if elsewhere is None:
                hand_over(zygote, pid, fd, zygote.cold or why, is_warm=warm and not zygote.dead)
                return
            os.close(fd)
            zygote.end_stem(pid)
            try:
                fresh = self._one_shot(request)
            except OSError as error:
                fail(f"could not start {context.python}: {error}")
                return
            fresh.take_stem(lambda pid, fd: hand_over(fresh, pid, fd, elsewhere), fail)

        zygote.take_stem(take, fail)

    def attempt_ended(self, stem_pid: int, stopped: Stopped | None) -> None:
        """End the stem of an ended attempt, and inspect or end the stem's zygote.

        `stopped` is the end of the attempt; None for an unknown end. Zygotes without a sandbox stay.
        """
        zygote = self._used.pop(stem_pid, None)
        if zygote is None:
            return
        zygote.end_stem(stem_pid)
        why = abnormal_end(stopped)
        if why:
            self._replace(zygote, why)
        elif zygote not in self._suspects:
            self._suspects.append(zygote)

    def is_entered(self, snapshot: str) -> bool:
        """Return True if a zygote runs or starts in the restored environment `snapshot`."""
        return any(key.environment == snapshot for key in self._zygotes)

    def leave_environments(self) -> bool:
        """End interpreters in restored environments, unless a run waits for them.

        Return True if the pool ended an interpreter.
        """
        leaving = [
            key
            for key, zygote in self._zygotes.items()
            if key.environment and not zygote.waited_for and key.elsewhere() not in self._kept
        ]
        for key in leaving:
            self._discard(key, "the agent ended the zygote of this environment to free a full disk")
        return bool(leaving)

    def refill(self) -> None:
        """Request a standby stem from each zygote that has none."""
        for zygote in self._zygotes.values():
            zygote.refill()

    def tend(self, kept: Collection[Key]) -> None:
        """End idle zygotes and used one-run interpreters.

        The zygotes of open sessions (`kept`) stay alive.
        """
        self._kept = frozenset(key.elsewhere() for key in kept)
        now_ns = self._clock.boottime_ns()
        for key, zygote in list(self._zygotes.items()):
            idle = now_ns - zygote.used_ns > IDLE_S * 1e9 and not zygote.waited_for
            if idle and key.elsewhere() not in self._kept:
                self._discard(key, "the previous zygote was idle for ten minutes")
            elif not zygote.ready and now_ns - zygote.started_ns > PRELOAD_S * 1e9:
                zygote.process.kill()
                zygote.cold = f"preloading took more than {PRELOAD_S:.0f} s"
                self._give_up(zygote, zygote.cold)
        self._suspects = [zygote for zygote in self._suspects if not self._inspect(zygote)]
        if now_ns > self._weigh_ns and self._zygotes:
            self._weigh_ns = now_ns + round(_WEIGH_S * 1e9)
            # The pool measures one zygote at a time, because runs wait meanwhile.
            min(self._zygotes.values(), key=lambda zygote: zygote.weighed_ns).weigh(now_ns)
            self._bound()
        for zygote in [shot for shot in self._one_shots if not shot.waited_for]:
            self._one_shots.remove(zygote)
            self._close(zygote)
        self._ending = [one for one in self._ending if not one.end(now_ns)]

    def close(self) -> None:
        """End all zygotes and their child processes, and wait for at most a second."""
        for zygote in (*self._zygotes.values(), *self._one_shots):
            self._close(zygote)
        for _ in range(_CLOSING_LOOKS):
            now_ns = self._clock.boottime_ns()
            self._ending = [one for one in self._ending if not one.end(now_ns)]
            if not self._ending:
                return
            select.select([], [], [], _CLOSING_PAUSE_S)

    def _choose(self, request: ZygoteRequest) -> tuple[Zygote, str]:
        """Return the interpreter for a caller and the reason for a cold start ("" if the interpreter is warm)."""
        key, environment = request.key, request.environment
        if request.owner == UNKNOWN_OWNER:
            return self._one_shot(request), ("the server did not name the run's owner, and owners share no interpreter")
        self._leave_deleted(key, environment)
        if environment is not None and key not in self._zygotes:
            self._move_one(key, environment)
        zygote = self._zygotes.get(key)
        if key in self._cold and zygote is not None and zygote.ready:
            del self._cold[key]  # The agent can keep the interpreter warm again.
        elif key in self._cold:
            why, since_ns = self._cold[key]
            if zygote is None and self._clock.boottime_ns() - since_ns > _RETRY_S * 1e9:
                # The current run does not wait for the new zygote.
                self._warm(key, request)
            return self._one_shot(request), why
        if zygote is not None:
            damage = "the previous zygote died" if zygote.dead else zygote.damage()
            if not damage:
                return zygote, "" if zygote.ready else f"the warm interpreter was still starting: {zygote.why}"
            self._discard(key, damage)
        zygote = self._warm(key, request)
        return zygote, zygote.why

    def _leave_deleted(self, key: Key, environment: RestoredEnvironment | None) -> None:
        """End the zygote of a key if its environment was deleted and restored again."""
        zygote = self._zygotes.get(key)
        if zygote is not None and not zygote.lives_in(environment):
            self._discard(key, "the environment was deleted and restored again")

    def _move_one(self, key: Key, environment: RestoredEnvironment) -> None:
        """Move a compatible zygote to this environment, or record why no zygote is compatible."""
        for other, zygote in sorted(self._zygotes.items(), key=lambda item: -item[1].used_ns):
            if other.elsewhere() != key.elsewhere():
                continue
            why = zygote.misfit(environment)
            if not why:
                self._zygotes[key] = self._zygotes.pop(other)
                zygote.move(environment)
                return
            self._gone.setdefault(key, why)

    def _warm(self, key: Key, request: ZygoteRequest) -> Zygote:
        if key in self._zygotes:
            return self._zygotes[key]
        self._bound(ZygoteUsage(key, self._clock.boottime_ns(), 0))
        zygote = self._zygotes[key] = self._spawn(request, self._preload)
        zygote.used_ns = zygote.started_ns = self._clock.boottime_ns()
        zygote.why = self._gone.pop(key, "") or first_run(key, [other for other in self._zygotes if other != key])
        return zygote

    def _bound(self, *starting: ZygoteUsage) -> None:
        """End the zygotes that are too many or use too much memory. `starting` are zygotes about to start."""
        usages = [
            ZygoteUsage(key, zygote.used_ns, zygote.memory_bytes, key.elsewhere() in self._kept)
            for key, zygote in self._zygotes.items()
        ]
        for key, why in excess([*usages, *starting], self._memory_max).items():
            self._discard(key, why)

    def _inspect(self, zygote: Zygote) -> bool:
        """End a zygote with processes of no run in its sandbox. Return False to repeat the inspection."""
        found = zygote.strangers()
        if found:
            self._replace(zygote, strangers_text(found))
            kill(each.pids[0] for each in found)
            with contextlib.suppress(OSError, IsolationUnavailable):  # The receipt of the next run has the reason too.
                self.on_stranger(f"{zygote.key.owner}: {strangers_text(found)}. The agent ended them")
        return found is not None

    def _replace(self, zygote: Zygote, why: str) -> None:
        """End a zygote, unless the pool has ended it already. The next run with its key starts another."""
        if self._zygotes.get(zygote.key) is zygote:
            self._discard(zygote.key, why)

    def _one_shot(self, request: ZygoteRequest) -> Zygote:
        zygote = self._spawn(request, ())
        self._one_shots.append(zygote)
        return zygote

    def _spawn(self, request: ZygoteRequest, preload: tuple[str, ...]) -> Zygote:
        if request.principal is None:
            zygote = Zygote(request, preload, (self._home.agent_log, self._log), self._cgroups, self._spawner)
        else:  # Code of a principal can write to its log and would read the words of other principals in a shared one.
            path = self._home.principal_log(request.principal.uid)
            log = open_log(path)
            try:
                zygote = Zygote(request, preload, (path, log), self._cgroups, self._spawner)
            finally:
                os.close(log)
        self._selector.register(zygote.channel, selectors.EVENT_READ, lambda: self._hear(zygote))
        return zygote

    def _hear(self, zygote: Zygote) -> None:
        if not zygote.hear():
            if self._zygotes.get(zygote.key) is zygote:
                del self._zygotes[zygote.key]
                self._remember(zygote.key, "the previous zygote died")
            self._close(zygote)
        elif zygote.cold:
            self._give_up(zygote, zygote.cold)
        elif zygote.ready:
            self.became_ready, self._weigh_ns = True, 0

    def _give_up(self, zygote: Zygote, why: str) -> None:
        """Stop keeping a zygote for its key. For ten seconds, each run with this key gets a new interpreter."""
        self._cold[zygote.key] = (why, self._clock.boottime_ns())
        while len(self._cold) > _REMEMBERED_MAX:
            self._cold.pop(next(iter(self._cold)))
        self._zygotes.pop(zygote.key, None)
        self._let_go(zygote)

    def _let_go(self, zygote: Zygote) -> None:
        """Close a zygote.

        Each run that waits for a stem of the closed zygote gets a new interpreter in the run's environment.
        """
        waiting = zygote.release_takers()
        self._close(zygote)
        for taker in waiting:
            try:
                request = ZygoteRequest(
                    zygote.context, taker.environment, zygote.key.owner, zygote.principal, zygote.level
                )
                self._one_shot(request).take_stem(taker.take, taker.fail)
            except OSError as error:
                taker.fail(f"could not start {zygote.context.python}: {error}")

    def _remember(self, key: Key, why: str) -> None:
        self._gone[key] = why
        while len(self._gone) > _REMEMBERED_MAX:  # Each new combination of start-up variables adds a key.
            self._gone.pop(next(iter(self._gone)))

    def _discard(self, key: Key, why: str) -> None:
        self._remember(key, why)
        zygote = self._zygotes.pop(key)
        zygote.cold = zygote.cold or why
        self._let_go(zygote)

    def _close(self, zygote: Zygote) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(zygote.channel)
        zygote.close()
        if not zygote.containment.end(self._clock.boottime_ns()):
            self._ending.append(zygote.containment)


def _memory_max() -> int:
    """Return the memory that all zygotes together may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(MEMORY_BYTES_MIN, min(whole, memory_limit_bytes() or whole) // MEMORY_SHARE)
