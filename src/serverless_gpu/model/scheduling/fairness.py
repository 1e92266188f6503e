"""Fair-share scheduling: decayed device usage of teams and users, and the next team and user to serve.

    counted(now) = used: GPU-seconds, halved after each half-life          while the run holds devices, every second
                 + an advance for each placement (`entry_penalty_s`)       until the run ends, then refunded in full
    turn         = the team with the least counted / weight, then the user of that team with the least counted / weight

The advance for each placement makes waiting users alternate during a burst of runs. The scheduler refunds the advance
at the end of the run, so that only actual usage counts.

A user without a team forms a one-user team, ``"~name"``. A CPU slot counts as a small fraction of a GPU. With full
weight, a user's thousand CPU slots would exceed every other user's usage.

Changes of a user's devices arrive without timestamps and take effect at the next decision (`settle`).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.scheduling.values import DeviceShare, QueuedRun, QueuePolicy, TeamUse, Used

CPU_WEIGHT = 1 / 32
"""Weight of one CPU slot in the fair share, in GPUs."""
_S = 1e9
_FORGOTTEN = 1e-3
"""GPU-seconds below which the scheduler removes an idle fair-share account."""
_SWEEP_NS = 86_400 * 1_000_000_000

Key = tuple[str, str]
_K = TypeVar("_K")


def team_of(wanted: QueuedRun) -> str:
    """Return the team whose fair share a run uses. A user without a team forms a one-user team."""
    return wanted.team or f"~{wanted.owner}"


def charged(gpu_type: str, count: int) -> float:
    """Return the fair-share weight of devices, in GPUs."""
    return count * CPU_WEIGHT if gpu_type == CPU else float(count)


def charged_all(shares: tuple[DeviceShare, ...]) -> float:
    """Return the fair-share weight of a gang's devices, in GPUs."""
    return sum(charged(share.gpu_type, share.count) for share in shares)


class _Account:
    """The decayed usage of one team, or of one user of a team."""

    __slots__ = ("at_ns", "rate", "value")

    def __init__(self, at_ns: int) -> None:
        self.value, self.at_ns, self.rate = 0.0, at_ns, 0.0


