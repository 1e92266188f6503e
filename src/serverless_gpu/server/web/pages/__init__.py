"""Declares the web pages, one module for each page. `ROUTES` lists them."""

from serverless_gpu.server.http.routing import Routes
from serverless_gpu.server.web.pages import (
    audit,
    budgets,
    environments,
    home,
    nodes,
    policies,
    pools,
    prices,
    queue,
    runs,
    secrets,
    server,
    shell,
    sign_in,
    usage,
)

ROUTES: tuple[Routes, ...] = (
    shell.root,
    shell.routes,
    sign_in.routes,
    home.routes,
    runs.routes,
    nodes.routes,
    usage.routes,
    budgets.routes,
    policies.routes,
    prices.routes,
    secrets.routes,
    environments.routes,
    audit.routes,
    server.routes,
    queue.routes,
    pools.routes,
)
"""Routes of all pages. Add each new page module to this list."""
