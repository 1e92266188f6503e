"""What the ledger has, by budget and day: read once, then what was written since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import sqlalchemy as sa

from serverless_gpu.model.billing.budget import NOTHING, BudgetUse, Subject
from serverless_gpu.model.billing.budget_periods import part_until
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.utc_days import DAY_NS
from serverless_gpu.server.budgets.budget_index import BudgetIndex
from serverless_gpu.server.records import accounts, charges
from serverless_gpu.server.records.runs.crews import Gang
from serverless_gpu.server.records.runs.uncharged_crews import Unposted

_KNOWN_MAX = 100_000
"""Accounts that are remembered; beyond, all of them are read again."""


class _Cut:
    """What is posted of one day of UTC before a moment, by budget."""

    def __init__(self) -> None:
        self.seq = 0
        self.uses: dict[str, BudgetUse] = {}

    def add(self, names: Iterable[str], use: BudgetUse) -> None:
        """Count a use for budgets."""
        for name in names:
            self.uses[name] = self.uses.get(name, NOTHING) + use


def use_until(line: LedgerLine, use: BudgetUse, at_ns: int) -> BudgetUse:
    """Return what of the use of a line lies before a moment."""
    micros, gpu_ms, unpriced_ms = (
        part_until(amount, line.gpu_ms, line.gpus, line.start_ns, line.end_ns, at_ns)
        for amount in (use.micros, use.gpu_ms, use.unpriced_ms)
    )
    return BudgetUse(micros=micros, gpu_ms=gpu_ms, unpriced_ms=unpriced_ms)


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
        self._days: dict[str, dict[int, BudgetUse]] = {name: {} for name in self._index.budgets}
        self._accounts: dict[int, tuple[Subject, tuple[str, ...], bool]] = {}
        self._posted: dict[Gang, list[tuple[LedgerLine, BudgetUse]]] = {}
        self._cuts: dict[int, _Cut] = {}

    def days(self, name: str) -> Mapping[int, BudgetUse]:
        """Return what is posted for a budget, by day."""
        return self._days[name]

    def posted_of(self, gang: Gang) -> Sequence[tuple[LedgerLine, BudgetUse]]:
        """Return what is posted of an attempt that goes on, by line."""
        return self._posted.get(gang, ())

    def before(self, name: str, at_ns: int) -> BudgetUse:
        """Return what is posted for a budget of a moment's day of UTC, before that moment."""
        cut = self._cuts.get(at_ns)
        return NOTHING if cut is None else cut.uses.get(name, NOTHING)

    def account(self, number: int) -> tuple[Subject, tuple[str, ...], bool]:
        """Return whose an account is, which budgets count it, and whether it is in another currency."""
        return self._accounts.get(number, (Subject(owner=""), (), False))

    def read(
        self,
        connection: sa.Connection,
        there: Mapping[Gang, Unposted],
        wall_ns: int,
        cuts: AbstractSet[int] = frozenset(),
    ) -> None:
        """Read what was posted since, and what is posted of attempts that go on.

        Args:
            connection: of a transaction that sees one state of the database.
            there: attempts that go on, or whose charges have not been written.
            wall_ns: now, nanoseconds since 1970.
            cuts: moments within a day of UTC at which periods of budgets began.
        """
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
                gang: [(one.entry.line, self._use_of(one)) for one in own if one.entry.line.day >= self.first_day]
                for gang, own in charges.of_attempts(connection, may).items()
            }
        for one in sums:
            use = self._use(one.account_id, one.micros, one.billed_ms, one.unpriced_ms)
            for name in self._accounts[one.account_id][1]:
                self._days[name][one.day] = self._days[name].get(one.day, NOTHING) + use
        self._seq = newest
        self._cuts = {at_ns: self._cuts.get(at_ns) or _Cut() for at_ns in cuts}
        for at_ns, cut in self._cuts.items():
            self._read_cut(connection, at_ns, cut, newest)

    def _read_cut(self, connection: sa.Connection, at_ns: int, cut: _Cut, newest: int) -> None:
        """Read what was posted since of the time before a moment, on its day of UTC."""
        if cut.seq == newest:
            return
        whole, crossing = charges.before(connection, at_ns, after_seq=cut.seq)
        self._get_to_know(connection, {one.account_id for one in whole} | {number for number, _ in crossing})
        for one in whole:
            cut.add(
                self._accounts[one.account_id][1], self._use(one.account_id, one.micros, one.billed_ms, one.unpriced_ms)
            )
        for number, line in crossing:
            cut.add(self._accounts[number][1], use_until(line, self._use_of_line(number, line), at_ns))
        cut.seq = newest

    def _get_to_know(self, connection: sa.Connection, wanted: AbstractSet[int]) -> None:
        if len(self._accounts) > _KNOWN_MAX:
            self._accounts = {}
        for number, account in accounts.find_many(connection, wanted - self._accounts.keys()).items():
            is_foreign = account.currency != self._currency
            self._accounts[number] = (account.subject, self._index.names(account.subject), is_foreign)

    def _use_of(self, posted: charges.Posted) -> BudgetUse:
        return self._use_of_line(posted.account_id, posted.entry.line)

    def _use_of_line(self, account_id: int, line: LedgerLine) -> BudgetUse:
        unpriced_ms = line.billed_ms if line.micros is None else 0
        return self._use(account_id, line.micros or 0, line.billed_ms, unpriced_ms)

    def _use(self, account_id: int, micros: int, billed_ms: int, unpriced_ms: int) -> BudgetUse:
        if self._accounts[account_id][2]:
            return BudgetUse(gpu_ms=billed_ms, unpriced_ms=billed_ms)
        return BudgetUse(micros=micros, gpu_ms=billed_ms, unpriced_ms=unpriced_ms)
