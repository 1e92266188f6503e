"""What the ledger has, by budget and day: read once, then what was written since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import sqlalchemy as sa

from serverless_gpu.model.budget import NOTHING, Subject, Use
from serverless_gpu.model.days import DAY_NS
from serverless_gpu.server import accounts, charges
from serverless_gpu.server.budget_index import BudgetIndex
from serverless_gpu.server.crews import Gang
from serverless_gpu.server.uncharged import Unposted

_KNOWN_MAX = 100_000
"""Accounts that are remembered; beyond, all of them are read again."""


class Sums:
    """What the ledger has, by budget and day; read on from where it was read to.

    Args:
        first_day: days before it count for nothing any more.
        index: the budgets.
        currency: of them.
    """

    def __init__(self, first_day: int = -1, index: BudgetIndex | None = None, currency: str = "") -> None:
        self.first_day = first_day
        self._index, self._currency = index or BudgetIndex(()), currency
        self._seq = 0
        self._days: dict[str, dict[int, Use]] = {name: {} for name in self._index.budgets}
        self._accounts: dict[int, tuple[Subject, tuple[str, ...], bool]] = {}
        self._posted: dict[Gang, list[tuple[int, Use]]] = {}

    def days(self, name: str) -> Mapping[int, Use]:
        """Return what is posted for a budget, by day."""
        return self._days[name]

    def posted_of(self, gang: Gang) -> Sequence[tuple[int, Use]]:
        """Return what is posted of an attempt that goes on, by day."""
        return self._posted.get(gang, ())

    def account(self, number: int) -> tuple[Subject, tuple[str, ...], bool]:
        """Return whose an account is, which budgets count it, and whether it is in another currency."""
        return self._accounts.get(number, (Subject(owner=""), (), False))

    def read(self, connection: sa.Connection, there: Mapping[Gang, Unposted], wall_ns: int) -> None:
        """Read what was posted since, and what is posted of attempts that go on."""
        if not self._index.budgets:  # nobody asks what is posted, only who goes on
            going = {one.attempt.account_id for one in there.values() if one.attempt.account_id is not None}
            self._get_to_know(connection, going)
            return
        newest = charges.newest_seq(connection)
        assert newest >= self._seq, "an older state of the ledger would be counted twice"
        sums = []
        if newest > self._seq:
            sums = charges.sums(connection, from_day=self.first_day, after_seq=self._seq)
        wanted = {one.account_id for one in sums}
        wanted |= {one.attempt.account_id for one in there.values() if one.attempt.account_id is not None}
        self._get_to_know(connection, wanted)
        # Nothing is posted of an attempt before its first day is over, or it has ended.
        today_ns = wall_ns // DAY_NS * DAY_NS
        may = {gang for gang, one in there.items() if one.attempt.created_ns < today_ns or one.attempt.uncharged}
        if newest > self._seq or may != self._posted.keys():
            self._posted = {
                gang: [(one.entry.line.day, self._use_of(one)) for one in own if one.entry.line.day >= self.first_day]
                for gang, own in charges.of_attempts(connection, may).items()
            }
        for one in sums:
            use = self._use(one.account_id, one.micros, one.billed_ms, one.unpriced_ms)
            for name in self._accounts[one.account_id][1]:
                self._days[name][one.day] = self._days[name].get(one.day, NOTHING) + use
        self._seq = newest

    def _get_to_know(self, connection: sa.Connection, wanted: AbstractSet[int]) -> None:
        if len(self._accounts) > _KNOWN_MAX:
            self._accounts = {}
        for number, account in accounts.find_many(connection, wanted - self._accounts.keys()).items():
            is_foreign = account.currency != self._currency
            self._accounts[number] = (account.subject, self._index.names(account.subject), is_foreign)

    def _use_of(self, posted: charges.Posted) -> Use:
        line = posted.entry.line
        unpriced_ms = line.billed_ms if line.micros is None else 0
        return self._use(posted.account_id, line.micros or 0, line.billed_ms, unpriced_ms)

    def _use(self, account_id: int, micros: int, billed_ms: int, unpriced_ms: int) -> Use:
        if self._accounts[account_id][2]:
            return Use(gpu_ms=billed_ms, unpriced_ms=billed_ms)
        return Use(micros=micros, gpu_ms=billed_ms, unpriced_ms=unpriced_ms)
