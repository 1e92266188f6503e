"""Shows and changes pools and fair shares."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serverless_gpu.errors import NotFound
from serverless_gpu.model.egress import EGRESS, OPEN
from serverless_gpu.model.isolation import LEVELS
from serverless_gpu.server import pools
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Routes, reading, writing
from serverless_gpu.server.nodes import node_service
from serverless_gpu.server.records.pools import UNSET
from serverless_gpu.server.runs import queue_views
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX
from serverless_gpu.wire.nodes import PoolRequest
from serverless_gpu.wire.queue import ShareRequest

routes = Routes("pool-pages", mount=WEB)
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Lines = Annotated[str, msgspec.Meta(max_length=8_000)]


@routes.get("/pools", needs=reading("pools"))
def show_pools(call: Call, site: Site) -> Page:
    """List pools with their devices, and the fair shares of teams and users."""
    shares = site.ask_if_allowed(call, queue_views.list_shares)
    return site.page(
        call,
        "pools.html",
        title="Pools and shares",
        nav="pools",
        wakes=(SCHEDULER,),
        pools=site.ask(call, pools.list_pools).pools,
        shares=shares.shares if shares is not None else (),
        half_life_ms=shares.half_life_s * 1000 if shares is not None else 0,
    )


@routes.get("/pools/{name}", needs=reading("pools"))
def show_pool(call: Call, site: Site, name: str) -> Page:
    """Show a pool, and the form that changes it."""
    there = site.ask(call, pools.list_pools).pools
    pool = next((one for one in there if one.name == name), None)
    if pool is None:
        raise NotFound(f"there is no pool {name[:64]!r}")
    nodes = site.ask_if_allowed(call, node_service.list_nodes)
    others = [node.name for node in nodes.nodes if node.pool != name and node.pool] if nodes is not None else []
    return site.page(
        call,
        "pool.html",
        title=f"Pool {pool.name}",
        nav="pools",
        wakes=(SCHEDULER,),
        pool=pool,
        others=others,
        levels=(UNSET, *LEVELS),
        egresses=EGRESS,
    )


# --- changes ----------------------------------------------------------------------------------------------------------


class PoolForm(Form, frozen=True, kw_only=True):
    """The properties of a pool. `allow` has one destination per line. `nodes` moves nodes into the pool."""

    name: Name
    kind: str = "on-demand"
    lends: bool = False
    return_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    isolation: str = UNSET
    egress: str = OPEN
    allow: Lines = ""
    nodes: tuple[Annotated[str, msgspec.Meta(max_length=256)], ...] = ()


class NewPoolForm(Form, frozen=True, kw_only=True):
    """The name of a new pool."""

    name: Name


class ShareForm(Form, frozen=True, kw_only=True):
    """The weight of a team or a user. The weight 1 removes the share."""

    kind: Literal["team", "user"]
    name: Name
    weight: Annotated[float, msgspec.Meta(gt=0)]


@routes.post("/pools", needs=writing("pools"), limit=FORM_BYTES_MAX)
def make_pool(call: Call, site: Site, body: NewPoolForm) -> Redirect:
    """Create a pool with default properties."""
    made = site.ask(call, pools.put_pool, name=body.name, body=PoolRequest())
    return Redirect(path=f"/pools/{made.name}")


@routes.post("/pools/{name}", needs=writing("pools"), limit=FORM_BYTES_MAX)
def change_pool(call: Call, site: Site, name: str, body: PoolForm) -> Redirect:
    """Change a pool."""
    asked = PoolRequest(
        kind=body.kind,
        lends=body.lends,
        return_s=body.return_s,
        isolation=body.isolation,
        egress=body.egress,
        allow=form_values.lines(body.allow),
        nodes=body.nodes,
    )
    site.ask(call, pools.put_pool, name=name, body=asked)
    return Redirect(path=f"/pools/{name}")


@routes.post("/pools/{name}/delete", needs=writing("pools"), limit=FORM_BYTES_MAX)
def delete_pool(call: Call, site: Site, name: str, body: Form) -> Redirect:
    """Delete a pool without references."""
    site.ask(call, pools.delete_pool, name=name)
    return Redirect(path="/pools")


@routes.post("/shares", needs=writing("shares"), limit=FORM_BYTES_MAX)
def put_share(call: Call, site: Site, body: ShareForm) -> Redirect:
    """Set the weight of a team or a user."""
    if body.weight == 1:
        site.ask(call, queue_views.remove_share, kind=body.kind, name=body.name)
    else:
        site.ask(call, queue_views.put_share, kind=body.kind, name=body.name, body=ShareRequest(weight=body.weight))
    return Redirect(path="/pools")
