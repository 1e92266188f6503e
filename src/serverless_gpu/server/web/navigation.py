"""Lists the pages of the navigation bar, each with the right that shows it."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Need, reading
from serverless_gpu.server.web.api_calls import reach_of


class NavEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the navigation bar.

    Attributes:
        name: identifier, which a page names to highlight its entry.
        title: text of the link.
        path: path of the page below `/ui`.
        needs: access that shows the entry.
        key: letter that opens the page after `g`, or "".
        roles: roles that see the entry; empty for every role with access.
    """

    name: str
    title: str
    path: str
    needs: Need = ANY_CALLER
    key: str = ""
    roles: tuple[str, ...] = ()


ENTRIES = (
    NavEntry(name="home", title="Home", path="/", key="h"),
    NavEntry(name="runs", title="Runs", path="/runs", needs=reading("runs"), key="r"),
    NavEntry(name="queue", title="Queue", path="/queue", needs=reading("runs"), key="q"),
    NavEntry(name="nodes", title="Nodes", path="/nodes", needs=reading("nodes"), key="n"),
    NavEntry(name="pools", title="Pools", path="/pools", needs=reading("pools"), key="p"),
    NavEntry(name="usage", title="Usage", path="/usage", needs=reading("usage"), key="u"),
    NavEntry(name="budgets", title="Budgets", path="/budgets", needs=reading("budgets"), key="b"),
    NavEntry(name="policies", title="Policies", path="/policies", needs=reading("policies")),
    NavEntry(name="prices", title="Prices", path="/prices", needs=reading("prices")),
    NavEntry(name="people", title="People", path="/people", needs=reading("tokens")),
    NavEntry(name="secrets", title="Secrets", path="/secrets", needs=reading("secrets")),
    NavEntry(name="environments", title="Environments", path="/environments", needs=reading("environments")),
    NavEntry(name="indexes", title="Indexes", path="/indexes", needs=reading("indexes")),
    NavEntry(name="audit", title="Audit", path="/audit", needs=reading("audit")),
    NavEntry(name="server", title="Server", path="/server", needs=reading("metrics")),
)


def visible_entries(call: Call) -> list[NavEntry]:
    """Return the entries that the reader of a page may open."""
    return [
        entry
        for entry in ENTRIES
        if reach_of(call, entry.needs) != AccessReach.NONE and (not entry.roles or call.who.role in entry.roles)
    ]
