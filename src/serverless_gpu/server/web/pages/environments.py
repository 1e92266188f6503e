"""Shows the environments of runs: units with sizes, who uses them, and differences."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.server import environment_catalog
from serverless_gpu.server.environment_catalog import DiffQuery, EnvironmentsQuery
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.web.site import WEB, Page, Site
from serverless_gpu.wire.blobs import EnvironmentDiff

routes = Routes("environment-pages", mount=WEB)
ROWS = 50
UNITS = 200
_Address = Annotated[str, msgspec.Meta(max_length=64)]


class EnvironmentsPageQuery(Query, frozen=True, kw_only=True):
    """Position in the list."""

    cursor: Annotated[str, msgspec.Meta(max_length=100)] = ""


class UnitsQuery(Query, frozen=True, kw_only=True):
    """Choice of units: a text that their names contain, and True to show more than the largest."""

    text: Annotated[str, msgspec.Meta(max_length=100)] = ""
    all: bool = False


class DiffPageQuery(Query, frozen=True, kw_only=True):
    """Addresses of two environments."""

    old: _Address = ""
    new: _Address = ""


@routes.get("/environments", needs=reading("environments"))
def show_environments(call: Call, site: Site, query: EnvironmentsPageQuery) -> Page:
    """List environments by last use."""
    asked = EnvironmentsQuery(cursor=query.cursor, limit=ROWS)
    found = site.ask(call, environment_catalog.list_environments, query=asked)
    return site.page(
        call,
        "environments.html",
        title="Environments",
        nav="environments",
        # The server reads sizes of new snapshots bit by bit, and the open page shows them when they are known.
        wakes=(),
        environments=found.environments,
        cursor=found.cursor,
        is_first=not query.cursor,
    )


@routes.get("/environments/diff", needs=reading("environments"))
def show_difference(call: Call, site: Site, query: DiffPageQuery) -> Page:
    """Compare two environments."""
    found: EnvironmentDiff | None = None
    problem: ServerlessGpuError | None = None
    if query.old and query.new:
        try:
            asked = DiffQuery(old=query.old.strip(), new=query.new.strip())
            found = site.ask(call, environment_catalog.compare_environments, query=asked)
        except ServerlessGpuError as error:
            problem = error
    recent = site.ask(call, environment_catalog.list_environments, query=EnvironmentsQuery(limit=ROWS))
    page = site.page(
        call,
        "environment_diff.html",
        title="Difference of environments",
        nav="environments",
        query=query,
        diff=found,
        recent=recent.environments,
        problem=problem,
    )
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)


@routes.get("/environments/{address}", needs=reading("environments"))
def show_environment(call: Call, site: Site, address: str, query: UnitsQuery) -> Page:
    """Show one environment with its units and runs."""
    found = site.ask(call, environment_catalog.show_environment, address=address)
    text = query.text.casefold()
    units = [unit for unit in found.units if text in unit.name.casefold() or text in unit.address]
    recent = site.ask(call, environment_catalog.list_environments, query=EnvironmentsQuery(limit=ROWS))
    return site.page(
        call,
        "environment.html",
        title=f"Environment {address[:12]}",
        nav="environments",
        environment=found,
        units=units if query.all else units[:UNITS],
        unit_count=len(units),
        largest=max((unit.size for unit in found.units), default=0),
        query=query,
        recent=[one for one in recent.environments if one.address != address],
    )
