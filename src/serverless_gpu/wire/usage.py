"""Use and what it cost: sums of the ledger, and its rows.

GET /usage?by=&from_day=&until_day=&where=&limit=       → UsageView    sums by user, team, tag, month …
GET /usage/prices                                       → ListPrices   the price book, to join those with
GET /usage/records?after=&from_day=&until_day=&limit=   → RecordPage   rows, as billing tables have them
GET /usage/demand                                       → `demand.py`  when GPUs were had

Days are of UTC, numbered from 1970-01-01; `until_day` is the first that is not among them. What somebody may not see is
in no sum.
"""

from __future__ import annotations

from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.usage_report import ReportRow
from serverless_gpu.wire.base import Answer

GROUPS_MAX = 10_000
GROUPS_DEFAULT = 1_000
RECORDS_MAX = 2_000
SKUS_MAX = 500


class UsageView(Answer, frozen=True, kw_only=True):
    """A report.

    Attributes:
        by: what it is grouped by.
        from_day: the first day; `until_day` the first that is not in it any more.
        groups: those that cost most; periods in their order.
        totals: of all there are, shown or not, one for each currency.
        is_cut: whether there are more groups.
        going: how many attempts go on, or ended and are not in the ledger yet: computed from what their nodes told.
        is_going_cut: whether there are more of those than were looked at.
    """

    by: tuple[str, ...]
    from_day: int
    until_day: int
    groups: tuple[ReportRow, ...]
    totals: tuple[ReportRow, ...]
    is_cut: bool = False
    going: int = 0
    is_going_cut: bool = False


class RecordPage(Answer, frozen=True, kw_only=True):
    """Some rows of the ledger, in the order in which they were posted.

    Attributes:
        after: what to ask with for those that follow; None where these are the last.
    """

    records: tuple[BillingRow, ...]
    after: int | None = None


class ListPrices(Answer, frozen=True, kw_only=True):
    """The price book as billing tables have it.

    Attributes:
        is_cut: whether more was used than is looked at.
    """

    prices: tuple[ListPrice, ...]
    is_cut: bool = False