class Fairness:
    """Fair-share accounts of teams and users.

    `policy` contains the half-life, the entry penalty and the weights.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._teams: dict[str, _Account] = {}
        self._users: dict[Key, _Account] = {}
        self._now_ns = self._swept_ns = 0
        # Maps each run to its account, GPUs, start time and advance.
        self._held: dict[str, tuple[Key, float, int, float]] = {}
        self._begun: dict[str, tuple[Key, float, int]] = {}
        self._ended: list[str] = []
        self._is_look = False
        self.set_policy(policy)

    def set_policy(self, policy: QueuePolicy) -> None:
        """Apply another half-life and other weights to future usage, and keep past usage."""
        self._policy = policy
        half_life_s = policy.half_life_s
        self._rate = 0.0 if math.isinf(half_life_s) else math.log(2) / max(half_life_s, 1e-9)

    def tell(self, used: Used) -> None:
        """Replace the usage of ended runs, and add the usage of running runs since their allocation."""
        self._replace(self._teams, used.teams, used.at_ns)
        self._replace(self._users, used.users, used.at_ns)
        for key, gpus, since_ns, advance in self._held.values():
            past_s = max(0, used.at_ns - since_ns) / _S
            had = gpus * self._grown(past_s) + advance * self._decay(past_s)
            for account in (self._teams[key[0]], self._users[key]):
                account.value += had
        self._now_ns = max(self._now_ns, used.at_ns)

    def _replace(self, accounts: dict[_K, _Account], values: Mapping[_K, float], at_ns: int) -> None:
        for key in {*accounts, *values}:
            account = accounts.setdefault(key, _Account(at_ns))
            account.value, account.at_ns = values.get(key, 0.0), at_ns

    def begin(self, run_id: str, wanted: QueuedRun, gpus: float, since_ns: int) -> None:
        """Record that a run has used its devices since `since_ns`. `settle` adds the usage to the accounts."""
        self._begun[run_id] = ((team_of(wanted), wanted.owner), gpus, since_ns)

    def place(self, run_id: str, wanted: QueuedRun, gpus: float) -> None:
        """Count devices that a run gets now, and charge the advance until the run releases them."""
        key = (team_of(wanted), wanted.owner)
        advance = gpus * self._policy.entry_penalty_s
        self._held[run_id] = (key, gpus, self._now_ns, advance)
        for account in self._accounts(key):
            account.value += advance
            account.rate += gpus

    def end(self, run_id: str) -> None:
        """Record that a run has released its devices. `settle` updates the accounts and refunds the advance."""
        if self._begun.pop(run_id, None) is None and run_id in self._held:
            self._ended.append(run_id)

    def settle(self, now_ns: int) -> None:
        """Update the accounts: stop counting ended runs, and count started runs since their allocation."""
        self._now_ns = now_ns = max(now_ns, self._now_ns)
        for run_id in self._ended:
            key, gpus, since_ns, advance = self._held.pop(run_id)
            left = advance * self._decay(max(0, now_ns - since_ns) / _S)
            for account in self._accounts(key):
                account.rate = max(0.0, account.rate - gpus)
                account.value = max(0.0, account.value - left)
        self._ended.clear()
        for run_id, (key, gpus, since_ns) in self._begun.items():
            self._held[run_id] = (key, gpus, since_ns, 0.0)
            past_s = max(0, now_ns - since_ns) / _S
            for account in self._accounts(key):
                account.value += gpus * self._grown(past_s)
                account.rate += gpus
        self._begun.clear()
        if now_ns - self._swept_ns >= _SWEEP_NS:
            self._swept_ns = now_ns
            # Remove accounts whose usage has decayed below the minimum.
            keys = {key for key, *_ in self._held.values()}
            teams = {team for team, _ in keys}
            self._users = {key: each for key, each in self._users.items() if key in keys or self._is_left(each)}
            self._teams = {name: each for name, each in self._teams.items() if name in teams or self._is_left(each)}

    def _is_left(self, account: _Account) -> bool:
        return account.rate > 0 or self._current(account) >= _FORGOTTEN

    def at(self, now_ns: int) -> Fairness:
        """Return a copy of the fair-share accounts at a given time, so that queries do not affect decisions."""
        other = copy.copy(self)
        changed = {self._held[run_id][0] for run_id in self._ended} | {key for key, *_ in self._begun.values()}
        teams = {team: copy.copy(self._teams[team]) for team, _ in changed if team in self._teams}
        users = {key: copy.copy(self._users[key]) for key in changed if key in self._users}
        other._teams, other._users = self._teams | teams, self._users | users
        other._held, other._begun, other._ended = dict(self._held), dict(self._begun), list(self._ended)
        other.settle(now_ns)
        other._is_look = True
        return other

    def team(self, name: str) -> float:
        """Return a team's usage divided by the team's weight, as of the last `settle`."""
        account = self._teams.get(name)
        if account is None:
            return 0.0
        weights = self._policy.user_weights if name.startswith("~") else self._policy.team_weights
        return _weighed(self._current(account), weights.get(name.removeprefix("~"), 1.0))

    def user(self, team: str, owner: str) -> float:
        """Return a user's usage in a team divided by the user's weight, as of the last `settle`."""
        account = self._users.get((team, owner))
        if account is None:
            return 0.0
        return _weighed(self._current(account), self._policy.user_weights.get(owner, 1.0))

    def is_behind(self, team: str, owner: str, due: float, most: list[tuple[float, str]]) -> bool:
        """Return True if a team or user has used less than another team or user.

        The usage difference must be at least `due` GPU-seconds. An `owner` of "" compares whole teams.
        """
        name, mine = (owner, self.user(team, owner)) if owner else (team, self.team(team))
        is_team = not owner and not team.startswith("~")
        weights = self._policy.team_weights if is_team else self._policy.user_weights
        ahead = max((use for use, other in most if other != name), default=0.0)
        return (ahead - mine) * weights.get(name.removeprefix("~"), 1.0) >= due

    def usage(self, now_ns: int) -> dict[str, TeamUse]:
        """Return the decayed usage of each team at a given time."""
        look = self.at(now_ns)
        advances: dict[str, float] = defaultdict(float)
        for (team, _), _, since_ns, advance in look._held.values():
            advances[team] += advance * look._decay(max(0, look._now_ns - since_ns) / _S)
        found: dict[str, TeamUse] = {}
        for name, account in sorted(look._teams.items()):
            counted = look._current(account)
            found[name] = TeamUse(used_gpu_s=max(0.0, counted - advances[name]), counted_gpu_s=counted)
        return found

    def _accounts(self, key: Key) -> tuple[_Account, _Account]:
        team, user = self._teams.get(key[0]), self._users.get(key)
        if team is None:
            team = self._teams[key[0]] = _Account(self._now_ns)
        if user is None:
            user = self._users[key] = _Account(self._now_ns)
        self._current(team)
        self._current(user)
        return team, user

    def _current(self, account: _Account) -> float:
        """Return the current value of an account. Store the value unless this object is a copy from `at`."""
        passed_ns = self._now_ns - account.at_ns
        if passed_ns <= 0:
            return account.value
        passed_s = passed_ns / _S
        value = account.value * self._decay(passed_s) + account.rate * self._grown(passed_s)
        if not self._is_look:
            account.value, account.at_ns = value, self._now_ns
        return value

    def _decay(self, passed_s: float) -> float:
        """Return the fraction of past usage that remains after `passed_s` seconds of decay."""
        return math.exp(-self._rate * passed_s)

    def _grown(self, passed_s: float) -> float:
        """Return the decayed usage of one GPU over the last `passed_s` seconds."""
        return passed_s if not self._rate else -math.expm1(-self._rate * passed_s) / self._rate


def _weighed(use: float, weight: float) -> float:
    return use / weight if weight > 0 else math.inf
