"""Declares the web pages, one module for each page. `ROUTES` lists them."""

from serverless_gpu.server.http.routing import Routes
from serverless_gpu.server.web.pages import device, home, nodes, people, pools, queue, runs, shell, sign_in

ROUTES: tuple[Routes, ...] = (
    shell.root,
    shell.routes,
    sign_in.routes,
    home.routes,
    runs.routes,
    nodes.routes,
    queue.routes,
    pools.routes,
    device.routes,
    people.routes,
)
"""Routes of all pages. Add each new page module to this list."""
