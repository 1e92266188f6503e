"""Whether environments can be mounted here: tried in a process of its own, which then has a namespace of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from serverless_gpu.doctor.facts import MountFacts, UnknownFact
from serverless_gpu.doctor.probes.bounded_calls import look
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.inside import namespaces
from serverless_gpu.node.processes.spawn import clean_process

_FINE = b"fine"


def look_at_mounts(environ: Mapping[str, str], limit_s: float) -> MountFacts | UnknownFact:
    """Return whether a process of this user can mount an environment from its home.

    Args:
        environ: the caller's variables.
        limit_s: seconds it may take.
    """
    home = find_home(environ)
    ended = look(
        lambda fd, log: clean_process(__name__, (fd, str(home.root)), fds=(fd,), log=log, environ=environ), limit_s
    )
    if ended.answer == _FINE:
        return MountFacts()
    if not ended.answer:
        return UnknownFact(f"{ended.why}. {ended.written.strip()[-300:]}")
    return MountFacts(problem=ended.answer.decode("utf-8", "replace"), is_root=os.geteuid() == 0)


def main(fd: int, home: str) -> None:
    """Try it and say why not."""
    os.write(fd, namespaces.probe_mounts(home).encode() or _FINE)
