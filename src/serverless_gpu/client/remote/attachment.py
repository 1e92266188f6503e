"""Finding a run of a server again by its id, from any machine that has a token for it.

Only the caller's own results are loaded, since loading runs code. Another principal's results need
`allow_pickle_from="bob"`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from serverless_gpu.client.remote.profile import is_configured
from serverless_gpu.client.remote.run_watch import RemoteRun
from serverless_gpu.client.remote.server import server_of
from serverless_gpu.client.runs.run import Run
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.node.base.home import Home, find_home


def attach(home: Home, run_id: str, trusted: Collection[str]) -> Run[object] | None:
    """Return a server's run, or None without a server; `trusted` principals' results load, too."""
    if not is_configured(home.root, os.environ):
        return None
    server = server_of(home.root, os.environ)
    view = server.run(run_id)
    is_trusted = view.owner in trusted or view.owner == server.principal()
    untrusted = "" if is_trusted else view.owner
    return Run(RemoteRun(server, view, home.remote / run_id, untrusted=untrusted), view.spec)


def unfinished(run_ids: Sequence[str]) -> list[str]:
    """Return which runs of the server have not ended, without waiting for a server that is away."""
    server = server_of(find_home(os.environ).root, os.environ)
    return [run_id for run_id in run_ids if server.run(run_id, patiently=False).state not in TERMINAL]
