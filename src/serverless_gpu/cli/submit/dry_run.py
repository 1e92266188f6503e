"""`sgpu submit --dry-run`: shows the request, its server, start and cost. Only an estimate request is sent.

A refusal of the run refuses the rehearsal with the same message and exit code, after all that is known was printed. A
run that no node can ever serve starts never, with the exit code that it would end with. A server that is away refuses
nothing: when the run would start is unknown then, and the line says why.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Iterator

import msgspec

from serverless_gpu.ambient import format_utc
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.client.estimating import Estimate, estimate_run
from serverless_gpu.client.launch import snapshot_environment
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.environment.service_messages import Where
from serverless_gpu.errors import EnvironmentProblem, ServerUnavailable
from serverless_gpu.lazy_import import load
from serverless_gpu.model.spec import Command, Priority, RunSpec, check_command
from serverless_gpu.node.base.home import Home, find_home

_SUBMITTING = "serverless_gpu.client.remote.submission"
_CHOICE = "serverless_gpu.client.remote.pool_choice"
_SERVER = "serverless_gpu.client.remote.server"
_SHORT = 12
_NEVER = 1  # as of a run that ends because nothing can serve it
_IMPORTS = {
    "live": "this machine's files, where they lie",
    "auto": "this machine's files if the server is its own and has no other, else a snapshot of them",
}


class _Imported(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of ranks."""

    environment: str  # ``"live"``, ``"snapshot"``, or ``"auto"`` where only the server decides
    snapshot: str = ""  # address of an existing one; "" where it is captured first

    @property
    def text(self) -> str:
        """Return it in words."""
        if self.environment in _IMPORTS:
            return _IMPORTS[self.environment]
        if self.snapshot:
            return f"snapshot {self.snapshot[:_SHORT]} of this environment, which is there already"
        return "a snapshot of this environment, which is captured first"


def rehearse(spec: RunSpec, *, as_json: bool) -> None:
    """Print the request and its start; raise what would refuse the run."""
    command = spec.payload
    assert isinstance(command, Command)
    check_command(command)
    home = find_home(os.environ)
    url = find_profile(home.root, os.environ).url if spec.remote else ""
    spec, imported = _resolved(home, spec)
    if as_json:
        estimate = estimate_run(spec)
        print_json(_as_json(spec, url, imported, estimate))
    else:
        for line in _wished(spec, command, url, imported):
            say(line)
        estimate = estimate_run(spec)
        for line in _foreseen(estimate):
            say(line)
    if estimate.impossible:
        sys.exit(_NEVER)


def _resolved(home: Home, spec: RunSpec) -> tuple[RunSpec, _Imported]:
    """Return the request after variables and server defaults, without waiting for a server that is away."""
    if not spec.remote:
        return spec, _imported(home, spec.environment, None)
    server = load(_SERVER).server_of(home.root, os.environ)
    try:
        server.version(patiently=False)
        choice = load(_CHOICE).choose(spec, os.environ, functools.partial(server.pools, patiently=False))
        environment = load(_SUBMITTING).environment_of(spec, server)
    except ServerUnavailable:
        return spec, _Imported(environment=spec.environment)
    return choice.applied(spec), _imported(home, environment, server.store())


def _imported(home: Home, environment: str, store: Where | None) -> _Imported:
    """Return the ranks' environment without capturing it."""
    if environment != "snapshot":
        return _Imported(environment=environment)
    with contextlib.suppress(EnvironmentProblem):  # the run itself would say it
        recognition = snapshot_environment.Recognition(home, capture=False, store=store)
        try:
            wanted = recognition.wanted()
        finally:
            recognition.close()
        return _Imported(environment=environment, snapshot=wanted.snapshot if wanted is not None else "")
    return _Imported(environment=environment)


def _wished(spec: RunSpec, command: Command, url: str, imported: _Imported) -> Iterator[str]:
    """Yield the lines of the request, with defaults that decide something."""
    resources = spec.resources
    per = "process per node" if command.per == "node" else "process per GPU"
    yield f"would run: {shlex.join(command.argv)}"
    yield f"called: {spec.name}"
    some = "GPU" if resources.gpus == 1 else "GPUs"
    place = ", all on one node" if resources.same_node else ""
    yield f"on: {resources.gpus} {resources.gpu_type or f'{some} of the only type there is'}, one {per}{place}"
    yield f"where: {url}, pool {spec.pool or 'any on-demand one'}" if spec.remote else "where: this machine"
    if spec.remote:
        policy = f", policy {spec.policy}" if spec.policy else ""
        yield f"class: {Priority(spec.priority).value}{f', team {spec.team}' if spec.team else ''}{policy}"
    yield f"imports: {imported.text}"
    usual = msgspec.to_builtins(RunSpec())
    said = {"name", "resources", "payload", "remote", "environment", "pool", "priority", "team", "policy"}
    wished = {name: value for name, value in msgspec.to_builtins(spec).items() if name not in {*said, "spec_version"}}
    parts = [f"{name}={value}" for name, value in wished.items() if value != usual[name]]
    parts += [f"{name}={value}" for name in ("cpus", "memory_bytes") if (value := getattr(resources, name, None))]
    yield f"further: {' · '.join(parts) or 'nothing'}"


def _foreseen(estimate: Estimate) -> Iterator[str]:
    """Yield the lines of the estimate by a server or this machine."""
    yield f"would start: {estimate.start_text()}"
    if estimate.policy:
        yield f"under policy: {estimate.policy}"
    if estimate.cost is not None:
        yield f"would cost: {estimate.cost}"
    yield from (f"from budget: {budget}" for budget in estimate.budgets)


def _as_json(spec: RunSpec, url: str, imported: _Imported, estimate: Estimate) -> dict[str, object]:
    start = estimate.start
    return {
        "submitted": False,
        "server": url or None,
        "imports": imported.environment,
        "snapshot": imported.snapshot or None,
        "spec": spec,
        "estimate": {
            "start": None if start is None else format_utc(round(start.timestamp() * 1e9)),
            "seconds": estimate.seconds,
            "is_bound": estimate.is_bound,
            "basis": estimate.basis,
            "node": estimate.node,
            "nodes": estimate.nodes,
            "place": estimate.place,
            "impossible": estimate.impossible,
            "cost": estimate.cost,
            "policy": estimate.policy,
            "budgets": estimate.budgets,
        },
    }
