"""Declares the web pages, one module for each page. `ROUTES` lists them."""

from serverless_gpu.server.http.routing import Routes
from serverless_gpu.server.web.pages import (
    audit,
    budgets,
    compare,
    environments,
    home,
    nodes,
    policies,
    pools,
    prices,
    queue,
    run,
    run_logs,
    run_metrics,
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
    run.routes,
    compare.routes,
    run_logs.routes,
    run_metrics.routes,
)
"""Routes of all pages. Add each new page module to this list."""
