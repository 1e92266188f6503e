"""Searches, verifies and exports the audit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from serverless_gpu.ambient import format_utc
from serverless_gpu.model import calendars
from serverless_gpu.model.audit_chain import ChainedEntry
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.server import audit
from serverless_gpu.server.audit import AuditQuery, VerificationQuery
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.web.downloads import CSV, JSON_LINES, Download, csv_pieces
from serverless_gpu.server.web.site import WEB, Page, Site
from serverless_gpu.wire.access import AuditPage

routes = Routes("audit-pages", mount=WEB)
ROWS = 100
PENDING_S = 60.0
"""Age in seconds from which an entry outside the chain is a problem. The server chains an entry within two seconds."""
EXPORT_MAX = 1_000_000
_PAGE = 1_000
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Day = Annotated[str, msgspec.Meta(max_length=10)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_COLUMNS = ("number", "time", "principal", "action", "subject", "detail", "token", "sha256")


class AuditPageQuery(Query, frozen=True, kw_only=True):
    """Filters and position of the page. `from` and `to` are UTC days, and `to` is inclusive."""

    who: _Text = ""
    action: _Text = ""
    subject: _Text = ""
    from_: _Day = msgspec.field(default="", name="from")
    to: _Day = ""
    before: _Number | None = None

    def filters(self) -> dict[str, Any]:
        """Return the filters as parameters of the API."""
        return {
            "principal": self.who.strip(),
            "action": self.action,
            "subject": self.subject.strip(),
            "from_ns": usage_report.day_of(self.from_) * DAY_NS if self.from_ else None,
            "to_ns": (usage_report.day_of(self.to) + 1) * DAY_NS if self.to else None,
        }

    def parameters(self) -> dict[str, Any]:
        """Return the filters as parameters of this page."""
        return {"who": self.who, "action": self.action, "subject": self.subject, "from_": self.from_, "to": self.to}


@routes.get("/audit", needs=reading("audit"))
def show_audit(call: Call, site: Site, query: AuditPageQuery) -> Page:
    """List audit entries, newest first."""
    asked = AuditQuery(newest=True, limit=ROWS, before=query.before, **query.filters())
    found = site.ask(call, audit.page, query=asked)
    entries = tuple(reversed(found.entries))
    return site.page(
        call,
        "audit.html",
        title="Audit",
        nav="audit",
        query=query,
        parameters=query.parameters(),
        rows=entries,
        older=entries[-1].number if len(entries) == ROWS else None,
        actions=sorted(action.value for action in Action),
        detail=detail_text,
        last=found.last,
        pending=found.pending,
        is_stuck=is_stuck(found),
        today=calendars.format_day(call.clock.wall_ns() // DAY_NS),
        subject_page=subject_page,
    )


@routes.get("/audit/verification", needs=reading("audit"))
def verify_audit(call: Call, site: Site, query: VerificationQuery) -> Page:
    """Verify the audit chain for some seconds, and show the result."""
    result = site.ask(call, audit.verify, query=query)
    pending = site.ask(call, audit.page, query=AuditQuery(limit=1, newest=True))
    return site.page(
        call,
        "audit_verification.html",
        title="Verification of the audit chain",
        nav="audit",
        result=result,
        after=query.after,
        is_stuck=is_stuck(pending),
        pending=pending.pending,
    )


@routes.get("/audit/export.jsonl", needs=reading("audit"))
def export_json(call: Call, site: Site, query: AuditPageQuery) -> Download:
    """Return the matching entries in the format of `sgpu audit export`, oldest first."""
    lines = _joined(msgspec.json.encode(entry) + b"\n" for entry in _entries(call, site, query))
    return Download(name="audit.jsonl", media_type=JSON_LINES, content=lines)


@routes.get("/audit/export.csv", needs=reading("audit"))
def export_csv(call: Call, site: Site, query: AuditPageQuery) -> Download:
    """Return the matching entries as CSV, oldest first."""
    lines = (
        (
            entry.number,
            format_utc(entry.at_ns),
            entry.principal,
            entry.action,
            entry.subject,
            detail_text(entry),
            entry.token,
            entry.sha256,
        )
        for entry in _entries(call, site, query)
    )
    return Download(name="audit.csv", media_type=CSV, content=csv_pieces(_COLUMNS, lines))


def detail_text(entry: ChainedEntry) -> str:
    """Return the details of an entry as text."""
    return msgspec.json.encode(entry.detail).decode() if entry.detail else ""


def is_stuck(page: AuditPage) -> bool:
    """Return True if entries have waited too long for their place in the chain."""
    return page.pending_since_ns is not None and page.now_ns - page.pending_since_ns > PENDING_S * 1e9


def subject_page(entry: ChainedEntry) -> str:
    """Return the path of the page of an entry's subject, or ""."""
    noun = entry.action.partition(".")[0]
    if entry.action.endswith((".delete", ".expire")) or not entry.subject:
        return ""
    pages = {"run": "/runs/", "budget": "/budgets/", "policy": "/policies/"}
    return f"{pages[noun]}{entry.subject}" if noun in pages else ""


def _entries(call: Call, site: Site, query: AuditPageQuery) -> Iterator[ChainedEntry]:
    """Yield the matching entries page by page, oldest first, up to `EXPORT_MAX`."""
    after, count = 0, 0
    while count < EXPORT_MAX:
        asked = AuditQuery(after=after, limit=_PAGE, **query.filters())
        page = site.ask(call, audit.page, query=asked).entries
        yield from page
        if len(page) < _PAGE:
            return
        after, count = page[-1].number, count + len(page)


def _joined(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines in larger pieces."""
    held: list[bytes] = []
    for line in lines:
        held.append(line)
        if len(held) >= _PAGE:
            yield b"".join(held)
            held.clear()
    yield b"".join(held)
