"""Finding a run of a server again by its id, from any machine that has a token for it.

What a run returned is loaded only where it is one's own: loading is running code. Somebody else's has to be named,
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
    """Return the handle of a run of the server, or None where there is no server.

    Args:
        home: where copies of its files come to.
        run_id: the run.
        trusted: principals whose results may be loaded beside one's own.

    Raises:
        NotFound: it has no such run, or none that one may see.
        ServerlessGpuError: the server refuses, or is away.
    """
    if not is_configured(home.root, os.environ):
        return None
    server = server_of(home.root, os.environ)
    view = server.run(run_id)
    is_trusted = view.owner in trusted or view.owner == server.principal()
    untrusted = "" if is_trusted else view.owner
    return Run(RemoteRun(server, view, home.remote / run_id, untrusted=untrusted), view.spec)


def unfinished(run_ids: Sequence[str]) -> list[str]:
    """Return which runs of the server have not ended; a server that is away is not waited for.

    Raises:
        ServerlessGpuError: the server refuses, or is away.
    """
    server = server_of(find_home(os.environ).root, os.environ)
    return [run_id for run_id in run_ids if server.run(run_id, patiently=False).state not in TERMINAL]
